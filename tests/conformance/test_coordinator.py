"""The Coordinator seam, over every engine behind it."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conveyor.engines.coordinator import Coordinator, Lease
from tests.support.clocks import ManualClock

TTL = 10.0

several = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class TestLeases:
    async def test_one_of_many_gets_it(self, coordinator: Coordinator) -> None:
        leases = await asyncio.gather(*(coordinator.lease("ingest", f"holder {n}", TTL) for n in range(20)))
        (granted,) = [lease for lease in leases if lease is not None]
        assert granted.name == "ingest"
        assert granted.holder == f"holder {leases.index(granted)}"

    async def test_it_is_free_when_it_lapses(self, coordinator: Coordinator, clock: ManualClock) -> None:
        first = await coordinator.lease("ingest", "a", TTL)
        assert first is not None
        clock.advance(TTL - 1)
        assert await coordinator.lease("ingest", "b", TTL) is None
        clock.advance(1)
        second = await coordinator.lease("ingest", "b", TTL)
        assert second is not None
        assert second.fence > first.fence

    async def test_it_is_free_when_the_clock_was_set_back(self, coordinator: Coordinator, clock: ManualClock) -> None:
        assert await coordinator.lease("job", "one", 30.0)
        clock.step(-7200)
        assert await coordinator.lease("job", "two", 30.0) is not None
        assert await coordinator.lease("job", "one", 30.0) is None

    async def test_renewing_keeps_it(self, coordinator: Coordinator, clock: ManualClock) -> None:
        lease = await coordinator.lease("ingest", "a", TTL)
        assert lease is not None
        for _ in range(5):
            clock.advance(TTL - 1)
            assert await coordinator.renew(lease, TTL)
            assert await coordinator.lease("ingest", "b", TTL) is None

    async def test_a_lapsed_lease_is_not_renewed(self, coordinator: Coordinator, clock: ManualClock) -> None:
        lease = await coordinator.lease("ingest", "a", TTL)
        assert lease is not None
        clock.advance(TTL)
        assert not await coordinator.renew(lease, TTL)
        taken = await coordinator.lease("ingest", "b", TTL)
        assert taken is not None
        assert not await coordinator.renew(lease, TTL)
        assert await coordinator.renew(taken, TTL)

    async def test_a_holder_that_asks_again_gets_a_new_fence(self, coordinator: Coordinator) -> None:
        first = await coordinator.lease("ingest", "a", TTL)
        second = await coordinator.lease("ingest", "a", TTL)
        assert first is not None
        assert second is not None
        assert second.fence > first.fence
        assert not await coordinator.renew(first, TTL), "the first grant is over"
        await coordinator.release(first)
        assert await coordinator.lease("ingest", "b", TTL) is None, "a stale release changes nothing"
        assert await coordinator.renew(second, TTL)

    async def test_releasing_frees_it(self, coordinator: Coordinator) -> None:
        lease = await coordinator.lease("ingest", "a", TTL)
        assert lease is not None
        await coordinator.release(lease)
        assert not await coordinator.renew(lease, TTL)
        other = await coordinator.lease("ingest", "b", TTL)
        assert other is not None
        assert other.fence > lease.fence
        await coordinator.release(lease)
        assert await coordinator.renew(other, TTL)

    async def test_a_lease_that_was_never_granted(self, coordinator: Coordinator) -> None:
        made_up = Lease("ingest", "a", 1)
        assert not await coordinator.renew(made_up, TTL)
        await coordinator.release(made_up)
        await coordinator.lease("ingest", "b", TTL)
        assert not await coordinator.renew(made_up, TTL)
        assert not await coordinator.renew(Lease("ingest", "b", 99), TTL)

    async def test_names_have_leases_of_their_own(self, coordinator: Coordinator) -> None:
        assert await coordinator.lease("one", "a", TTL) is not None
        assert await coordinator.lease("two", "b", TTL) is not None
        assert await coordinator.lease("one", "b", TTL) is None

    async def test_fences_grow_over_restarts(
        self, coordinators: Callable[[], AbstractAsyncContextManager[Any]], clock: ManualClock
    ) -> None:
        fences = []
        for restart in range(4):
            async with coordinators() as engine:
                coordinator: Coordinator = engine.coordinator
                for holder in ("a", "b", "a"):
                    lease = await coordinator.lease("ingest", f"{holder}{restart}", TTL)
                    assert lease is not None
                    fences.append(lease.fence)
                    clock.advance(TTL)
        assert fences == sorted(set(fences))

    @several
    @given(
        steps=st.lists(
            st.tuples(st.sampled_from(["lease", "renew", "release", "pass"]), st.integers(0, 2), st.integers(1, 12)),
            max_size=25,
        )
    )
    async def test_never_two_holders_and_fences_only_grow(
        self, coordinator: Coordinator, clock: ManualClock, steps: list[tuple[str, int, int]]
    ) -> None:
        name = clock.new_id("lease")
        held: dict[int, Lease] = {}
        owner: tuple[int, float] | None = None
        highest = 0
        for step, who, seconds in steps:
            now = clock.now()
            live = owner[0] if owner is not None and owner[1] > now else None
            if step == "pass":
                clock.advance(seconds)
            elif step == "lease":
                lease = await coordinator.lease(name, f"holder {who}", seconds)
                assert (lease is not None) == (live in (None, who))
                if lease is not None:
                    assert lease.fence > highest
                    highest = lease.fence
                    held[who] = lease
                    owner = (who, now + seconds)
            elif who in held and step == "renew":
                renewed = await coordinator.renew(held[who], seconds)
                assert renewed == (live == who)
                owner = (who, now + seconds) if renewed else owner
            elif who in held:
                await coordinator.release(held[who])
                owner = None if live == who else owner


class TestSemaphores:
    async def test_a_holder_gets_what_is_left(self, coordinator: Coordinator) -> None:
        assert await coordinator.acquire("run", "a", 6, 10, TTL) == 6
        assert await coordinator.acquire("run", "b", 6, 10, TTL) == 4
        assert await coordinator.acquire("run", "c", 1, 10, TTL) == 0
        assert await coordinator.permits_in_use("run") == 10

    async def test_it_sets_and_does_not_add(self, coordinator: Coordinator) -> None:
        assert await coordinator.acquire("run", "a", 3, 10, TTL) == 3
        assert await coordinator.acquire("run", "a", 5, 10, TTL) == 5
        assert await coordinator.acquire("run", "a", 2, 10, TTL) == 2
        assert await coordinator.permits_in_use("run") == 2

    async def test_letting_go_leaves_room_for_the_others(self, coordinator: Coordinator) -> None:
        await coordinator.acquire("run", "a", 6, 10, TTL)
        await coordinator.acquire("run", "b", 4, 10, TTL)
        assert await coordinator.acquire("run", "a", 0, 10, TTL) == 0
        assert await coordinator.permits_in_use("run") == 4
        assert await coordinator.acquire("run", "b", 10, 10, TTL) == 10

    async def test_letting_go_alone(self, coordinator: Coordinator) -> None:
        await coordinator.acquire("run", "a", 6, 10, TTL)
        await coordinator.acquire("run", "a", 0, 10, TTL)
        assert await coordinator.permits_in_use("run") == 0
        assert await coordinator.acquire("run", "never held", 0, 10, TTL) == 0

    async def test_what_is_held_for_too_long_was_held_by_another_clock(
        self, coordinator: Coordinator, clock: ManualClock
    ) -> None:
        assert await coordinator.acquire("run", "dead", 10, 10, TTL) == 10
        clock.step(-6 * 86_400)
        # On a monotonic clock no time has passed; on the coordinator's own, it lapses in six days.
        clock.advance(TTL)
        assert await coordinator.acquire("run", "a", 4, 10, TTL) == 4
        assert await coordinator.permits_in_use("run") == 4

    async def test_what_a_dead_holder_held_lapses(self, coordinator: Coordinator, clock: ManualClock) -> None:
        await coordinator.acquire("run", "a", 6, 10, TTL)
        clock.advance(TTL / 2)
        await coordinator.acquire("run", "b", 4, 10, TTL)
        clock.advance(TTL / 2)
        assert await coordinator.permits_in_use("run") == 4
        assert await coordinator.acquire("run", "c", 9, 10, TTL) == 6
        clock.advance(TTL / 2)
        assert await coordinator.permits_in_use("run") == 6

    async def test_setting_again_keeps_it(self, coordinator: Coordinator, clock: ManualClock) -> None:
        for _ in range(5):
            await coordinator.acquire("run", "a", 3, 3, TTL)
            clock.advance(TTL - 1)
            assert await coordinator.acquire("run", "b", 1, 3, TTL) == 0

    async def test_a_smaller_limit_takes_from_who_asks(self, coordinator: Coordinator) -> None:
        await coordinator.acquire("run", "a", 6, 10, TTL)
        await coordinator.acquire("run", "b", 4, 10, TTL)
        assert await coordinator.acquire("run", "a", 6, 5, TTL) == 1
        assert await coordinator.acquire("run", "b", 4, 1, TTL) == 0
        assert await coordinator.permits_in_use("run") == 1

    async def test_semaphores_do_not_mix(self, coordinator: Coordinator) -> None:
        await coordinator.acquire("one", "a", 5, 5, TTL)
        assert await coordinator.acquire("two", "a", 5, 5, TTL) == 5
        assert await coordinator.permits_in_use("three") == 0

    async def test_holders_at_once_stay_within_the_limit(self, coordinator: Coordinator) -> None:
        granted = await asyncio.gather(*(coordinator.acquire("run", f"h{n}", 3, 10, TTL) for n in range(20)))
        assert sum(granted) == 10 == await coordinator.permits_in_use("run")

    @several
    @given(
        steps=st.lists(
            st.tuples(st.integers(0, 3), st.integers(0, 8), st.sampled_from([0, 0, 1, 4, 7])), min_size=1, max_size=30
        ),
        limit=st.integers(1, 10),
    )
    async def test_the_limit_holds_whatever_is_asked(
        self, coordinator: Coordinator, clock: ManualClock, steps: list[tuple[int, int, int]], limit: int
    ) -> None:
        name = clock.new_id("semaphore")
        model: dict[int, tuple[int, float]] = {}
        for who, want, passing in steps:
            clock.advance(passing)
            now = clock.now()
            model = {each: entry for each, entry in model.items() if entry[1] > now and each != who}
            expected = max(0, min(want, limit - sum(count for count, _ in model.values())))
            assert await coordinator.acquire(name, f"holder {who}", want, limit, TTL) == expected
            if expected:
                model[who] = (expected, now + TTL)
            assert await coordinator.permits_in_use(name) == sum(count for count, _ in model.values()) <= limit


class TestRates:
    async def test_passes_come_at_the_rate(self, coordinator: Coordinator) -> None:
        waits = [await coordinator.reserve("host", 1, 10.0, 1) for _ in range(5)]
        assert waits == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])

    async def test_a_burst_goes_first(self, coordinator: Coordinator) -> None:
        waits = [await coordinator.reserve("host", 1, 10.0, 3) for _ in range(6)]
        assert waits == pytest.approx([0.0, 0.0, 0.0, 0.1, 0.2, 0.3])

    async def test_idle_time_gives_back_the_burst_and_no_more(
        self, coordinator: Coordinator, clock: ManualClock
    ) -> None:
        for _ in range(3):
            await coordinator.reserve("host", 1, 10.0, 3)
        clock.advance(1000)
        waits = [await coordinator.reserve("host", 1, 10.0, 3) for _ in range(5)]
        assert waits == pytest.approx([0.0, 0.0, 0.0, 0.1, 0.2])

    async def test_several_at_once_are_as_many_one_by_one(self, coordinator: Coordinator) -> None:
        """The wait is until all of them may be used."""
        assert await coordinator.reserve("host", 4, 10.0, 2) == pytest.approx(0.2)
        assert await coordinator.reserve("host", 1, 10.0, 2) == pytest.approx(0.3)
        assert await coordinator.reserve("other", 2, 10.0, 2) == 0.0

    async def test_buckets_do_not_mix(self, coordinator: Coordinator) -> None:
        await coordinator.reserve("one", 5, 1.0, 1)
        assert await coordinator.reserve("two", 1, 1.0, 1) == 0.0

    async def test_what_is_too_far_ahead_is_not_reserved(self, coordinator: Coordinator, clock: ManualClock) -> None:
        waits = [await coordinator.reserve("host", 1, 2.0, 1, 0.5) for _ in range(4)]
        assert waits == pytest.approx([0.0, 0.5, 1.0, 1.0])
        assert [wait > 0.5 for wait in waits] == [False, False, True, True]
        clock.advance(0.5)
        assert await coordinator.reserve("host", 3, 2.0, 3, 0.5) == pytest.approx(0.5)
        assert await coordinator.reserve("host", 1, 2.0, 1, 0.5) == pytest.approx(2.0)
        assert await coordinator.reserve("host", 1, 2.0, 1) == pytest.approx(2.0)

    async def test_passes_of_another_clock_are_not_waited_for(
        self, coordinator: Coordinator, clock: ManualClock
    ) -> None:
        for _ in range(3):
            await coordinator.reserve("host", 1, 0.5, 1, 0.5)
        clock.step(-6 * 86_400)
        # One pass was used on a monotonic clock.
        clock.advance(2.0)
        assert await coordinator.reserve("host", 1, 0.5, 1, 0.5) == 0.0
        assert await coordinator.reserve("host", 1, 0.5, 1, 0.5) == pytest.approx(2.0), "and the rate holds"

    @several
    @given(rate=st.floats(0.3, 1000), within=st.floats(0, 2), pauses=st.lists(st.floats(0, 1), min_size=1, max_size=40))
    async def test_a_wait_says_whether_it_was_reserved(
        self, coordinator: Coordinator, clock: ManualClock, rate: float, within: float, pauses: list[float]
    ) -> None:
        name = clock.new_id("bucket")
        passes: list[float] = []
        for pause in pauses:
            wait = await coordinator.reserve(name, 1, rate, 1, within)
            if wait <= within:
                passes.append(clock.now() + wait)
            clock.advance(pause)
        assert all(after - before >= 1 / rate - 1e-3 for before, after in pairwise(passes))

    @several
    @given(
        count=st.integers(1, 60),
        rate=st.sampled_from([0.5, 1.0, 7.0, 100.0]),
        burst=st.integers(1, 10),
        pauses=st.lists(st.floats(0, 3), min_size=60, max_size=60),
    )
    async def test_no_window_has_more_than_its_share(
        self, coordinator: Coordinator, clock: ManualClock, count: int, rate: float, burst: int, pauses: list[float]
    ) -> None:
        name = clock.new_id("bucket")
        passes = []
        for pause in pauses[:count]:
            clock.advance(pause)
            passes.append(clock.now() + await coordinator.reserve(name, 1, rate, burst))
        passes.sort()
        for first in range(count):
            for last in range(first, count):
                assert last - first + 1 <= burst + (passes[last] - passes[first]) * rate + 1e-3

    @several
    @given(count=st.integers(1, 200), rate=st.floats(0.1, 1000), burst=st.integers(1, 50))
    async def test_as_many_at_once_take_their_time(
        self, coordinator: Coordinator, clock: ManualClock, count: int, rate: float, burst: int
    ) -> None:
        name = clock.new_id("bucket")
        waits = [await coordinator.reserve(name, 1, rate, burst) for _ in range(count)]
        assert waits == sorted(waits)
        assert waits[-1] == pytest.approx(max(0, count - burst) / rate, abs=1e-6)


class TestCache:
    async def test_a_value_lasts_as_long_as_it_was_told_to(self, coordinator: Coordinator, clock: ManualClock) -> None:
        assert await coordinator.cached("key") is None
        await coordinator.cache("key", b"value\0\xff", TTL)
        clock.advance(TTL - 1)
        assert await coordinator.cached("key") == b"value\0\xff"
        clock.advance(1)
        assert await coordinator.cached("key") is None

    async def test_a_new_value_replaces_the_old(self, coordinator: Coordinator, clock: ManualClock) -> None:
        await coordinator.cache("key", b"one", TTL)
        clock.advance(TTL - 1)
        await coordinator.cache("key", b"", TTL)
        clock.advance(TTL - 1)
        assert await coordinator.cached("key") == b""

    async def test_keys_do_not_mix(self, coordinator: Coordinator) -> None:
        await coordinator.cache("one", b"1", TTL)
        assert await coordinator.cached("two") is None
        assert await coordinator.cached("on") is None

    async def test_a_value_is_swapped_if_it_is_still_the_old_one(self, coordinator: Coordinator) -> None:
        assert not await coordinator.swap("key", b"old", b"new", TTL), "there is none"
        assert await coordinator.swap("key", None, b"one", TTL)
        assert not await coordinator.swap("key", None, b"two", TTL), "there is one"
        assert not await coordinator.swap("key", b"other", b"two", TTL)
        assert await coordinator.cached("key") == b"one"
        assert await coordinator.swap("key", b"one", b"two\0\xff", TTL)
        assert await coordinator.cached("key") == b"two\0\xff"
        assert await coordinator.swap("key", b"two\0\xff", b"", TTL)
        assert not await coordinator.swap("key", None, b"x", TTL), "an empty value is a value"
        assert await coordinator.swap("key", b"", b"x", TTL)

    async def test_a_swapped_value_lapses_too(self, coordinator: Coordinator, clock: ManualClock) -> None:
        await coordinator.cache("key", b"one", TTL)
        clock.advance(TTL - 1)
        assert await coordinator.swap("key", b"one", b"two", TTL)
        clock.advance(TTL - 1)
        assert await coordinator.cached("key") == b"two"
        clock.advance(1)
        assert not await coordinator.swap("key", b"two", b"three", TTL), "what lapsed is none"
        assert await coordinator.swap("key", None, b"three", TTL)

    async def test_one_of_many_swaps(self, coordinator: Coordinator) -> None:
        for old in (None, b"first"):
            new = [b"%d" % number for number in range(20)] if old else [b"first"] * 20
            swapped = await asyncio.gather(*(coordinator.swap("key", old, each, TTL) for each in new))
            assert sum(swapped) == 1
            assert await coordinator.cached("key") == new[swapped.index(True)]


class TestTallies:
    async def test_amounts_add_up(self, coordinator: Coordinator) -> None:
        assert await coordinator.add_counters("run", {"failed": 2, "ended": 5}, TTL) == {"failed": 2, "ended": 5}
        assert await coordinator.add_counters("run", {"ended": 1}, TTL) == {"failed": 2, "ended": 6}
        assert await coordinator.add_counters("run", {"ended": -6}, TTL) == {"failed": 2, "ended": 0}

    async def test_adding_nothing_reads(self, coordinator: Coordinator, clock: ManualClock) -> None:
        assert await coordinator.add_counters("run", {}, TTL) == {}
        await coordinator.add_counters("run", {"ended": 5}, TTL)
        clock.advance(TTL - 1)
        assert await coordinator.add_counters("run", {}, TTL) == {"ended": 5}
        clock.advance(1)
        assert await coordinator.add_counters("run", {}, TTL) == {}, "reading keeps nothing"

    async def test_they_lapse_after_the_last_addition(self, coordinator: Coordinator, clock: ManualClock) -> None:
        await coordinator.add_counters("run", {"failed": 1}, TTL)
        clock.advance(TTL - 1)
        assert await coordinator.add_counters("run", {"ended": 1}, TTL) == {"failed": 1, "ended": 1}
        clock.advance(TTL - 1)
        assert await coordinator.add_counters("run", {"ended": 1}, TTL) == {"failed": 1, "ended": 2}
        clock.advance(TTL)
        assert await coordinator.add_counters("run", {"ended": 1}, TTL) == {"ended": 1}

    async def test_what_was_added_under_a_name_is_added_once(
        self, coordinator: Coordinator, clock: ManualClock
    ) -> None:
        for _ in range(3):
            assert await coordinator.add_counters("run", {"ended": 5, "failed": 1}, TTL, once="a") == {
                "ended": 5,
                "failed": 1,
            }
            clock.advance(1)
        assert await coordinator.add_counters("run", {"ended": 5}, TTL, once="b") == {"ended": 10, "failed": 1}
        assert await coordinator.add_counters("run", {"ended": 5}, TTL, once="a") == {"ended": 10, "failed": 1}
        assert await coordinator.add_counters("run", {"ended": 5}, TTL) == {"ended": 15, "failed": 1}
        assert await coordinator.add_counters("other", {"ended": 5}, TTL, once="a") == {"ended": 5}, (
            "each tally has its own"
        )
        clock.advance(TTL)
        assert await coordinator.add_counters("run", {"ended": 5}, TTL, once="a") == {"ended": 5}

    async def test_amounts_of_many_names_add_up(self, coordinator: Coordinator, clock: ManualClock) -> None:
        await coordinator.add_counters_of({}, TTL)
        await coordinator.add_counters("one", {"1": 1}, TTL)
        clock.advance(TTL - 1)
        await coordinator.add_counters_of({"one": {"1": 2, "2": 3}, "two": {"1": 4}}, TTL)
        clock.advance(TTL - 1)
        assert await coordinator.add_counters("one", {}, TTL) == {"1": 3, "2": 3}
        assert await coordinator.add_counters("two", {}, TTL) == {"1": 4}

    async def test_tallies_do_not_mix(self, coordinator: Coordinator) -> None:
        await coordinator.add_counters("one", {"ended": 5}, TTL)
        assert await coordinator.add_counters("two", {}, TTL) == {}
        assert await coordinator.add_counters("on", {"ended": 1}, TTL) == {"ended": 1}

    async def test_adding_at_once_loses_nothing(self, coordinator: Coordinator) -> None:
        await asyncio.gather(
            *(coordinator.add_counters("run", {"ended": 1, f"h{n % 3}": n}, TTL) for n in range(30)),
            *(coordinator.add_counters("run", {"ended": 100}, TTL, once="x") for _ in range(10)),
        )
        expected = {"ended": 130, **{f"h{k}": sum(range(k, 30, 3)) for k in range(3)}}
        assert await coordinator.add_counters("run", {}, TTL) == expected
