"""References: from tasks to the messages on a run's queue. A message carries a chunk of references, in index order."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.engines.queue import Outgoing, Queue, QueueName
from conveyor.model import Chunk, RunKey, TaskRef, TaskSeed

log = structlog.get_logger()

# A message of SQS holds 256 KiB; what is around the inputs is small.
MAX_CHUNK_BYTES = 200_000
# A reference's own weight beside its input.
_REF_BYTES = 16
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 5.0

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Chunk)


def encode(chunk: Chunk, delay: float = 0.0) -> Outgoing:
    return Outgoing(_encoder.encode(chunk), delay)


def decode(body: bytes) -> Chunk:
    return _decoder.decode(body)


def messages(run: RunKey, seeds: Iterable[TaskSeed], chunk_size: int) -> list[Outgoing]:
    """The run's references as messages, each of at most `chunk_size` of them and about 200 KB. An input that is
    larger than this travels alone."""
    return [encode(Chunk(run, refs)) for refs in _chunks(seeds, chunk_size)]


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


def _chunks(seeds: Iterable[TaskSeed], chunk_size: int) -> Iterator[list[TaskRef]]:
    refs: list[TaskRef] = []
    weight = 0
    for seed in seeds:
        size = _REF_BYTES + (len(seed.input) if seed.input.isascii() else len(seed.input.encode()))
        if refs and (len(refs) >= chunk_size or weight + size > MAX_CHUNK_BYTES):
            yield refs
            refs, weight = [], 0
        refs.append(TaskRef(seed.index, seed.input))
        weight += size
    if refs:
        yield refs
