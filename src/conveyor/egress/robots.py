"""Robots: what sites allow to be fetched, for jobs with `robots: obey`. Gets the request of each hop, and raises if
robots.txt of its origin disallows it, or could not be read.

The file is requested the way of the task, by the same route and through the guard, without any of the job's headers but
User-Agent. It is read once for each origin, tenant, user agent and gateway, and kept for an hour, within a bound on all
of them. As RFC 9309 says, an answer of 400 to 499 allows everything; if there is no answer, or one of 500 and more (or
429), nothing is requested, unless rules that were read before are known.
"""

import asyncio
from collections import OrderedDict
from datetime import timedelta
from functools import partial

import msgspec
from pyreqwest.exceptions import PyreqwestError
from pyreqwest.http import Url
from pyreqwest.response import Response

from conveyor.clock import Clock
from conveyor.egress import descriptors
from conveyor.egress.clients import Clients
from conveyor.egress.decoding import codings_of
from conveyor.egress.failures import Failure, failure_of, is_connecting
from conveyor.egress.heads import ResponseHead, read_ascii_head
from conveyor.egress.origins import origin_of
from conveyor.egress.redirects import REDIRECT_STATUSES, OutgoingRequest, follow_redirect, headers_to_send
from conveyor.egress.responses import decode_pieces, phrase, raw_pieces, retry_after
from conveyor.egress.robots_rules import RobotsRules, parse_robots, product_token
from conveyor.egress.routes import Hop, Route
from conveyor.egress.target_guard import TargetGuard
from conveyor.model import Job, RobotsMode, TenantId

BLOCKED = "blocked_by_robots"
UNAVAILABLE = "robots_unavailable"
# How much of a file counts.
MAX_BYTES = 512 * 1024
# Files that are kept, and the characters of their rules in all.
MAX_FILES = 4000
MAX_CHARACTERS = 16 * 1024 * 1024
# How long a file is kept; how long after a failure it is not requested again, at most.
KEEP_SECONDS = 3600.0
RETRY_SECONDS = 60.0
MAX_RETRY_SECONDS = 3600.0
_MAX_REDIRECTS = 5
_TIMEOUT = 30.0
_CONNECT = 10.0
# How long a task waits whose attempt was over before the file was read.
_READING_SECONDS = 5.0


class RobotsUnavailable(Failure):
    """robots.txt could not be read. The task waits, without an attempt, unless its patience is over (`is_final`)."""

    def __init__(self, code: str, message: str, delay: float, *, is_final: bool = False) -> None:
        super().__init__(code, message)
        self.delay = delay
        self.is_final = is_final


class RobotsPolicy(msgspec.Struct, frozen=True):
    """How a job obeys: whose it is, its user agent, and for how many seconds tasks wait for a file."""

    tenant: TenantId
    user_agent: str
    patience: float


class RobotsFile(msgspec.Struct):
    """What is known of one file: its rules, or why there are none and since when; and until when that counts."""

    until: float
    rules: RobotsRules | None = None
    failure: tuple[str, str] = ("", "")
    failed_since: float = 0.0


Key = tuple[str, TenantId, str, object]


