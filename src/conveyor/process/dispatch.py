"""Dispatch: deals one worker's slots to the runs that have work. Pure; the worker acts on it."""

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


def deal(demands: Iterable[Demand], slots: int, round_number: int = 0) -> Mapping[RunId, int]:
    """Deal slots one at a time, round robin over tenants and over each tenant's runs, so that neither a tenant with
    many runs nor a run with many tasks gets more than its share. Among a tenant's runs, the highest priority goes
    first. `round_number` rotates the first tenant and run, for when there are more runs than slots."""
    hands = _hands(demands, round_number)
    dealt: dict[RunId, int] = {}
    while slots > 0 and hands:
        runs = hands.popleft()
        demand = runs.popleft()
        dealt[demand.run_id] = dealt.get(demand.run_id, 0) + 1
        slots -= 1
        if dealt[demand.run_id] < demand.want:
            _requeue(runs, demand)
        if runs:
            hands.append(runs)
    return dealt


def _hands(demands: Iterable[Demand], round_number: int) -> deque[deque[Demand]]:
    by_tenant: dict[TenantId, list[Demand]] = {}
    for demand in demands:
        if demand.want > 0:
            by_tenant.setdefault(demand.tenant, []).append(demand)
    # A tenant's runs rotate once every tenant has been first: in step with the tenants, some runs never would be.
    rounds = round_number // max(1, len(by_tenant))
    hands = deque(deque(_in_order(runs, rounds)) for runs in by_tenant.values())
    hands.rotate(-round_number)
    return hands


def _in_order(runs: list[Demand], rounds: int) -> list[Demand]:
    start = rounds % len(runs)
    return sorted(runs[start:] + runs[:start], key=lambda demand: -demand.priority)


def _requeue(runs: deque[Demand], demand: Demand) -> None:
    """Insert a demand behind its equals and before those of a lower priority."""
    if not runs or runs[-1].priority >= demand.priority:
        runs.append(demand)
        return
    at = next((i for i, other in enumerate(runs) if other.priority < demand.priority), len(runs))
    runs.insert(at, demand)
