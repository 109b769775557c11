"""Joined writes, on a real connection: in order, none later than it must be, and nothing long held back."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from conveyor.api.joined_writes import _MAX_BYTES, JoinedWrites

Connection = tuple[JoinedWrites, asyncio.StreamReader]


@pytest.fixture
async def connection() -> AsyncIterator[Connection]:
    """The writes of the server's side, and the reader of the client's."""
    loop = asyncio.get_running_loop()
    accepted: asyncio.Future[asyncio.Transport] = loop.create_future()

    class Accepting(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            accepted.set_result(transport)

    server = await loop.create_server(Accepting, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        yield JoinedWrites(await accepted, loop), reader
    finally:
        writer.close()
        accepted.result().close()
        server.close()


async def test_head_and_body_are_one_write(connection: Connection) -> None:
    writes, reader = connection
    writes.write(b"head ")
    writes.write(b"body")
    assert writes._waiting == [b"head ", b"body"]
    writes.flush()
    assert writes._waiting == []
    assert await reader.readexactly(9) == b"head body"


async def test_what_nobody_completes_is_written_all_the_same(connection: Connection) -> None:
    writes, reader = connection
    writes.write(b"the beginning of a stream")
    assert await reader.readexactly(25) == b"the beginning of a stream"
    writes.write(b" and more")
    assert await reader.readexactly(9) == b" and more"


async def test_a_long_body_meets_the_flow_control(connection: Connection) -> None:
    writes, reader = connection
    writes.write(b"head")
    writes.write(bytes(_MAX_BYTES))
    assert writes._waiting == []
    assert await reader.readexactly(4 + _MAX_BYTES) == b"head" + bytes(_MAX_BYTES)


async def test_nothing_is_lost_by_a_close(connection: Connection) -> None:
    writes, reader = connection
    writes.write(b"the last words")
    writes.close()
    assert writes.is_closing()
    writes.write(b"too late")
    assert await reader.read() == b"the last words"
