"""What to do with a chunk that a queue delivered. Pure; the feeder acts on it.

A start counts as lost when the queue redelivers a chunk that a worker had begun. A chunk with too many lost starts may
hold a poison task: it is split, so that each task goes on alone, even an only one, and a task that still loses its
workers is dead-lettered. Its last start has a worker to itself: a death that took other work along proves nothing.
"""

from collections.abc import Sequence
from enum import Enum, auto

from conveyor.engines.queue import Delivery
from conveyor.model import LONG_KINDS, Chunk, JobKind, TaskRef


class ChunkDecision(Enum):
    """What the feeder does with one delivered chunk."""

    # The lane gets its references.
    FEED = auto()
    # The same, once no other chunk of this worker is on trial.
    TRY = auto()
    # The same, with nothing else in flight at this worker.
    TRY_EXCLUSIVELY = auto()
    # Nothing of it is left to run: its message is acknowledged.
    ACKNOWLEDGE = auto()
    # Each of its references goes on in a message of its own.
    SPLIT = auto()
    # Its only task fails and is dead-lettered.
    DEAD_LETTER = auto()


def decide(
    kind: JobKind, delivery: Delivery, chunk: Chunk, refs: Sequence[TaskRef], max_lost_starts: int, *, superseded: bool
) -> ChunkDecision:
    """Decide on a chunk of which `refs` are unfinished. `superseded`: the monitor has requeued its task since."""
    starts = delivery.lost_starts + 1
    if not refs:
        return ChunkDecision.ACKNOWLEDGE
    if chunk.lost:
        return ChunkDecision.DEAD_LETTER
    if superseded:
        return ChunkDecision.ACKNOWLEDGE
    if kind in LONG_KINDS:
        # Their progress documents count lost starts: see task_progress.py.
        return ChunkDecision.FEED
    if starts > max_lost_starts:
        return ChunkDecision.DEAD_LETTER if chunk.alone else ChunkDecision.SPLIT
    is_last_start = starts == max_lost_starts
    if chunk.alone:
        return ChunkDecision.TRY_EXCLUSIVELY if is_last_start else ChunkDecision.TRY
    return ChunkDecision.TRY if is_last_start and max_lost_starts > 1 else ChunkDecision.FEED


def can_be_superseded(delivery: Delivery, chunk: Chunk, refs: Sequence[TaskRef]) -> bool:
    """Return whether to look up the generation of the chunk's task: the monitor requeues tasks one by one, and only
    those that were delivered before."""
    return delivery.receives > 1 and len(refs) == 1 and not chunk.lost
