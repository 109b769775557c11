"""InProgressSharing: one worker tells the coordinator which tasks it attempts, so that lists show them as in progress.
It costs nothing while attempts are quick, and a few calls a second while they are slow."""

from collections.abc import Mapping

from conveyor.clock import Clock
from conveyor.coordination.in_progress import share_in_progress
from conveyor.engines.coordinator import Coordinator
from conveyor.model import RunId
from conveyor.process.lane import Lane

# How often to look. An attempt that two looks find is slow enough to be shown.
_LOOK_SECONDS = 1.0
# How soon to share again what has not changed.
_SHARE_SECONDS = 3.0
# Runs of a worker whose tasks are shared, and tasks of each: a page of a list has no more.
_MAX_RUNS = 16
_MAX_TASKS = 1_000


class InProgressSharing:
    """`lanes` are those of the worker."""

    def __init__(self, coordinator: Coordinator, clock: Clock, worker: str, lanes: Mapping[RunId, Lane]) -> None:
        self._coordinator = coordinator
        self._clock = clock
        self._worker = worker
        self._lanes = lanes
        # What the last look found, and what was shared, and when.
        self._found: dict[RunId, frozenset[int]] = {}
        self._shared: dict[RunId, tuple[float, list[int]]] = {}

    async def share(self) -> float:
        """Share what has changed. Returns the seconds until the next look."""
        before, self._found = self._found, self._look()
        slow = {run_id: sorted(indexes & before.get(run_id, frozenset())) for run_id, indexes in self._found.items()}
        for run_id in [*self._shared, *(run_id for run_id in slow if run_id not in self._shared)]:
            await self._share_run(run_id, slow.get(run_id, [])[:_MAX_TASKS])
        return _LOOK_SECONDS

    def _look(self) -> dict[RunId, frozenset[int]]:
        found: dict[RunId, frozenset[int]] = {}
        for run_id, lane in self._lanes.items():
            if indexes := lane.in_progress():
                found[run_id] = frozenset(indexes)
            if len(found) == _MAX_RUNS:
                break
        return found

    async def _share_run(self, run_id: RunId, indexes: list[int]) -> None:
        at, shared = self._shared.get(run_id, (0.0, []))
        if indexes == shared and (not indexes or self._clock.monotonic() - at < _SHARE_SECONDS):
            return
        await share_in_progress(self._coordinator, run_id, self._worker, indexes, self._clock.now())
        if indexes:
            self._shared[run_id] = (self._clock.monotonic(), indexes)
        else:
            self._shared.pop(run_id, None)
