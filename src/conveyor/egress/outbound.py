"""Requests that Conveyor makes for a user outside of tasks: webhooks, and lists that a schedule reads. They pass the
same guard as fetch targets and connect to the very address that was checked.

Failures come out as OutboundFailed, with a code, and never with the URL: queries and paths have secrets in them.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, timedelta
from email.utils import parsedate_to_datetime

from pyreqwest.client import Client, ClientBuilder
from pyreqwest.exceptions import DetailedPyreqwestError, PyreqwestError, RequestTimeoutError
from pyreqwest.http import Url
from pyreqwest.response import Response

from conveyor import __version__
from conveyor.egress.target_guard import (
    BadUrl,
    DnsFailed,
    TargetGuard,
    TargetRefused,
    ip_literal,
    parse_url,
    url_problem,
)

USER_AGENT = f"conveyor/{__version__}"
CONNECT_SECONDS = 10.0
REDIRECTS = frozenset({301, 302, 303, 307, 308})

_MAX_PINNED = 64
_IDLE_SECONDS = 15.0
_PIECE = 64 * 1024
# For the body of an answer that nobody looks into.
_BODY_SECONDS = 1.0
_CONNECTING = "client error (Connect)"

Pairs = Sequence[tuple[str, str]]


class OutboundFailed(Exception):
    """A request that got no answer."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Outbound:
    """Clients for one event loop, and the guard before them, which closes with it. `root_certificate` is a PEM to trust
    beside the public authorities."""

    def __init__(self, guard: TargetGuard, *, root_certificate: bytes | None = None) -> None:
        self._guard = guard
        self._root_certificate = root_certificate
        self._shared: Client | None = None
        self._pinned: OrderedDict[tuple[str, str], Client] = OrderedDict()

    async def close(self) -> None:
        clients = [*self._pinned.values(), *([self._shared] if self._shared else [])]
        for client in clients:
            await client.close()
        await self._guard.close()

    async def post(self, url: str, headers: Pairs, body: bytes, timeout: float) -> tuple[int, str | None]:
        """Status and Retry-After of the answer, which stands once its head is there, whatever becomes of its body. A
        redirect is an answer like any other."""
        answer: tuple[int, str | None] | None = None
        try:
            async with self._open("POST", _parsed(url), headers, body, timeout) as response:
                answer = response.status, _header(response, "retry-after")
                # Read, so that the connection can be used again; a body that is longer or slower is not worth that.
                async with asyncio.timeout(_BODY_SECONDS):
                    await response.body_reader.read(_PIECE)
        except OutboundFailed:
            if answer is None:
                raise
        assert answer is not None
        return answer

    @asynccontextmanager
    async def get(self, url: str, headers: Pairs, timeout: float, redirects: int) -> AsyncIterator[Response]:
        """The answer, its body still on the wire, after at most so many redirects; each of them passes the guard.
        `timeout` is for each request as a whole."""
        target = _parsed(url)
        first = target.origin_ascii
        for _ in range(redirects + 1):
            own = headers if target.origin_ascii == first else ()
            async with self._open("GET", target, own, None, timeout) as response:
                location = _header(response, "location") if response.status in REDIRECTS else None
                if location is None:
                    yield response
                    return
                target = _joined(target, location)
        raise OutboundFailed("too_many_redirects", f"more than {redirects} redirects")

    @asynccontextmanager
    async def _open(
        self, method: str, url: Url, headers: Pairs, body: bytes | None, timeout: float
    ) -> AsyncIterator[Response]:
        try:
            async with asyncio.timeout(timeout):
                client, at, named = await self._way(url)
                builder = client.request(method, at).timeout(timedelta(seconds=timeout)).headers([*headers, *named])
                # The head is an answer before any of the body is there.
                builder = (builder if body is None else builder.body_bytes(body)).streamed_read_buffer_limit(0)
                request = builder.build_streamed()
                async with request as response:
                    yield response
        except PyreqwestError as error:
            raise _failed(error) from None
        except (BadUrl, TargetRefused, DnsFailed) as error:
            raise OutboundFailed(error.code, error.message) from None
        except TimeoutError:
            raise OutboundFailed("timeout", f"it took longer than {timeout:g} seconds") from None

    async def _way(self, url: Url) -> tuple[Client, Url, Pairs]:
        """The client, the URL to ask it for, and the headers that this takes."""
        if self._guard.allow_private:
            return self._free(), url, ()
        host = url.host_str or ""
        address = await self._guard.resolve(host, url.port_or_known_default or 0, CONNECT_SECONDS)
        if ip_literal(host) is not None:
            return self._free(), url, ()
        if url.scheme == "http":
            # Without TLS the name is only a header.
            return self._free(), url.with_ip_host(address), (("host", url.authority),)
        return await self._to(host, address), url, ()

    def _free(self) -> Client:
        if self._shared is None:
            self._shared = self._builder().build()
        return self._shared

    async def _to(self, host: str, address: str) -> Client:
        """A client to which the name has only this address; TLS still checks the certificate against the name."""
        client = self._pinned.get((host, address))
        if client is None:
            # Port 0 stands for the port of the URL.
            client = await asyncio.to_thread(self._builder().resolve(host, address, 0).build)
            self._pinned[host, address] = client
        self._pinned.move_to_end((host, address))
        while len(self._pinned) > _MAX_PINNED:
            # Dropped, not closed: requests under way finish.
            self._pinned.popitem(last=False)
        return client

    def _builder(self) -> ClientBuilder:
        builder = (
            ClientBuilder()
            .no_proxy()
            .follow_redirects(False)
            .referer(False)
            .user_agent(USER_AGENT)
            .connect_timeout(timedelta(seconds=CONNECT_SECONDS))
            .pool_idle_timeout(timedelta(seconds=_IDLE_SECONDS))
            # A list is stored as it is sent, and nobody looks into the answer to a webhook.
            .gzip(False)
            .brotli(False)
            .zstd(False)
            .deflate(False)
        )
        return builder.add_root_certificate_pem(self._root_certificate) if self._root_certificate else builder


