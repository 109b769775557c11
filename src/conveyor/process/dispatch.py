"""Dispatch: deals one worker's slots to the runs that have work. Pure; the worker acts on it."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from heapq import heappop, heapreplace
from itertools import islice

import msgspec

from conveyor.model import RunId, TenantId


class Demand(msgspec.Struct, frozen=True):
    """A run that could use up to `want` slots, the slot time that it and its tenant have had (slot_times.py), and how
    many workers serve the tenant."""

    tenant: TenantId
    run_id: RunId
    want: int
    priority: int = 0
    served: float = 0.0
    tenant_served: float = 0.0
    # Slots that the run gets at a time when it is its turn among its tenant's runs.
    portion: int = 1
    workers: int = 1


def deal(demands: Iterable[Demand], slots: int) -> Mapping[RunId, int]:
    """Deal slots one at a time, round robin over tenants and over each tenant's runs, so that neither a tenant with
    many runs nor a run with many tasks gets more than its share. A run whose tasks are quick gets its tenant's slots in
    portions. The tenant that was served least goes first, and so does its run that was served least, among those of the
    highest priority. A tenant that N workers serve gets a slot in every Nth round. Runs are returned in the order in
    which they got their first slot."""
    return count_dealt(islice(deals(demands), max(0, slots)))


def count_dealt(order: Iterable[RunId]) -> dict[RunId, int]:
    """How many slots each run gets, in the order of the first of each."""
    dealt: dict[RunId, int] = {}
    for run_id in order:
        dealt[run_id] = dealt.get(run_id, 0) + 1
    return dealt


def deals(demands: Iterable[Demand]) -> Iterator[RunId]:
    """The run that gets the first slot, the second one, and so on, until no run could use another one."""
    hands = [(0, place, runs) for place, runs in enumerate(_hands(demands))]
    dealt: dict[RunId, int] = {}
    while hands:
        round_, place, runs = hands[0]
        demand = runs.popleft()
        count = dealt[demand.run_id] = dealt.get(demand.run_id, 0) + 1
        if count < demand.want and count % demand.portion:
            runs.appendleft(demand)
        elif count < demand.want:
            _requeue(runs, demand)
        if runs:
            heapreplace(hands, (round_ + demand.workers, place, runs))
        else:
            heappop(hands)
        yield demand.run_id


def _hands(demands: Iterable[Demand]) -> list[deque[Demand]]:
    by_tenant: dict[TenantId, list[Demand]] = {}
    for demand in demands:
        if demand.want > 0:
            by_tenant.setdefault(demand.tenant, []).append(demand)
    tenants = sorted(by_tenant.values(), key=lambda runs: runs[0].tenant_served)
    return [
        deque(sorted(runs, key=lambda demand: (-demand.priority, demand.served, demand.portion))) for runs in tenants
    ]


def _requeue(runs: deque[Demand], demand: Demand) -> None:
    """Insert a demand behind its equals and before those of a lower priority."""
    if not runs or runs[-1].priority >= demand.priority:
        runs.append(demand)
        return
    at = next((i for i, other in enumerate(runs) if other.priority < demand.priority), len(runs))
    runs.insert(at, demand)
