"""A capability of engines on which records, tasks and queue are one database: one transaction records the outcomes of
many runs."""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from conveyor.engines.queue import Outgoing, QueueName
from conveyor.engines.tasks import Finished, TaskEvent
from conveyor.model import Counts, Job, OutboxEvent, TaskEnd
from conveyor.states import RunState


class RunMove(NamedTuple):
    """A move of a run that follows from its counts, as `move_run` makes it, with its outbox event."""

    sources: Collection[RunState]
    target: RunState
    reason: str | None
    code: str | None
    event: OutboxEvent


class RunFlush(NamedTuple):
    """What is recorded of one run: the ends of tasks, events of tasks, and references to requeue."""

    job: Job
    ends: Sequence[TaskEnd] = ()
    events: Sequence[TaskEvent] = ()
    queue: QueueName | None = None
    messages: Sequence[Outgoing] = ()
    # Called in the transaction, maybe in another thread, with the counts after it. It does no I/O.
    decide: Callable[[Counts], RunMove | None] = lambda counts: None


class RunFlushed(NamedTuple):
    """Which tasks of a run moved, its counts afterwards, and the move that was made."""

    finished: Finished
    moved: RunMove | None


Receipts = Sequence[tuple[QueueName, str]]


class AtomicFlush(Protocol):
    """A capability: records, tasks and queue are one database, so one transaction records what workers did."""

    async def record_flush(self, runs: Sequence[RunFlush], acks: Receipts) -> list[RunFlushed]:
        """For each run finish tasks as `finish` does, append events, send messages, and make the move that `decide`
        returns, if the run is in one of its sources; then acknowledge messages. All or nothing. The counts that are
        returned are those after the commit."""
