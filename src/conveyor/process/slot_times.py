"""SlotTimes: how many slot-seconds tenants and their runs have had lately, as one worker sees it. Whoever had least is
next."""

from collections.abc import Iterable
from math import inf

from conveyor.model import RunId, TenantId

# Slot time of this long ago counts half.
_HALF_LIFE = 60.0
# A tenant that is gone is forgotten when it is ahead of the others by no more than this.
_LEVEL = 0.01


class SlotTimes:
    """An order holds for a turn: slots that changed hands with every charge would be handed on more than used."""

    def __init__(self, turn_seconds: float) -> None:
        self._turn_seconds = turn_seconds
        self._turn = -1
        self._tenants: dict[TenantId, float] = {}
        self._runs: dict[RunId, float] = {}
        # As of the beginning of the turn.
        self._tenant_order: dict[TenantId, float] = {}
        self._run_order: dict[RunId, float] = {}
        self._floor = 0.0
        self._run_floors: dict[TenantId, float] = {}

    def charge(self, tenant: TenantId, run_id: RunId, slot_seconds: float, workers: int = 1) -> None:
        """Count slot time that a run has had. A tenant that several workers serve is charged for all of them: what it
        has here, it is taken to have at each."""
        self._tenants[tenant] = self._tenants.get(tenant, self._floor) + slot_seconds * workers
        self._runs[run_id] = self._runs.get(run_id, self._run_floors.get(tenant, 0.0)) + slot_seconds

    def update(self, runs: Iterable[tuple[TenantId, RunId]], now: float) -> None:
        """Begin a new turn, if it is time. `runs` are those that the worker serves: a new one is level with the least
        served of its tenant, a new tenant with the least served tenant. Those that are gone are forgotten, a tenant
        once the others have had as much."""
        turn = int(now / self._turn_seconds)
        if turn == self._turn:
            return
        decay = 0.5 ** (min(turn - self._turn, 1000) * self._turn_seconds / _HALF_LIFE) if self._turn >= 0 else 1.0
        self._turn = turn
        present = list(runs)
        tenants = {tenant for tenant, _ in present}
        self._floor = decay * min((self._tenants[tenant] for tenant in tenants & self._tenants.keys()), default=0.0)
        decayed = {tenant: served * decay for tenant, served in self._tenants.items()}
        self._tenants = {tenant: max(self._floor, decayed.get(tenant, 0.0)) for tenant in tenants}
        self._tenants |= {tenant: served for tenant, served in decayed.items() if served > self._floor + _LEVEL}
        self._begin_runs(present, decay)
        self._tenant_order, self._run_order = dict(self._tenants), dict(self._runs)

    def order(self, tenant: TenantId, run_id: RunId) -> tuple[float, float]:
        """Return what the run's tenant and the run had when the turn began."""
        run_served = self._run_order.get(run_id)
        if run_served is None:
            run_served = self._run_floors.get(tenant, 0.0)
        return self._tenant_order.get(tenant, self._floor), run_served

    def _begin_runs(self, present: list[tuple[TenantId, RunId]], decay: float) -> None:
        floors: dict[TenantId, float] = {}
        for tenant, run_id in present:
            if run_id in self._runs:
                floors[tenant] = min(floors.get(tenant, inf), self._runs[run_id] * decay)
        self._runs = {
            run_id: max(floors.get(tenant, 0.0), self._runs.get(run_id, 0.0) * decay) for tenant, run_id in present
        }
        self._run_floors = floors
