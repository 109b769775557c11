"""Dispatch: how one worker's slots are dealt to the runs that have work. Pure; the worker acts on it."""

from collections import deque
from collections.abc import Iterable, Mapping

import msgspec

from conveyor.model import RunId, TenantId


class Demand(msgspec.Struct, frozen=True):
    """A run that could use up to `want` slots."""

    tenant: TenantId
    run_id: RunId
    want: int
    priority: int = 0


def deal(demands: Iterable[Demand], slots: int, turn: int = 0) -> Mapping[RunId, int]:
    """Deal slots one at a time: round robin over tenants, then over the runs of each, so that neither a tenant with
    many runs nor a run with many tasks takes more than its turn. Among a tenant's runs, those of the highest priority
    are satisfied first. `turn` rotates who is first, for when there are more runs than slots."""
    hands = _hands(demands, turn)
    dealt: dict[RunId, int] = {}
    while slots > 0 and hands:
        runs = hands.popleft()
        demand = runs.popleft()
        dealt[demand.run_id] = dealt.get(demand.run_id, 0) + 1
        slots -= 1
        if dealt[demand.run_id] < demand.want:
            _back_in_line(runs, demand)
        if runs:
            hands.append(runs)
    return dealt


def _hands(demands: Iterable[Demand], turn: int) -> deque[deque[Demand]]:
    by_tenant: dict[TenantId, list[Demand]] = {}
    for demand in demands:
        if demand.want > 0:
            by_tenant.setdefault(demand.tenant, []).append(demand)
    # A tenant's runs move on once every tenant has been first: in step with the tenants, some would never be.
    rounds = turn // max(1, len(by_tenant))
    hands = deque(deque(_in_order(runs, rounds)) for runs in by_tenant.values())
    hands.rotate(-turn)
    return hands


def _in_order(runs: list[Demand], turn: int) -> list[Demand]:
    start = turn % len(runs)
    return sorted(runs[start:] + runs[:start], key=lambda demand: -demand.priority)


def _back_in_line(runs: deque[Demand], demand: Demand) -> None:
    """Behind its equals and before those of a lower priority."""
    at = next((i for i, other in enumerate(runs) if other.priority < demand.priority), len(runs))
    runs.insert(at, demand)
