"""Dispatch: how slots are dealt, as properties of every deal."""

from collections.abc import Mapping

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.model import RunId, TenantId
from conveyor.process.dispatch import Demand, deal
from conveyor.process.slot_times import SlotTimes


@st.composite
def demand_lists(draw: st.DrawFn, priorities: st.SearchStrategy[int] | None = None) -> list[Demand]:
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    wants = st.one_of(st.integers(0, 12), st.sampled_from([1_000_000]))
    return [
        Demand(
            TenantId(f"t{tenant}"),
            RunId(f"t{tenant}r{run}"),
            draw(wants),
            0 if priorities is None else draw(priorities),
        )
        for tenant, runs in enumerate(sizes)
        for run in range(runs)
    ]


def by_tenant(demands: list[Demand], dealt: Mapping[RunId, int]) -> dict[TenantId, tuple[int, int]]:
    """What each tenant wanted and got."""
    totals: dict[TenantId, tuple[int, int]] = {}
    for demand in demands:
        want, got = totals.get(demand.tenant, (0, 0))
        totals[demand.tenant] = (want + demand.want, got + dealt.get(demand.run_id, 0))
    return totals


any_slots = st.integers(0, 60)


@given(demands=demand_lists(st.integers(-2, 2)), slots=any_slots)
def test_no_more_than_there_is_and_none_is_left_unused(demands: list[Demand], slots: int) -> None:
    dealt = deal(demands, slots)
    wanted = sum(demand.want for demand in demands)
    assert sum(dealt.values()) == min(slots, wanted)
    for demand in demands:
        assert 0 <= dealt.get(demand.run_id, 0) <= demand.want
    assert set(dealt) <= {demand.run_id for demand in demands}


@given(demands=demand_lists(st.integers(-2, 2)), slots=any_slots)
def test_tenants_share_max_min_within_one(demands: list[Demand], slots: int) -> None:
    """Nobody has two more than a tenant that could use another."""
    totals = by_tenant(demands, deal(demands, slots))
    for want, got in totals.values():
        if got < want:
            assert all(other <= got + 1 for _, other in totals.values())


@given(demands=demand_lists(), slots=any_slots)
def test_runs_of_one_tenant_share_within_one(demands: list[Demand], slots: int) -> None:
    dealt = deal(demands, slots)
    for hungry in demands:
        got = dealt.get(hungry.run_id, 0)
        if got < hungry.want:
            siblings = [each for each in demands if each.tenant == hungry.tenant]
            assert all(dealt.get(each.run_id, 0) <= got + 1 for each in siblings)


@given(demands=demand_lists(st.integers(-2, 2)), slots=any_slots)
def test_a_higher_priority_is_satisfied_first(demands: list[Demand], slots: int) -> None:
    dealt = deal(demands, slots)
    for high in demands:
        for low in demands:
            if low.tenant == high.tenant and low.priority < high.priority and dealt.get(low.run_id, 0) > 0:
                assert dealt.get(high.run_id, 0) == high.want


@given(demands=demand_lists(st.integers(-2, 2)), slots=st.integers(1, 60))
def test_a_priority_is_of_its_tenant_only(demands: list[Demand], slots: int) -> None:
    totals = by_tenant(demands, deal(demands, slots))
    hungry = [tenant for tenant, (want, _) in totals.items() if want > 0]
    if slots >= len(hungry):
        assert all(totals[tenant][1] > 0 for tenant in hungry)


@settings(max_examples=300)
@given(demands=demand_lists(), slots=st.integers(1, 8))
def test_who_was_served_least_is_next(demands: list[Demand], slots: int) -> None:
    """With fewer slots than runs, each has had one after as many turns as there are tenants times runs of one."""
    hungry = {demand.run_id for demand in demands if demand.want > 0}
    tenants = {demand.tenant for demand in demands}
    most_runs = max(sum(each.tenant == tenant for each in demands) for tenant in tenants)
    times = SlotTimes(1.0)
    served: set[RunId] = set()
    for turn in range(len(tenants) * most_runs):
        times.update([(demand.tenant, demand.run_id) for demand in demands], float(turn))
        dealt = deal([in_order(demand, times) for demand in demands], slots)
        for demand in demands:
            times.charge(demand.tenant, demand.run_id, dealt.get(demand.run_id, 0))
        served |= dealt.keys()
    assert served == hungry


def in_order(demand: Demand, times: SlotTimes) -> Demand:
    tenant_served, served = times.order(demand.tenant, demand.run_id)
    return msgspec.structs.replace(demand, served=served, tenant_served=tenant_served)


def test_a_small_job_beside_a_huge_one_gets_its_slots_at_once() -> None:
    for tenants in (("acme", "acme"), ("acme", "other")):
        huge = Demand(TenantId(tenants[0]), RunId("huge"), 1_000_000)
        small = Demand(TenantId(tenants[1]), RunId("small"), 10)
        assert deal([huge, small], 256) == {RunId("huge"): 246, RunId("small"): 10}
        assert deal([small, huge], 16) == {RunId("huge"): 8, RunId("small"): 8}


def test_a_tenant_with_many_runs_has_one_share() -> None:
    many = [Demand(TenantId("many"), RunId(f"m{number}"), 1000) for number in range(50)]
    one = Demand(TenantId("one"), RunId("o"), 1000)
    dealt = deal([*many, one], 100)
    assert dealt[RunId("o")] == 50
    assert {dealt[run.run_id] for run in many} == {1}


@given(demand_lists(), any_slots, st.integers(2, 16))
def test_portions_change_nothing_between_tenants(demands: list[Demand], slots: int, portion: int) -> None:
    portions = [msgspec.structs.replace(demand, portion=portion) for demand in demands]
    dealt = deal(portions, slots)
    assert by_tenant(portions, dealt) == by_tenant(demands, deal(demands, slots))
    for tenant in {demand.tenant for demand in demands}:
        unsatisfied = [demand for demand in demands if demand.tenant == tenant]
        got = [dealt.get(demand.run_id, 0) for demand in unsatisfied if dealt.get(demand.run_id, 0) < demand.want]
        assert max(got, default=0) - min(got, default=0) <= portion, "no run is ahead of another by more"


def test_quick_runs_of_one_tenant_get_slots_in_portions() -> None:
    many = [Demand(TenantId("t"), RunId(f"r{number}"), 100, served=number, portion=16) for number in range(30)]
    other = Demand(TenantId("u"), RunId("other"), 8)
    dealt = deal([*many, other], 72)
    assert dealt == {"r0": 16, "r1": 16, "r2": 16, "r3": 16, "other": 8}


def test_nothing_wanted_nothing_dealt() -> None:
    assert deal([], 10) == {}
    assert deal([Demand(TenantId("t"), RunId("r"), 0)], 10) == {}
    assert deal([Demand(TenantId("t"), RunId("r"), 5)], 0) == {}


@given(workers=st.integers(1, 50), slots=st.integers(1, 200))
def test_a_tenant_that_many_workers_serve_gets_the_less_of_each(workers: int, slots: int) -> None:
    one = Demand(TenantId("one"), RunId("one"), 1_000_000)
    many = Demand(TenantId("many"), RunId("many"), 1_000_000, workers=workers)
    dealt = deal([one, many], slots)
    assert sum(dealt.values()) == slots
    assert abs(dealt.get(many.run_id, 0) - slots / (workers + 1)) <= 1
