"""SlotDealer: deals a worker's slots to its lanes, within the limits of the fleet and of each run, and says which runs
need more than the worker has."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from math import inf

from conveyor.clock import Clock
from conveyor.coordination.limits import run_slots
from conveyor.model import RunId, TenantId
from conveyor.process.dispatch import Demand, count_dealt, deals
from conveyor.process.lane import Lane
from conveyor.process.run_permits import PermitWish, RunPermits
from conveyor.process.slot_times import SlotTimes
from conveyor.settings import Settings

# How long a lane keeps its slots while others wait for a turn.
_TURN_SECONDS = 1.0
# How long a run falls behind before another worker may join, and until it asks again.
_BEHIND_SECONDS = 0.5
_ASK_AGAIN = 5.0

# Portions are for a worker with so many slots; one with fewer deals smaller ones, to as many runs at a time.
_USUAL_SLOTS = 256

# A full worker looks for further runs once one in four of its slots is unused: a look for each would cost too much.
_ROOM = 4

# The semaphore that all workers share if the fleet has a limit.
ROLE = "role:worker"


class SlotDealer:
    """An attempt starts only in a slot of its lane's width, and a lane is widened only by slots that are free. So no
    more attempts than `worker_concurrency` run, and attempts beyond the width of a lane that had to make room keep
    their slots until they end. `ask_help` is called with a run that falls behind here; `workers_of` says how many
    workers serve a tenant."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        permits: RunPermits,
        ask_help: Callable[[RunId], None],
        workers_of: Callable[[TenantId], int] = lambda tenant: 1,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._permits = permits
        self._help = ask_help
        self._times = SlotTimes(_TURN_SECONDS, workers_of, clock.jitter)
        self._workers_of = workers_of
        # Slots to deal, as of the last deal; those in use, and by which lanes, with the time since when.
        self._slots = settings.worker_concurrency
        self._in_use = 0
        self._used: dict[Lane, tuple[int, float]] = {}
        # Lanes that were dealt more slots than were free, with their widths: the first gets the next slot.
        self._owed: deque[tuple[Lane, int]] = deque()
        # Whose slots the next ones would have been in the last deal, which tenants could use some, and lanes that do
        # not use all of theirs since.
        self._line: Iterator[RunId] = iter(())
        self._wanting: set[TenantId] = set()
        self._idle: dict[Lane, None] = {}
        # Whether lanes could use more slots than there are.
        self.is_contended = False

    async def deal(self, lanes: Collection[Lane]) -> None:
        """Set the width of every lane."""
        now = self._clock.monotonic()
        for lane in list(self._used):
            self._count(lane, now)
        self._times.update([(lane.job.tenant, lane.job.run.run_id) for lane in lanes], now)
        demands = {lane.job.run.run_id: self._demand(lane) for lane in lanes}
        slots = await self._count_slots(demands.values())
        self._slots = slots
        order = deals(demands.values())
        dealt = count_dealt(islice(order, slots))
        self._line = order
        self._wanting = {demand.tenant for demand in demands.values() if demand.want}
        self._times.begin(dict.fromkeys(demands[run_id].tenant for run_id in dealt), self._wanting)
        self._idle.clear()
        self._narrow(lanes, dealt)
        granted = await self._acquire(lanes, dealt)
        self.is_contended = sum(demand.want for demand in demands.values()) > slots
        self._set_widths(lanes, {run_id: min(count, granted[run_id]) for run_id, count in dealt.items()})
        is_fleet_full = slots < self._settings.worker_concurrency
        for lane in lanes:
            run_id = lane.job.run.run_id
            width, permits = dealt.get(run_id, 0), granted.get(run_id, 0)
            lane.note_starved(is_starved=width > 0 and permits == 0)
            self.note_behind(lane, is_behind=width < demands[run_id].want and permits >= width and not is_fleet_full)

    async def _acquire(self, lanes: Collection[Lane], dealt: Mapping[RunId, int]) -> Mapping[RunId, int]:
        """Return how many permits each run has here. Runs without slots, of which none is to be given back, have none
        and are not among them."""
        wishes: dict[str, PermitWish] = {}
        names: dict[RunId, str] = {}
        for lane in lanes:
            run_id = lane.job.run.run_id
            # The semaphore also counts what runs, so ask for more while attempts of a wider deal go on.
            want = max(dealt.get(run_id, 0), lane.attempts)
            name = run_slots(run_id)
            if want or self._permits.has(name):
                names[run_id] = name
                wishes[name] = PermitWish(want, lane.job.options.concurrency)
        granted = await self._permits.acquire(wishes)
        return {run_id: granted[name] for run_id, name in names.items()}

    def note_idle(self, lane: Lane) -> None:
        """The lane has no references for some of its slots."""
        self._idle[lane] = None

    async def pass_on_idle(self, lanes: Mapping[RunId, Lane]) -> None:
        """Go on with the last deal: slots that lanes do not use, or that finished ones had, go to those that are next.
        It looks at no other lane."""
        idle, self._idle = list(self._idle), {}
        self._give_up_idle(lanes, idle)
        dealt: dict[RunId, int] = {}
        free = self._slots - self._in_use
        while free > 0 and (run_id := next(self._line, None)) is not None:
            lane = lanes.get(run_id)
            if lane is None:
                continue
            width = dealt.get(run_id, max(lane.width, lane.attempts))
            if width < min(lane.demand, lane.job.options.concurrency):
                dealt[run_id] = width + 1
                free -= 1
        if dealt:
            self._times.begin(dict.fromkeys(lanes[run_id].job.tenant for run_id in dealt), self._wanting)
            granted = await self._acquire([lanes[run_id] for run_id in dealt], dealt)
            # Some may have been dropped meanwhile.
            self._widen(lanes, {run_id: min(count, granted[run_id]) for run_id, count in dealt.items()})

    def _give_up_idle(self, lanes: Mapping[RunId, Lane], idle: Iterable[Lane]) -> None:
        """Narrow lanes to what they use. Those that were owed slots get theirs first."""
        now = self._clock.monotonic()
        for lane in idle:
            if lanes.get(lane.job.run.run_id) is lane and (use := lane.demand) < lane.width:
                lane.set_width(use)
                self._count(lane, now)
        self._pass_on(now)

    def on_slots_freed(self, lane: Lane) -> None:
        """Attempts beyond the lane's width have ended: pass their slots on."""
        now = self._clock.monotonic()
        self._count(lane, now)
        self._pass_on(now)

    def _pass_on(self, now: float) -> None:
        """Widen lanes that wait for slots by those that are free."""
        if not self._owed:
            return
        free = self._slots - self._in_use
        widths: dict[Lane, int] = {}
        while free > 0 and self._owed:
            free -= 1
            lane, width = self._owed.popleft()
            widths[lane] = widths.get(lane, lane.width) + 1
            if widths[lane] < width:
                self._owed.append((lane, width))
        for lane, width in widths.items():
            lane.set_width(width)
            self._count(lane, now)

    def forget(self, lane: Lane) -> None:
        """The lane stops: it gets no more slots. Those of its attempts are free when they end."""
        self._owed = deque(owed for owed in self._owed if owed[0] is not lane)
        self._idle.pop(lane, None)

    def _narrow(self, lanes: Collection[Lane], dealt: Mapping[RunId, int]) -> None:
        """Narrow lanes before permits of their runs are given back: while the coordinator is asked, no attempt starts
        in a slot whose permit another worker may have by then."""
        now = self._clock.monotonic()
        for lane in lanes:
            if (width := dealt.get(lane.job.run.run_id, 0)) < lane.width:
                lane.set_width(width)
                self._count(lane, now)
        owed = [(lane, min(width, dealt.get(lane.job.run.run_id, 0))) for lane, width in self._owed]
        self._owed = deque((lane, width) for lane, width in owed if width > lane.width)
        self._pass_on(now)

    def _set_widths(self, lanes: Collection[Lane], widths: Mapping[RunId, int]) -> None:
        """Narrow lanes, then widen others by the slots that are free."""
        now = self._clock.monotonic()
        self._owed.clear()
        by_run = {lane.job.run.run_id: lane for lane in lanes}
        for run_id, lane in by_run.items():
            if (width := widths.get(run_id, 0)) <= lane.width and not lane.is_settled(width):
                lane.set_width(width)
                self._count(lane, now)
            elif lane in self._used:
                self._count(lane, now)
        self._widen(by_run, widths)

    def _widen(self, lanes: Mapping[RunId, Lane], widths: Mapping[RunId, int]) -> None:
        """Widen lanes by the slots that are free, in the order of `widths`."""
        now = self._clock.monotonic()
        for run_id, width in widths.items():
            lane = lanes.get(run_id)
            if lane is None:
                continue
            if width > lane.width:
                free = max(0, self._slots - self._in_use)
                # What the lane has in use beyond its width is its own.
                lane.set_width(min(width, lane.slots_in_use + free))
                self._count(lane, now)
            if width > lane.width:
                self._owed.append((lane, width))

    def _count(self, lane: Lane, now: float) -> None:
        """Charge for the slots that the lane had in use since it was counted last, and count those that it has now."""
        used, since = self._used.get(lane, (0, now))
        if used:
            self._times.charge(lane.job.tenant, lane.job.run.run_id, used * (now - since))
        in_use = lane.slots_in_use
        self._in_use += in_use - used
        if in_use:
            self._used[lane] = in_use, now
        elif used:
            del self._used[lane]

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

    def free_slots(self, lanes: Collection[Lane], new_runs: int) -> int:
        """Return how many slots are left. Of new runs nothing is known yet: each counts as one task. A run that is here
        as a whole, and whose outcomes wait to be recorded, counts as none."""
        left = self._settings.worker_concurrency - new_runs
        for lane in lanes:
            if left <= 0:
                break
            least = 0 if lane.has_whole_run else 1
            left -= min(max(least, lane.demand), lane.job.options.concurrency)
        return max(0, left)

    @property
    def has_room(self) -> bool:
        """Whether enough slots are unused for the worker to take further runs, by what was dealt and released."""
        return self._slots - self._in_use >= max(1, self._slots // _ROOM)

    async def _count_slots(self, demands: Collection[Demand]) -> int:
        """Return how many tasks this worker may run at once: within its own limit and the fleet's."""
        own, fleet = self._settings.worker_concurrency, self._settings.fleet_concurrency
        if fleet == 0:
            return own
        want = max(min(own, sum(demand.want for demand in demands)), self._in_use)
        return min(own, (await self._permits.acquire({ROLE: PermitWish(want, fleet)}))[ROLE])

    def _demand(self, lane: Lane) -> Demand:
        job = lane.job
        tenant_served, served = self._times.order(job.tenant, job.run.run_id)
        want = min(lane.demand, job.options.concurrency)
        portion = max(1, lane.portion * min(self._settings.worker_concurrency, _USUAL_SLOTS) // _USUAL_SLOTS)
        workers = self._workers_of(job.tenant)
        return Demand(job.tenant, job.run.run_id, want, job.options.priority, served, tenant_served, portion, workers)
