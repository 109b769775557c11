"""References: from tasks to the messages on a run's queue. A message carries a chunk of references, in index order."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.engines.queue import Outgoing, Queue, QueueName, run_queues
from conveyor.model import Chunk, Run, RunKey, TaskRef, TaskSeed

log = structlog.get_logger()

# A message of SQS holds 256 KiB; what is around the inputs is small.
MAX_CHUNK_BYTES = 200_000
# A reference's own weight beside its input.
_REF_BYTES = 16
# How much longer than the first of a message its others may wait.
_ABOUT = 1.25
# Seconds that the queues of an ended run are kept for those who still hold messages of it.
_HOLDERS = 30.0
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 5.0

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Chunk)


def encode(chunk: Chunk, delay: float = 0.0) -> Outgoing:
    return Outgoing(_encoder.encode(chunk), delay)


def decode(body: bytes) -> Chunk:
    return _decoder.decode(body)


async def has_holders(queue: Queue, run: Run, now: float) -> bool:
    """Whether somebody may still send to a queue of this ended run: who holds a message of it may, until they hear of
    its end. Without its queues nobody could know."""
    if run.ended_at is None or now - run.ended_at > _HOLDERS:
        return False
    for name in run_queues(run.run_id):
        if (await queue.depth(name)).held:
            return True
    return False


def messages(run: RunKey, seeds: Iterable[TaskSeed], chunk_size: int) -> list[Outgoing]:
    """The run's references as messages, each of at most `chunk_size` of them and about 200 KB. An input that is
    larger than this travels alone."""
    refs = (TaskRef(seed.index, seed.input) for seed in seeds)
    return [encode(Chunk(run, chunk)) for chunk in _chunks(refs, chunk_size)]


def gathered(run: RunKey, delayed: Iterable[tuple[float, TaskRef]], chunk_size: int) -> list[Outgoing]:
    """References that come again after delays of their own as few messages: those that are due at about the same time
    share one, and come when the last of them is."""
    batches: list[list[tuple[float, TaskRef]]] = []
    for delay, ref in sorted(delayed, key=lambda each: each[0]):
        if not batches or delay > batches[-1][0][0] * _ABOUT + 1.0:
            batches.append([])
        batches[-1].append((delay, ref))
    return [
        encode(Chunk(run, chunk), batch[-1][0])
        for batch in batches
        for chunk in _chunks((ref for _, ref in batch), chunk_size)
    ]


async def send_all(queue: Queue, name: QueueName, outgoing: Sequence[Outgoing], clock: Clock) -> None:
    """Send until every message is taken: a batch may be taken in part."""
    pause = _FIRST_PAUSE
    while outgoing:
        unsent = await queue.send(name, outgoing)
        if not unsent:
            return
        log.warning("queue took part of a batch; sending the rest again", queue=name, left=len(unsent))
        outgoing = [outgoing[position] for position in unsent]
        await clock.sleep(pause)
        pause = min(pause * 2, _LONGEST_PAUSE)


def _chunks(given: Iterable[TaskRef], chunk_size: int) -> Iterator[list[TaskRef]]:
    refs: list[TaskRef] = []
    weight = 0
    for ref in given:
        size = _REF_BYTES + (len(ref.input) if ref.input.isascii() else len(ref.input.encode()))
        if refs and (len(refs) >= chunk_size or weight + size > MAX_CHUNK_BYTES):
            yield refs
            refs, weight = [], 0
        refs.append(ref)
        weight += size
    if refs:
        yield refs
