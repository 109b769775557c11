"""Serving. Gets a System and an address, runs uvicorn in the present event loop until it is told to stop."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn

from conveyor.api.application import create_app
from conveyor.api.protocol import CappedProtocol
from conveyor.errors import Unavailable
from conveyor.system import System

KEEP_ALIVE_SECONDS = 30
# Then what still runs is cut off: an export to a slow client must not hold up a deploy.
SHUTDOWN_SECONDS = 10
_BACKLOG = 2048
_DATE_SECONDS = 1.0

OnReady = Callable[[str], None]
Application = Callable[[Any, Any, Any], Awaitable[None]]


class _Server(uvicorn.Server):
    """Signals belong to the process, not to one of its roles; someone waits to hear that the port is open; and it stops
    when an event is set, without looking for that ten times a second."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None], stop: asyncio.Event) -> None:
        super().__init__(config)
        self._ready = ready
        self._stop = stop

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def main_loop(self) -> None:
        while not self._stop.is_set():
            # What it does every so often: the date that answers bear, which is given in seconds.
            await self.on_tick(0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DATE_SECONDS):
                    await self._stop.wait()


async def serve(system: System, host: str, port: int, stop: asyncio.Event, on_ready: OnReady) -> None:
    """Serve the API until `stop` is set, then finish what is being answered. Port 0 takes a free one; `on_ready` gets
    the URL."""
    await serve_app(create_app(system, stop), host, port, stop, on_ready)


async def serve_app(app: Application, host: str, port: int, stop: asyncio.Event, on_ready: OnReady) -> None:
    """The same for any application."""
    config = uvicorn.Config(
        app,
        loop="none",
        http=CappedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        # What it warns of, any stranger can cause; a failure of ours is logged at the edge.
        log_level="error",
        server_header=False,
        # Who asks is decided by the key; an address out of a header would only be a lie in the log.
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        backlog=_BACKLOG,
    )
    listener = _listen(host, port)
    server = _Server(config, lambda: on_ready(_url(listener)), stop)
    try:
        await server.serve(sockets=[listener])
    finally:
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # With the protocol named: asyncio turns Nagle off only where it is, and each answer would wait 40 ms.
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _refused(host, port, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _refused(host, port, error) from error
    return listener


def _refused(host: str, port: int, error: OSError) -> Unavailable:
    return Unavailable(f"Can not listen on {host}:{port}: {error.strerror or error}.")


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
