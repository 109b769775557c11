"""The ready index, a part of the Coordinator seam, over every engine behind it."""

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conveyor.engines.coordinator import Coordinator, PermitRequest
from conveyor.engines.ready import Look, LookRequest, ReadyMark, SeatAction, SeatNews
from conveyor.model import JobId, RunId, TenantId
from tests.support.clocks import ManualClock

TTL = 10.0
VISIBILITY = 30.0


def mark(run: str, tenant: str = "acme", delay: float = 0.0, **changes: Any) -> ReadyMark:
    return ReadyMark(RunId(run), TenantId(tenant), JobId(f"job of {run}"), delay, **changes)


def leave(run: str, delay: float = inf, pause: float = 0.0) -> SeatNews:
    return SeatNews(RunId(run), SeatAction.LEAVE, delay, pause)


def help_for(run: str) -> SeatNews:
    return SeatNews(RunId(run), SeatAction.HELP)


class Looker:
    """A worker: it knows its seats, and passes on what it has seen."""

    def __init__(self, coordinator: Coordinator, name: str) -> None:
        self._coordinator = coordinator
        self.name = name
        self.seats: set[str] = set()
        self.since = 0

    async def look(self, news: Sequence[SeatNews] = (), limit: int = 100, **asked: Any) -> Look:
        self.seats -= {each.run_id for each in news if each.action in (SeatAction.LEAVE, SeatAction.FINISH)}
        self.seats |= {each.run_id for each in news if each.action is SeatAction.CLAIM}
        request = LookRequest(
            self.name,
            **{
                "ttl": TTL,
                "visibility": VISIBILITY,
                "news": news,
                "seat_count": len(self.seats),
                "since": self.since,
                "limit": limit,
                **asked,
            },
        )
        look = await self._coordinator.look_for_runs(request)
        if look.seats is not None:
            self.seats = {str(each.run_id) for each in look.seats}
        self.seats |= {str(each.run_id) for each in look.taken}
        self.since = look.seen
        return look

    async def take(self, news: Sequence[SeatNews] = (), limit: int = 100, **asked: Any) -> list[str]:
        return [str(each.run_id) for each in (await self.look(news, limit, **asked)).taken]


@pytest.fixture
def one(coordinator: Coordinator) -> Looker:
    return Looker(coordinator, "one")


@pytest.fixture
def two(coordinator: Coordinator) -> Looker:
    return Looker(coordinator, "two")