def retry_after(text: str | None, now: float) -> float:
    """Seconds that an answer asks us to wait, by the value of its Retry-After: a number of them, or a date."""
    text = (text or "").strip()
    if text.isascii() and text.isdecimal():
        return float(text[:12])
    try:
        at = parsedate_to_datetime(text)
        return max(0.0, (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() - now)
    except (ValueError, TypeError, IndexError, OverflowError):
        return 0.0


def _parsed(url: str) -> Url:
    try:
        return parse_url(url)
    except BadUrl as error:
        raise OutboundFailed(error.code, error.message) from None


def _joined(base: Url, location: str) -> Url:
    try:
        url = base.join(location)
        problem = url_problem(url)
    except ValueError:
        problem = "it is not a URL"
    if problem is not None:
        raise OutboundFailed("bad_redirect", f"the Location of the redirect can not be followed: {problem}")
    return url


def _header(response: Response, name: str) -> str | None:
    try:
        return response.get_header(name)
    except ValueError:
        # Not ASCII.
        return None


def _failed(error: PyreqwestError) -> OutboundFailed:
    told = (error.details.get("causes") or []) if isinstance(error, DetailedPyreqwestError) else []
    causes = [cause["message"] for cause in told]
    if isinstance(error, RequestTimeoutError) or "operation timed out" in causes:
        return OutboundFailed("timeout", "no answer in time")
    if _CONNECTING not in causes:
        return OutboundFailed("read_failed", "the connection broke before there was an answer")
    if "dns error" in causes:
        return OutboundFailed("dns_failed", "the name of the target has no address")
    if "tcp connect error" in causes or "os error" in causes[-1] or "eof" in causes[-1]:
        return OutboundFailed("connect_failed", "the connection failed")
    return OutboundFailed("tls_failed", "TLS failed")
