"""Which tasks of a page have a damaged or missing body or extracted result, for a rerun of these. Gets tasks, reads
their bodies, returns those that cannot be read."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from conveyor.engines.blobs import Blobs
from conveyor.errors import BodyDamaged
from conveyor.jobs.body_coding import LARGE
from conveyor.model import BodyRef, Task
from conveyor.read.results import stream_body

_READS_AT_ONCE = 64
_BYTES_AT_ONCE = 64 * 1024 * 1024


async def damaged_tasks(blobs: Blobs, tasks: Sequence[Task]) -> AsyncGenerator[list[Task], None]:
    """The tasks whose bodies are damaged, some at a time. It yields, perhaps nothing, before an ingester's lease could
    expire: bodies may be many and long."""
    bodies = [(task, task.detail.body) for task in tasks] + [(task, task.detail.extracted) for task in tasks]
    small = [(task, ref) for task, ref in bodies if ref is not None and ref.length <= LARGE]
    found: set[int] = set()
    for start in range(0, len(small), _READS_AT_ONCE):
        group = small[start : start + _READS_AT_ONCE]
        damaged = await asyncio.gather(*(_is_damaged(blobs, ref) for _, ref in group))
        new = {task.index: task for (task, _), is_damaged in zip(group, damaged, strict=True) if is_damaged}
        yield [task for task in new.values() if task.index not in found]
        found.update(new)
    for task, ref in bodies:
        if ref is None or ref.length <= LARGE or task.index in found:
            continue
        read = 0
        try:
            async for piece in stream_body(blobs, ref):
                read += len(piece)
                if read >= _BYTES_AT_ONCE:
                    read = 0
                    yield []
        except BodyDamaged:
            found.add(task.index)
            yield [task]


async def _is_damaged(blobs: Blobs, ref: BodyRef) -> bool:
    try:
        async for _ in stream_body(blobs, ref):
            pass
    except BodyDamaged:
        return True
    return False
