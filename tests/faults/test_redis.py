"""The Coordinator on a Redis that forgets, restarts, breaks connections or does not answer."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conveyor.clock import SystemClock
from conveyor.engines.coordinator import Coordinator, Lease
from conveyor.engines.ready import LookRequest, ReadyMark
from conveyor.engines.redis import RedisEngine
from conveyor.engines.redis import redis_server as module
from conveyor.engines.redis.address import RedisNode, read_address
from conveyor.errors import EngineFailed, InvalidSetting
from conveyor.model import JobId, RunId, TenantId
from tests.servers.redis import Leak, RedisServer
from tests.servers.redis import redis as tls_redis
from tests.servers.redis_tls import PASSWORD, RIGHTS, tls_door, tls_url
from tests.support.clocks import JumpingClock, ManualClock

TTL = 30.0
# `CONVEYOR_REDIS_CASES` asks for more seeds.
CASES = int(os.environ.get("CONVEYOR_REDIS_CASES", "40"))

several = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def shared() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.close()


@pytest.fixture
def redis(shared: RedisServer) -> RedisServer:
    """Running and empty."""
    shared.say("FLUSHALL")
    return shared


@pytest.fixture
def clock() -> ManualClock:
    """What the server takes for the time."""
    return ManualClock()


@pytest.fixture
async def coordinator(redis: RedisServer, clock: ManualClock) -> AsyncIterator[Coordinator]:
    async with RedisEngine.open(redis.url, SystemClock(), clock) as engine:
        yield engine.coordinator


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Coordinator]:
    """On the server's own clock."""
    async with RedisEngine.open(url, SystemClock()) as engine:
        yield engine.coordinator


async def granted(coordinator: Coordinator, name: str, holder: str, ttl: float = TTL) -> Lease:
    lease = await coordinator.lease(name, holder, ttl)
    assert lease is not None
    return lease


