"""SlotTimes: how many slot-seconds tenants and their runs have had lately, as one worker sees it. Whoever had least is
next.

A tenant that N workers serve is charged for all of them: what it has here, it is taken to have at each. So each of them
owes it one slot in a long while. If all of them owed it at the same time, it would have N slots at once and then none
for N times as long. So the part of a charge that stands for more workers than tenants have here as a rule is drawn by
lot, with the right mean and without memory: some worker of the N has a slot for the tenant in every moment.
"""

from collections.abc import Callable, Collection, Iterable
from heapq import nlargest
from math import inf, log

import msgspec

from conveyor.model import RunId, TenantId

# Slot time of this long ago counts half.
_HALF_LIFE = 60.0
# A tenant that is gone is forgotten when it is ahead of the others by no more than this.
_LEVEL = 0.01


class _TenantTime(msgspec.Struct):
    """What a tenant has had. `workers` serve it; each slot-second counts for `weight`, drawn in the turn `drawn`."""

    served: float
    workers: int = 1
    weight: float = 1.0
    drawn: int = -1


class SlotTimes:
    """An order holds for a turn: slots that changed hands with every charge would be handed on more than used."""

    def __init__(
        self,
        turn_seconds: float,
        workers_of: Callable[[TenantId], int] = lambda tenant: 1,
        chance: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._turn_seconds = turn_seconds
        self._workers_of = workers_of
        self._chance = chance
        self._turn = -1
        # How many workers serve the tenants here: the median.
        self._usual_workers = 1
        self._tenants: dict[TenantId, _TenantTime] = {}
        self._runs: dict[RunId, float] = {}
        # As of the beginning of the turn.
        self._tenant_order: dict[TenantId, float] = {}
        self._run_order: dict[RunId, float] = {}
        self._floor = 0.0
        self._run_floors: dict[TenantId, float] = {}

    def charge(self, tenant: TenantId, run_id: RunId, slot_seconds: float) -> None:
        """Count slot time that a run has had."""
        time = self._time_of(tenant)
        time.served += slot_seconds * time.weight
        self._runs[run_id] = self._runs.get(run_id, self._run_floors.get(tenant, 0.0)) + slot_seconds

    def begin(self, tenants: Iterable[TenantId], wanting: Collection[TenantId]) -> None:
        """These tenants are dealt slots; those in `wanting` could use some."""
        times = {tenant: time for tenant in tenants if (time := self._time_of(tenant)).drawn != self._turn}
        shared = {tenant for tenant, time in times.items() if time.workers > 1}
        # What nobody else needed is not held against them: others would have all slots for N times as long.
        highest = nlargest(2, ((self._served(each), each) for each in wanting)) if shared else []
        for tenant, time in times.items():
            time.drawn = self._turn
            time.weight = self._draw_weight(time.workers)
            if tenant in shared:
                time.served = min(time.served, next((at for at, each in highest if each != tenant), self._floor))

    def update(self, runs: Iterable[tuple[TenantId, RunId]], now: float) -> None:
        """Begin a new turn, if it is time. `runs` are those that the worker serves: a new one is level with the least
        served of its tenant, a new tenant with the least served tenant. Those that are gone are forgotten, a tenant
        once the others have had as much."""
        turn = int(now / self._turn_seconds)
        if turn == self._turn:
            return
        turns = min(turn - self._turn, 1000) if self._turn >= 0 else 0
        decay = 0.5 ** (turns * self._turn_seconds / _HALF_LIFE)
        self._turn = turn
        present = list(runs)
        self._begin_tenants(dict.fromkeys(tenant for tenant, _ in present), decay)
        self._begin_runs(present, decay)
        self._tenant_order = {tenant: time.served for tenant, time in self._tenants.items()}
        self._run_order = dict(self._runs)

    def order(self, tenant: TenantId, run_id: RunId) -> tuple[float, float]:
        """Return what the run's tenant and the run had when the turn began."""
        run_served = self._run_order.get(run_id)
        if run_served is None:
            run_served = self._run_floors.get(tenant, 0.0)
        return self._served(tenant), run_served

    def _served(self, tenant: TenantId) -> float:
        return self._tenant_order.get(tenant, self._floor)

    def _time_of(self, tenant: TenantId) -> _TenantTime:
        time = self._tenants.get(tenant)
        if time is None:
            time = self._tenants[tenant] = _TenantTime(self._floor, max(1, self._workers_of(tenant)))
        return time

    def _draw_weight(self, workers: int) -> float:
        usual = min(workers, self._usual_workers)
        return float(usual) if usual == workers else usual + (workers - usual) * -log(1.0 - self._chance())

    def _begin_tenants(self, tenants: Collection[TenantId], decay: float) -> None:
        before = min((self._tenants[tenant].served for tenant in tenants if tenant in self._tenants), default=0.0)
        self._floor = before * decay
        workers_each = sorted([max(1, self._workers_of(tenant)) for tenant in tenants]) or [1]
        # The lower median.
        self._usual_workers = workers_each[(len(workers_each) - 1) // 2]
        for tenant, time in list(self._tenants.items()):
            # What is charged for N workers takes as much longer to be forgotten, or it would count for less.
            ahead = max(0.0, time.served - before) * decay ** (1 / time.workers)
            if tenant in tenants:
                workers = max(1, self._workers_of(tenant))
                weight = self._draw_weight(workers) if time.workers <= self._usual_workers else workers
                ahead, time.workers = ahead * weight / time.workers, workers
            elif ahead <= _LEVEL:
                del self._tenants[tenant]
                continue
            time.served = self._floor + ahead
        for tenant in tenants:
            self._time_of(tenant)

    def _begin_runs(self, present: list[tuple[TenantId, RunId]], decay: float) -> None:
        floors: dict[TenantId, float] = {}
        for tenant, run_id in present:
            if run_id in self._runs:
                floors[tenant] = min(floors.get(tenant, inf), self._runs[run_id] * decay)
        self._runs = {
            run_id: max(floors.get(tenant, 0.0), self._runs.get(run_id, 0.0) * decay) for tenant, run_id in present
        }
        self._run_floors = floors
