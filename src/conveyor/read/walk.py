"""Walk: the tasks of an export in the order of the user's list, from any position.

It reads one run, or several runs of a job and takes the latest outcome of each task. Each run, or each sorted object of
one, is a stream in order of index. The walk merges the streams up to the index that all of them have reached.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple, Protocol

import msgspec

from conveyor.engines.tasks import ReadsByIndex, TaskFilter
from conveyor.jobs.latest_outcomes import hides
from conveyor.model import RunKey, Task

# Rows of one read.
ROWS = 2000

# Higher than any index.
END = 1 << 62


class Position(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a walk resumes: after this index; `offsets` are the places in the streams."""

    after: int = -1
    offsets: Sequence[int] = ()


class TaskBatch(NamedTuple):
    """Tasks in order of index, each once. A walk from `position` yields them again; up to the index `last` there are no
    others; `read` is the number of rows that were read."""

    tasks: list[Task]
    position: Position
    last: int
    read: int


class TaskStream(Protocol):
    """Tasks in order of index. All tasks up to the index `known` are in `tasks`, or were taken before."""

    tasks: list[Task]
    known: int
    # Rows read since the last batch.
    read: int
    # Where the first of `tasks` can be read again.
    offset: int

    async def more(self) -> None:
        """Read the next rows. Called when `tasks` is empty."""


async def merged(
    streams: Sequence[TaskStream], after: int, where: TaskFilter | None = None
) -> AsyncGenerator[TaskBatch, None]:
    """The tasks after `after`. Streams of newer runs are before those of older ones: if several have a task, its latest
    outcome is taken. `where` filters by that, which is known only after the merge."""
    done = after
    while done < END:
        while behind := [stream for stream in streams if stream.known <= done]:
            for stream in behind:
                stream.tasks = []
            await asyncio.gather(*(stream.more() for stream in behind))
        known = min((stream.known for stream in streams), default=END)
        position = Position(done, [stream.offset for stream in streams])
        by_stream = [_take(stream, done, known) for stream in streams]
        tasks = by_stream[0] if len(by_stream) == 1 else _latest_of(by_stream)
        if where is not None:
            tasks = [task for task in tasks if matches(task, where)]
        read = sum(stream.read for stream in streams)
        for stream in streams:
            stream.read = 0
        yield TaskBatch(tasks, position, known, read)
        done = known


class RunStream:
    """A run on an engine that stores rows by index."""

    def __init__(self, tasks: ReadsByIndex, run: RunKey, where: TaskFilter, after: int) -> None:
        self._engine = tasks
        self._run = run
        self._where = where
        self.tasks: list[Task] = []
        self.known = after
        self.read = 0
        self.offset = 0

    async def more(self) -> None:
        walked = await self._engine.walk(self._run, self.known, ROWS, self._where)
        self.tasks = walked.tasks
        self.read += walked.read
        self.known = END if walked.last is None else walked.last


def matches(task: Task, where: TaskFilter) -> bool:
    """Whether a task matches the filter."""
    return (
        (where.status is None or task.status == where.status)
        and (where.error_code is None or task.error_code == where.error_code)
        and (where.http_status is None or task.http_status == where.http_status)
        and (where.tag is None or _tag(task.input) == where.tag)
    )


def _take(stream: TaskStream, done: int, known: int) -> list[Task]:
    """Remove and return the tasks after `done` up to `known`. Earlier ones were taken before the walk was resumed."""
    cut = len(stream.tasks)
    if known < stream.known:
        cut = next((at for at, task in enumerate(stream.tasks) if task.index > known), cut)
    taken, stream.tasks = stream.tasks[:cut], stream.tasks[cut:]
    if taken and taken[0].index <= done:
        taken = [task for task in taken if task.index > done]
    return taken


def _latest_of(by_stream: Sequence[list[Task]]) -> list[Task]:
    by_index: dict[int, Task] = {}
    for tasks in by_stream:
        for task in tasks:
            newer = by_index.get(task.index)
            if newer is None or not hides(newer, task):
                by_index[task.index] = task
    return [by_index[index] for index in sorted(by_index)]


def _tag(task_input: msgspec.Raw) -> object:
    try:
        value = msgspec.json.decode(task_input)
    except msgspec.DecodeError:
        return None
    return value.get("tag") if isinstance(value, dict) else None
