"""Walk: the tasks of an export in the order of the user's list, from any place in it.

One run, or several of the same job of which for each task the latest counts. Every run, or every part of one that was
sorted elsewhere, is a stream in order of index; what all of them are known up to goes on together.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple, Protocol

import msgspec

from conveyor.engines.tasks import TaskFilter, WalksByIndex
from conveyor.model import RunKey, Task

# Rows that are read at once.
ROWS = 2000

# Higher than any index.
END = 1 << 62


class Position(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a walk goes on: after this index; `offsets` is where in each stream that is."""

    after: int = -1
    offsets: Sequence[int] = ()


class TaskBatch(NamedTuple):
    """Tasks in order of index, each once. `position` is from where a walk finds them again, `last` the index up to
    which there are no others, `read` how many rows it took."""

    tasks: list[Task]
    position: Position
    last: int
    read: int


class TaskStream(Protocol):
    """Tasks in order of index. `known` is the index up to which all are in `tasks`, or were taken."""

    tasks: list[Task]
    known: int
    # Rows read since it was last asked.
    read: int
    # Where the first of `tasks` can be read again.
    offset: int

    async def more(self) -> None:
        """Read on. `tasks` is empty: all that was known went on."""


async def merged(
    streams: Sequence[TaskStream], after: int, where: TaskFilter | None = None
) -> AsyncGenerator[TaskBatch, None]:
    """What follows `after`: of tasks with the same index that of the first stream that has one. `where` is for what
    the streams did not see to: a task counts by its latest run, and so is known only here."""
    done = after
    while done < END:
        while behind := [stream for stream in streams if stream.known <= done]:
            for stream in behind:
                stream.tasks = []
            await asyncio.gather(*(stream.more() for stream in behind))
        known = min((stream.known for stream in streams), default=END)
        position = Position(done, [stream.offset for stream in streams])
        found = [_take(stream, done, known) for stream in streams]
        tasks = found[0] if len(found) == 1 else _first_of(found)
        if where is not None:
            tasks = [task for task in tasks if matches(task, where)]
        read = sum(stream.read for stream in streams)
        for stream in streams:
            stream.read = 0
        yield TaskBatch(tasks, position, known, read)
        done = known


class RunStream:
    """A run, read from an engine whose rows stand by index."""

    def __init__(self, tasks: WalksByIndex, run: RunKey, where: TaskFilter, after: int) -> None:
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
    """Whether a task is one of those that a listing with this filter returns."""
    return (
        (where.status is None or task.status == where.status)
        and (where.error_code is None or task.error_code == where.error_code)
        and (where.http_status is None or task.http_status == where.http_status)
        and (where.tag is None or _tag(task.input) == where.tag)
    )


def _take(stream: TaskStream, done: int, known: int) -> list[Task]:
    """The tasks after `done` up to `known`. Those before were taken when the walk was last here."""
    cut = len(stream.tasks)
    if known < stream.known:
        cut = next((at for at, task in enumerate(stream.tasks) if task.index > known), cut)
    taken, stream.tasks = stream.tasks[:cut], stream.tasks[cut:]
    if taken and taken[0].index <= done:
        taken = [task for task in taken if task.index > done]
    return taken


def _first_of(found: Sequence[list[Task]]) -> list[Task]:
    by_index: dict[int, Task] = {}
    for tasks in found:
        for task in tasks:
            by_index.setdefault(task.index, task)
    return [by_index[index] for index in sorted(by_index)]


def _tag(given: msgspec.Raw) -> object:
    try:
        value = msgspec.json.decode(given)
    except msgspec.DecodeError:
        return None
    return value.get("tag") if isinstance(value, dict) else None
