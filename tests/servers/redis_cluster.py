"""A cluster of Valkey servers on loopback: three masters, each with a third of the slots, and replicas where asked."""

import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from conveyor.clock import SystemClock
from conveyor.engines.redis import RedisEngine
from tests.servers.redis import RedisServer, free_port, with_prefix
from tests.support.clocks import ManualClock

_MASTERS = 3
_PATIENCE = 90.0


def _node() -> RedisServer:
    options = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()), "--cluster-node-timeout", "1000")
    # A replica that was away for a while may be promoted all the same, and data arrives at once.
    quick = ("--cluster-replica-validity-factor", "0", "--repl-diskless-sync-delay", "0")
    return RedisServer(*options, *quick)


class RedisCluster:
    """`masters[n]` begins with the nth third of the slots; `replicas[n]` are those of `masters[n]`."""

    def __init__(self, *replicas_of: int) -> None:
        self.masters = [_node() for _ in range(_MASTERS)]
        self.replicas = {number: _node() for number in replicas_of}
        size = REDIS_CLUSTER_HASH_SLOTS // _MASTERS + 1
        for number, node in enumerate(self.masters):
            last = min((number + 1) * size, REDIS_CLUSTER_HASH_SLOTS) - 1
            node.ask("CLUSTER", "ADDSLOTSRANGE", number * size, last)
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in self.nodes[1:]:
            bus = node.ask("CONFIG", "GET", "cluster-port")["cluster-port"]
            self.masters[0].ask("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        self._wait(self._all_know_all)
        for number, node in self.replicas.items():
            node.ask("CLUSTER", "REPLICATE", self.masters[number].ask("CLUSTER", "MYID"))
        self.wait_until_well()

    @property
    def nodes(self) -> list[RedisServer]:
        return [*self.masters, *self.replicas.values()]

    @property
    def url(self) -> str:
        return f"redis+cluster://127.0.0.1:{self.masters[0].port},127.0.0.1:{self.masters[1].port}"

    def owner(self, key: str) -> RedisServer:
        """The node that says that it has the key's slot."""
        slot = key_slot(key.encode())
        for first, last, master, *_ in self.masters[1].ask("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == master[1])
        raise AssertionError(f"nobody has slot {slot}")

    def begin_move(self, key: str) -> Callable[[], None]:
        """Begin to move the key's slot to another master; the function that ends it."""
        slot, source = key_slot(key.encode()), self.owner(key)
        target = next(node for node in self.masters if node is not source)
        ids = {node: node.ask("CLUSTER", "MYID") for node in (source, target)}
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])

        def move_keys() -> None:
            while keys := source.ask("CLUSTER", "GETKEYSINSLOT", slot, 100):
                source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
            # The new owner first: nobody then believes that the slot is nowhere.
            for node in (target, source, *(other for other in self.masters if other not in (source, target))):
                node.ask("CLUSTER", "SETSLOT", slot, "NODE", ids[target])

        return move_keys

    def wait_until_well(self) -> None:
        """Until all nodes serve, and every replica has what its master has."""
        self._wait(lambda: all("cluster_state:ok" in node.say("CLUSTER", "INFO").decode() for node in self.nodes))
        for number in self.replicas:
            self._wait(lambda: "master_link_status:up" in self.pair(number)[1].say("INFO", "replication").decode())  # noqa: B023  (called at once)

    def pair(self, number: int) -> tuple[RedisServer, RedisServer]:
        """The master and the replica of this third of the slots, whichever is which now."""
        one, two = self.masters[number], self.replicas[number]
        return (one, two) if one.ask("ROLE")[0] == "master" else (two, one)

    def wait_for_promotion(self, node: RedisServer, away: RedisServer | None = None) -> None:
        """Until all but the one that is away know that it is a master, and serve again."""
        name = node.ask("CLUSTER", "MYID")
        self._wait(lambda: all(_knows_master(other, name) for other in self.nodes if other is not away))

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def _all_know_all(self) -> bool:
        known = [node.say("CLUSTER", "NODES").decode() for node in self.nodes]
        return all(len(text.splitlines()) >= len(self.nodes) + 1 and "handshake" not in text for text in known)

    def _wait(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not is_so():
            assert time.monotonic() < deadline, "the cluster did not come to it"
            time.sleep(0.02)


def _knows_master(node: RedisServer, name: str) -> bool:
    lines = node.say("CLUSTER", "NODES").decode().splitlines()
    said = next((line for line in lines if line.startswith(name)), "")
    return "master" in said and "cluster_state:ok" in node.say("CLUSTER", "INFO").decode()


_clusters: dict[int, RedisCluster] = {}


def redis_cluster() -> RedisCluster:
    """The cluster that the tests of this process share."""
    pid = os.getpid()
    if pid not in _clusters:
        _clusters[pid] = RedisCluster()
    return _clusters[pid]


@asynccontextmanager
async def open_engine(place: Path, clock: ManualClock) -> AsyncIterator[RedisEngine]:
    async with RedisEngine.open(with_prefix(redis_cluster().url, place), SystemClock(), clock) as engine:
        yield engine
