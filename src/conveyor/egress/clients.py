"""HTTP clients, built once and cached. A route gets one by how it connects: to any address, to a pinned address, or
through a proxy. Jobs that differ in how they use TLS have clients of their own.

A client leaves the cache without being closed: its requests in flight finish, then its connections close.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import NamedTuple

from pyreqwest.client import Client, ClientBuilder
from pyreqwest.proxy import ProxyBuilder
from pyreqwest.response import Response

from conveyor.clock import Clock
from conveyor.egress.failures import Failure
from conveyor.egress.heads import ResponseHead, read_head
from conveyor.egress.lru import Lru

# The connect timeout belongs to the client, so it is rounded up to one of these: not every task gets a client.
CONNECT_STEPS = (0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
# The default of 90 seconds would keep a socket open to each host of a long list.
IDLE_SECONDS = 15.0
MAX_PINS = 512
MAX_PROXIED = 64
# Building a client takes 5 ms, for one pin or a hundred: pins that arrive meanwhile share the next client.
BUILD_PAUSE = 0.02
# A streaming client has no total timeout. Readers have shorter timeouts; this one ends abandoned requests.
STREAM_SILENCE = 300.0
# HTTP/2 sends at most a window ahead of its reader. The defaults of 64 KiB slow down what comes from far away; that for
# headers is less than HTTP/1.1 gets.
_STREAM_WINDOW = 1024 * 1024
_CONNECTION_WINDOW = 16 * 1024 * 1024
_MAX_HEADERS = 256 * 1024


def connect_step(seconds: float) -> float:
    """The connect timeout of the client for a requested one."""
    return CONNECT_STEPS[min(bisect_left(CONNECT_STEPS, seconds), len(CONNECT_STEPS) - 1)]


class Pin(NamedTuple):
    """A name, and the only address that it may resolve to."""

    host: str
    address: str
    connect: float


class Proxy(NamedTuple):
    """The proxy of a client. `address` pins its host."""

    url: str
    headers: tuple[tuple[str, str], ...]
    host: str
    address: str | None
    connect: float


class TlsMode(NamedTuple):
    """What a job says about TLS. `insecure`: no certificate is verified. `http2`: servers may choose HTTP/2 in the
    handshake."""

    insecure: bool = False
    http2: bool = False


class Clients:
    """All clients of one mode. `root_certificate` are certificates, as PEM, to trust besides the public authorities.
    With `streaming`, bodies have no total timeout. No client decodes a body: decoding.py does."""

    def __init__(
        self,
        clock: Clock,
        user_agent: str,
        root_certificate: bytes | None = None,
        *,
        streaming: bool = False,
        mode: TlsMode = TlsMode(),  # noqa: B008  (frozen)
    ) -> None:
        self.mode = mode
        self._streaming = streaming
        self._clock = clock
        self._user_agent = user_agent
        self._root_certificate = root_certificate
        self._shared: dict[float, Client] = {}
        self._proxied: Lru[Proxy, Client] = Lru(MAX_PROXIED)
        self._pinned: Lru[Pin, Client] = Lru(MAX_PINS)
        self._wanted: dict[Pin, asyncio.Future[Client]] = {}
        self._builder: asyncio.Task[None] | None = None

    def shared(self, connect: float) -> Client:
        """The client that connects to whatever address the URL has."""
        client = self._shared.get(connect)
        if client is None:
            client = self._shared[connect] = self._base(connect).build()
        return client

    def proxied(self, proxy: Proxy) -> Client:
        """A client that sends all requests through a proxy."""
        return self._proxied.get(proxy) or self._proxied.put(proxy, self._build_proxied(proxy))

    def known_pinned(self, pin: Pin) -> Client | None:
        """The client for a pin, if it is built."""
        return self._pinned.get(pin)

    async def pinned(self, pin: Pin) -> Client:
        """A client that resolves the name to this address only. TLS still checks the certificate against the name."""
        client = self._pinned.get(pin)
        if client is not None:
            return client
        wanted = self._wanted.get(pin)
        if wanted is None:
            wanted = self._wanted[pin] = asyncio.get_running_loop().create_future()
        if self._builder is None:
            self._builder = asyncio.create_task(self._build_wanted())
        return await asyncio.shield(wanted)

    async def read_head(self, response: Response) -> ResponseHead:
        """The head of a response that has values that are not ASCII."""
        return await read_head(response, self.shared(CONNECT_STEPS[-1]))

    async def close(self) -> None:
        if self._builder is not None:
            self._builder.cancel()
            await asyncio.gather(self._builder, return_exceptions=True)
        self._fail_wanted(Failure("read_failed", "the worker is stopping"))
        clients = [*self._shared.values(), *self._proxied.values(), *self._pinned.values()]
        for client in {id(client): client for client in clients}.values():
            await client.close()

    async def _build_wanted(self) -> None:
        try:
            while self._wanted:
                batch = self._next_batch()
                client = await asyncio.to_thread(self._build_pinned, batch)
                for pin in batch:
                    self._pinned.put(pin, client)
                    _settle(self._wanted.pop(pin), client)
                if self._wanted:
                    await self._clock.sleep(BUILD_PAUSE)
        except Exception as error:
            self._fail_wanted(error)
        finally:
            self._builder = None

    def _fail_wanted(self, error: Exception) -> None:
        for wanted in self._wanted.values():
            _settle(wanted, error)
        self._wanted.clear()

    def _next_batch(self) -> list[Pin]:
        """As many pins as fit into one client: one connect timeout, and one address per name."""
        first = next(iter(self._wanted))
        by_host: dict[str, Pin] = {}
        for pin in self._wanted:
            if pin.connect == first.connect:
                by_host.setdefault(pin.host, pin)
        return list(by_host.values())

    def _build_pinned(self, pins: Iterable[Pin]) -> Client:
        builder: ClientBuilder | None = None
        for pin in pins:
            # Port 0 means the port of the URL.
            builder = (builder or self._base(pin.connect)).resolve(pin.host, pin.address, 0)
        assert builder is not None
        return builder.build()

    def _build_proxied(self, proxy: Proxy) -> Client:
        builder = self._base(proxy.connect).proxy(ProxyBuilder.all(proxy.url).headers(proxy.headers))
        return builder.build() if proxy.address is None else builder.resolve(proxy.host, proxy.address, 0).build()

    def _base(self, connect: float) -> ClientBuilder:
        builder = (
            ClientBuilder()
            .no_proxy()
            .follow_redirects(False)
            .referer(False)
            .user_agent(self._user_agent)
            .connect_timeout(timedelta(seconds=connect))
            .pool_idle_timeout(timedelta(seconds=IDLE_SECONDS))
            # The client would read only the first member of a gzip body, and no stacked codings.
            .gzip(False)
            .brotli(False)
            .zstd(False)
            .deflate(False)
            # As browsers and curl take them: old servers fold long headers, or leave a space before the colon.
            .http1_allow_obsolete_multiline_headers_in_responses(True)
            .http1_allow_spaces_after_header_name_in_responses(True)
        )
        if self._streaming:
            builder = builder.read_timeout(timedelta(seconds=STREAM_SILENCE))
        if self.mode.http2:
            builder = (
                builder.http2(True)
                .http2_initial_stream_window_size(_STREAM_WINDOW)
                .http2_initial_connection_window_size(_CONNECTION_WINDOW)
                .http2_max_header_list_size(_MAX_HEADERS)
            )
        if self.mode.insecure:
            builder = builder.danger_accept_invalid_certs(True)
        return builder.add_root_certificate_pem(self._root_certificate) if self._root_certificate else builder


class ModeClients:
    """The clients of one executor, by mode."""

    def __init__(
        self, clock: Clock, user_agent: str, root_certificate: bytes | None = None, *, streaming: bool = False
    ) -> None:
        self._make = partial(Clients, clock, user_agent, root_certificate, streaming=streaming)
        self.usual = self._make()
        self._by_mode = {self.usual.mode: self.usual}

    def of(self, mode: TlsMode) -> Clients:
        clients = self._by_mode.get(mode)
        if clients is None:
            clients = self._by_mode[mode] = self._make(mode=mode)
        return clients

    async def close(self) -> None:
        for clients in self._by_mode.values():
            await clients.close()


def _settle(wanted: asyncio.Future[Client], result: Client | Exception) -> None:
    if wanted.done():
        return
    if isinstance(result, Exception):
        wanted.set_exception(result)
        # Retrieved, so that asyncio does not log it if all waiting tasks were cancelled.
        wanted.exception()
    else:
        wanted.set_result(result)
