"""Tasks: the rows of tasks and their events, the bulk. Batches in, batches out."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec

from conveyor.model import Counts, EventRecord, Page, RunKey, Task, TaskEnd, TaskId, TaskSeed
from conveyor.states import TaskStatus

# Rows that one scan looks at, at most.
MOST_SCANNED = 5000


class TaskFilter(msgspec.Struct, frozen=True):
    """Which tasks a listing returns; every given field must match."""

    status: TaskStatus | None = None
    error_code: str | None = None
    http_status: int | None = None
    # The user's own, from the input.
    tag: str | None = None


class TaskEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Something that happened to one task: an attempt that failed, a dead letter."""

    index: int
    at: float
    event: str
    data: str


class Finished(msgspec.Struct, frozen=True):
    """What a batch of terminal transitions really moved."""

    moved: frozenset[int]
    counts: Counts


class Walked(msgspec.Struct, frozen=True):
    """A stretch of a run in the order of its list: the tasks of it that match, how many rows it has, and the index of
    the last of them, None if no row follows."""

    tasks: list[Task]
    read: int
    last: int | None


class Scanned(msgspec.Struct, frozen=True):
    """Tasks of a shard that match, and the task_id up to which all were looked at, None if no row follows."""

    tasks: list[Task]
    last: TaskId | None


class Scans(Protocol):
    """The part of Tasks that a listing needs."""

    async def scan(self, run: RunKey, shard: int, after: TaskId | None, limit: int, where: TaskFilter) -> Scanned:
        """As page, for a request: it looks at no more than MOST_SCANNED rows, and may return fewer than there are, or
        none. On DynamoDB, it looks at as many as it takes."""


class Tasks(Scans, Protocol):
    """Every method takes the RunKey, which names the tenant, the run and its shard count; the shard of a task
    follows from these alone."""

    async def put(self, run: RunKey, seeds: Sequence[TaskSeed]) -> None:
        """Write tasks as pending. One that is there already is left as it is, whatever its status."""

    async def unfinished(self, run: RunKey, indexes: Sequence[int]) -> frozenset[int]:
        """The status guard: which of these exist and are not terminal."""

    async def finish(self, run: RunKey, ends: Sequence[TaskEnd]) -> Finished:
        """Move each pending task to its terminal status, once. Those that were terminal before, or are not there,
        do not move; counts follow the moves in the same step, by status and by error code."""

    async def cancel_pending(self, run: RunKey, limit: int, at: float) -> int:
        """Move up to `limit` pending tasks to cancelled; returns how many moved."""

    async def counts(self, run: RunKey) -> Counts:
        """Counts as they are kept with the moves, without a scan."""

    async def recount(self, run: RunKey) -> Counts:
        """Count rows, repair the kept counts if they drifted, and return the truth."""

    async def error_codes(self, run: RunKey, limit: int) -> list[tuple[str, int]]:
        """The most frequent error codes of failed tasks."""

    async def task(self, run: RunKey, task_id: TaskId) -> Task | None:
        """One task."""

    async def at(self, run: RunKey, indexes: Sequence[int]) -> list[Task]:
        """Those of these tasks that are there, in order of index."""

    async def page(self, run: RunKey, shard: int, after: TaskId | None, limit: int, where: TaskFilter) -> list[Task]:
        """Up to `limit` tasks of one shard that match, in lexicographic order of task_id, following `after`; fewer only
        at the end. However many rows that takes: for roles, and for readers of everything. A run has the shards 0 to
        shard_count - 1; merging them is the reader's part (serve/)."""

    async def note(self, run: RunKey, events: Sequence[TaskEvent]) -> None:
        """Append to the audit trail."""

    async def events(self, run: RunKey, task_id: TaskId | None, cursor: str | None, limit: int) -> Page[EventRecord]:
        """What was noted of the run, or of one of its tasks, oldest first."""

    async def delete(self, run: RunKey, limit: int) -> int:
        """Remove up to `limit` rows of the run and return how many; 0 when nothing is left."""


async def page_by_scans(
    tasks: Scans, run: RunKey, shard: int, after: TaskId | None, limit: int, where: TaskFilter
) -> list[Task]:
    """What page returns, put together by scans: others read in between."""
    found: list[Task] = []
    while len(found) < limit:
        scanned = await tasks.scan(run, shard, after, limit - len(found), where)
        found += scanned.tasks
        if scanned.last is None:
            break
        after = scanned.last
    return found


@runtime_checkable
class WalksByIndex(Protocol):
    """A capability: rows stand by index, so that a whole run can be read in the order of its list without a jump."""

    async def walk(self, run: RunKey, after: int, limit: int, where: TaskFilter) -> Walked:
        """Look at the `limit` rows that follow the index `after`, over all shards; -1 is before the first."""
