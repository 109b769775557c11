"""Trial: the one suspect chunk that a worker runs at a time, so that a poison task shows itself.

The death of a worker takes everything along that was in flight, and says nothing about one task of it. So the last
start of a task that is about to be dead-lettered has the worker to itself: the trial waits until nothing else is in
flight, and nothing is received meanwhile. Both are bounded: other runs must not stand still for an attempt of an hour.
"""

from collections.abc import Sequence
from math import inf

from conveyor.clock import Clock
from conveyor.model import TaskRef
from conveyor.process.lane import Lane
from conveyor.process.recorder import LeasedChunk

# How long a trial waits for what is in flight, and how long nothing is received beside it.
_EXCLUSIVE_SECONDS = 30.0


class Trial:
    """One for each worker."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._chunk: LeasedChunk | None = None
        # The trial that waits for an idle worker, with its lane and its references.
        self._next: tuple[Lane, LeasedChunk, list[TaskRef]] | None = None
        # Until when a trial waits for the worker, or has it to itself.
        self._until = -inf

    def begin(self, lane: Lane, chunk: LeasedChunk, refs: list[TaskRef], *, exclusive: bool) -> bool:
        """Put a chunk on trial, unless another one is. A poison task would otherwise cost all other chunks that the
        worker leases their last start too."""
        if self._next is not None or (self._chunk is not None and self._chunk.left > 0 and not self._chunk.lost):
            return False
        self._chunk = chunk
        if exclusive:
            # The lane leases it from now on, and gets its references when the worker is idle.
            lane.chunks[chunk.receipt] = chunk
            self._next = lane, chunk, refs
            self._until = self._clock.monotonic() + _EXCLUSIVE_SECONDS
        else:
            lane.feed(chunk, refs)
        return True

    def is_exclusive(self, lanes: Sequence[Lane]) -> bool:
        """Return whether the worker must not receive anything. Starts the trial that waits, once it can."""
        now = self._clock.monotonic()
        if self._next is not None:
            lane, chunk, refs = self._next
            if lane not in lanes or chunk.lost:
                # The lane was dropped and has released the chunk, or its lease expired.
                self._next, self._until = None, -inf
            elif now >= self._until or not _is_anything_beside(chunk, lanes):
                self._next, self._until = None, now + _EXCLUSIVE_SECONDS
                lane.feed(chunk, refs)
        is_over = self._chunk is None or self._chunk.left == 0 or self._chunk.lost
        return not is_over and now < self._until


def _is_anything_beside(chunk: LeasedChunk, lanes: Sequence[Lane]) -> bool:
    """Whether other chunks have references without a durable outcome, or attempts run."""
    return any(
        lane.active > 0 or any(other is not chunk and other.left > 0 for other in lane.chunks.values())
        for lane in lanes
    )
