"""StalledRuns: runs whose queues cannot be counted, and that have finished no task for too long. Their references may
be lost: only time shows it. A needless repair has tasks run twice, so each waits twice as long as the one before.
"""

from collections.abc import Collection

import msgspec

from conveyor.clock import Clock
from conveyor.engines.queue import Depth
from conveyor.model import LONG_KINDS, Job, RunId

_SHORTEST_PATIENCE = 300.0
_SHORTEST_PATIENCE_OF_LONG_TASKS = 3600.0
_LONGEST_PATIENCE = 86_400.0


class Stall(msgspec.Struct):
    """How many tasks of a run have finished, since when, and how long that may last."""

    ended: int
    since: float
    patience: float


class StalledRuns:
    """What one sweeper has seen."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._stalls: dict[RunId, Stall] = {}

    def forget_others(self, runs: Collection[RunId]) -> None:
        """Forget all runs but these."""
        self._stalls = {run_id: stall for run_id, stall in self._stalls.items() if run_id in runs}

    def is_stalled(self, job: Job, depth: Depth, ended: int) -> bool:
        """Whether the run should be repaired now. A run that has a known message is not stalled."""
        now = self._clock.monotonic()
        stall = self._stalls.setdefault(job.run.run_id, Stall(ended, now, _patience(job)))
        if stall.ended != ended or depth.total or not depth.unknown:
            stall.ended, stall.since = ended, now
        if now - stall.since < stall.patience:
            return False
        stall.since, stall.patience = now, min(_LONGEST_PATIENCE, 2 * stall.patience)
        return True


def _patience(job: Job) -> float:
    """Twice as long as one task may need for an attempt and the pause after it."""
    options = job.options
    shortest = _SHORTEST_PATIENCE_OF_LONG_TASKS if job.kind in LONG_KINDS else _SHORTEST_PATIENCE
    pause = max(options.backoff.cap, 0.0 if options.outage is None else options.outage.delay)
    return max(shortest, 2 * (options.timeout + pause))
