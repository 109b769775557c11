"""SlotDealer: deals a worker's slots to its lanes, within the limits of the fleet and of each run, and says which runs
need more than the worker has."""

from collections.abc import Callable, Collection
from math import inf

from conveyor.clock import Clock
from conveyor.coordination.limits import run_slots
from conveyor.model import RunId
from conveyor.process.dispatch import Demand, deal
from conveyor.process.lane import Lane
from conveyor.process.run_permits import PermitWish, RunPermits
from conveyor.settings import Settings

# How long a lane keeps its slots while others wait for a turn.
_TURN_SECONDS = 1.0
# How long a run falls behind before another worker may join, and until it asks again.
_BEHIND_SECONDS = 0.5
_ASK_AGAIN = 5.0

# The semaphore that all workers share if the fleet has a limit.
ROLE = "role:worker"


class SlotDealer:
    """`ask_help` is called with a run that falls behind here."""

    def __init__(
        self, settings: Settings, clock: Clock, permits: RunPermits, ask_help: Callable[[RunId], None]
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._permits = permits
        self._help = ask_help

    async def deal(self, lanes: Collection[Lane]) -> None:
        """Set the width of every lane."""
        demands = {lane.job.run.run_id: _demand(lane) for lane in lanes}
        slots = await self._slots(demands.values(), lanes)
        # Not with every tick: what runs in a lane goes on when its slot goes to another one.
        widths = deal(demands.values(), slots, int(self._clock.monotonic() / _TURN_SECONDS))
        granted = await self._permits.acquire(
            {
                # The semaphore also counts what runs, so ask for more while attempts of a wider deal go on.
                run_slots(run_id): PermitWish(max(widths.get(run_id, 0), lane.active), lane.job.options.concurrency)
                for run_id, lane in ((lane.job.run.run_id, lane) for lane in lanes)
            }
        )
        is_fleet_full = slots < self._settings.worker_concurrency
        for lane in lanes:
            run_id = lane.job.run.run_id
            width, permits = widths.get(run_id, 0), granted[run_slots(run_id)]
            lane.set_width(min(width, permits))
            lane.note_starved(is_starved=width > 0 and permits == 0)
            self.note_behind(lane, is_behind=width < demands[run_id].want and permits >= width and not is_fleet_full)

    def note_behind(self, lane: Lane, *, is_behind: bool) -> None:
        """Let another worker join a run that has had too few slots here for a while."""
        now = self._clock.monotonic()
        if not is_behind:
            lane.help_at = inf
        elif lane.help_at == inf:
            lane.help_at = now + _BEHIND_SECONDS
        elif now >= lane.help_at:
            lane.help_at = now + _ASK_AGAIN
            self._help(lane.job.run.run_id)

    def has_free_slots(self, lanes: Collection[Lane], new_runs: int) -> bool:
        """Whether slots are left. Of new runs nothing is known yet: each counts as one task."""
        left = self._settings.worker_concurrency - new_runs
        for lane in lanes:
            if left <= 0:
                break
            left -= min(max(1, lane.demand), lane.job.options.concurrency)
        return left > 0

    async def _slots(self, demands: Collection[Demand], lanes: Collection[Lane]) -> int:
        """Return how many tasks this worker may run at once: within its own limit and the fleet's."""
        own, fleet = self._settings.worker_concurrency, self._settings.fleet_concurrency
        if fleet == 0:
            return own
        want = max(min(own, sum(demand.want for demand in demands)), sum(lane.active for lane in lanes))
        return min(own, (await self._permits.acquire({ROLE: PermitWish(want, fleet)}))[ROLE])


def _demand(lane: Lane) -> Demand:
    job = lane.job
    return Demand(job.tenant, job.run.run_id, min(lane.demand, job.options.concurrency), job.options.priority)
