"""BreakdownParts: what one worker's attempts came to, by run, until it is added to the breakdowns of the runs.

Outcomes are added in batches, after they are durable, and cost no call. An errand of the worker adds each part to its
run's document some seconds after its first outcome, and at the end of the run. Of small runs nothing is collected, or
nothing is written once their size shows.
"""

import asyncio
from collections.abc import Collection, Sequence

import structlog

from conveyor.clock import Clock
from conveyor.engines.records import DocumentRecords
from conveyor.errors import ConveyorError
from conveyor.jobs.breakdowns import SMALL_RUN, Breakdown, FailedAttempt, add_part, is_small
from conveyor.jobs.task_hosts import task_hosts
from conveyor.model import Job, RunId, RunKey
from conveyor.process.load_tally import LoadTally
from conveyor.process.recorded_outcomes import RecordedOutcome, RecordedPages

log = structlog.get_logger()

# How long outcomes wait for their document: longer if they are few and the worker serves many runs, so that documents
# cost what attempts cost, not what workers and runs do; and less if they are the first of their run, because somebody
# may be looking. How often to look, and how many documents one look writes.
_FIRST_SECONDS = 1.0
_WRITE_SECONDS = 5.0
_MAX_WRITE_SECONDS = 60.0
_MANY_ATTEMPTS = 100
_FEW_RUNS = 4
_LOOK_SECONDS = 1.0
_WRITES = 20


class RunPart:
    """What is not added yet of one run."""

    __slots__ = ("attempts", "fresh", "is_finished", "is_stored", "key", "number", "since", "writing")

    def __init__(self, job: Job, since: float) -> None:
        self.key: RunKey = job.key
        self.fresh = Breakdown()
        self.attempts = 0
        # The part that is being written, under its number: if the answer is lost, it is written again as the same.
        self.writing: Breakdown | None = None
        self.number = 0
        # When it was last written, or began.
        self.since = since
        self.is_stored = False
        self.is_finished = False


class BreakdownParts:
    """One for each worker."""

    def __init__(self, documents: DocumentRecords, clock: Clock, worker: str, load: LoadTally) -> None:
        self._documents = documents
        self._clock = clock
        self._load = load
        self.worker = worker
        self._runs: dict[RunId, RunPart] = {}
        # Of the last part. Numbers only grow, over all runs.
        self._number = 0

    def __contains__(self, run_id: RunId) -> bool:
        return run_id in self._runs

    def add(
        self,
        job: Job,
        records: Sequence[RecordedOutcome],
        pages: Sequence[RecordedPages],
        moved: Collection[int],
        now: float,
    ) -> None:
        """Add outcomes that were written just now: last attempts whose tasks moved, and retried ones."""
        self._load.add(job.tenant, records, len(moved), now)
        if is_small(job):
            return
        part = self._runs.get(job.run.run_id)
        if part is None:
            part = self._runs[job.run.run_id] = RunPart(job, self._clock.monotonic())
        part.attempts += len(records) + sum([len(stored.refs) for stored in pages])
        for stored in pages:
            self._add_pages(part.fresh, stored, moved, now)
        succeeded: list[RecordedOutcome] = []
        failed: list[RecordedOutcome] = []
        for record in records:
            if record.outcome.error is not None:
                if record.delay is not None or record.ref.index in moved:
                    failed.append(record)
            elif record.delay is None and record.ref.index in moved:
                succeeded.append(record)
        part.fresh.add_successes(
            task_hosts(record.ref.input for record in succeeded), (record.outcome.elapsed for record in succeeded), now
        )
        hosts = task_hosts(record.ref.input for record in failed)
        part.fresh.add_failures([_failed(record, host) for record, host in zip(failed, hosts, strict=True)], now)

    def finish(self, run_id: RunId, total: int) -> None:
        """The run has finished with `total` tasks: write the rest of its breakdown soon, unless it turned out small."""
        part = self._runs.get(run_id)
        if part is None:
            return
        if total <= SMALL_RUN and not part.is_stored and part.writing is None:
            del self._runs[run_id]
        else:
            part.is_finished = True

    async def write_due(self) -> float:
        """Write the parts that have waited long enough. Returns the seconds until the next look."""
        now = self._clock.monotonic()
        patience = min(_MAX_WRITE_SECONDS, _WRITE_SECONDS * max(1.0, len(self._runs) / _FEW_RUNS))
        due = [
            part for part in self._runs.values() if part.is_finished or now - part.since >= _patience(part, patience)
        ]
        due.sort(key=lambda part: part.since)
        for written in await asyncio.gather(*map(self._write, due[:_WRITES]), return_exceptions=True):
            if isinstance(written, BaseException):
                raise written
        return _LOOK_SECONDS

    async def close(self) -> None:
        """Write all parts. If one cannot be written, it is lost with those after it."""
        try:
            for part in list(self._runs.values()):
                is_again = part.writing is not None
                await self._write(part)
                if is_again:
                    await self._write(part)
        except ConveyorError as error:
            log.warning("breakdowns not written", runs=len(self._runs), error=str(error))

    async def _write(self, part: RunPart) -> None:
        if part.writing is None:
            if not part.fresh.buckets:
                self._forget(part)
                return
            part.writing, part.fresh, part.attempts = part.fresh, Breakdown(), 0
            self._number += 1
            part.number = self._number
        if await add_part(self._documents, part.key, part.writing, self.worker, part.number, self._clock.now()):
            part.writing, part.is_stored = None, True
            part.since = self._clock.monotonic()
            if part.is_finished and not part.fresh.buckets:
                self._forget(part)

    def _forget(self, part: RunPart) -> None:
        if self._runs.get(part.key.run_id) is part:
            del self._runs[part.key.run_id]

    @staticmethod
    def _add_pages(fresh: Breakdown, stored: RecordedPages, moved: Collection[int], now: float) -> None:
        refs, seconds = stored.refs, stored.pages.elapsed
        if not all(ref.index in moved for ref in refs):
            chosen = [place for place, ref in enumerate(refs) if ref.index in moved]
            refs, seconds = [refs[place] for place in chosen], [seconds[place] for place in chosen]
        fresh.add_successes(task_hosts([ref.input for ref in refs]), seconds, now)


def _patience(part: RunPart, of_few: float) -> float:
    if part.attempts < _MANY_ATTEMPTS:
        return of_few
    return _WRITE_SECONDS if part.is_stored else _FIRST_SECONDS


def _failed(record: RecordedOutcome, host: str) -> FailedAttempt:
    outcome = record.outcome
    assert outcome.error is not None
    return FailedAttempt(
        record.ref.index,
        record.ref.attempt,
        host,
        outcome.error,
        outcome.http_status,
        outcome.elapsed,
        is_retried=record.delay is not None,
    )
