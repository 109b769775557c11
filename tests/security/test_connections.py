"""More client connections than the server takes: it refuses them, and health checks are still answered."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from conveyor.api import connection_limit, protocol
from conveyor.api.connection_limit import SPARE
from conveyor.api.protocol import CappedProtocol
from tests.support.api import Api, new_server, parsed

LIMIT = 3
# More than the system keeps for one connection.
ANSWERS = 40

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(api: Api) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection(*api.address)
    try:
        yield reader, writer
    finally:
        writer.close()


async def asked(connection: Connection, path: str, key: str = "") -> bytes:
    """All that comes back until the server closes; one that stays open has answered once."""
    reader, writer = connection
    authorization = f"authorization: Bearer {key}\r\n" if key else ""
    writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n{authorization}\r\n".encode())
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""
    length = int(parsed(head).headers.get("content-length", "0"))
    return head + await reader.readexactly(length)


async def is_closed(connection: Connection) -> bool:
    async with asyncio.timeout(30):
        try:
            return await connection[0].read() == b""
        except ConnectionError:
            return True


async def full(stack: AsyncExitStack, api: Api, count: int = LIMIT) -> list[Connection]:
    """Connections that the server has accepted: each has had an answer."""
    opened = []
    for _ in range(count):
        connection = await stack.enter_async_context(connected(api))
        assert parsed(await asked(connection, "/v1/jobs", api.key)).status == 200
        opened.append(connection)
    return opened


async def connections_have_a_limit() -> None:
    async with new_server(max_connections=LIMIT) as api, AsyncExitStack() as stack:
        # The client of the test may have one open, too.
        taken = await full(stack, api)
        for path in ("/v1/jobs", "/", "/v1/openapi.json", "/healthzz"):
            async with connected(api) as one_more:
                refused = parsed(await asked(one_more, path, api.key))
                assert (refused.status, refused.json["code"]) == (503, "overloaded"), path
                assert int(refused.headers["retry-after"]) > 0
                assert await is_closed(one_more)
        assert parsed(await asked(taken[0], "/v1/jobs", api.key)).status == 200, "those that are open go on"


async def test_connections_have_a_limit() -> None:
    await connections_have_a_limit()


async def test_health_checks_are_answered_above_it() -> None:
    async with new_server(max_connections=LIMIT) as api, AsyncExitStack() as stack:
        await full(stack, api)
        for path in ("/healthz", "/readyz", "/healthz?x=1"):
            async with connected(api) as one_more:
                assert parsed(await asked(one_more, path)).status in {200, 400}
                assert await is_closed(one_more), "it makes room for the next check"


async def test_further_ones_are_closed_at_once() -> None:
    async with new_server(max_connections=LIMIT) as api, AsyncExitStack() as stack:
        await full(stack, api)
        spare = [await stack.enter_async_context(connected(api)) for _ in range(SPARE)]
        # In the order in which they came: all before it are accepted.
        async with connected(api) as too_many:
            assert await is_closed(too_many)
        for _, writer in spare:
            writer.close()
        for reader, _ in spare:
            await reader.read()


async def test_a_place_is_free_again() -> None:
    async with new_server(max_connections=LIMIT) as api, AsyncExitStack() as stack:
        taken = await full(stack, api)
        taken[0][1].write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert await taken[0][0].read()
        for _ in range(50):
            # The server may see the end of the other connection a moment later.
            async with connected(api) as next_one:
                if parsed(await asked(next_one, "/v1/jobs", api.key)).status == 200:
                    return
        raise AssertionError("the place was never free")


@asynccontextmanager
async def unread(api: Api) -> AsyncIterator[Connection]:
    """A client that asks for a page of some size so often at once, without a key, and reads nothing by itself."""
    small = socket.socket()
    small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    small.setblocking(False)
    await asyncio.get_running_loop().sock_connect(small, api.address)
    reader, writer = await asyncio.open_connection(sock=small)
    transport: Any = writer.transport
    transport.pause_reading()
    try:
        writer.write(b"GET /dashboard/app.js HTTP/1.1\r\nhost: localhost\r\n\r\n" * ANSWERS)
        yield reader, writer
    finally:
        writer.transport.abort()


Stuck = asyncio.Queue[CappedProtocol]


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Stuck:
    """The server's side of each connection on which a response waits for its client."""
    found: Stuck = asyncio.Queue()
    pause_writing = CappedProtocol.pause_writing

    def noted(self: CappedProtocol) -> None:
        pause_writing(self)
        found.put_nowait(self)

    monkeypatch.setattr(CappedProtocol, "pause_writing", noted)
    return found


async def test_a_client_that_does_not_read_is_cut_off(stuck: Stuck) -> None:
    async with new_server() as api, unread(api):
        server_side = await stuck.get()
        for _ in range(2):
            assert not server_side.transport.is_closing()
            server_side._look_at_reader()
        assert server_side.transport.is_closing()
        assert not server_side._writes.untaken


async def test_so_is_one_whose_connection_is_closing(stuck: Stuck) -> None:
    """A connection that closes waits for its client for as long as that is there."""
    async with new_server() as api, unread(api):
        server_side = await stuck.get()
        server_side._close_connection()
        server_side._look_at_reader()
        assert server_side._writes.untaken
        server_side._look_at_reader()
        assert not server_side._writes.untaken


async def test_one_that_reads_slowly_gets_all(stuck: Stuck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "UNREAD_BYTES", 1)
    async with new_server() as api, unread(api) as (reader, writer):
        server_side = await stuck.get()
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        transport: Any = writer.transport
        transport.resume_reading()
        received, seen = b"", 0
        while piece := await reader.read(1 << 20):
            received += piece
            if (taken := server_side._writes.taken) > seen or not server_side._writes.untaken:
                server_side._look_at_reader()
                seen = taken
        assert received.count(b"HTTP/1.1 200 OK") == ANSWERS + 1


async def test_places_of_clients_that_do_not_read_are_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "UNREAD_SECONDS", 0.2)
    async with new_server(max_connections=LIMIT) as api, AsyncExitStack() as stack:
        for _ in range(LIMIT):
            await stack.enter_async_context(unread(api))
        async with asyncio.timeout(30):
            while True:
                async with connected(api) as next_one:
                    if parsed(await asked(next_one, "/v1/jobs", api.key)).status == 200:
                        return


async def test_what_nobody_reads_has_a_limit(stuck: Stuck, monkeypatch: pytest.MonkeyPatch) -> None:
    async with new_server() as api, AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(unread(api))
        waiting = [await stuck.get() for _ in range(3)]
        assert all(each.unread_bytes for each in waiting)
        # Less than two of them have.
        monkeypatch.setattr(connection_limit, "MAX_UNREAD_BYTES", 64 * 1024)
        await stack.enter_async_context(unread(api))
        assert await stuck.get() not in waiting
        assert [bool(each.unread_bytes) for each in waiting].count(True) <= 1
        assert (await api.get("/v1/jobs")).status == 200