class TestTaking:
    async def test_a_run_is_taken_once(self, coordinator: Coordinator, one: Looker, two: Looker) -> None:
        await coordinator.mark_runs([mark("a")])
        (taken,) = (await one.look()).taken
        assert (taken.run_id, taken.tenant, taken.job_id, taken.pause) == ("a", "acme", "job of a", 0.0)
        assert await two.take() == []
        assert await one.take() == []

    async def test_it_is_taken_when_it_is_due(self, coordinator: Coordinator, clock: ManualClock, one: Looker) -> None:
        await coordinator.mark_runs([mark("a", delay=5.0), mark("a", delay=60.0)])
        clock.advance(4.9)
        assert await one.take() == []
        clock.advance(0.2)
        assert await one.take() == ["a"]

    async def test_the_earliest_mark_counts_and_later_ones_are_kept(
        self, coordinator: Coordinator, clock: ManualClock, one: Looker
    ) -> None:
        await coordinator.mark_runs([mark("a", delay=60.0)])
        await coordinator.mark_runs([mark("a", delay=5.0)])
        clock.advance(6.0)
        assert await one.take() == ["a"]
        assert await one.take([leave("a")]) == []
        clock.advance(53.0)
        assert await one.take() == []
        clock.advance(2.0)
        assert await one.take() == ["a"], "the second message is due"

    async def test_a_message_that_was_sent_while_the_run_was_served_is_not_forgotten(
        self, coordinator: Coordinator, one: Looker
    ) -> None:
        await coordinator.mark_runs([mark("a")])
        await one.take()
        await coordinator.mark_runs([mark("a")])
        assert await one.take([leave("a", delay=60.0)]) == ["a"]
        assert await one.take([leave("a", delay=60.0)]) == []

    async def test_of_many_times_about_each_is_kept(
        self, coordinator: Coordinator, clock: ManualClock, one: Looker
    ) -> None:
        """No message waits much longer than it must because there are many others."""
        for delay in range(1, 400):
            await coordinator.mark_runs([mark("a", delay=float(delay))])
        taken = []
        for second in range(1, 400):
            clock.advance(1.0)
            if await one.take([leave("a")] if one.seats else []):
                taken.append(second)
        assert taken[0] <= 2
        assert taken[-1] == 399
        assert all(later - earlier <= max(60.0, earlier) for earlier, later in pairwise(taken))

    async def test_a_busy_worker_takes_only_what_is_overdue(
        self, coordinator: Coordinator, clock: ManualClock, one: Looker
    ) -> None:
        await coordinator.mark_runs([mark("a")])
        assert await one.take(overdue=0.25) == []
        clock.advance(0.3)
        assert await one.take(overdue=0.25) == ["a"]

    async def test_a_busy_worker_takes_runs_of_its_tenants_sooner(
        self, coordinator: Coordinator, clock: ManualClock, one: Looker
    ) -> None:
        await coordinator.mark_runs([mark("a0", "acme"), mark("a1", "acme"), mark("b0", "bolt")])
        clock.advance(0.3)
        own = {"overdue": 1.0, "unjoined": [TenantId("acme")], "unjoined_overdue": 0.25}
        assert sorted(await one.take(**own)) == ["a0", "a1"]
        clock.advance(0.8)
        assert await one.take(**own) == ["b0"]

    async def test_a_worker_that_waits_for_its_own_runs_serves_other_tenants(
        self, coordinator: Coordinator, clock: ManualClock, one: Looker
    ) -> None:
        await coordinator.mark_runs([mark("a0", "acme"), mark("b0", "bolt")])
        clock.advance(0.3)
        assert await one.take(overdue=0.25, unjoined=[TenantId("acme")], unjoined_overdue=1e9) == ["b0"]
        assert await one.take(overdue=0.25, unjoined=[TenantId("acme")], unjoined_overdue=0.25) == ["a0"]

    async def test_a_mark_does_not_make_an_overdue_run_younger(
        self, coordinator: Coordinator, clock: ManualClock, one: Looker
    ) -> None:
        await coordinator.mark_runs([mark("a")])
        clock.advance(0.2)
        await coordinator.mark_runs([mark("a")])
        clock.advance(0.1)
        assert await one.take(overdue=0.25) == ["a"]

    async def test_tenants_take_turns(self, coordinator: Coordinator, one: Looker, two: Looker) -> None:
        await coordinator.mark_runs([mark(f"a{n}", "acme") for n in range(50)])
        await coordinator.mark_runs([mark("b0", "bolt"), mark("c0", "core"), mark("c1", "core")])
        assert {run[0] for run in await one.take(limit=3)} == {"a", "b", "c"}
        assert {run[0] for run in await two.take(limit=2)} == {"a", "c"}
        assert len(await one.take(limit=7)) == 7

    async def test_the_least_recently_served_tenant_is_first(self, coordinator: Coordinator, one: Looker) -> None:
        await coordinator.mark_runs([mark(f"{tenant}{n}", tenant) for tenant in "ab" for n in range(5)])
        first = [(await one.take(limit=1))[0][0] for _ in range(6)]
        assert first in (["a", "b"] * 3, ["b", "a"] * 3)

    async def test_tenants_whose_runs_are_due_later_hide_none(self, coordinator: Coordinator, one: Looker) -> None:
        await coordinator.mark_runs([mark("first"), mark("second")])
        assert len(await one.take(limit=1)) == 1, "now the others were served less recently"
        await coordinator.mark_runs([mark(f"later {n}", f"tenant {n}", delay=60.0) for n in range(20)])
        assert len(await one.take(limit=4)) == 1

    async def test_of_a_tenant_the_run_that_waits_longest_is_first(
        self, coordinator: Coordinator, clock: ManualClock, one: Looker
    ) -> None:
        for run in ("late", "later", "latest"):
            await coordinator.mark_runs([mark(run)])
            clock.advance(1.0)
        assert await one.take(limit=2) == ["late", "later"]

    async def test_a_worker_does_not_get_what_it_cannot_serve(
        self, coordinator: Coordinator, one: Looker, two: Looker
    ) -> None:
        await coordinator.mark_runs([mark("a")])
        await coordinator.mark_runs([mark("b")])
        assert await one.take(skipped=[RunId("a")]) == ["b"]
        assert await two.take() == ["a"]

    async def test_what_one_worker_passes_by_is_there_for_the_others(
        self, coordinator: Coordinator, clock: ManualClock, one: Looker, two: Looker
    ) -> None:
        for run in ("a", "b", "c"):
            await coordinator.mark_runs([mark(run)])
            clock.advance(1.0)
        assert await one.take(skipped=[RunId("a"), RunId("b")]) == ["c"], "the last one of the tenant that is listed"
        assert await two.take() == ["a", "b"]

    async def test_the_pause_is_handed_on_until_there_is_a_message(self, coordinator: Coordinator, one: Looker) -> None:
        await coordinator.mark_runs([mark("a")])
        await one.take()
        (again,) = (await one.look([leave("a", 0.0, pause=4.0)])).taken
        assert again.pause == 4.0
        await one.look([leave("a", 1.0, pause=8.0)])
        await coordinator.mark_runs([mark("a")])
        (again,) = (await one.look()).taken
        assert again.pause == 0.0

    async def test_of_more_tenants_than_a_look_chooses_among_none_is_forgotten_and_a_new_one_does_not_wait(
        self, coordinator: Coordinator, clock: ManualClock, one: Looker
    ) -> None:
        tenants = [f"tenant {number}" for number in range(600)]
        await coordinator.mark_runs([mark(f"{n} of {tenant}", tenant) for n in range(2) for tenant in tenants])
        taken: list[str] = []
        for _ in range(6):
            clock.advance(1.0)
            taken += await one.take()
        await coordinator.mark_runs([mark("new", "new")])
        clock.advance(0.1)
        found = await one.take(limit=300)
        assert "new" in found, "no other tenant was served less recently"
        taken += found
        while found := await one.take():
            clock.advance(1.0)
            taken += found
        assert len(taken) == 1201
        assert len(set(taken)) == 1201
        assert await one.take() == []


