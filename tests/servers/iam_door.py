"""A door to the Postgres of this test process that asks for a password over TLS, as RDS does for an IAM token.

It lets everybody in who comes by TLS, and remembers the passwords. The server behind it asks for none.
"""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tests.servers import postgres
from tests.support.target_site import tls_context

_ASKS_FOR_TLS = 80877103
_CLEARTEXT = b"R" + struct.pack(">ii", 8, 3)


class IamDoor:
    """Listens on a port of its own while it is open."""

    def __init__(self) -> None:
        self.port = 0
        self.passwords: list[str] = []
        self.refused = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    @asynccontextmanager
    async def open(cls) -> AsyncIterator["IamDoor"]:
        door = cls()
        listener = await asyncio.start_server(door._serve, "127.0.0.1", 0)
        door.port = listener.sockets[0].getsockname()[1]
        try:
            yield door
        finally:
            listener.close()
            for task in door._tasks:
                task.cancel()
            await asyncio.gather(*door._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with suppress(OSError, asyncio.IncompleteReadError):
            if struct.unpack(">ii", await reader.readexactly(8)) != (8, _ASKS_FOR_TLS):
                self.refused += 1
            else:
                await self._let_in(reader, writer)
        writer.close()
        self._tasks.discard(task)

    async def _let_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"S")
        await writer.start_tls(tls_context())
        size = await reader.readexactly(4)
        startup = size + await reader.readexactly(int.from_bytes(size) - 4)
        writer.write(_CLEARTEXT)
        assert await reader.readexactly(1) == b"p"
        password = await reader.readexactly(int.from_bytes(await reader.readexactly(4)) - 4)
        self.passwords.append(password.rstrip(b"\0").decode())
        there, back = await asyncio.open_connection("127.0.0.1", postgres.server().port)
        try:
            back.write(startup)
            async with asyncio.TaskGroup() as group:
                group.create_task(_copy(reader, back))
                group.create_task(_copy(there, writer))
        finally:
            back.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await source.read(65536):
            target.write(piece)
            await target.drain()
    target.close()
