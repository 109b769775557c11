"""Load: finished tasks and retried attempts of each tenant, by minute and over all workers, in the coordinator. The
sampler keeps them (recover/load_keeper.py); what it had not kept is lost with the coordinator."""

from collections import Counter
from collections.abc import Mapping

from conveyor.engines.coordinator import Coordinator
from conveyor.model import TenantId

MINUTE = 60.0
SUCCEEDED, FAILED, RETRIED = "succeeded", "failed", "retried"
FIELDS = (SUCCEEDED, FAILED, RETRIED)

_KEEP_SECONDS = 1800.0


async def add_load(
    coordinator: Coordinator, minute: int, amounts: Mapping[tuple[str, TenantId], int], once: str
) -> None:
    """Add to what happened in a minute, by field and tenant. An addition with the same `once` is applied once."""
    named = {f"{field}/{tenant}": amount for (field, tenant), amount in amounts.items()}
    await coordinator.add_counters(_name(minute), named, _KEEP_SECONDS, once)


async def read_load(coordinator: Coordinator, minute: int) -> dict[TenantId, Counter[str]]:
    """What happened in a minute, by tenant and field."""
    found: dict[TenantId, Counter[str]] = {}
    for name, amount in (await coordinator.add_counters(_name(minute), {}, _KEEP_SECONDS)).items():
        field, _, tenant = name.partition("/")
        found.setdefault(TenantId(tenant), Counter())[field] += amount
    return found


def _name(minute: int) -> str:
    return f"load:{minute}"