class TestSeats:
    async def test_one_that_leaves_says_when_the_run_is_due(
        self, coordinator: Coordinator, clock: ManualClock, one: Looker, two: Looker
    ) -> None:
        await coordinator.mark_runs([mark("a")])
        await one.take()
        await one.look([leave("a", delay=7.0)])
        assert await two.take() == []
        clock.advance(7.1)
        assert await two.take() == ["a"]

    async def test_only_the_last_time_that_a_worker_said_counts(
        self, coordinator: Coordinator, clock: ManualClock, one: Looker
    ) -> None:
        """Or a quiet run would be looked at more and more often."""
        await coordinator.mark_runs([mark("a")])
        await one.take()
        await one.look([leave("a", delay=50.0)])
        await coordinator.mark_runs([mark("a")])
        assert await one.take() == ["a"]
        await one.look([leave("a", delay=100.0)])
        clock.advance(99.0)
        assert await one.take() == []
        clock.advance(2.0)
        assert await one.take() == ["a"]

    async def test_a_run_that_was_left_without_a_time_waits_for_a_mark(
        self, coordinator: Coordinator, clock: ManualClock, one: Looker
    ) -> None:
        await coordinator.mark_runs([mark("a")])
        await one.take()
        await one.look([leave("a")])
        clock.advance(3600.0)
        assert await one.take() == []
        await coordinator.mark_runs([ReadyMark(RunId("a"), delay=0.0)])
        assert await one.take() == ["a"], "the index knows whose run it is"

    async def test_others_join_when_a_worker_asks_for_help(
        self, coordinator: Coordinator, one: Looker, two: Looker
    ) -> None:
        await coordinator.mark_runs([mark("a")])
        await one.take()
        assert await one.take([help_for("a")]) == [], "it serves the run already"
        assert await two.take(unjoined=[TenantId("acme")]) == []
        assert await two.take() == ["a"]
        assert await Looker(coordinator, "three").take() == [], "one may join for each call"
        await one.look([leave("a", delay=0.0)])
        assert await one.take() == [], "the other still serves it"
        assert await one.take() == []

    async def test_seats_of_a_dead_worker_are_free_after_the_lease(
        self, coordinator: Coordinator, clock: ManualClock, one: Looker, two: Looker
    ) -> None:
        await coordinator.mark_runs([mark("a"), mark("b")])
        await one.take()
        for _ in range(4):
            clock.advance(TTL - 1)
            assert await two.take() == []
            await one.take()
        clock.advance(TTL - 0.1)
        assert await two.take() == []
        clock.advance(0.2)
        assert sorted(await two.take()) == ["a", "b"]
        await two.look([leave("a"), leave("b")])
        clock.advance(VISIBILITY - 1)
        assert await two.take() == []
        clock.advance(2)
        assert sorted(await two.take()) == ["a", "b"], "what the dead worker had in flight is visible now"

    async def test_many_times_that_passed_while_a_dead_worker_had_the_seat(
        self, coordinator: Coordinator, clock: ManualClock, one: Looker, two: Looker
    ) -> None:
        """One of them a second before the seat is freed."""
        await coordinator.mark_runs([mark("a")])
        await one.take()
        for delay in range(1, 16):
            await coordinator.mark_runs([mark("a", delay=float(delay))])
        await coordinator.mark_runs([mark("a", delay=10 * TTL)])
        clock.advance(10 * TTL - 20.0)
        await coordinator.mark_runs([mark("a", delay=19.0)])
        clock.advance(20.0)
        assert await two.take() == ["a"]

    async def test_a_worker_that_was_taken_for_dead_learns_it_and_claims_its_runs(
        self, coordinator: Coordinator, clock: ManualClock, one: Looker, two: Looker
    ) -> None:
        await coordinator.mark_runs([mark("a"), mark("b")])
        await one.take()
        clock.advance(TTL + 1)
        await two.take(limit=1)
        look = await one.look(limit=0)
        assert look.seats == []
        claim = SeatNews(RunId("b"), SeatAction.CLAIM, tenant=TenantId("acme"), job_id=JobId("job of b"))
        assert await one.take([claim]) in (["a"], [])
        assert "b" in one.seats
        clock.advance(TTL - 1)
        assert (await one.look(limit=0)).seats is None

    async def test_a_claim_makes_the_index_know_the_run(self, coordinator: Coordinator, one: Looker) -> None:
        claim = SeatNews(RunId("a"), SeatAction.CLAIM, tenant=TenantId("acme"), job_id=JobId("job of a"))
        look = await one.look([claim])
        assert look.seats is None
        assert await coordinator.known_runs([RunId("a")]) == {"a"}

    async def test_a_lost_answer_is_repeated(self, coordinator: Coordinator, one: Looker) -> None:
        """The engine took runs, and the worker never heard of them."""
        await coordinator.mark_runs([mark("a"), mark("b")])
        await one.look()
        one.seats = set()
        look = await one.look()
        assert look.seats is not None
        assert sorted(each.run_id for each in look.seats) == ["a", "b"]
        assert {each.job_id for each in look.seats} == {"job of a", "job of b"}
        assert (await one.look()).seats is None

    async def test_news_may_be_repeated(self, coordinator: Coordinator, one: Looker, two: Looker) -> None:
        await coordinator.mark_runs([mark("a")])
        await one.take()
        for _ in range(3):
            await one.look([leave("a", delay=5.0)], limit=0)
        assert await two.take() == []
        assert (await one.look()).seats is None

    async def test_a_worker_that_stops_leaves_nothing(self, coordinator: Coordinator, one: Looker, two: Looker) -> None:
        await coordinator.mark_runs([mark("a")])
        await one.take()
        await one.look([leave("a", delay=0.0)], limit=0, ttl=0.0)
        assert await two.take() == ["a"]


