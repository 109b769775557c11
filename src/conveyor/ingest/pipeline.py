"""The ingest of one list, as one visible function. A crash anywhere in it resumes at the last checkpoint and converges:
task ids are deterministic, references that are sent twice fall to the status guard, and the total is absolute."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec

from conveyor.clock import Clock
from conveyor.engines.blobs import Blobs
from conveyor.engines.coordinator import Coordinator, Lease
from conveyor.engines.queue import Queue, run_queue
from conveyor.engines.records import Checkpoint, Records
from conveyor.engines.tasks import Tasks
from conveyor.faults import crashpoint
from conveyor.lifecycle import Lifecycle
from conveyor.model import InputJson, Job, TaskSeed
from conveyor.references import messages, send_all

# Tasks written in one step; memory and what a crash repeats are bounded by it.
BATCH = 5000
BATCH_BYTES = 8 * 1024 * 1024

LEASE_SECONDS = 60.0


@dataclass(frozen=True)
class Ingest:
    """What the pipeline works with."""

    records: Records
    tasks: Tasks
    queue: Queue
    coordinator: Coordinator
    blobs: Blobs
    lifecycle: Lifecycle
    clock: Clock

    async def run(self, job: Job, source: str, lease: Lease) -> bool:
        """Ingest the staged list at `source`. False if the lease was lost: another goes on with it."""
        at = await self.records.checkpointed(job.run.run_id) or Checkpoint(0, 0)
        async for batch in self._batches(source, at):
            await self.tasks.put(job.key, batch.seeds)
            crashpoint("ingest.put.after")
            outgoing = messages(job.key, batch.seeds, job.options.chunk_size)
            await send_all(self.queue, run_queue(job.run.run_id), outgoing, self.clock)
            crashpoint("ingest.enqueue.after")
            at = batch.after
            if not await self.records.checkpoint(job.job_id, job.run.run_id, at, lease.fence):
                return False
            crashpoint("ingest.checkpoint.after")
            if not await self.coordinator.renew(lease, LEASE_SECONDS):
                return False
        await self.lifecycle.latch(job, at.next_index)
        return True

    async def clear_up(self, job: Job) -> None:
        """A run that ended while its list was read may have been swept before its last batch was written."""
        while await self.tasks.cancel_pending(job.key, BATCH, self.clock.now()):
            pass
        await self.queue.drop(run_queue(job.run.run_id))
        counts = await self.tasks.counts(job.key)
        await self.records.set_total(job.job_id, job.run.run_id, counts.ended)

    async def _batches(self, source: str, at: Checkpoint) -> AsyncIterator["Batch"]:
        index, offset = at.next_index, at.offset
        seeds: list[TaskSeed] = []
        size = 0
        async for line in _lines(self.blobs.stream(source, offset)):
            offset += len(line) + 1
            size += len(line)
            seeds.append(TaskSeed(index, InputJson(line.decode())))
            index += 1
            if len(seeds) == BATCH or size >= BATCH_BYTES:
                yield Batch(seeds, Checkpoint(index, offset))
                seeds, size = [], 0
        if seeds:
            yield Batch(seeds, Checkpoint(index, offset))


class Batch(msgspec.Struct, frozen=True):
    """Some tasks, and the checkpoint once they are durable and enqueued."""

    seeds: list[TaskSeed]
    after: Checkpoint


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Lines of a staged list; the last may lack its newline."""
    rest = b""
    async for piece in pieces:
        lines = (rest + piece).split(b"\n")
        rest = lines.pop()
        for line in lines:
            yield line
    if rest:
        yield rest
