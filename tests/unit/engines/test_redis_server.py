"""Calls to a Redis: they are carried on whatever happens to the connection, and wherever their slot goes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from redis.crc import key_slot

from conveyor import system
from conveyor.clock import SystemClock
from conveyor.engines.redis import node_calls
from conveyor.engines.redis.address import read_address
from conveyor.engines.redis.coordinator import RedisCoordinator
from conveyor.engines.redis.redis_server import Server, load_script, open_server
from conveyor.errors import EngineFailed
from tests.support.clocks import JumpingClock

SCRIPT = load_script("held")
# Of different halves of the slots.
LOW, HIGH = "b", "a"


class Node:
    """Speaks the protocol, and answers what it is told to."""

    def __init__(self) -> None:
        self.port = 0
        self.connections = 0
        self.commands: list[list[bytes]] = []
        self.answer: Callable[[list[bytes]], bytes] = lambda _: b"+OK\r\n"
        # The nodes of its cluster.
        self.nodes: list[Node] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while head := await reader.readline():
            words = []
            for _ in range(int(head[1:])):
                size = int((await reader.readline())[1:])
                words.append((await reader.readexactly(size + 2))[:-2])
            if words[0] == b"CLIENT":
                writer.write(b"+OK\r\n")
                continue
            self.commands.append(words)
            writer.write(self._slots() if words[0] == b"CLUSTER" else self.answer(words))
        writer.close()

    def _slots(self) -> bytes:
        """The slots in equal shares."""
        share = 16384 // len(self.nodes)
        ranges = [
            f"*3\r\n:{at * share}\r\n:{(at + 1) * share - 1}\r\n*2\r\n$9\r\n127.0.0.1\r\n:{node.port}\r\n"
            for at, node in enumerate(self.nodes)
        ]
        return f"*{len(ranges)}\r\n{''.join(ranges)}".encode()

    def scripts(self) -> list[list[bytes]]:
        return [words for words in self.commands if words[0] in (b"EVAL", b"EVALSHA")]


@asynccontextmanager
async def nodes(count: int, clock: Any = None) -> AsyncIterator[tuple[Server, list[Node]]]:
    """Nodes of one cluster, and a client of them; or one server."""
    made = [Node() for _ in range(count)]
    async with AsyncExitStack() as stack:
        for node in made:
            listener = await stack.enter_async_context(await asyncio.start_server(node, "127.0.0.1", 0))
            node.port = listener.sockets[0].getsockname()[1]
            node.nodes = made
        scheme = "redis" if count == 1 else "redis+cluster"
        address = read_address(f"{scheme}://127.0.0.1:{made[0].port}")
        server = await stack.enter_async_context(open_server(address, clock or SystemClock()))
        yield server, made


def says_once(error: bytes, then: bytes = b":7\r\n") -> Callable[[list[bytes]], bytes]:
    left = [b"-" + error + b"\r\n"]
    return lambda words: then if words[0] == b"ASKING" or not left else left.pop()


async def held(server: Server, key: str) -> int:
    async with asyncio.timeout(5):
        return int(await server.run(SCRIPT, [key], [""]))


async def test_a_connection_that_does_not_close_ends_no_calls() -> None:
    async with nodes(1, JumpingClock()) as (server, (node,)):
        await server.command("TIME")
        (calls,) = server._nodes.values()
        pool: Any = calls._client.connection_pool
        closing = pool.disconnect

        async def disconnect() -> None:
            await closing()
            raise TimeoutError("the connection was not closed in time")

        pool.disconnect = disconnect
        node.answer = says_once(b"READONLY not yet")
        try:
            async with asyncio.timeout(5):
                await server.command("PING")
        except TimeoutError:
            raise AssertionError("the call was never answered") from None
        finally:
            pool.disconnect = closing
    assert [words for words in node.commands if words == [b"PING"]] == [[b"PING"]] * 2


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "error",
    [
        b"LOADING the data is read",
        b"READONLY You can't write against a read only replica.",
        b"ERR Error running script: -READONLY You can't write against a read only replica.",
        b"MASTERDOWN Link with MASTER is down",
        b"NOREPLICAS Not enough good replicas to write.",
        b"CLUSTERDOWN The cluster is down",
        b"TRYAGAIN Multiple keys request during rehashing of slot",
        b"NOSCRIPT No matching script",
    ],
)
async def test_what_passes_is_waited_for(error: bytes, count: int) -> None:
    async with nodes(count) as (server, made):
        for node in made:
            node.answer = says_once(error)
        assert await held(server, LOW) == 7
        assert len(made[0].scripts()) == 2


async def test_a_call_goes_where_its_slot_is() -> None:
    assert key_slot(LOW.encode()) < 8192 <= key_slot(HIGH.encode())
    async with nodes(2) as (server, (one, two)):
        one.answer, two.answer = (lambda _: b":1\r\n"), (lambda _: b":2\r\n")
        assert await asyncio.gather(held(server, LOW), held(server, HIGH)) == [1, 2]


@pytest.mark.parametrize("host", ["127.0.0.1", "", "?"])
async def test_a_slot_that_moved_stays_there(host: str) -> None:
    async with nodes(2) as (server, (one, two)):
        one.answer = says_once(f"MOVED {key_slot(LOW.encode())} {host}:{two.port}".encode())
        two.answer = lambda _: b":2\r\n"
        one.nodes = two.nodes = [two]
        assert await held(server, LOW) == 2
        assert await held(server, LOW) == 2
        assert len(one.scripts()) <= 1


async def test_a_slot_that_moves_is_asked_for_once() -> None:
    async with nodes(2) as (server, (one, two)):
        one.answer = says_once(f"ASK {key_slot(LOW.encode())} 127.0.0.1:{two.port}".encode(), b":1\r\n")
        two.answer = lambda words: b"+OK\r\n" if words[0] == b"ASKING" else b":2\r\n"
        assert await held(server, LOW) == 2
        assert [words[0] for words in two.commands if words[0] != b"CLUSTER"] == [b"ASKING", b"EVAL"]
        assert await held(server, LOW) == 1, "it has not moved yet"


async def test_nodes_that_send_a_call_in_circles_fail_it_in_the_end() -> None:
    clock = JumpingClock()
    async with nodes(2, clock) as (server, (one, two)):
        one.answer = lambda _: f"-MOVED 1 127.0.0.1:{two.port}\r\n".encode()
        two.answer = lambda _: f"-MOVED 1 127.0.0.1:{one.port}\r\n".encode()
        call = asyncio.create_task(held(server, LOW))
        turns = 0
        while not call.done():
            await asyncio.sleep(0.01)
            clock.advance(1.0)
            turns += 1
        with pytest.raises(EngineFailed, match="does not answer: 1 127"):
            await call
        assert len(one.scripts()) + len(two.scripts()) < 10 * turns, "with pauses"


async def test_a_call_that_has_to_wait_holds_up_no_other() -> None:
    """Both are at one node, whose connection stays."""
    async with nodes(2) as (server, (one, _)):
        one.answer = lambda words: b"-TRYAGAIN not yet\r\n" if LOW.encode() in words else b":1\r\n"
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(held(server, LOW))
            other = next(name for name in map(str, range(99)) if key_slot(name.encode()) < 8192)
            while len([words for words in one.scripts() if LOW.encode() in words]) < 4:
                assert await held(server, other) == 1
            one.answer = lambda _: b":1\r\n"
        assert waiting.result() == 1
        # The others asked which slots it has.
        asked = len([words for words in one.commands if words[0] == b"CLUSTER"])
        assert one.connections <= asked + 1


async def test_names_are_spread_and_the_keys_of_one_call_are_not() -> None:
    async with nodes(1) as (server, (node,)):
        node.answer = lambda words: b"*0\r\n" if b":once" in b"".join(words) else b"$1\r\n1\r\n"
        coordinator = RedisCoordinator(server, "conveyor", SystemClock(), None)
        for number in range(64):
            name = f"name {number}}}"
            await coordinator.acquire(name, "me", 1, 1, 1.0)
            await coordinator.permits_in_use(name)
            await coordinator.reserve(name, 1, 1.0, 1)
            await coordinator.add_counters(name, {"n": 1}, 1.0)
            await coordinator.swap(name, None, b"new", 1.0)
            await coordinator.cache(name, b"new", 1.0)
            await coordinator.cached(name)
            lease = await coordinator.lease(name, "me", 1.0)
            assert lease is not None
            await coordinator.renew(lease, 1.0)
            await coordinator.release(lease)
        await coordinator.forget_leases("name")
    slots: dict[bytes, set[int]] = {}
    for words in node.scripts():
        keys = words[3 : 3 + int(words[2])]
        used = {key_slot(key) for key in keys}
        assert len(used) == 1, keys
        slots.setdefault(keys[0].split(b":")[1], set()).update(used)
    assert {kind: len(used) for kind, used in slots.items()} == {
        b"semaphore": 64,
        b"bucket": 64,
        b"tally": 64,
        b"cache": 64,
        b"leases": 16,
    }


async def test_a_task_that_swallows_a_cancellation_ends() -> None:
    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(1):
            await node_calls.end(task)
    except TimeoutError:
        raise AssertionError("it did not end") from None
    finally:
        task.cancel()


def test_no_secret_of_a_url_is_shown() -> None:
    for url in (
        "redis+sentinel://me:secret@one,two/main/0?sentinel_password=secret",
        "redis+sentinel://one/main?sentinel_password=a@secret",
        "postgres://me:pa?secret@host/database",
        "rediss://:secret@cache/0",
    ):
        assert "secret" not in system._shown(url), url
    assert system._shown("redis+cluster://one,two?prefix=p") == "redis+cluster://one,two"
    assert system._shown("rediss://:secret@cache/0") == "rediss://…@cache/0"
