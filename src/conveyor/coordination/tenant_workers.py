"""TenantWorkers: how many workers of the fleet serve each tenant. The more do, the less of its slots each of them gives
to the tenant: one with runs at every worker has no more of the fleet than one with runs at a few.

Each worker is a holder of one permit for each of its tenants. While the coordinator is away, the last counts hold.
"""

from collections.abc import Collection

from conveyor.engines.coordinator import Coordinator, PermitRequest
from conveyor.model import TenantId

# The permits of a worker that died or no longer lacks slots expire after this long.
_HOLD_SECONDS = 10.0
_NO_LIMIT = 1_000_000


class TenantWorkers:
    """The counts as one worker knows them."""

    def __init__(self, coordinator: Coordinator, holder: str) -> None:
        self._coordinator = coordinator
        self._holder = holder
        self._counts: dict[TenantId, int] = {}

    def count(self, tenant: TenantId) -> int:
        """Return how many workers serve the tenant, this one included."""
        return self._counts.get(tenant, 1)

    async def share(self, tenants: Collection[TenantId]) -> None:
        """Say that this worker deals slots to these tenants and no others, and count the workers that do."""
        gone = [PermitRequest(_name(tenant), 0, _NO_LIMIT) for tenant in self._counts if tenant not in tenants]
        served = [PermitRequest(_name(tenant), 1, _NO_LIMIT) for tenant in tenants]
        await self._coordinator.acquire_many([*gone, *served], self._holder, _HOLD_SECONDS)
        counts = await self._coordinator.permits_in_use_of([_name(tenant) for tenant in tenants])
        self._counts = {tenant: max(1, count) for tenant, count in zip(tenants, counts, strict=True)}


def _name(tenant: TenantId) -> str:
    return f"tenant:{tenant}"