class Robots:
    """The files that one executor knows. `user_agent` is that of jobs without their own."""

    def __init__(self, clients: Clients, guard: TargetGuard, clock: Clock, user_agent: str) -> None:
        self._clients = clients
        self._guard = guard
        self._clock = clock
        self._user_agent = user_agent
        self._files: OrderedDict[Key, RobotsFile] = OrderedDict()
        self._characters = 0
        self._reading: dict[Key, asyncio.Task[RobotsFile]] = {}

    def obeyed(self, job: Job, route: Route) -> Route:
        """The route for a job's requests, which lets only those pass that robots.txt allows if the job obeys it."""
        options = job.options
        if options.robots is not RobotsMode.OBEY:
            return route
        own = (value for name, value in options.headers.items() if name.lower() == "user-agent")
        policy = RobotsPolicy(job.tenant, next(own, self._user_agent), options.breaker.patience)
        return _ObeyingRoute(self, policy, route)

    def key(self, policy: RobotsPolicy, route: Route, request: OutgoingRequest) -> Key | None:
        """The file that says whether to make this request; None if none does."""
        origin = origin_of(request.url)
        if origin is None or request.url.path == "/robots.txt":
            return None
        own = (value for name, value in request.headers if name.lower() == "user-agent")
        return origin, policy.tenant, next(own, policy.user_agent), route.scope

    def known(self, key: Key) -> RobotsFile | None:
        file = self._files.get(key)
        return file if file is not None and self._clock.monotonic() < file.until else None

    def check(self, file: RobotsFile, policy: RobotsPolicy, key: Key, url: Url) -> None:
        """Raise Failure if the file disallows the URL, RobotsUnavailable if it could not be read."""
        if file.rules is None:
            raise self._unavailable(policy, file)
        query = url.query_string
        if not file.rules.allows(url.path if query is None else f"{url.path}?{query}"):
            raise Failure(BLOCKED, f"robots.txt of the site disallows it for the user agent {product_token(key[2])}")

    async def close(self) -> None:
        for reading in self._reading.values():
            reading.cancel()
        await asyncio.gather(*self._reading.values(), return_exceptions=True)

    def _unavailable(self, policy: RobotsPolicy, file: RobotsFile) -> RobotsUnavailable:
        now = self._clock.monotonic()
        code, message = file.failure
        is_final = now - file.failed_since >= policy.patience
        # Tasks that wait for the same file do not all come back at once.
        delay = max(1.0, file.until - now) * (1 + 0.2 * self._clock.jitter())
        return RobotsUnavailable(code, f"robots.txt could not be read: {message}", delay, is_final=is_final)

    async def read(self, key: Key, route: Route, seconds: float) -> RobotsFile:
        """Read the file, once for all who wait for it. Raises RobotsUnavailable if that takes longer than `seconds`."""
        reading = self._reading.get(key)
        if reading is None:
            reading = self._reading[key] = asyncio.create_task(self._read(key, route))
            reading.add_done_callback(partial(self._on_read, key))
        done, _ = await asyncio.wait({reading}, timeout=max(0.0, seconds))
        if not done:
            raise RobotsUnavailable(UNAVAILABLE, "robots.txt could not be read in time", _READING_SECONDS)
        return reading.result()

    def _on_read(self, key: Key, reading: "asyncio.Task[RobotsFile]") -> None:
        del self._reading[key]
        if not reading.cancelled():
            # Retrieved, so that asyncio does not log it if all who waited are gone.
            reading.exception()

    async def _read(self, key: Key, route: Route) -> RobotsFile:
        origin, _, agent, _ = key
        known = self._files.get(key)
        now = self._clock.monotonic()
        try:
            async with asyncio.timeout(_TIMEOUT):
                head, body = await self._request(Url(f"{origin}/robots.txt"), agent, route)
        except TimeoutError:
            file = self._failed(known, (UNAVAILABLE, f"no answer within {_TIMEOUT:g} seconds"), None)
        except Exception as error:
            failure = failure_of(error, route.gateway_codes)
            if known is None and failure.code in ("target_refused", descriptors.CODE):
                # The task itself would meet the same.
                raise
            code = failure.code if failure.code == "gateway_failed" else UNAVAILABLE
            file = self._failed(known, (code, failure.message), None)
        else:
            if head.status >= 500 or head.status == 429:
                wait = retry_after(head.fields.get("retry-after"), self._clock.now())
                file = self._failed(known, (UNAVAILABLE, f"the site answered {phrase(head.status)}"), wait)
            else:
                is_found = 200 <= head.status < 300
                rules = parse_robots(body if is_found else b"", product_token(agent))
                file = RobotsFile(now + KEEP_SECONDS, rules)
        self._keep(key, file)
        return file

    def _failed(self, known: RobotsFile | None, failure: tuple[str, str], wait: float | None) -> RobotsFile:
        """What counts after the file could not be read: the rules that are known, if there are any."""
        now = self._clock.monotonic()
        until = now + min(MAX_RETRY_SECONDS, max(RETRY_SECONDS, wait or 0.0))
        if known is None:
            return RobotsFile(until, None, failure, now)
        return RobotsFile(until, known.rules, failure, known.failed_since or now)

    async def _request(self, url: Url, agent: str, route: Route) -> tuple[ResponseHead, bytes]:
        request = OutgoingRequest("GET", url, (("user-agent", agent), ("accept-encoding", "identity")))
        for _ in range(_MAX_REDIRECTS + 1):
            hop = route.ready(request, _CONNECT) or await route.hop(request, _CONNECT, _TIMEOUT)
            builder = hop.client.request("GET", hop.url).timeout(timedelta(seconds=_TIMEOUT))
            builder = builder.headers([*headers_to_send(request), *hop.headers]).streamed_read_buffer_limit(0)
            try:
                async with builder.build_streamed() as response:
                    head = read_ascii_head(response) or await self._clients.read_head(response)
                    route.check_status(request, head.status)
                    if head.status not in REDIRECT_STATUSES or "location" not in head.fields:
                        body = b"" if head.status >= 300 else await _first_bytes(response, head)
                        return head, body
            except PyreqwestError as error:
                if hop.pinned is not None and is_connecting(error):
                    self._guard.avoid(*hop.pinned)
                raise
            request = follow_redirect(request, head, route.unwrap(head.fields["location"]))
        # As if there were none: so the RFC says.
        return msgspec.structs.replace(head, status=404), b""

    def _keep(self, key: Key, file: RobotsFile) -> None:
        self._forget(key)
        self._files[key] = file
        self._characters += _characters(key, file)
        while len(self._files) > MAX_FILES or (self._characters > MAX_CHARACTERS and len(self._files) > 1):
            self._forget(next(iter(self._files)))

    def _forget(self, key: Key) -> None:
        file = self._files.pop(key, None)
        if file is not None:
            self._characters -= _characters(key, file)


