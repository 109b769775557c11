"""One exchange with a target whose response may be long. Sends a request through the job's route and the guard, follows
redirects, and returns the response with its body still unread.

Unlike a fetch it has no total timeout: a response must begin within `patience`, and its reader watches the rest.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
from pyreqwest.exceptions import PyreqwestError
from pyreqwest.request import StreamRequest
from pyreqwest.response import Response

from conveyor import __version__
from conveyor.clock import Clock
from conveyor.egress.ca_bundle import read_ca_bundle
from conveyor.egress.clients import ModeClients, connect_step
from conveyor.egress.failures import Failure, failure_of, is_connecting
from conveyor.egress.heads import ResponseHead, read_ascii_head
from conveyor.egress.lru import Lru
from conveyor.egress.redirects import REDIRECT_STATUSES, OutgoingRequest, follow_redirect, headers_to_send
from conveyor.egress.robots import Robots, RobotsUnavailable
from conveyor.egress.routes import Hop, Route, job_routes, operator_gateway
from conveyor.egress.target_guard import TargetGuard
from conveyor.errors import BadInput, InvalidSetting
from conveyor.lists.gateways import gateway_problem, route_problem
from conveyor.lists.inputs import headers_problem
from conveyor.model import Job, JobId, Options
from conveyor.settings import Settings

USER_AGENT = f"conveyor/{__version__}"
MAX_PLANS = 256

Pairs = tuple[tuple[str, str], ...]


class ExchangePlan(msgspec.Struct):
    """The options of a job, prepared once for all its exchanges."""

    options: Options
    route: Route
    headers: Pairs
    connect: float


class OpenResponse(msgspec.Struct):
    """A response that has begun, and the request that it answers: the last one, after redirects."""

    response: Response
    head: ResponseHead
    request: OutgoingRequest


class Exchange:
    """The clients and routes of one executor. `root_certificate` is a PEM to trust beside the system's, instead of the
    operator's."""

    def __init__(
        self, settings: Settings, clock: Clock, guard: TargetGuard, *, root_certificate: bytes | None = None
    ) -> None:
        self._guard = guard
        trusted = root_certificate or read_ca_bundle(settings.ca_bundle)
        self._clients = ModeClients(clock, USER_AGENT, trusted, streaming=True)
        self._allows_insecure = settings.allow_insecure
        self._robots = Robots(self._clients.usual, guard, clock, USER_AGENT)
        self._gateway = operator_gateway(settings.gateway)
        self._plans: Lru[tuple[JobId, int], ExchangePlan] = Lru(MAX_PLANS)
        wrong = None if self._gateway is None else gateway_problem(self._gateway)
        if wrong is not None:
            raise InvalidSetting(f"CONVEYOR_GATEWAY: {wrong}")

    async def close(self) -> None:
        await self._robots.close()
        await self._clients.close()
        await self._guard.close()

    def plan(self, job: Job, member: int = 0) -> ExchangePlan:
        """Prepare the job's options, for one gateway of its pool. Raises BadInput: they may have been stored before
        today's checks."""
        plan = self._plans.get((job.job_id, member))
        if plan is not None and (plan.options is job.options or plan.options == job.options):
            return plan
        options = job.options
        wrong = headers_problem(options.headers) or route_problem(options, self._gateway, self._allows_insecure)
        if wrong is not None:
            raise BadInput(wrong)
        routes = job_routes(options, self._gateway, self._clients, self._guard)
        # A reference may have been taken before the job's pool changed.
        route = self._robots.obeyed(job, routes[member if member < len(routes) else 0])
        plan = ExchangePlan(options, route, tuple(options.headers.items()), connect_step(options.connect_timeout))
        return self._plans.put((job.job_id, member), plan)

    @asynccontextmanager
    async def open(
        self, plan: ExchangePlan, request: OutgoingRequest, patience: float, connect: float | None = None
    ) -> AsyncIterator[OpenResponse]:
        """Send the request and follow redirects. Raises what egress/failures.py maps. A failure on the way of a chain
        is a Failure with the status of the last response and the URL of the last request."""
        connect = plan.connect if connect is None else connect_step(connect)
        async with AsyncExitStack() as stack:
            yield await self._follow(stack, plan, request, patience, connect)

    async def _follow(
        self, stack: AsyncExitStack, plan: ExchangePlan, request: OutgoingRequest, patience: float, connect: float
    ) -> OpenResponse:
        max_redirects = plan.options.max_redirects
        head: ResponseHead | None = None
        try:
            for _ in range(max_redirects + 1):
                response = await self._send(stack, plan, request, patience, connect)
                head = read_ascii_head(response) or await self._clients.usual.read_head(response)
                plan.route.check_status(request, head.status)
                if max_redirects == 0 or head.status not in REDIRECT_STATUSES or "location" not in head.fields:
                    return OpenResponse(response, head, request)
                await stack.aclose()
                location = plan.route.unwrap(head.fields["location"])
                reached, request = request, follow_redirect(request, head, location)
            request = reached
            raise Failure("too_many_redirects", f"more than {max_redirects} redirects")
        except Exception as error:
            if head is None or isinstance(error, RobotsUnavailable):
                raise
            failure = failure_of(error, plan.route.gateway_codes)
            raise Failure(failure.code, failure.message, head.status, str(request.url)) from error

    async def _send(
        self, stack: AsyncExitStack, plan: ExchangePlan, request: OutgoingRequest, patience: float, connect: float
    ) -> Response:
        """Send one request."""
        hop = plan.route.ready(request, connect) or await plan.route.hop(request, connect, patience)
        try:
            return await self._begin(stack, request, hop, patience)
        except PyreqwestError as error:
            if hop.pinned is not None and is_connecting(error):
                self._guard.avoid(*hop.pinned)
            raise

    async def _begin(self, stack: AsyncExitStack, request: OutgoingRequest, hop: Hop, patience: float) -> Response:
        try:
            async with asyncio.timeout(patience):
                return await stack.enter_async_context(_build_request(request, hop))
        except TimeoutError:
            raise Failure("timeout", f"the response did not begin within {patience:g} seconds") from None


def _build_request(request: OutgoingRequest, hop: Hop) -> StreamRequest:
    # Bytes that the client reads ahead are lost when the connection breaks.
    builder = hop.client.request(request.method, hop.url).streamed_read_buffer_limit(0)
    sent = merge_headers(headers_to_send(request), hop.headers)
    if sent:
        builder = builder.headers(sent)
    if request.body is not None:
        builder = builder.body_bytes(request.body)
    return builder.build_streamed()


def merge_headers(general: Pairs, special: Pairs) -> Pairs:
    """Merge two lists of headers. Where both have the same name, the special one counts."""
    own = {name.lower() for name, _ in special}
    return (*(pair for pair in general if pair[0].lower() not in own), *special)
