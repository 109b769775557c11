"""Runs uvicorn for a System in the current event loop, until an event is set."""

import asyncio
import contextlib
import math
import socket
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import uvicorn

from conveyor.api.addressing import Addressing
from conveyor.api.application import create_app
from conveyor.api.connection_limit import ConnectionLimit
from conveyor.api.protocol import CappedProtocol
from conveyor.errors import Unavailable
from conveyor.settings import Settings
from conveyor.system import System

# Open responses are cut off after this share of the time to stop: the rest is for work in flight.
_RESPONSE_SHARE = 1 / 6
_BACKLOG = 2048
_DATE_SECONDS = 1.0

OnReady = Callable[[str], None]
Application = Callable[[Any, Any, Any], Awaitable[None]]


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which belong to the process; it reports when the port is open, and stops on
    an event rather than by polling ten times a second."""

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
            # Updates the Date header, which has a resolution of one second.
            await self.on_tick(0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DATE_SECONDS):
                    await self._stop.wait()


async def serve(system: System, host: str, port: int, stop: asyncio.Event, on_ready: OnReady) -> None:
    """Serve the API until `stop` is set, then finish open responses. Port 0 picks a free one; `on_ready` gets the
    URL."""
    await serve_app(create_app(system, stop), system.settings, host, port, stop, on_ready)


async def serve_app(
    app: Application, settings: Settings, host: str, port: int, stop: asyncio.Event, on_ready: OnReady
) -> None:
    """Like serve, for any application."""
    protocol: Any = partial(CappedProtocol, Addressing(settings, host), ConnectionLimit(settings.max_connections))
    config = uvicorn.Config(
        app,
        loop="none",
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        # Any client can cause its warnings; the edge logs our own failures.
        log_level="error",
        server_header=False,
        # Anyone can send these headers: `forwarding` knows whose count.
        proxy_headers=False,
        timeout_keep_alive=math.ceil(settings.keep_alive_seconds),
        timeout_graceful_shutdown=math.ceil(settings.drain_seconds * _RESPONSE_SHARE),
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
        # The protocol must be named: otherwise asyncio leaves Nagle on, and each response waits 40 ms.
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
    return Unavailable(f"Cannot listen on {host}:{port}: {error.strerror or error}. Choose another port.")


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
