"""The outcomes on their way from a runner to the store, and the messages that they belong to."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from itertools import repeat

import msgspec

from conveyor.engines.queue import QueueName
from conveyor.model import Job, Outcome, RunId, TaskEnd, TaskRef
from conveyor.process.executors.fetch.frames import StoredPages
from conveyor.process.outcomes import SLOW_SECONDS, with_worker
from conveyor.states import TaskStatus


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


class RecordedPages:
    """Pages that a fetcher has stored, on their way to the rows: first and last attempts alike, all of which succeeded.
    By column, so that the worker makes no object for each."""

    __slots__ = ("chunks", "counted", "counts", "job", "pages", "refs")

    def __init__(self, job: Job, chunks: list[LeasedChunk], refs: list[TaskRef], pages: StoredPages) -> None:
        self.job = job
        self.chunks = chunks
        self.refs = refs
        self.pages = pages
        # How many of them each message has.
        self.counts = Counter(chunks)
        # As in RecordedOutcome.
        self.counted = False

    def __len__(self) -> int:
        return len(self.refs)

    def ends(self, now: float, worker: str) -> list[TaskEnd]:
        """What is written to the rows."""
        pages, refs = self.pages, self.refs
        indexes, attempts = [ref.index for ref in refs], [ref.attempt for ref in refs]
        succeeded, no_error, details = repeat(TaskStatus.SUCCEEDED), repeat(None), pages.details
        if max(pages.elapsed, default=0.0) >= SLOW_SECONDS:
            details = [
                with_worker(detail, worker) if seconds >= SLOW_SECONDS else detail
                for detail, seconds in zip(details, pages.elapsed, strict=True)
            ]
        return list(map(TaskEnd, indexes, succeeded, attempts, pages.http_statuses, no_error, details, repeat(now)))

    def outcomes(self) -> list[RecordedOutcome]:
        """The same, one by one."""
        return [
            RecordedOutcome(self.job, chunk, ref, outcome, None, counted=self.counted)
            for chunk, ref, outcome in zip(self.chunks, self.refs, page_outcomes(self.pages), strict=True)
        ]


def page_outcomes(pages: StoredPages) -> list[Outcome]:
    """The outcomes of stored pages, one by one."""
    return [
        Outcome(TaskStatus.SUCCEEDED, http_status, elapsed=elapsed, detail=detail, segment=pages.segment)
        for http_status, elapsed, detail in zip(pages.http_statuses, pages.elapsed, pages.details, strict=True)
    ]


class RunOutcomes:
    """What a flush writes of one run."""

    __slots__ = ("job", "pages", "records")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.records: list[RecordedOutcome] = []
        self.pages: list[RecordedPages] = []

    def one_by_one(self) -> list[RecordedOutcome]:
        """All outcomes, pages too."""
        return [*self.records, *(record for pages in self.pages for record in pages.outcomes())]


def by_run(batch: Iterable[RecordedOutcome], pages: Iterable[RecordedPages] = ()) -> list[RunOutcomes]:
    """The outcomes of each run."""
    runs: dict[RunId, RunOutcomes] = {}
    for record in batch:
        run_id = record.job.run.run_id
        run = runs.get(run_id)
        if run is None:
            run = runs[run_id] = RunOutcomes(record.job)
        run.records.append(record)
    for stored in pages:
        runs.setdefault(stored.job.run.run_id, RunOutcomes(stored.job)).pages.append(stored)
    return list(runs.values())
