"""A SOCKS5 proxy on a free loopback port (RFC 1928, RFC 1929), which remembers what it was asked. Names lead where the
test says; no name is resolved here."""

import asyncio
import struct
from collections.abc import Mapping
from ipaddress import ip_address

from tests.support.target_site import Listener, relay

_NO_AUTHENTICATION, _USER_AND_PASSWORD, _NONE_OF_THEM = 0, 2, 0xFF
_NAME, _V4, _V6 = 3, 1, 4
HOST_UNREACHABLE = 4


class SocksProxy(Listener):
    """`ports` has the port on loopback for each name. With `login`, user and password are required. `reply` is what
    every request is answered with, if it is not 0."""

    def __init__(
        self,
        ports: Mapping[str, int],
        host: str = "127.0.0.1",
        *,
        login: tuple[str, str] | None = None,
        reply: int = 0,
    ) -> None:
        super().__init__(host)
        self._ports = ports
        self._login = login
        self._reply = reply
        # Host, as it was asked for, and port.
        self.asked: list[tuple[str, int]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not await self._let_in(reader, writer):
            return
        _, _, _, kind = await reader.readexactly(4)
        host = await _read_host(reader, kind)
        (port,) = struct.unpack(">H", await reader.readexactly(2))
        self.asked.append((host, port))
        reply = self._reply or (0 if host in self._ports else HOST_UNREACHABLE)
        writer.write(bytes([5, reply, 0, _V4]) + bytes(6))
        if reply:
            await writer.drain()
            return
        there_reader, there_writer = await asyncio.open_connection(self.host, self._ports[host])
        try:
            await asyncio.gather(relay(reader, there_writer), relay(there_reader, writer))
        finally:
            there_writer.close()

    async def _let_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        _, count = await reader.readexactly(2)
        wanted = _NO_AUTHENTICATION if self._login is None else _USER_AND_PASSWORD
        if wanted not in await reader.readexactly(count):
            writer.write(bytes([5, _NONE_OF_THEM]))
            await writer.drain()
            return False
        writer.write(bytes([5, wanted]))
        if self._login is None:
            return True
        await reader.readexactly(1)
        given = (await _read_text(reader), await _read_text(reader))
        writer.write(bytes([1, given != self._login]))
        await writer.drain()
        return given == self._login


async def _read_host(reader: asyncio.StreamReader, kind: int) -> str:
    if kind == _NAME:
        return await _read_text(reader)
    assert kind in {_V4, _V6}
    return str(ip_address(await reader.readexactly(4 if kind == _V4 else 16)))


async def _read_text(reader: asyncio.StreamReader) -> str:
    (length,) = await reader.readexactly(1)
    return (await reader.readexactly(length)).decode()
