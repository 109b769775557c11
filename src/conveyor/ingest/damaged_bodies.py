"""Which tasks of a page have a damaged or missing body, for a rerun of these. Gets tasks, reads their bodies, returns
those that cannot be read."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from conveyor.engines.blobs import Blobs
from conveyor.errors import BodyDamaged
from conveyor.jobs.body_coding import LARGE
from conveyor.model import Task
from conveyor.read.results import read_body, stream_body

_READS_AT_ONCE = 64
_BYTES_AT_ONCE = 64 * 1024 * 1024


async def damaged_tasks(blobs: Blobs, tasks: Sequence[Task]) -> AsyncGenerator[list[Task], None]:
    """The tasks whose bodies are damaged, some at a time. It yields, perhaps nothing, before an ingester's lease could
    expire: bodies may be many and long."""
    small = [task for task in tasks if task.detail.body is not None and task.detail.body.length <= LARGE]
    for start in range(0, len(small), _READS_AT_ONCE):
        group = small[start : start + _READS_AT_ONCE]
        damaged = await asyncio.gather(*(_is_damaged(blobs, task) for task in group))
        yield [task for task, is_damaged in zip(group, damaged, strict=True) if is_damaged]
    for task in tasks:
        ref = task.detail.body
        if ref is None or ref.length <= LARGE:
            continue
        read = 0
        try:
            async for piece in stream_body(blobs, ref):
                read += len(piece)
                if read >= _BYTES_AT_ONCE:
                    read = 0
                    yield []
        except BodyDamaged:
            yield [task]


async def _is_damaged(blobs: Blobs, task: Task) -> bool:
    try:
        await read_body(blobs, task)
    except BodyDamaged:
        return True
    return False
