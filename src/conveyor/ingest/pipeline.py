"""The ingest of a list. `ingest_range` is the pipeline: read → write tasks → enqueue references → checkpoint, until the
range is done; then, if all ranges are, the total and the latch.

It may be done again from any point, by anyone: task ids are deterministic, so that a rewrite changes nothing;
references that are sent twice fall to the status guard; the total is the sum of what each range says of itself.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec

from conveyor.clock import Clock
from conveyor.engines.blobs import Blobs
from conveyor.engines.coordinator import Lease
from conveyor.engines.queue import CONTROL, Outgoing, Queue, run_queue, run_queues
from conveyor.engines.records import Records
from conveyor.engines.tasks import Tasks
from conveyor.faults import crashpoint
from conveyor.ingest.plan import KeepHold, check_unchanged, make_plan, range_pieces, reading_of, reject_invalid
from conveyor.ingest.rerun import copied, plan_rerun
from conveyor.lifecycle import Lifecycle
from conveyor.lists import BATCH, Batch, read
from conveyor.model import IngestRange, Job, OnInvalid, Range, invalid_prefix
from conveyor.references import has_holders, messages, send_all
from conveyor.settings import Settings
from conveyor.states import RunState
from conveyor.telemetry import metrics

T = TypeVar("T")


@dataclass(frozen=True)
class Ingest:
    """What the pipeline works with."""

    settings: Settings
    clock: Clock
    records: Records
    tasks: Tasks
    queue: Queue
    blobs: Blobs
    lifecycle: Lifecycle

    async def split(self, job: Job, keep_hold: KeepHold) -> None:
        """Look the list over, write down its ranges, and have each ingested. Raises HoldLost."""
        ranges: list[Range] = []
        if job.run.lineage is not None and not job.run.sealed:
            ranges = await plan_rerun(self.records, self.tasks, self.clock, job, keep_hold)
            if not await self._write_plan(job, ranges):
                return
        # An open job that nobody has closed yet has no list of its own; its ranges are what was added so far.
        elif job.source is not None and not job.run.sealed:
            most = self.settings.max_list_bytes
            range_bytes = self.settings.ingest_range_bytes
            ranges = await make_plan(self.blobs, job.source, job.kind, range_bytes, most, keep_hold)
            if job.options.on_invalid is OnInvalid.REJECT:
                await reject_invalid(self.blobs, ranges, job.kind, most, partial(self._keep_invalid, job), keep_hold)
            if not await self._write_plan(job, ranges):
                return
        elif not (await self.records.ingested(job.run.run_id)).done:
            ranges = await self.records.ranges(job.run.run_id)
        await self.request([(job, one) for one in ranges if not one.done])
        await self.finish(job)

    async def _write_plan(self, job: Job, ranges: list[Range]) -> bool:
        crashpoint("ingest.split.before")
        written = await self.records.split(job.job_id, job.run.run_id, ranges)
        crashpoint("ingest.split.after")
        return written

    async def request(self, ranges: list[tuple[Job, Range]]) -> None:
        """Have ranges ingested by whoever is free."""
        outgoing = [
            Outgoing(msgspec.json.encode(IngestRange(job.tenant, job.job_id, job.run.run_id, one.number)))
            for job, one in ranges
        ]
        await send_all(self.queue, CONTROL, outgoing, self.clock)

    async def ingest_range(self, job: Job, one: Range, lease: Lease, keep_hold: KeepHold) -> bool:
        """Make tasks of one range. False if it is another's by now. Raises ListUnreadable, and HoldLost."""
        if job.run.lineage is None:
            await check_unchanged(self.blobs, one, keep_hold)
        async with aclosing(_ahead(self._batches(job, one))) as batches:
            return await self._ingest_batches(job, one, lease, keep_hold, batches)

    async def _ingest_batches(
        self, job: Job, one: Range, lease: Lease, keep_hold: KeepHold, batches: AsyncIterator[Batch]
    ) -> bool:
        async for batch in batches:
            await self.tasks.put(job.key, batch.seeds)
            crashpoint("ingest.put.after")
            outgoing = messages(job.key, batch.seeds, job.options.chunk_size)
            await send_all(self.queue, run_queue(job.run.run_id), outgoing, self.clock)
            crashpoint("ingest.enqueue.after")
            await self._keep_invalid(job, one, batch)
            metrics.INGESTED.add(len(batch.seeds), "task")
            metrics.INGESTED.add(len(batch.invalid), "invalid")
            one = _advanced(one, batch)
            if not await self.records.checkpoint(job.run.run_id, one, lease.fence):
                return False
            crashpoint("ingest.checkpoint.after")
            if not await keep_hold():
                return False
        done = msgspec.structs.replace(one, done=True)
        if not await self.records.checkpoint(job.run.run_id, done, lease.fence):
            return False
        crashpoint("ingest.done.after")
        await self.finish(job)
        return True

    def _batches(self, job: Job, one: Range) -> AsyncGenerator[Batch, None]:
        if job.run.lineage is not None:
            return copied(self.records, self.tasks, job, one)
        pieces = range_pieces(self.blobs, one, self.settings.max_list_bytes)
        return read(pieces, reading_of(one, job.kind))

    async def finish(self, job: Job) -> None:
        """Set the total and the latch if every range is done and none will come."""
        run = await self.records.run(job.job_id, job.run.run_id)
        if run is None or not run.sealed or run.last_batch or run.state is not RunState.INGESTING:
            return
        ingested = await self.records.ingested(run.run_id)
        if not ingested.done:
            return
        # A list without tasks is a mistake; a rerun without any has nothing to do.
        if ingested.tasks == 0 and run.lineage is None:
            reason = _without_tasks(job, ingested.invalid)
            await self.lifecycle.move(job, RunState.FAILED, reason, await self.tasks.counts(job.key))
            return
        await self.lifecycle.latch(job, ingested.tasks, ingested.invalid)

    async def clear_up(self, job: Job) -> None:
        """A run that ended while its list was read may have been swept before its last batch was written."""
        while await self.tasks.cancel_pending(job.key, BATCH, self.clock.now()):
            pass
        # Where somebody holds messages, the sweeper is not done with the run: it knows of them by the queues.
        if not await has_holders(self.queue, job.run, self.clock.now()):
            for queue in run_queues(job.run.run_id):
                await self.queue.drop(queue)
        counts = await self.tasks.counts(job.key)
        await self.records.set_total(job.job_id, job.run.run_id, counts.ended, job.run.invalid)

    async def _keep_invalid(self, job: Job, one: Range, batch: Batch) -> None:
        """Under a name that follows from the place in the list, so that doing it again writes over it."""
        if batch.invalid:
            lines = b"".join(msgspec.json.encode(line) + b"\n" for line in batch.invalid)
            await self.blobs.put(f"{invalid_prefix(job)}{one.number:06d}-{batch.index:012d}.jsonl", lines)


def _without_tasks(job: Job, invalid: int) -> str:
    why = f"the list has no tasks ({invalid} lines were not valid)" if invalid else "there were no tasks"
    # Why it was closed, if nobody asked for that.
    return f"{job.reason}; {why}" if job.reason else why


def _advanced(one: Range, batch: Batch) -> Range:
    return msgspec.structs.replace(
        one,
        index=batch.index,
        offset=batch.offset,
        tasks=one.tasks + len(batch.seeds),
        invalid=one.invalid + len(batch.invalid),
    )


async def _ahead(items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Get the next item ready while the present one is worked on."""
    coming = asyncio.ensure_future(anext(items, None))
    try:
        while (item := await coming) is not None:
            coming = asyncio.ensure_future(anext(items, None))
            yield item
    finally:
        # Whoever wants no more does not wait for what was to come, and it must have stopped before it is closed.
        coming.cancel()
        await asyncio.wait([coming])
        await items.aclose()
