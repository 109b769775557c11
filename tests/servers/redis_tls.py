"""A Valkey server behind TLS that wants a client's certificate, and a user with the rights that the docs list.

The server of the wheel has no TLS of its own: a door before it does.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote, urlencode

from conveyor.clock import SystemClock
from conveyor.engines.redis import RedisEngine
from tests.servers.redis import redis, with_prefix
from tests.support.certificates import certificates
from tests.support.clocks import ManualClock

USER = "conveyor"
PASSWORD = "p@ss/w?rd#:"
# As in docs/how-to/redis.md.
RIGHTS = "+@read +@write -@dangerous +@connection +eval +evalsha +time +info +cluster|slots"


@asynccontextmanager
async def tls_door(port: int) -> AsyncIterator[int]:
    """The port of a door to the server, which speaks TLS and lets in who has the certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates()["ca"])
    context.load_cert_chain(certificates()["cert"], certificates()["key"])
    context.verify_mode = ssl.CERT_REQUIRED
    copying: set[asyncio.Task[None]] = set()

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while piece := await source.read(65536):
                target.write(piece)
                await target.drain()
        except OSError:
            pass
        finally:
            target.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        copying.update((asyncio.create_task(copy(reader, back)), asyncio.create_task(copy(there, writer))))

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()
        for task in copying:
            task.cancel()
        await asyncio.gather(*copying, return_exceptions=True)
        await listener.wait_closed()


def tls_url(port: int, **changed: str | None) -> str:
    """The URL of a door, with other files or without some."""
    files = {name: file for name, file in {**certificates(), **changed}.items() if file is not None}
    return f"rediss://{USER}:{quote(PASSWORD, safe='')}@127.0.0.1:{port}/0?{urlencode(files)}"


def make_user(prefix: str) -> None:
    redis().ask("ACL", "SETUSER", USER, "reset", "on", f">{PASSWORD}", f"~{{{prefix}:*", *RIGHTS.split())


@asynccontextmanager
async def open_engine(place: Path, clock: ManualClock) -> AsyncIterator[RedisEngine]:
    async with tls_door(redis().port) as port:
        url = with_prefix(tls_url(port), place)
        make_user(url.rpartition("=")[2])
        async with RedisEngine.open(url, SystemClock(), clock) as engine:
            yield engine