def _characters(key: Key, file: RobotsFile) -> int:
    return len(key[0]) + len(key[2]) + (0 if file.rules is None else file.rules.size)


async def _first_bytes(response: Response, head: ResponseHead) -> bytes:
    """The file, as far as it counts."""
    pieces = raw_pieces(response, head)
    codings = codings_of(head)
    body = bytearray()
    async for piece in decode_pieces(pieces, codings, MAX_BYTES) if codings else pieces:
        body += piece
        if len(body) >= MAX_BYTES:
            break
    return bytes(body[:MAX_BYTES])


class _ObeyingRoute:
    """A route that lets only those requests pass that robots.txt of their origin allows: each hop of a redirect."""

    def __init__(self, robots: Robots, policy: RobotsPolicy, route: Route) -> None:
        self._robots = robots
        self._policy = policy
        self._route = route
        self.gateway_codes = route.gateway_codes
        self.scope = route.scope

    def check_status(self, request: OutgoingRequest, status: int) -> None:
        self._route.check_status(request, status)

    def unwrap(self, location: str) -> str:
        return self._route.unwrap(location)

    def ready(self, request: OutgoingRequest, connect: float) -> Hop | None:
        key = self._robots.key(self._policy, self._route, request)
        if key is not None:
            file = self._robots.known(key)
            if file is None:
                return None
            self._robots.check(file, self._policy, key, request.url)
        return self._route.ready(request, connect)

    async def hop(self, request: OutgoingRequest, connect: float, timeout: float) -> Hop:
        key = self._robots.key(self._policy, self._route, request)
        if key is not None:
            file = self._robots.known(key) or await self._robots.read(key, self._route, timeout)
            self._robots.check(file, self._policy, key, request.url)
        return self._route.ready(request, connect) or await self._route.hop(request, connect, timeout)
