"""The Coordinator on a cluster whose slots move, whose masters die and whose replicas are promoted."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
from redis.crc import key_slot

from conveyor.clock import SystemClock
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.redis import RedisEngine
from conveyor.errors import EngineFailed
from tests.servers.redis import RedisServer
from tests.servers.redis_cluster import RedisCluster

TTL = 30.0


@pytest.fixture(scope="module")
def shared() -> Iterator[RedisCluster]:
    cluster = RedisCluster(0)
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(shared: RedisCluster) -> RedisCluster:
    """Whole, and empty."""
    for node in shared.nodes:
        if not node.is_running:
            node.start()
    shared.wait_until_well()
    for node in shared.nodes:
        if node.ask("ROLE")[0] == "master":
            node.ask("FLUSHALL")
    return shared


@pytest.fixture
async def coordinator(cluster: RedisCluster) -> AsyncIterator[Coordinator]:
    async with RedisEngine.open(cluster.url, SystemClock()) as engine:
        yield engine.coordinator


def named(kind: str, number: int) -> str:
    """A name whose key is in this third of the slots."""
    tries = (f"name {at}" for at in range(1000))
    return next(name for name in tries if key_slot(f"{{conveyor:{kind}:{name}}}".encode()) // 5462 == number)


class Load:
    """Callers who ask again and again, each of whom counts what it was told."""

    def __init__(self) -> None:
        self.calls = 0
        self._stop = asyncio.Event()

    @asynccontextmanager
    async def running(self, step: Callable[[], Awaitable[object]], callers: int = 8) -> AsyncIterator[None]:
        async def go() -> None:
            while not self._stop.is_set():
                await step()
                self.calls += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(callers):
                group.create_task(go())
            try:
                yield
            finally:
                self._stop.set()

    async def more(self, count: int = 50) -> None:
        """Until so many more calls were answered."""
        enough = self.calls + count
        while self.calls < enough:  # noqa: ASYNC110  (the callers wait for a server)
            await asyncio.sleep(0.01)


def errors(node: RedisServer, code: str) -> int:
    """How often the node has said so."""
    said: dict[str, dict[str, int]] = node.ask("INFO", "errorstats")
    return said.get(f"errorstat_{code}", {}).get("count", 0)


class TestSpread:
    async def test_names_are_on_all_nodes(self, cluster: RedisCluster, coordinator: Coordinator) -> None:
        await asyncio.gather(*(coordinator.acquire(f"run {n}", "a", 1, 10, TTL) for n in range(100)))
        await asyncio.gather(*(coordinator.reserve(f"host {n}", 1, 0.01, 1) for n in range(100)))
        await asyncio.gather(*(coordinator.lease(f"ingest:{n}", "a", TTL) for n in range(100)))
        for node in cluster.masters:
            assert node.ask("DBSIZE") > 50
            kinds = {key.split(":")[1] for key in node.ask("KEYS", "*")}
            assert kinds == {"semaphore", "bucket", "leases"}

    async def test_leases_of_a_prefix_are_forgotten_on_all_nodes(
        self, cluster: RedisCluster, coordinator: Coordinator
    ) -> None:
        names = [f"ingest:run_1:{n}" for n in range(50)]
        await asyncio.gather(*(coordinator.lease(name, "a", TTL) for name in [*names, "ingest:run_2"]))
        await coordinator.forget_leases("ingest:run_1")
        assert all(await asyncio.gather(*(coordinator.lease(name, "b", TTL) for name in names)))
        assert await coordinator.lease("ingest:run_2", "b", TTL) is None

    async def test_calls_at_once_share_one_connection_to_each_node(
        self, cluster: RedisCluster, coordinator: Coordinator
    ) -> None:
        def count(field: str) -> list[int]:
            return [node.ask("INFO", "stats")[field] for node in cluster.masters]

        await asyncio.gather(*(coordinator.acquire(f"run {n}", "a", 1, 10, TTL) for n in range(100)))
        connections, reads = count("total_connections_received"), count("total_reads_processed")
        await asyncio.gather(*(coordinator.acquire(f"run {n}", "a", 1, 10, TTL) for n in range(600)))
        assert [
            after - before for before, after in zip(connections, count("total_connections_received"), strict=True)
        ] == [
            2,
            2,
            2,
        ], "those that ask"
        # Of 600 calls, each node gets about 200, in a few pieces of 64 KB, which a busy machine may deliver in parts.
        assert max(after - before for before, after in zip(reads, count("total_reads_processed"), strict=True)) < 50


class TestSlotsThatMove:
    async def test_calls_follow_while_all_is_counted_once(
        self, cluster: RedisCluster, coordinator: Coordinator
    ) -> None:
        load, key = Load(), "{conveyor:tally:run}"
        async with load.running(lambda: coordinator.add_counters("run", {"n": 1}, TTL)):
            for _ in range(4):
                await load.more()
                end_move = await asyncio.to_thread(cluster.begin_move, key)
                await asyncio.sleep(0.05)
                await asyncio.to_thread(end_move)
            await load.more()
        assert await coordinator.add_counters("run", {}, TTL) == {"n": load.calls}

    async def test_a_key_that_is_not_there_any_more_is_asked_for_where_it_goes(
        self, cluster: RedisCluster, coordinator: Coordinator
    ) -> None:
        name = named("semaphore", 1)
        source = cluster.owner(f"{{conveyor:semaphore:{name}}}")
        before = errors(source, "ASK")
        end_move = cluster.begin_move(f"{{conveyor:semaphore:{name}}}")
        assert await coordinator.acquire(name, "a", 6, 10, TTL) == 6
        assert await coordinator.acquire(name, "b", 6, 10, TTL) == 4
        assert await coordinator.permits_in_use(name) == 10
        assert errors(source, "ASK") >= before + 3
        end_move()
        assert await coordinator.permits_in_use(name) == 10

    async def test_keys_of_one_script_that_are_apart_are_waited_for(
        self, cluster: RedisCluster, coordinator: Coordinator
    ) -> None:
        name = named("tally", 2)
        key = f"{{conveyor:tally:{name}}}"
        assert await coordinator.add_counters(name, {"n": 1}, TTL, once="a") == {"n": 1}
        nodes = [node for node in cluster.masters if node.is_running]
        before = sum(errors(node, "TRYAGAIN") for node in nodes)
        end_move = cluster.begin_move(key)
        source = cluster.owner(key)
        target = next(node for node in cluster.masters if node is not source)
        source.ask("MIGRATE", "127.0.0.1", target.port, key, 0, 5000)
        adding = asyncio.create_task(coordinator.add_counters(name, {"n": 1}, TTL, once="b"))
        other = named("semaphore", 1)
        while sum(errors(node, "TRYAGAIN") for node in nodes) < before + 2:
            assert await coordinator.acquire(other, "a", 1, 1, TTL) == 1, "others are not held up"
        assert not adding.done()
        end_move()
        assert await adding == {"n": 2}


class TestFailover:
    async def test_a_replica_that_takes_over_in_order_loses_nothing(
        self, cluster: RedisCluster, coordinator: Coordinator
    ) -> None:
        name, load = named("tally", 0), Load()
        async with load.running(lambda: coordinator.add_counters(name, {"n": 1}, TTL)):
            for _ in range(2):
                await load.more()
                _, replica = cluster.pair(0)
                replica.ask("CLUSTER", "FAILOVER")
                await asyncio.to_thread(cluster.wait_for_promotion, replica)
            await load.more()
        assert await coordinator.add_counters(name, {}, TTL) == {"n": load.calls}

    @pytest.mark.parametrize("how", ["killed", "frozen"])
    async def test_a_master_that_dies_under_load(
        self, cluster: RedisCluster, coordinator: Coordinator, how: str
    ) -> None:
        """Nobody sees an error. What it had not handed on may be lost; nothing is counted twice; fences grow."""
        name, held, load = named("tally", 0), named("semaphore", 0), Load()
        fences: list[int] = []
        master, replica = cluster.pair(0)

        async def step() -> None:
            await coordinator.add_counters(name, {"n": 1}, TTL)
            await coordinator.acquire(held, "me", 3, 5, TTL)

        async def lease() -> None:
            names = [f"ingest:{n}" for n in range(16)]
            leases = await asyncio.gather(*(coordinator.lease(each, "me", TTL) for each in names))
            assert all(leases)
            fences.extend(lease.fence for lease in leases[:1] if lease is not None)

        async with load.running(step), Load().running(lease, 1):
            await load.more()
            master.kill() if how == "killed" else master.freeze()
            try:
                await asyncio.to_thread(cluster.wait_for_promotion, replica, master)
                await load.more()
            finally:
                master.start() if how == "killed" else master.thaw()
            await load.more()
        counted = (await coordinator.add_counters(name, {}, TTL))["n"]
        assert 0 < counted <= load.calls
        assert await coordinator.permits_in_use(held) == 3
        assert fences == sorted(set(fences))

    async def test_one_that_is_away_does_not_hold_up_the_others(
        self, cluster: RedisCluster, coordinator: Coordinator
    ) -> None:
        for node in cluster.nodes:
            node.ask("CONFIG", "SET", "cluster-require-full-coverage", "no")
        lost, there = named("semaphore", 1), named("semaphore", 2)
        master = cluster.owner(f"{{conveyor:semaphore:{lost}}}")
        await coordinator.acquire(lost, "me", 1, 5, TTL)
        master.kill()
        try:
            waiting = asyncio.create_task(coordinator.acquire(lost, "me", 1, 5, TTL))
            for _ in range(200):
                assert await coordinator.acquire(there, "me", 1, 5, TTL) == 1
            assert not waiting.done()
        finally:
            master.start()
        assert await waiting == 1


class TestOpening:
    async def test_the_url_of_one_server_for_a_cluster(self, cluster: RedisCluster) -> None:
        async with RedisEngine.open(cluster.masters[1].url, SystemClock()) as engine:
            with pytest.raises(EngineFailed, match=r"is a node of a cluster\. Write redis\+cluster://"):
                await asyncio.gather(*(engine.coordinator.permits_in_use(f"run {n}") for n in range(20)))

    async def test_the_url_of_a_cluster_for_one_server(self) -> None:
        server = RedisServer()
        try:
            with pytest.raises(EngineFailed, match="cluster support disabled"):
                async with RedisEngine.open(server.url.replace("redis:", "redis+cluster:"), SystemClock()):
                    pass
        finally:
            server.close()

    async def test_it_says_what_it_checked(self, cluster: RedisCluster) -> None:
        async with RedisEngine.open(cluster.url, SystemClock()) as engine:
            found = await engine.checks()
            assert found[0] == ("redis: reachable: 3 masters", None)
            assert [problem for _, problem in found if problem is not None] == []
            cluster.masters[2].ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
            try:
                problem = dict(await engine.checks())["redis: eviction"]
                assert f"127.0.0.1:{cluster.masters[2].port} evicts any key" in str(problem)
            finally:
                cluster.masters[2].ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