class TestChanges:
    async def test_workers_see_which_of_their_runs_changed(
        self, coordinator: Coordinator, one: Looker, two: Looker
    ) -> None:
        await coordinator.mark_runs([mark("a"), mark("b")])
        await one.take(limit=1)
        await two.take()
        assert (await one.look()).changed == []
        await coordinator.mark_runs([ReadyMark(RunId(run), is_changed=True) for run in one.seats])
        assert set((await one.look()).changed) == one.seats
        assert (await two.look()).changed == []
        assert (await one.look()).changed == []

    async def test_a_change_is_repeated_until_it_was_seen(self, coordinator: Coordinator, one: Looker) -> None:
        await coordinator.mark_runs([mark("a")])
        await one.take()
        await coordinator.mark_runs([ReadyMark(RunId("a"), is_changed=True)])
        since = one.since
        for _ in range(3):
            one.since = since
            assert (await one.look()).changed == ["a"]
        assert (await one.look()).changed == []

    async def test_a_change_alone_makes_nothing_due(self, coordinator: Coordinator, one: Looker) -> None:
        await coordinator.mark_runs([mark("a", delay=inf, is_changed=True)])
        assert await one.take() == []

    async def test_a_finished_run_leaves_once_nobody_serves_it(
        self, coordinator: Coordinator, one: Looker, two: Looker
    ) -> None:
        await coordinator.mark_runs([mark("a"), mark("b")])
        await one.take(limit=1)
        await coordinator.mark_runs([ReadyMark(RunId(run), is_finished=True) for run in "ab"])
        look = await one.look()
        assert look.seats is None
        assert set(look.changed) == one.seats
        assert await two.take() == []
        assert await coordinator.known_runs([RunId("a"), RunId("b")]) == one.seats
        await one.look([leave(run, delay=1.0) for run in one.seats])
        assert await coordinator.known_runs([RunId("a"), RunId("b")]) == frozenset()

    async def test_a_worker_that_finds_a_run_finished_removes_it(
        self, coordinator: Coordinator, one: Looker, two: Looker
    ) -> None:
        await coordinator.mark_runs([mark("a")])
        await one.take()
        await coordinator.mark_runs([mark("a", delay=5.0)])
        await one.look([SeatNews(RunId("a"), SeatAction.FINISH)])
        assert await coordinator.known_runs([RunId("a")]) == frozenset()
        assert (await one.look()).seats is None
        await coordinator.mark_runs([mark("a")])
        assert await two.take() == ["a"], "it was resumed"

    async def test_a_message_makes_a_finished_run_due_again(self, coordinator: Coordinator, one: Looker) -> None:
        await coordinator.mark_runs([mark("a")])
        await one.take()
        await coordinator.mark_runs([ReadyMark(RunId("a"), is_finished=True)])
        await coordinator.mark_runs([mark("a")])
        assert await one.take([leave("a")]) == ["a"]


