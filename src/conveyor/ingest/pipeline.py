"""The ingest of a list. `ingest_range` is the pipeline: read → write tasks → enqueue references → checkpoint, until the
range is done. When all ranges are done, `finish` sets the total and latches the run.

Any ingester may repeat it from any point: task ids are deterministic, so a second write changes nothing; workers drop
references of finished tasks; the total is the sum of the ranges' counts.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

import msgspec

from conveyor.clock import Clock
from conveyor.engines.blobs import Blobs
from conveyor.engines.coordinator import Lease
from conveyor.engines.queue import CONTROL, Queue, run_queue, run_queues
from conveyor.engines.records import Records
from conveyor.engines.tasks import Tasks
from conveyor.errors import ListChanged, ListUnreadable
from conveyor.faults import crashpoint
from conveyor.ingest.plan import (
    PIECES,
    Renew,
    check_unchanged,
    make_plan,
    range_pieces,
    reading_of,
    reject_invalid,
    while_leased,
)
from conveyor.ingest.rerun_walk import copy_tasks, plan_rerun
from conveyor.jobs.chunks import has_holders, messages, range_message, send_all
from conveyor.lifecycle import Lifecycle
from conveyor.lists.list_bytes import ListBytes, RemoteLists
from conveyor.lists.reader import BATCH, ListBatch, encode_invalid, read
from conveyor.model import Job, OnInvalid, Range, Source, invalid_key
from conveyor.read.prefetch import prefetch
from conveyor.settings import Settings
from conveyor.states import ReasonCode, RunState
from conveyor.telemetry import metrics

# Batches that are being written while the one before them is enqueued, so that the writer of a store is never idle.
PUTS_AHEAD = 2


@dataclass(frozen=True)
class IngestPipeline:
    """Plans and ingests the lists of runs."""

    settings: Settings
    clock: Clock
    records: Records
    tasks: Tasks
    queue: Queue
    blobs: Blobs
    lifecycle: Lifecycle
    # Reads lists that are not staged. None: staged lists only.
    remote: RemoteLists | None = None

    async def close(self) -> None:
        if self.remote is not None:
            await self.remote.close()

    async def split(self, job: Job, renew: Renew) -> None:
        """Plan the ranges of the list, store them, and enqueue an ingest of each. Raises LeaseLostError."""
        ranges: list[Range] = []
        if job.run.lineage is not None and not job.run.sealed:
            ranges = await plan_rerun(self.records, self.tasks, self.clock, job, renew)
            if not await self._write_plan(job, ranges):
                return
        # A job that is still open has no list: its ranges are the batches that were added so far.
        elif job.source is not None and not job.run.sealed:
            lists = self._lists(job)
            source = await lists.pin(job.source) or await self._copy(job, job.source, renew)
            ranges = await make_plan(lists, source, job.kind, self.settings.ingest_range_bytes, renew)
            if job.options.on_invalid is OnInvalid.REJECT:
                store_invalid = partial(self._store_invalid, job)
                await reject_invalid(lists, ranges, job.kind, store_invalid, renew)
            if not await self._write_plan(job, ranges):
                return
        elif not (await self.records.ingests.ingested(job.run.run_id)).done:
            ranges = await self.records.ingests.ranges(job.run.run_id)
        await self.enqueue([(job, range_) for range_ in ranges if not range_.done])
        await self.finish(job)

    def _lists(self, job: Job) -> ListBytes:
        return ListBytes(self.blobs, job.tenant, self.settings.max_list_bytes, self.remote)

    async def _copy(self, job: Job, source: Source, renew: Renew) -> Source:
        """Stage a list whose URL cannot be read by range. The copy is removed with the job."""
        # Each attempt has a key of its own: a slow earlier one never overwrites the list of the plan.
        key = f"lists/{job.tenant}/{job.job_id}/{self.clock.new_id('list')}"
        digest = sha256()

        async def pieces() -> AsyncIterator[bytes]:
            async for piece in while_leased(self._lists(job).copied(source), renew, PIECES):
                digest.update(piece)
                yield piece

        crashpoint("ingest.copy.before")
        size = await self.blobs.put_stream(key, pieces())
        crashpoint("ingest.copy.after")
        if digest.hexdigest() != (source.sha256 or digest.hexdigest()):
            raise ListChanged("The list has another sha256 than the job named.")
        return msgspec.structs.replace(source, key=key, size=size, sha256=digest.hexdigest(), remote=None)

    async def _write_plan(self, job: Job, ranges: list[Range]) -> bool:
        crashpoint("ingest.split.before")
        written = await self.records.ingests.split(job.job_id, job.run.run_id, ranges)
        crashpoint("ingest.split.after")
        return written

    async def enqueue(self, ranges: list[tuple[Job, Range]]) -> None:
        """Enqueue an ingest of each range, for any ingester."""
        outgoing = [range_message(job, range_.number) for job, range_ in ranges]
        await send_all(self.queue, CONTROL, outgoing, self.clock)

    async def ingest_range(self, job: Job, range_: Range, lease: Lease, renew: Renew, take_turns: Renew) -> bool:
        """Turn one range into tasks, and let others have their turn between two batches. False: the lease is lost, or
        the turn is over. Raises ListUnreadable and LeaseLostError."""
        if job.run.lineage is None:
            await check_unchanged(self._lists(job), range_, renew)
        async with (
            aclosing(prefetch(self._batches(job, range_))) as batches,
            aclosing(self._put_all(job, batches)) as written,
        ):
            return await self._ingest_batches(job, range_, lease, take_turns, written)

    async def _ingest_batches(
        self, job: Job, range_: Range, lease: Lease, take_turns: Renew, batches: AsyncIterator[ListBatch]
    ) -> bool:
        # The checkpoint of a batch is written while the next one is enqueued: a store writes both at once.
        saving: asyncio.Task[bool] | None = None
        try:
            async for batch in batches:
                crashpoint("ingest.put.after")
                outgoing = messages(job.key, batch.seeds, job.options.chunk_size)
                await send_all(self.queue, run_queue(job.run.run_id), outgoing, self.clock)
                crashpoint("ingest.enqueue.after")
                await self._store_invalid(job, range_, batch)
                metrics.INGESTED.add(len(batch.seeds), "task")
                metrics.INGESTED.add(len(batch.invalid), "invalid")
                range_ = _advanced(range_, batch)
                if saving is not None and not await saving:
                    return False
                saving = asyncio.create_task(self._checkpoint(job, range_, lease))
                if not await take_turns():
                    return False
        finally:
            # The next ingester of the range must find the last checkpoint.
            if saving is not None:
                await asyncio.gather(saving, return_exceptions=True)
        if saving is not None and not await saving:
            return False
        done = msgspec.structs.replace(range_, done=True)
        if not await self.records.ingests.checkpoint(job.run.run_id, done, lease.fence):
            return False
        crashpoint("ingest.done.after")
        await self.finish(job)
        return True

    async def _checkpoint(self, job: Job, range_: Range, lease: Lease) -> bool:
        is_ours = await self.records.ingests.checkpoint(job.run.run_id, range_, lease.fence)
        crashpoint("ingest.checkpoint.after")
        return is_ours

    async def _put_all(self, job: Job, batches: AsyncIterator[ListBatch]) -> AsyncGenerator[ListBatch, None]:
        """The batches whose tasks are written, in order; the next ones are being read and written meanwhile. What was
        read before a list turned out unreadable comes first, then the error."""
        writing: deque[tuple[ListBatch, asyncio.Future[None]]] = deque()
        reading: asyncio.Future[ListBatch | None] | None = asyncio.ensure_future(_next(batches))
        unreadable: ListUnreadable | None = None
        try:
            while reading is not None or writing:
                has_room = len(writing) <= PUTS_AHEAD
                waited: list[asyncio.Future[Any]] = [writing[0][1]] if writing else []
                if reading is not None and has_room:
                    waited.append(reading)
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                if reading is not None and has_room and reading.done():
                    try:
                        batch = reading.result()
                    except ListUnreadable as error:
                        batch, unreadable = None, error
                    reading = None
                    if batch is not None:
                        writing.append((batch, asyncio.ensure_future(self.tasks.put(job.key, batch.seeds))))
                        reading = asyncio.ensure_future(_next(batches))
                elif writing and writing[0][1].done():
                    yield await _written(writing)
            if unreadable is not None:
                raise unreadable
        finally:
            # Nothing is read or written any more once the ingest of a range has ended.
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            await asyncio.gather(*(put for _, put in writing), return_exceptions=True)

    def _batches(self, job: Job, range_: Range) -> AsyncGenerator[ListBatch, None]:
        if job.run.lineage is not None:
            return copy_tasks(self.records, self.tasks, self.blobs, job, range_)
        return read(range_pieces(self._lists(job), range_), reading_of(range_, job.kind))

    async def finish(self, job: Job) -> None:
        """Set the total and latch the run if every range is done and no more can be added."""
        run = await self.records.jobs.run(job.job_id, job.run.run_id)
        if run is None or not run.sealed or run.last_batch or run.state is not RunState.INGESTING:
            return
        ingested = await self.records.ingests.ingested(run.run_id)
        if not ingested.done:
            return
        # A list without tasks is a mistake; a rerun without tasks completes at once.
        if ingested.tasks == 0 and run.lineage is None:
            reason = _without_tasks(job, ingested.invalid)
            counts = await self.tasks.counts(job.key)
            await self.lifecycle.move(job, RunState.FAILED, reason, counts, code=ReasonCode.NO_TASKS)
            return
        await self.lifecycle.latch(job, ingested.tasks, ingested.invalid)

    async def clear_up(self, job: Job) -> None:
        """Cancel what the ingest of a finished run wrote last: the sweeper may have been there before."""
        while await self.tasks.cancel_pending(job.key, BATCH, self.clock.now()):
            pass
        # While a worker has messages in flight, the sweeper still needs the queues: they show that.
        if not await has_holders(self.queue, job.run, self.clock.now()):
            for queue in run_queues(job.run.run_id):
                await self.queue.drop(queue)
        counts = await self.tasks.counts(job.key)
        await self.records.jobs.set_total(job.job_id, job.run.run_id, counts.ended, job.run.invalid)

    async def _store_invalid(self, job: Job, range_: Range, batch: ListBatch) -> None:
        if batch.invalid:
            await self.blobs.put(invalid_key(job, range_.number, batch.index), encode_invalid(batch.invalid))


async def _next(batches: AsyncIterator[ListBatch]) -> ListBatch | None:
    return await anext(batches, None)


async def _written(writing: deque[tuple[ListBatch, asyncio.Future[None]]]) -> ListBatch:
    batch, put = writing[0]
    await put
    writing.popleft()
    return batch


def _without_tasks(job: Job, invalid: int) -> str:
    lines = "1 invalid line" if invalid == 1 else f"{invalid} invalid lines"
    why = f"the list has no tasks ({lines})" if invalid else "there were no tasks"
    # The reason says why the server closed an open job.
    return f"{job.reason}; {why}" if job.reason else why


def _advanced(range_: Range, batch: ListBatch) -> Range:
    return msgspec.structs.replace(
        range_,
        index=batch.index,
        offset=batch.offset,
        tasks=range_.tasks + len(batch.seeds),
        invalid=range_.invalid + len(batch.invalid),
    )