class TestForgetful:
    """FLUSHALL at any moment: nothing fails, and what was granted is over."""

    async def test_fences_grow(self, redis: RedisServer, coordinator: Coordinator, clock: ManualClock) -> None:
        fences = []
        for number in range(20):
            fences.append((await granted(coordinator, "ingest", f"holder {number}")).fence)
            if number % 2:
                redis.say("FLUSHALL")
            else:
                clock.advance(TTL)
        assert fences == sorted(set(fences))

    async def test_a_holder_learns_that_it_holds_nothing(self, redis: RedisServer, coordinator: Coordinator) -> None:
        first = await granted(coordinator, "ingest", "a")
        redis.say("FLUSHALL")
        assert not await coordinator.renew(first, TTL)
        second = await granted(coordinator, "ingest", "b")
        assert second.fence > first.fence
        await coordinator.release(first)
        assert not await coordinator.renew(first, TTL)
        assert await coordinator.renew(second, TTL)

    async def test_holders_that_ask_again_are_within_the_limit(
        self, redis: RedisServer, coordinator: Coordinator
    ) -> None:
        held = {f"h{number}": await coordinator.acquire("run", f"h{number}", 4, 10, TTL) for number in range(4)}
        assert sum(held.values()) == 10
        redis.say("FLUSHALL")
        assert await coordinator.acquire("run", "late", 10, 10, TTL) == 10, "overbooked, until the others ask again"
        again = [await coordinator.acquire("run", holder, count, 10, TTL) for holder, count in held.items()]
        assert sum(again) == 0
        assert await coordinator.permits_in_use("run") == 10

    async def test_the_rest_starts_from_nothing(self, redis: RedisServer, coordinator: Coordinator) -> None:
        await coordinator.reserve("host", 50, 10.0, 1)
        await coordinator.add_counters("run", {"failed": 5}, TTL, once="a")
        await coordinator.cache("key", b"value", TTL)
        redis.say("FLUSHALL")
        assert await coordinator.reserve("host", 1, 10.0, 1) == 0.0
        assert await coordinator.add_counters("run", {"failed": 1}, TTL, once="a") == {"failed": 1}
        assert await coordinator.cached("key") is None
        assert not await coordinator.swap("key", b"value", b"new", TTL)
        await coordinator.forget_leases("ingest")

    @several
    @given(
        steps=st.lists(
            st.tuples(
                st.sampled_from(["flush", "flush scripts", "lease", "renew", "release", "forget", "hold", "reserve"])
                | st.sampled_from(["tally", "swap", "cache", "pass"]),
                st.integers(0, 2),
                st.integers(1, 12),
            ),
            max_size=30,
        )
    )
    async def test_between_any_two_calls(  # noqa: PLR0912  (one branch for each method)
        self,
        redis: RedisServer,
        coordinator: Coordinator,
        clock: ManualClock,
        steps: list[tuple[str, int, int]],
    ) -> None:
        name = clock.new_id("name")
        leases: dict[int, Lease] = {}
        owner: tuple[int, float] | None = None
        highest, counted, value, due = 0, 0, None, 0.0
        for step, who, seconds in steps:
            now, holder = clock.now(), f"holder {who}"
            live = owner[0] if owner is not None and owner[1] > now else None
            if step == "pass":
                clock.advance(seconds)
            elif step == "flush scripts":
                redis.say("SCRIPT", "FLUSH")
            elif step == "flush":
                redis.say("FLUSHALL")
                owner, counted, value, due = None, 0, None, 0.0
            elif step == "lease":
                lease = await coordinator.lease(name, holder, seconds)
                assert (lease is not None) == (live in (None, who))
                if lease is not None:
                    assert lease.fence > highest
                    highest, leases[who], owner = lease.fence, lease, (who, now + seconds)
            elif step == "renew" and who in leases:
                renewed = await coordinator.renew(leases[who], seconds)
                assert renewed == (live == who)
                owner = (who, now + seconds) if renewed else owner
            elif step == "release" and who in leases:
                await coordinator.release(leases[who])
                owner = None if live == who else owner
            elif step == "forget":
                await coordinator.forget_leases(name)
                owner = None
            elif step == "hold":
                assert 0 <= await coordinator.acquire(name, holder, seconds, 10, TTL) <= seconds
            elif step == "reserve":
                due = max(due, now)
                assert await coordinator.reserve(name, 1, 1.0, 1) == pytest.approx(due - now)
                due += 1.0
            elif step == "tally":
                counted += seconds
                assert await coordinator.add_counters(name, {"n": seconds}, 1e6) == {"n": counted}
            elif step == "swap":
                old, value = value, b"%d" % seconds
                assert await coordinator.swap(name, old, value, 1e6)
            elif step == "cache":
                value = b"%d" % seconds
                await coordinator.cache(name, value, 1e6)
                assert await coordinator.cached(name) == value


