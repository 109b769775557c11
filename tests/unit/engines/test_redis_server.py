"""Calls to a Redis: they are carried on whatever happens to the connection."""

import asyncio
from typing import Any

from conveyor.engines.redis.address import read_address
from conveyor.engines.redis.redis_server import open_server
from tests.support.clocks import JumpingClock


class OneTime:
    """A server that says once that it is not there yet."""

    def __init__(self) -> None:
        self.pings = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readline():
            words = []
            for _ in range(int(head[1:])):
                size = int((await reader.readline())[1:])
                words.append((await reader.readexactly(size + 2))[:-2])
            if words[0] == b"PING":
                self.pings += 1
            known = words[0] != b"PING" or self.pings > 1
            writer.write(b"+OK\r\n" if known else b"-CLUSTERDOWN not yet\r\n")
        writer.close()


async def test_a_connection_that_does_not_close_ends_no_calls() -> None:
    answering = OneTime()
    async with await asyncio.start_server(answering, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        async with open_server(read_address(f"redis://127.0.0.1:{port}/0"), JumpingClock()) as server:
            pool: Any = server._client.connection_pool
            closing = pool.disconnect

            async def disconnect() -> None:
                await closing()
                raise TimeoutError("the connection was not closed in time")

            pool.disconnect = disconnect
            try:
                async with asyncio.timeout(5):
                    await server.command("PING")
            except TimeoutError:
                raise AssertionError("the call was never answered") from None
            finally:
                pool.disconnect = closing
    assert answering.pings == 2