class TestRestoring:
    async def test_a_mark_without_a_tenant_makes_no_entry(self, coordinator: Coordinator, one: Looker) -> None:
        await coordinator.mark_runs([ReadyMark(RunId("a"), delay=0.0, is_changed=True)])
        assert await one.take() == []
        assert await coordinator.known_runs([RunId("a")]) == frozenset()

    async def test_only_what_is_missing_is_restored(
        self, coordinator: Coordinator, clock: ManualClock, one: Looker, two: Looker
    ) -> None:
        await coordinator.mark_runs([mark("served")])
        await one.take()
        await coordinator.mark_runs([mark("later", delay=100.0), mark("unlisted", delay=inf)])
        await coordinator.mark_runs([mark(run, is_restored=True) for run in ("served", "later", "unlisted", "lost")])
        assert sorted(await two.take()) == ["lost", "unlisted"]

    async def test_it_is_known_whether_the_index_was_filled(self, coordinator: Coordinator, one: Looker) -> None:
        await coordinator.mark_runs([mark("a")])
        assert not (await one.look()).is_built
        await coordinator.mark_runs([], is_built=True)
        assert (await one.look()).is_built

    async def test_hastening_a_tenant(self, coordinator: Coordinator, clock: ManualClock, one: Looker) -> None:
        await coordinator.mark_runs([mark("a", delay=100.0), mark("b", "bolt", delay=100.0), mark("c", delay=inf)])
        await coordinator.hasten_tenant(TenantId("acme"))
        assert await one.take() == ["a"]

    async def test_hundreds_of_marks_at_once(self, coordinator: Coordinator, one: Looker) -> None:
        await coordinator.mark_runs([mark(f"run {n}") for n in range(450)], is_built=True)
        look = await one.look(limit=1000)
        assert len(look.taken) == 450
        assert look.is_built
        assert len(await coordinator.known_runs([RunId(f"run {n}") for n in range(450)])) == 450