class TestLostAnswers:
    """What was asked is carried out, the answer is lost, and the same is asked again."""

    @pytest.fixture
    async def leak(self, redis: RedisServer) -> AsyncIterator[Leak]:
        async with Leak.open(redis.port) as door:
            yield door

    @pytest.fixture
    async def coordinator(self, leak: Leak, clock: ManualClock) -> AsyncIterator[Coordinator]:
        async with RedisEngine.open(leak.url, SystemClock(), clock) as engine:
            yield engine.coordinator

    async def test_nothing_is_reserved_twice(self, leak: Leak, coordinator: Coordinator) -> None:
        waits = []
        for number in range(10):
            leak.losing = number % 3
            waits.append(await coordinator.reserve("host", 1, 10.0, 1))
        assert leak.lost == 9
        assert waits == pytest.approx([number / 10 for number in range(10)])

    async def test_at_once_too(self, leak: Leak, coordinator: Coordinator) -> None:
        await coordinator.reserve("host", 1, 10.0, 1)
        leak.losing = 5
        waits = await asyncio.gather(*(coordinator.reserve("host", 1, 10.0, 1) for _ in range(50)))
        assert leak.lost == 5
        assert sorted(waits) == pytest.approx([number / 10 for number in range(1, 51)])

    async def test_nothing_is_added_twice(self, leak: Leak, coordinator: Coordinator) -> None:
        leak.losing = 2
        assert await coordinator.add_counters("run", {"failed": 3}, TTL) == {"failed": 3}
        leak.losing = 1
        assert await coordinator.add_counters("run", {"failed": 3}, TTL, once="a") == {"failed": 6}
        leak.losing = 1
        assert await coordinator.add_counters("run", {"failed": 3}, TTL, once="a") == {"failed": 6}
        assert leak.lost == 4

    async def test_who_swapped_is_told_so(self, leak: Leak, coordinator: Coordinator) -> None:
        leak.losing = 1
        assert await coordinator.swap("key", None, b"one", TTL)
        leak.losing = 1
        assert not await coordinator.swap("key", None, b"two", TTL)
        leak.losing = 1
        assert await coordinator.swap("key", b"one", b"two", TTL)
        assert await coordinator.cached("key") == b"two"
        assert leak.lost == 3

    async def test_leases_and_semaphores_are_the_askers(self, leak: Leak, coordinator: Coordinator) -> None:
        leak.losing = 1
        lease = await granted(coordinator, "ingest", "a")
        leak.losing = 1
        assert await coordinator.renew(lease, TTL)
        leak.losing = 1
        assert await coordinator.acquire("run", "a", 3, 5, TTL) == 3
        leak.losing = 1
        await coordinator.release(lease)
        assert await coordinator.permits_in_use("run") == 3
        assert (await granted(coordinator, "ingest", "b")).fence > lease.fence
        assert leak.lost == 4

    async def test_answers_are_kept_no_longer_than_they_may_be_asked_for(
        self, redis: RedisServer, coordinator: Coordinator
    ) -> None:
        for _ in range(200):
            await coordinator.reserve("host", 1, 10.0, 1)
        await asyncio.gather(*(coordinator.add_counters("run", {"n": 1}, TTL) for _ in range(100)))
        await coordinator.reserve("host", 1, 10.0, 1)
        sizes = {key: redis.ask("HLEN", key) for key in redis.ask("KEYS", "*answers*")}
        assert len(sizes) == 2, "one of the bucket, one of the counters"
        assert max(sizes.values()) <= 101, "those that were asked for at once, and where the next begin"
        await coordinator.add_counters("run", {"n": 1}, TTL)
        assert {redis.ask("HLEN", key) for key in sizes} == {2}

    @pytest.mark.parametrize("seed", range(CASES))
    async def test_a_bad_day(self, leak: Leak, coordinator: Coordinator, seed: int) -> None:
        """Several who ask at once while answers are lost: nothing is granted, reserved or added twice."""
        chance = random.Random(seed)
        added, said, waits, swapped = 0, set[int](), list[float](), 0
        for _ in range(chance.randint(5, 10)):
            leak.losing = chance.choice([0, 0, 1, 2])
            match chance.randrange(4):
                case 0:
                    asked = [chance.randint(1, 3) for _ in range(chance.randint(1, 4))]
                    once = chance.choice([None, "the same"])
                    await asyncio.gather(
                        *(coordinator.add_counters("run", {"n": n}, TTL, once and f"{n}") for n in asked)
                    )
                    added += sum(asked) if once is None else sum(set(asked) - said)
                    said |= set(asked) if once else set()
                case 1:
                    count = chance.randint(1, 4)
                    waits += await asyncio.gather(*(coordinator.reserve("host", 1, 10.0, 1) for _ in range(count)))
                case 2:
                    names = [f"h{number}" for number in range(chance.randint(2, 4))]
                    leases = await asyncio.gather(*(coordinator.lease("ingest", name, TTL) for name in names))
                    (lease,) = [lease for lease in leases if lease is not None]
                    await coordinator.release(lease)
                case _:
                    old = b"%d" % swapped if swapped else None
                    news = [b"%d" % (swapped + 1)] * chance.randint(1, 3)
                    won = await asyncio.gather(*(coordinator.swap("key", old, new, TTL) for new in news))
                    assert sum(won) == 1
                    swapped += 1
        leak.losing = 0
        assert await coordinator.add_counters("run", {"n": 1}, TTL) == {"n": added + 1}
        assert sorted(waits) == pytest.approx([number / 10 for number in range(len(waits))])


