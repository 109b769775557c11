"""The Tasks seam: tasks and their events, the bulk of all data. Batches in, batches out."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from conveyor.errors import TasksElsewhere
from conveyor.model import Counts, EventRecord, Page, Replaced, RunKey, Task, TaskEnd, TaskId, TaskSeed
from conveyor.states import TaskStatus

# Maximum number of rows that one scan reads.
MAX_SCANNED = 5000
# Up to this many failed tasks of a run, a walk over them reads them alone. Of more, a walk over all tasks finds some.
FEW_FAILED = 50_000
# Error codes of replaced outcomes that are returned at most.
MAX_CODES = 1000


class TaskFilter(msgspec.Struct, frozen=True):
    """Which tasks a listing returns. Every field that is set must match."""

    status: TaskStatus | None = None
    error_code: str | None = None
    http_status: int | None = None
    # The user's tag, from the input.
    tag: str | None = None


class TaskEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An event of one task: a failed attempt, a dead letter."""

    index: int
    at: float
    event: str
    data: str


class Finished(msgspec.Struct, frozen=True):
    """Which tasks of a batch of terminal transitions moved, and the run's counts afterwards."""

    moved: frozenset[int]
    counts: Counts


class SettledCounts(msgspec.Struct, frozen=True):
    """The counts of a run, of which `settled` tasks were counted just now, in place of a process that died. `pending`:
    tasks may be uncounted, by a process that is at work or has died; the next look tells which."""

    counts: Counts
    settled: int = 0
    pending: bool = False


class Walked(msgspec.Struct, frozen=True):
    """A page of a run in list order: the matching tasks, the number of rows read, and the index of the last row; None
    if no row follows."""

    tasks: list[Task]
    read: int
    last: int | None


class Scanned(msgspec.Struct, frozen=True):
    """The matching tasks of a shard, and the last task_id that was read; None if no row follows. `read` is the number
    of rows that were read, where the engine tells: DynamoDB bills those that do not match, too."""

    tasks: list[Task]
    last: TaskId | None
    read: int | None = None

    @property
    def rows_read(self) -> int:
        return len(self.tasks) if self.read is None else self.read


class Scans(Protocol):
    """The part of Tasks that listings use."""

    async def scan(self, run: RunKey, shard: int, after: TaskId | None, limit: int, where: TaskFilter) -> Scanned:
        """Like `page`, for requests: it reads at most about MAX_SCANNED rows, so it may return fewer tasks than
        match, or none. Over the shards of a run the bound is shared."""


class Tasks(Scans, Protocol):
    """Every method takes the RunKey: tenant, run and shard count. These alone determine the shard of a task."""

    # The largest result of a handler that is worth keeping in the row of its task, in bytes.
    inline_bytes: int

    async def put(self, run: RunKey, seeds: Sequence[TaskSeed]) -> None:
        """Write tasks as pending. A task that already exists stays as it is, whatever its status. The first tasks of a
        run decide whether it is a rerun, whose tasks have earlier outcomes; without tasks nothing is written."""

    async def unfinished(self, run: RunKey, indexes: Sequence[int]) -> frozenset[int]:
        """The status guard: which of these tasks exist and are not finished."""

    async def finish(self, run: RunKey, ends: Sequence[TaskEnd]) -> Finished:
        """Move each pending task to its terminal status, once. A finished or missing task does not move. The counts by
        status and by error code change in the same transaction, and for a rerun those of the outcomes it replaces."""

    async def cancel_pending(self, run: RunKey, limit: int, at: float) -> int:
        """Move up to `limit` pending tasks to cancelled. Returns how many moved."""

    async def counts(self, run: RunKey) -> Counts:
        """The stored counts, without a scan."""

    async def replaced(self, run: RunKey) -> Replaced:
        """The stored counts of the earlier outcomes that the finished tasks of a rerun replace, without a scan; of the
        error codes the most frequent."""

    async def recount(self, run: RunKey) -> Counts:
        """Count the tasks, repair stored counts that drifted, and return the result."""

    async def error_codes(self, run: RunKey, limit: int) -> list[tuple[str, int]]:
        """The most frequent error codes of failed tasks."""

    async def task(self, run: RunKey, task_id: TaskId) -> Task | None:
        """One task."""

    async def at(self, run: RunKey, indexes: Sequence[int]) -> list[Task]:
        """The tasks at these indexes, in order of index, without those that do not exist."""

    async def page(self, run: RunKey, shard: int, after: TaskId | None, limit: int, where: TaskFilter) -> list[Task]:
        """Up to `limit` matching tasks of one shard after `after`, in lexicographic order of task_id; fewer only at the
        end. It reads as many rows as needed: for roles, and for readers of all tasks. A run has the shards 0 to
        shard_count - 1; the reader merges them (read/)."""

    async def note(self, run: RunKey, events: Sequence[TaskEvent]) -> None:
        """Append events of tasks."""

    async def events(self, run: RunKey, task_id: TaskId | None, cursor: str | None, limit: int) -> Page[EventRecord]:
        """The task events of the run, or of one of its tasks, oldest first."""

    async def delete(self, run: RunKey, limit: int) -> int:
        """Delete up to `limit` rows of the run. Returns how many; 0 when none is left. Raises TasksInUse if it had to
        wait for readers, which nobody else should wait behind."""