async def test_permits_of_many_semaphores_at_once(coordinator: Coordinator) -> None:
    assert await coordinator.acquire_many([], "a", TTL) == []
    wanted = [PermitRequest(f"run {n}", n % 7, 4) for n in range(300)]
    assert await coordinator.acquire_many(wanted, "a", TTL) == [min(4, n % 7) for n in range(300)]
    assert await coordinator.acquire_many(wanted[:7], "b", TTL) == [0, 1, 2, 1, 0, 0, 0]
    assert await coordinator.permits_in_use("run 6") == 4
    assert await coordinator.permits_in_use_of([]) == []
    names = [f"run {n}" for n in range(300)]
    assert await coordinator.permits_in_use_of([*names, "nobody's"]) == [
        *[await coordinator.permits_in_use(name) for name in names],
        0,
    ]


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["mark", "take", "leave", "help", "finish", "pass"]),
        st.integers(0, 2),
        st.integers(0, 4),
        st.sampled_from([0.0, 1.0, 6.0]),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=_STEPS)
async def test_no_message_is_forgotten(
    coordinator: Coordinator, clock: ManualClock, steps: list[tuple[str, int, int, float]]
) -> None:
    """Whatever workers do and whoever dies: a run with a mark is taken by one that looks long enough."""
    prefix = clock.new_id("case")
    workers = [Looker(coordinator, f"{prefix} {who}") for who in range(3)]
    owed: set[str] = set()
    finished: set[str] = set()
    for step, who, number, seconds in steps:
        run, worker = f"{prefix} {number}", workers[who]
        if step == "mark" and run not in finished:
            await coordinator.mark_runs([mark(run, f"{prefix} {number % 2}", seconds)])
            owed.add(run)
        elif step == "take":
            await worker.take(limit=2, overdue=seconds)
        elif step == "leave" and worker.seats:
            left = sorted(worker.seats)[0]
            await worker.look([leave(left, seconds)], limit=0)
            owed.add(left)
        elif step == "help" and worker.seats:
            await worker.look([help_for(sorted(worker.seats)[0])], limit=0)
        elif step == "finish":
            await coordinator.mark_runs([ReadyMark(RunId(run), is_finished=True)])
            finished.add(run)
        elif step == "pass":
            clock.advance(seconds)
    last = Looker(coordinator, f"{prefix} last")
    clock.advance(TTL + 10.0)
    found = set(await last.take())
    assert owed - finished <= found
    assert not found & finished
