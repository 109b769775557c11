"""The outcomes on their way from a runner to the store, and the messages that they belong to."""

import asyncio
from collections.abc import Iterable

import msgspec

from conveyor.engines.queue import QueueName
from conveyor.model import Job, Outcome, RunId, TaskRef


class LeasedChunk:
    """A message that this worker leases. `left` counts its references without a durable outcome."""

    __slots__ = (
        "generation",
        "left",
        "lost",
        "marking",
        "queue",
        "receipt",
        "recovered",
        "size",
        "suspect",
        "unwritten",
    )

    def __init__(
        self,
        queue: QueueName,
        receipt: str,
        left: int,
        suspect: bool = False,
        *,
        recovered: bool = False,
        size: int = 0,
        generation: int = 0,
    ) -> None:
        self.queue = queue
        self.receipt = receipt
        self.left = left
        # Outcomes that are not written yet: the recorder may still requeue their references.
        self.unwritten = 0
        # Whether it came from the recovery queue, its bytes, and how often the monitor had requeued its task by then.
        self.recovered = recovered
        self.size = size
        self.generation = generation
        # The lease may have expired and another worker may have it: none of its tasks may start here.
        self.lost = False
        # It was delivered before: its start is marked before any of its tasks starts.
        self.suspect = suspect
        self.marking: asyncio.Task[None] | None = None


class RecordedOutcome(msgspec.Struct, gc=False):
    """The outcome of one attempt, on its way to the store."""

    job: Job
    chunk: LeasedChunk
    ref: TaskRef
    outcome: Outcome
    # Seconds until the retry; None if the task is finished.
    delay: float | None
    # The task fails for good, and is a dead letter.
    is_dead_letter: bool = False
    # A transaction with other runs failed, which may have been committed.
    may_be_written: bool = False
    # A failed write is retried as a whole: these steps must not happen twice.
    noted: bool = False
    requeued: bool = False
    counted: bool = False


def by_run(batch: Iterable[RecordedOutcome]) -> list[list[RecordedOutcome]]:
    """The outcomes of each run."""
    groups: dict[RunId, list[RecordedOutcome]] = {}
    for record in batch:
        groups.setdefault(record.job.run.run_id, []).append(record)
    return list(groups.values())