async def page_by_scans(
    tasks: Scans, run: RunKey, shard: int, after: TaskId | None, limit: int, where: TaskFilter
) -> list[Task]:
    """A page made of several scans, so that other reads run in between."""
    matches: list[Task] = []
    while len(matches) < limit:
        scanned = await tasks.scan(run, shard, after, limit - len(matches), where)
        matches += scanned.tasks
        if scanned.last is None:
            break
        after = scanned.last
    return matches


@runtime_checkable
class ReadsByIndex(Protocol):
    """A capability: tasks are stored by index, so a whole run is read sequentially in list order."""

    async def walk(self, run: RunKey, after: int, limit: int, where: TaskFilter) -> Walked:
        """Read the `limit` rows after the index `after`, over all shards; -1 starts at the first. If only failed tasks
        are asked for, and few have failed, the others are not read, and do not count."""


@runtime_checkable
class SettlesCounts(Protocol):
    """A capability: counts change in a step of their own, which may be missing after a crash."""

    async def settle_counts(self, run: RunKey) -> SettledCounts:
        """The stored counts, as `counts` returns them, after counting tasks that another process finished and did not
        count, if an earlier look has found them, too."""


class RunTally(msgspec.Struct, frozen=True):
    """A run, counted row by row."""

    rows: int
    counts: Counts
    events: int


@runtime_checkable
class CopiesRuns(Protocol):
    """A capability: a finished run can be copied here from another engine, in steps that may repeat."""

    async def copy_events(self, run: RunKey, events: Sequence[TaskEvent]) -> None:
        """Append events of tasks, without those that are stored already."""

    async def tally(self, run: RunKey) -> RunTally:
        """Count the rows of a run."""


@runtime_checkable
class RoutesTasks(Protocol):
    """A capability: runs are on several engines."""

    @property
    def configured(self) -> Tasks:
        """The engine that takes the tasks of new jobs."""

    def engine_of(self, run: RunKey) -> Tasks:
        """The engine that holds a run. Raises TasksElsewhere."""


def may_lag(tasks: Tasks, run: RunKey) -> bool:
    """Whether the engine of a run counts in a step of its own. Raises TasksElsewhere."""
    return isinstance(_holder(tasks, run), SettlesCounts)


async def settled_counts(tasks: Tasks, run: RunKey) -> SettledCounts:
    """The stored counts, settled where that is needed. Raises TasksElsewhere."""
    engine = _holder(tasks, run)
    if isinstance(engine, SettlesCounts):
        return await engine.settle_counts(run)
    return SettledCounts(await tasks.counts(run))


def by_index(tasks: Tasks, run: RunKey) -> ReadsByIndex | None:
    """The engine that holds a run, if it stores tasks by index. Raises TasksElsewhere."""
    engine = tasks.engine_of(run) if isinstance(tasks, RoutesTasks) else tasks
    return engine if isinstance(engine, ReadsByIndex) else None


def is_configured(tasks: Tasks, run: RunKey) -> bool:
    """Whether the engine that takes the tasks of new jobs holds a run. Raises TasksElsewhere."""
    return _holder(tasks, run) is getattr(tasks, "configured", tasks)


def inline_bytes(tasks: Tasks, run: RunKey) -> int:
    """The largest result that the engine of a run keeps in rows. Raises TasksElsewhere."""
    return _holder(tasks, run).inline_bytes


def _holder(tasks: Tasks, run: RunKey) -> Tasks:
    # For each run of a flush and of a look, and so without `isinstance`, which looks at every attribute of a Protocol.
    engine_of: Callable[[RunKey], Tasks] | None = getattr(tasks, "engine_of", None)
    return tasks if engine_of is None else engine_of(run)


def is_reachable(tasks: Tasks, run: RunKey) -> bool:
    """Whether the engine that holds a run is open."""
    try:
        _holder(tasks, run)
    except TasksElsewhere:
        return False
    return True
