"""Queue messages of jobs: chunks of references on a run's queues, in index order, and requests for an ingest on the
control queue."""

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence

import msgspec
import structlog

from conveyor.clock import Clock, seconds_since
from conveyor.engines.queue import CONTROL, Outgoing, Queue, QueueName, SharesQueues, run_queues
from conveyor.engines.records import Records
from conveyor.engines.tasks import TaskFilter, Tasks
from conveyor.model import Chunk, IngestJob, IngestRange, InputJson, Job, Run, RunId, RunKey, TaskId, TaskRef, TaskSeed
from conveyor.states import ENDED, TaskStatus

log = structlog.get_logger()

# An SQS message holds 256 KiB; the overhead around the inputs is small.
MAX_CHUNK_BYTES = 200_000
# The size of a reference without its input.
_REF_BYTES = 16
# References share a message if their delays differ by no more than this factor.
_ABOUT = 1.25
# How long the queues of a finished run stay for workers that still have messages of it in flight, in seconds.
_HOLDER_SECONDS = 30.0
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 5.0

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Chunk)


def encode(chunk: Chunk, delay: float = 0.0) -> Outgoing:
    return Outgoing(_encoder.encode(chunk), delay)


def decode(body: bytes) -> Chunk:
    return _decoder.decode(body)


async def has_holders(queue: Queue, run: Run, now: float) -> bool:
    """Whether a worker may still send to a queue of this finished run: one with a message in flight may, until it sees
    that the run has finished. Only the run's queues show that."""
    if run.ended_at is None or seconds_since(run.ended_at, now) > _HOLDER_SECONDS:
        return False
    return await is_in_flight(queue, run.run_id)


async def is_in_flight(queue: Queue, run_id: RunId) -> bool:
    """Whether a message of the run is in flight, or may be, in a queue that several runs share."""
    for name in run_queues(run_id):
        if (await queue.depth(name)).held:
            return True
    shared = await queue.shared_depth() if isinstance(queue, SharesQueues) else None
    return shared is not None and shared.held > 0


async def drop_if_ended(records: Records, queue: Queue, job: Job, now: float) -> None:
    """Drop the run's queues if it has finished. For whoever sent to them without a message of the run in flight: the
    sweeper may have dropped the queues just before, and looks at each run once."""
    run = await records.jobs.run(job.job_id, job.run.run_id)
    if run is not None and (run.state not in ENDED or await has_holders(queue, run, now)):
        return
    for name in run_queues(job.run.run_id):
        await queue.drop(name)


def messages(run: RunKey, seeds: Iterable[TaskSeed], chunk_size: int) -> list[Outgoing]:
    """The run's references as messages, each with at most `chunk_size` references and about 200 KB. A larger input has
    a message to itself."""
    refs = [TaskRef(seed.index, seed.input) for seed in seeds]
    return [encode(Chunk(run, chunk)) for chunk in _chunks(refs, chunk_size)]


def delayed_messages(run: RunKey, delayed: Iterable[tuple[float, TaskRef]], chunk_size: int) -> list[Outgoing]:
    """References with delays of their own, in few messages: those that are due at about the same time share one, which
    becomes visible when the last of them is due."""
    batches: list[list[tuple[float, TaskRef]]] = []
    for delay, ref in sorted(delayed, key=lambda pair: pair[0]):
        if not batches or delay > batches[-1][0][0] * _ABOUT + 1.0:
            batches.append([])
        batches[-1].append((delay, ref))
    return [
        encode(Chunk(run, chunk), batch[-1][0])
        for batch in batches
        for chunk in _chunks([ref for _, ref in batch], chunk_size)
    ]


async def request_ingest(queue: Queue, job: Job, clock: Clock) -> None:
    """Have an ingester look at the run's list. A second message does no harm."""
    await send_all(queue, CONTROL, [ingest_message(job)], clock)


def ingest_message(job: Job) -> Outgoing:
    """The message that has the run's list split into ranges, or its ingest continued."""
    return Outgoing(msgspec.json.encode(IngestJob(job.tenant, job.job_id, job.run.run_id)))


def range_message(job: Job, number: int) -> Outgoing:
    """The message that has one range of the run's list ingested."""
    return Outgoing(msgspec.json.encode(IngestRange(job.tenant, job.job_id, job.run.run_id, number)))


async def pending_seeds(tasks: Tasks, job: Job, limit: int) -> AsyncGenerator[list[TaskSeed], None]:
    """The run's pending tasks, in pages of at most `limit`."""
    for shard in range(max(1, job.task_shard_count)):
        after: TaskId | None = None
        while page := await tasks.page(job.key, shard, after, limit, TaskFilter(status=TaskStatus.PENDING)):
            yield [TaskSeed(task.index, InputJson(bytes(task.input).decode())) for task in page]
            after = page[-1].task_id


async def requeue_pending(queue: Queue, name: QueueName, tasks: Tasks, job: Job, limit: int, clock: Clock) -> int:
    """Send references of all pending tasks of the run to a queue; returns their number. A worker drops a reference to a
    task that has finished, so that sending one too often does no harm."""
    count = 0
    async for seeds in pending_seeds(tasks, job, limit):
        await send_all(queue, name, messages(job.key, seeds, job.options.chunk_size), clock)
        count += len(seeds)
    return count


async def send_all(queue: Queue, name: QueueName, outgoing: Sequence[Outgoing], clock: Clock) -> None:
    """Send until the queue has accepted every message: it may accept a batch in part."""
    pause = _FIRST_PAUSE
    while outgoing:
        unsent = await queue.send(name, outgoing)
        if not unsent:
            return
        log.warning("queue accepted part of a batch; sending the rest again", queue=name, left=len(unsent))
        outgoing = [outgoing[position] for position in unsent]
        await clock.sleep(pause)
        pause = min(pause * 2, _LONGEST_PAUSE)


def _chunks(all_refs: list[TaskRef], chunk_size: int) -> Iterator[list[TaskRef]]:
    for start in range(0, len(all_refs), chunk_size):
        refs = all_refs[start : start + chunk_size]
        # A character has at most four bytes.
        if sum([len(ref.input) for ref in refs]) * 4 + _REF_BYTES * len(refs) <= MAX_CHUNK_BYTES:
            yield refs
        else:
            yield from _light_chunks(refs)


def _light_chunks(all_refs: Sequence[TaskRef]) -> Iterator[list[TaskRef]]:
    refs: list[TaskRef] = []
    weight = 0
    for ref in all_refs:
        size = _REF_BYTES + (len(ref.input) if ref.input.isascii() else len(ref.input.encode()))
        if refs and weight + size > MAX_CHUNK_BYTES:
            yield refs
            refs, weight = [], 0
        refs.append(ref)
        weight += size
    if refs:
        yield refs