class TestRestarts:
    def test_a_server_outlives_the_loop_in_which_it_was_restarted(self) -> None:
        """As one soak leaves it to the next."""
        server = RedisServer()
        try:
            server.kill()
            asyncio.run(asyncio.to_thread(server.start))
            assert server.say("PING").startswith(b"+PONG")
        finally:
            server.close()

    async def test_calls_outlast_one(self) -> None:
        server = RedisServer()
        try:
            async with opened(server.url) as coordinator:
                first = await granted(coordinator, "ingest", "a")
                server.kill()
                calls = [asyncio.create_task(coordinator.lease("ingest", f"h{n}", TTL)) for n in range(20)]
                more = [asyncio.create_task(coordinator.reserve("host", 1, 1.0, 1)) for _ in range(20)]
                await asyncio.sleep(0)
                await asyncio.to_thread(server.start)
                leases = [lease for lease in await asyncio.gather(*calls) if lease is not None]
                assert len(leases) == 1
                assert leases[0].fence > first.fence
                assert not await coordinator.renew(first, TTL)
                assert sorted(await asyncio.gather(*more)) == pytest.approx(list(range(20)), abs=0.9)
        finally:
            server.close()

    async def test_again_and_again_under_load(self) -> None:
        server = RedisServer()
        stop = asyncio.Event()
        fences: list[int] = []

        async def work(number: int) -> int:
            done = 0
            while not stop.is_set():
                lease = await coordinator.lease(f"name {number}", "me", TTL)
                assert lease is not None
                fences.append(lease.fence) if number == 0 else None
                await coordinator.acquire("run", f"h{number}", 1, 3, TTL)
                await coordinator.add_counters("run", {"n": 1}, TTL)
                done += 1
            return done

        try:
            async with opened(server.url) as coordinator:
                workers = [asyncio.create_task(work(number)) for number in range(8)]
                for _ in range(4):
                    await asyncio.sleep(0.05)
                    await asyncio.to_thread(server.kill)
                    await asyncio.to_thread(server.start)
                    await coordinator.permits_in_use("run")
                stop.set()
                assert all(await asyncio.gather(*workers))
                assert fences == sorted(set(fences))
                for number in range(8):
                    await coordinator.acquire("run", f"h{number}", 1, 3, TTL)
                assert await coordinator.permits_in_use("run") == 3
        finally:
            server.close()

    async def test_one_that_stays_away_is_an_error(self) -> None:
        server, clock = RedisServer(), JumpingClock()
        try:
            async with RedisEngine.open(server.url, clock) as engine:
                server.kill()
                call = asyncio.create_task(engine.coordinator.permits_in_use("run"))
                while not call.done():
                    await asyncio.sleep(0.01)
                    clock.advance(2.0)
                with pytest.raises(EngineFailed, match=f"127.0.0.1:{server.port}/0 does not answer"):
                    await call
                server.start()
                assert await engine.coordinator.permits_in_use("run") == 0, "it is found again by itself"
        finally:
            server.close()

    async def test_none_at_the_start_is_an_error(self) -> None:
        server, clock = RedisServer(), JumpingClock()
        server.close()

        async def start() -> None:
            async with RedisEngine.open(server.url, clock):
                pass

        starting = asyncio.create_task(start())
        while not starting.done():
            await asyncio.sleep(0.01)
            clock.advance(2.0)
        with pytest.raises(EngineFailed, match="does not answer"):
            await starting

    async def test_one_that_does_not_answer_in_time_gets_the_call_again(
        self, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It carries out both tries when it wakes up, and adds once."""
        monkeypatch.setattr(module, "_ROUND_TRIP", 0.1)
        async with opened(redis.url) as coordinator:
            await coordinator.reserve("host", 1, 0.001, 1)
            redis.freeze()
            try:
                call = asyncio.create_task(coordinator.add_counters("run", {"n": 1}, TTL))
                await asyncio.sleep(0.5)
                assert not call.done()
            finally:
                redis.thaw()
            assert await call == {"n": 1}
            assert await coordinator.add_counters("run", {}, TTL) == {"n": 1}

    async def test_who_leaves_disturbs_nobody(self, redis: RedisServer, coordinator: Coordinator) -> None:
        calls = [asyncio.create_task(coordinator.acquire("run", f"h{number}", 1, 1000, TTL)) for number in range(100)]
        await asyncio.sleep(0)
        for call in calls[::3]:
            call.cancel()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [answer for number, answer in enumerate(answers) if number % 3] == [1] * 66
        assert await coordinator.acquire("run", "last", 1, 1000, TTL) == 1

    async def test_calls_at_once_share_one_connection(self, redis: RedisServer, coordinator: Coordinator) -> None:
        def connections() -> int:
            lines = redis.say("INFO", "stats").decode().splitlines()
            return int(next(line for line in lines if line.startswith("total_connections_received")).split(":")[1])

        before = connections()
        await asyncio.gather(*(coordinator.reserve(f"host {number}", 1, 1.0, 1) for number in range(1000)))
        assert connections() == before + 1, "the one that asks"


async def test_a_look_among_thousands_of_tenants_is_as_much_work_as_among_hundreds(
    redis: RedisServer, coordinator: Coordinator
) -> None:
    """A script holds up all other calls: a fleet of a hundred workers looks four hundred times a second."""

    async def commands(tenants: int) -> int:
        redis.say("FLUSHALL")
        marks = [ReadyMark(RunId(f"run {n}"), TenantId(f"tenant {n}"), JobId("job"), 0.0) for n in range(tenants)]
        await coordinator.mark_runs(marks)
        await coordinator.look_for_runs(LookRequest("worker", TTL, TTL))
        redis.say("CONFIG", "RESETSTAT")
        look = await coordinator.look_for_runs(LookRequest("worker", TTL, TTL, limit=4))
        assert len(look.taken) == 4
        return sum(counts["calls"] for counts in redis.ask("INFO", "commandstats").values())

    few = await commands(200)
    assert few < 200
    assert await commands(2000) <= few + 10


class TestOnItsOwnClock:
    async def test_a_lease_lapses(self, redis: RedisServer) -> None:
        async with opened(redis.url) as one, opened(redis.url) as two:
            first = await granted(one, "ingest", "a", 0.05)
            second = None
            while second is None:
                second = await two.lease("ingest", "b", TTL)
            assert second.fence > first.fence
            assert not await one.renew(first, TTL)
            assert await one.lease("ingest", "a", TTL) is None

    async def test_processes_share_what_there_is(self, redis: RedisServer) -> None:
        async with opened(redis.url) as one, opened(redis.url) as two:
            assert await one.acquire("run", "a", 6, 10, TTL) == 6
            assert await two.acquire("run", "b", 6, 10, TTL) == 4
            assert await one.reserve("host", 1, 0.01, 1) == 0.0
            assert await two.reserve("host", 1, 0.01, 1) == pytest.approx(100, abs=20)
            await one.add_counters("run", {"n": 1}, TTL)
            assert await two.add_counters("run", {"n": 1}, TTL) == {"n": 2}
            assert await one.swap("key", None, b"a", TTL)
            assert not await two.swap("key", None, b"b", TTL)

    async def test_prefixes_do_not_mix(self, redis: RedisServer) -> None:
        async with opened(f"{redis.url}?prefix=one") as one, opened(f"{redis.url}?prefix=two") as two:
            await granted(one, "ingest", "a")
            await granted(two, "ingest", "b")
            await two.forget_leases("")
            assert await one.lease("ingest", "b", TTL) is None

    async def test_what_nobody_asks_for_any_more_goes(self, redis: RedisServer) -> None:
        async with opened(redis.url) as coordinator:
            await coordinator.acquire("run", "a", 6, 10, TTL)
            await coordinator.reserve("host", 1, 0.01, 1)
            await coordinator.add_counters("run", {"n": 1}, TTL, once="a")
            await coordinator.swap("key", None, b"a", TTL)
            await coordinator.cache("other", b"a", TTL)
            keys = [word for word in redis.say("KEYS", "*").decode().split() if word.startswith("{conveyor:")]
            assert len(keys) == 9
            for key in keys:
                assert 0 < int(redis.say("PTTL", key)[1:]) <= (100 + 60) * 1000

    async def test_a_lease_of_long_ago_goes(
        self, redis: RedisServer, coordinator: Coordinator, clock: ManualClock
    ) -> None:
        for number in range(300):
            await granted(coordinator, f"old {number}", "a")
        clock.advance(2 * 86_400)
        for number in range(300):
            await granted(coordinator, f"new {number % 100}", "a")
        sizes = dict.fromkeys(("by-name", "names", "ends"), 0)
        for key in redis.ask("KEYS", "{conveyor:leases:*"):
            sizes[key.rpartition(":")[2]] += redis.ask("HLEN" if key.endswith("by-name") else "ZCARD", key)
        assert sizes == dict.fromkeys(sizes, 100)


class TestOpening:
    @pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random"])
    @pytest.mark.parametrize("memory", ["0", "100mb"])
    async def test_a_server_that_throws_keys_away_is_refused(self, policy: str, memory: str) -> None:
        server = RedisServer("--maxmemory", memory, "--maxmemory-policy", policy)
        try:
            with pytest.raises(InvalidSetting, match=f"maxmemory-policy is {policy}.*noeviction"):
                async with opened(server.url):
                    pass
        finally:
            server.close()

    async def test_a_full_server_says_so(self) -> None:
        server = RedisServer("--maxmemory", "1mb", "--maxmemory-policy", "noeviction")
        try:
            async with opened(server.url) as coordinator:
                with pytest.raises(EngineFailed, match="memory"):
                    for number in range(1000):
                        await coordinator.cache(f"key {number}", b"x" * 10_000, TTL)
        finally:
            server.close()

    async def test_a_wrong_password_is_an_error_at_once(self) -> None:
        server = RedisServer("--requirepass", "right")
        try:
            for user in ("", ":wrong@", "nobody:right@"):
                with pytest.raises(EngineFailed, match="failed: ") as refused:
                    async with opened(server.url.replace("//", f"//{user}")):
                        pass
                assert "wrong" not in refused.value.message.replace("WRONG", "").replace("wrong number", "")
            async with opened(server.url.replace("//", "//:right@")) as coordinator:
                assert await coordinator.permits_in_use("run") == 0
        finally:
            server.close()

    async def test_it_says_what_it_checked(self, redis: RedisServer) -> None:
        async with RedisEngine.open(redis.url, SystemClock()) as engine:
            found = await engine.checks()
            assert len(found) == 5
            assert [problem for _, problem in found if problem is not None] == []
            assert found[1][0].startswith("redis: version: Valkey ")
            assert found[2][0] == "redis: eviction: noeviction"
            redis.say("CONFIG", "SET", "maxmemory-policy", "allkeys-random")
            try:
                assert "noeviction" in str(dict(await engine.checks())["redis: eviction"])
                redis.say("CONFIG", "SET", "maxmemory-policy", "volatile-lru")
                name, problem = (await engine.checks())[2]
                assert "volatile-lru" in name
                assert "never leases" in name
                assert problem is None
            finally:
                redis.say("CONFIG", "SET", "maxmemory-policy", "noeviction")

    async def test_a_user_that_may_not_ask_for_the_policy(self, redis: RedisServer) -> None:
        rights = RIGHTS.replace("+info ", "").split()
        redis.ask("ACL", "SETUSER", "limited", "reset", "on", ">secret", "~{conveyor:*", *rights)
        async with RedisEngine.open(redis.url.replace("//", "//limited:secret@"), SystemClock()) as engine:
            found = await engine.checks()
            assert [problem for _, problem in found if problem is not None] == []
            assert "unknown, because this user may not run INFO" in found[2][0]
        redis.ask("ACL", "SETUSER", "limited", "reset", "on", ">secret", "~other:*", *rights)
        async with RedisEngine.open(redis.url.replace("//", "//limited:secret@"), SystemClock()) as engine:
            with pytest.raises(EngineFailed, match=r"failed: .*permission") as refused:
                await engine.coordinator.cached("key")
            assert "secret" not in refused.value.message

    @pytest.mark.parametrize(
        ("changed", "said"), [({"ca": None}, "CERTIFICATE_VERIFY"), ({"cert": None, "key": None}, "")]
    )
    async def test_a_certificate_that_is_not_trusted(self, changed: dict[str, None], said: str) -> None:
        clock = JumpingClock()
        async with tls_door(tls_redis().port) as port:

            async def start() -> None:
                async with RedisEngine.open(tls_url(port, **changed), clock):
                    pass

            starting = asyncio.create_task(start())
            while not starting.done():
                await asyncio.sleep(0.01)
                clock.advance(1.0)
            with pytest.raises(EngineFailed, match=f"does not answer: .*{said}") as refused:
                await starting
            assert "p%40ss" not in refused.value.message
            assert PASSWORD not in refused.value.message

    @pytest.mark.parametrize(
        "url",
        [
            "",
            "localhost:6379",
            "http://localhost:6379",
            "redis://",
            "redis://:secret@",
            "redis://host:port/0",
            "redis://host:99999/0",
            "redis://host/one",
            "redis://host/0/1",
            "redis://host/0?prefix=",
            "redis://host/0?prefix=a{b}",
            "redis://host/0?prefix=a&prefix=b",
            "redis://:secret@host/0?timeout=3",
            "redis://[::1/0",
            "redis://:sec/ret@host/0",
            "redis://:x?secret=y@host/0",
            "redis://one,two/0",
            "redis://host/0?ca=/secret.pem",
            "rediss://host/0?key=/secret.pem",
            "redis://host/0?sentinel_password=secret",
            "redis+cluster://host/1",
            "redis+cluster://one,,two",
            "redis+cluster://one:0",
            "redis+sentinel://host",
            "redis+sentinel://host/main/one",
            "redis+other://host",
        ],
    )
    def test_a_url_that_is_none(self, url: str) -> None:
        with pytest.raises(InvalidSetting, match=r"Write redis://") as refused:
            read_address(url)
        assert "secret" not in refused.value.message

    def test_a_url_that_is_one(self) -> None:
        address = read_address("rediss://me:p%40ss@example.com:6380/3?prefix=blue")
        assert (address.mode, address.nodes, address.tls) == ("single", (RedisNode("example.com", 6380),), True)
        assert address.database == 3
        assert (address.username, address.password, address.prefix) == ("me", "p@ss", "blue")
        assert address.shown == "rediss://example.com:6380/3"
        plain = read_address("redis://localhost")
        assert (plain.nodes, plain.database, plain.tls) == ((RedisNode("localhost", 6379),), 0, False)
        assert (plain.username, plain.password) == (None, None)

    def test_the_url_of_a_cluster(self) -> None:
        address = read_address("valkeys+cluster://me:pw@a.example:7000,[::1],b.example/0?ca=%2Fetc%2Fca.pem")
        assert (address.mode, address.tls, address.database, address.ca) == ("cluster", True, 0, "/etc/ca.pem")
        assert address.nodes == (RedisNode("a.example", 7000), RedisNode("::1", 6379), RedisNode("b.example", 6379))
        assert address.shown == "rediss+cluster://a.example:7000,[::1]:6379,b.example:6379"
        assert address.options()["ssl_ca_certs"] == "/etc/ca.pem"

    def test_the_url_of_sentinels(self) -> None:
        address = read_address(
            "redis+sentinel://me:secret@a,b:26380/my%20master/2?sentinel_username=s&sentinel_password=hidden&prefix=p"
        )
        assert (address.mode, address.service, address.database) == ("sentinel", "my master", 2)
        assert address.nodes == (RedisNode("a", 26379), RedisNode("b", 26380))
        assert (address.options()["password"], address.sentinel_options()["password"]) == ("secret", "hidden")
        assert address.shown == "redis+sentinel://a:26379,b:26380/my master/2"
        for text in (repr(address), str(address), f"{address}", address.shown):
            assert "secret" not in text
            assert "hidden" not in text

    async def test_a_file_that_is_missing_is_an_error_at_once(self, tmp_path: Path) -> None:
        (tmp_path / "empty.pem").write_text("")
        for options in (f"ca={tmp_path}/none.pem", f"ca={tmp_path}/empty.pem", f"cert={tmp_path}/empty.pem"):
            with pytest.raises(InvalidSetting, match="not readable as PEM"):
                async with opened(f"rediss://:secret@127.0.0.1:1/0?{options}"):
                    pass
