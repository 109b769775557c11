"""Serving. Gets a System and an address, runs uvicorn in the present event loop until it is told to stop."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import uvicorn

from conveyor.api.app import create_app
from conveyor.api.protocol import CappedProtocol
from conveyor.errors import Unavailable
from conveyor.system import System

KEEP_ALIVE_SECONDS = 30
# Then what still runs is cut off: an export to a slow client must not hold up a deploy.
SHUTDOWN_SECONDS = 10
_BACKLOG = 2048

OnReady = Callable[[str], None]


class _Server(uvicorn.Server):
    """Signals belong to the process, not to one of its roles; and someone waits to hear that the port is open."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()


async def serve(system: System, host: str, port: int, stop: asyncio.Event, on_ready: OnReady) -> None:
    """Serve until `stop` is set, then finish what is being answered. Port 0 takes a free one; `on_ready` gets
    the URL."""
    config = uvicorn.Config(
        create_app(system),
        loop="none",
        http=CappedProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        # Who asks is decided by the key; an address out of a header would only be a lie in the log.
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        backlog=_BACKLOG,
    )
    listener = _listen(host, port)
    server = _Server(config, lambda: on_ready(_url(listener)))
    watcher = asyncio.create_task(_stop_when(server, stop), name="api-stop")
    try:
        await server.serve(sockets=[listener])
    finally:
        watcher.cancel()
        listener.close()


async def _stop_when(server: uvicorn.Server, stop: asyncio.Event) -> None:
    await stop.wait()
    server.should_exit = True


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise Unavailable(f"Can not listen on {host}:{port}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
