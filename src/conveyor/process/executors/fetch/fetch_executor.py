"""The fetch executor. Gets references whose input is a URL or an object with one, makes one attempt at each, and
returns the outcome: status, headers and body, or an error (egress/failures.py lists the codes).

It follows redirects itself, hop by hop, so that the guard checks each of them; one timeout spans all hops and the body.
It reads the body in pieces and counts after decoding, so that `max_body_bytes` bounds the memory.
An attempt that fails after a response keeps the URL that it had reached, and the status of the last response.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import timedelta
from hashlib import sha256
from typing import Any, Protocol, runtime_checkable

import msgspec
from pyreqwest.exceptions import PyreqwestError
from pyreqwest.request import StreamRequest

from conveyor import __version__
from conveyor.clock import Clock
from conveyor.egress import descriptors
from conveyor.egress.body_budget import BodyBudget, largest_body
from conveyor.egress.ca_bundle import read_ca_bundle
from conveyor.egress.clients import ModeClients, connect_step
from conveyor.egress.decoding import ACCEPTED, codings_of, decoded_head
from conveyor.egress.failures import Failure, failure_of, is_connecting
from conveyor.egress.heads import ResponseHead, read_ascii_head
from conveyor.egress.lru import Lru
from conveyor.egress.origins import make_origin, origin_of
from conveyor.egress.redirects import REDIRECT_STATUSES, OutgoingRequest, follow_redirect, headers_to_send
from conveyor.egress.responses import is_small_and_plain, phrase, read_body, retry_after
from conveyor.egress.robots import Robots, RobotsUnavailable
from conveyor.egress.routes import Hop, Route, job_routes, operator_gateway
from conveyor.egress.target_guard import BadUrl, TargetGuard, parse_url
from conveyor.errors import BadInput, InvalidSetting
from conveyor.lists.gateways import gateway_problem, route_problem
from conveyor.lists.inputs import (
    MAX_TIMEOUT,
    FetchInput,
    body_bytes,
    headers_problem,
    is_plain,
    parse_fetch_input,
    parse_url_or_input,
    problem,
)
from conveyor.model import Job, JobId, Options, Outcome, TaskError, TaskRef
from conveyor.process.changed_pages import NOT_MODIFIED, Condition
from conveyor.process.executors import LocalExecutor
from conveyor.settings import Settings
from conveyor.states import TaskStatus

USER_AGENT = f"conveyor/{__version__}"
MAX_PLANS = 256
# A URL whose host needs no parser: no escapes, no userinfo, nothing that the parser would change but letter case.
_PLAIN_URL = re.compile(r'"(https?)://([a-z0-9.-]*[a-z])(?::([0-9]{1,5}))?[/?#"]')

_IF_NONE_MATCH = "if-none-match"
_IF_MODIFIED_SINCE = "if-modified-since"
# With one of these, a response says something about the user's own condition, or has a part of the page.
_CONDITIONS = frozenset({_IF_NONE_MATCH, _IF_MODIFIED_SINCE, "if-match", "if-unmodified-since", "if-range", "range"})

Pairs = tuple[tuple[str, str], ...]


@runtime_checkable
class FetchesIfChanged(Protocol):
    """A capability of an executor: requests with conditions."""

    async def attempt_if_changed(
        self, gateway: int, job: Job, refs: Sequence[TaskRef], conditions: Sequence[Condition | None]
    ) -> list[Outcome]:
        """As `LocalExecutor.attempt_through`. An outcome may be unchanged; then it has no body."""


class FetchPlan(msgspec.Struct):
    """The options of a job, prepared once for all its attempts."""

    options: Options
    # One for each gateway of a pool; else one.
    routes: tuple[Route, ...]
    headers: Pairs
    # The headers of a task that has none of its own.
    plain_headers: Pairs
    # Empty means 200 to 299.
    successes: frozenset[int]
    connect: float
    timeout: timedelta
    # What is wrong with the options; no task of the job can be attempted then.
    problem: str | None

    def route(self, gateway: int) -> Route:
        """The route through one gateway. An order may be older than the job's pool."""
        return self.routes[gateway if gateway < len(self.routes) else 0]

    def succeeds(self, status: int) -> bool:
        return status in self.successes if self.successes else 200 <= status < 300

    def follows(self, answer: ResponseHead) -> bool:
        """Return whether to follow a redirect: not if the job allows none or counts its status as a success."""
        follows = self.options.max_redirects > 0 and answer.status not in self.successes
        return follows and "location" in answer.fields


class ReachedHop(msgspec.Struct, gc=False):
    """How far an attempt came: its last request, and the status of the last response."""

    request: OutgoingRequest | None = None
    status: int | None = None
    # When the head of the last response had arrived.
    head_at: float = 0.0


class FetchExecutor(LocalExecutor):
    """Runs tasks of kind fetch. One for each event loop. `root_certificate` is a PEM to trust beside the system's,
    instead of the operator's; `room` is passed on to BodyBudget."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        guard: TargetGuard,
        *,
        root_certificate: bytes | None = None,
        room: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        # All fetchers share the budget of the process.
        self._budget = BodyBudget(settings.body_budget_bytes // max(1, settings.fetchers), room)
        self._largest_body = largest_body(settings.body_budget_bytes, settings.fetchers)
        self._clock = clock
        self._guard = guard
        trusted = root_certificate or read_ca_bundle(settings.ca_bundle)
        self._clients = ModeClients(clock, USER_AGENT, trusted)
        self._allows_insecure = settings.allow_insecure
        self._robots = Robots(self._clients.usual, guard, clock, USER_AGENT)
        self._gateway = operator_gateway(settings.gateway)
        self._plans: Lru[JobId, FetchPlan] = Lru(MAX_PLANS)
        # Most attempts are of the same job as the one before.
        self._last_job: Job | None = None
        self._last_plan: FetchPlan | None = None
        wrong = None if self._gateway is None else gateway_problem(self._gateway)
        if wrong is not None:
            raise InvalidSetting(f"CONVEYOR_GATEWAY: {wrong}")

    def target(self, ref: TaskRef) -> str | None:
        return host_of(ref.input)

    def origin(self, ref: TaskRef) -> str | None:
        return input_origin(ref.input)

    async def attempt(self, job: Job, refs: Sequence[TaskRef]) -> list[Outcome]:
        return await self.attempt_through(0, job, refs)

    async def attempt_through(self, gateway: int, job: Job, refs: Sequence[TaskRef]) -> list[Outcome]:
        return list(await asyncio.gather(*(self.attempt_one(job, ref, gateway) for ref in refs)))

    async def attempt_if_changed(
        self, gateway: int, job: Job, refs: Sequence[TaskRef], conditions: Sequence[Condition | None]
    ) -> list[Outcome]:
        pairs = zip(refs, conditions, strict=True)
        return list(await asyncio.gather(*(self.attempt_one(job, ref, gateway, condition) for ref, condition in pairs)))

    def attempt_one(
        self, job: Job, ref: TaskRef, gateway: int = 0, condition: Condition | None = None
    ) -> Coroutine[Any, Any, Outcome]:
        plan = self._plan(job)
        return self._attempt(plan, plan.route(gateway), ref, condition)

    async def close(self) -> None:
        await self._robots.close()
        await self._clients.close()
        await self._guard.close()

    async def _attempt(self, plan: FetchPlan, route: Route, ref: TaskRef, condition: Condition | None) -> Outcome:
        started = self._clock.monotonic()
        while True:
            reached = ReachedHop()
            try:
                outcome = await self._fetch(plan, route, ref.input, started, reached, condition)
            except Exception as error:
                failure = failure_of(error, route.gateway_codes)
                outcome = Outcome(TaskStatus.FAILED, error=failure)
                if isinstance(error, RobotsUnavailable) and not error.is_final:
                    outcome.spends_attempt, outcome.retry_after = False, error.delay
                elif reached.request is not None and reached.status is not None:
                    outcome.http_status = reached.status
                    outcome.final_url = str(reached.request.url)
                elif failure.code == descriptors.CODE:
                    if await self._may_repeat(plan, started):
                        continue
                    outcome.spends_attempt, outcome.retry_after = False, descriptors.DELAY
            outcome.elapsed = self._clock.monotonic() - started
            if reached.head_at:
                outcome.first_byte = reached.head_at - started
            return outcome

    async def _may_repeat(self, plan: FetchPlan, started: float) -> bool:
        """Wait for a file descriptor; False at the timeout of the attempt. It occupies its slot meanwhile, so that as
        many attempts run at once as there are descriptors for."""
        await self._clock.sleep(descriptors.PAUSE * (1 + self._clock.jitter()))
        return self._clock.monotonic() - started < plan.timeout.total_seconds()

    async def _fetch(
        self,
        plan: FetchPlan,
        route: Route,
        text: str,
        started: float,
        reached: ReachedHop,
        condition: Condition | None,
    ) -> Outcome:
        """Make all hops of one attempt, in one coroutine: at 30,000 a second, one more layer would cost throughput."""
        connect, timeout = plan.connect, plan.timeout
        task_input = parse_url_or_input(text)
        if isinstance(task_input, str):
            request = plain_request(plan, task_input)
        else:
            request = first_request(plan, task_input)
            if task_input.connect_timeout is not None:
                connect = connect_step(task_input.connect_timeout)
            if task_input.timeout is not None:
                timeout = timedelta(seconds=task_input.timeout)
        deadline = started + timeout.total_seconds()
        for _ in range(plan.options.max_redirects + 1):
            reached.request = request
            hop = route.ready(request, connect)
            if hop is None:
                hop = await route.hop(request, connect, timeout.total_seconds())
                timeout = self._left(deadline)
            asked = request if condition is None else with_condition(request, condition)
            sent = build_request(asked, hop, timeout)
            try:
                # Not `async with`: a body that was read to its end leaves nothing to close.
                response = await sent.__aenter__()
                reached.head_at = self._clock.monotonic()
                try:
                    answer = read_ascii_head(response) or await self._clients.usual.read_head(response)
                    reached.status = answer.status
                    route.check_status(request, answer.status)
                    if answer.status not in REDIRECT_STATUSES or not plan.follows(answer):
                        # A job may be older than the setting, or was accepted under another one.
                        limit = min(plan.options.max_body_bytes, self._largest_body)
                        # Over HTTP/2 the client does not enforce the length.
                        if not plan.options.http2 and is_small_and_plain(answer, request.method, limit):
                            body = (await response.bytes()).to_bytes()
                        else:
                            body = await read_body(response, answer, request.method, limit, self._budget)
                        return self._outcome(plan, request, answer, body, condition, asked)
                except BaseException:
                    await sent.__aexit__(None, None, None)
                    raise
                await sent.__aexit__(None, None, None)
            except PyreqwestError as error:
                if hop.pinned is not None and is_connecting(error):
                    self._guard.avoid(*hop.pinned)
                raise
            request = follow_redirect(request, answer, route.unwrap(answer.fields["location"]))
            timeout = self._left(deadline)
        raise Failure("too_many_redirects", f"more than {plan.options.max_redirects} redirects")

    def _outcome(
        self,
        plan: FetchPlan,
        request: OutgoingRequest,
        answer: ResponseHead,
        body: bytes,
        condition: Condition | None,
        asked: OutgoingRequest,
    ) -> Outcome:
        """The outcome of a response. `asked` is the request, or with its condition, if that was sent."""
        if answer.status == NOT_MODIFIED and asked is not request:
            return unchanged_outcome(request, answer)
        if codings_of(answer):
            answer = decoded_head(answer)
        outcome = Outcome(
            TaskStatus.SUCCEEDED,
            http_status=answer.status,
            body=body,
            content_type=answer.fields.get("content-type"),
            final_url=str(request.url),
            headers=answer.pairs,
        )
        if not plan.succeeds(answer.status):
            outcome.status = TaskStatus.FAILED
            outcome.error = TaskError(f"http_{answer.status}", f"the target answered {phrase(answer.status)}")
            outcome.retry_after = retry_after(answer.fields.get("retry-after"), self._clock.now())
        elif condition is not None and condition.sha256:
            # The server may not know conditions.
            outcome.sha256 = sha256(body).hexdigest()
            if outcome.sha256 == condition.sha256:
                outcome.unchanged, outcome.body = True, None
        return outcome

    def _left(self, deadline: float) -> timedelta:
        seconds = deadline - self._clock.monotonic()
        if seconds <= 0:
            raise Failure("timeout", "the attempt took longer than its timeout")
        return timedelta(seconds=seconds)

    def _plan(self, job: Job) -> FetchPlan:
        if job is self._last_job and self._last_plan is not None:
            return self._last_plan
        self._last_job, self._last_plan = job, self._known_plan(job)
        return self._last_plan

    def _known_plan(self, job: Job) -> FetchPlan:
        plan = self._plans.get(job.job_id)
        if plan is not None and (plan.options is job.options or plan.options == job.options):
            return plan
        return self._plans.put(job.job_id, self._make_plan(job))

    def _make_plan(self, job: Job) -> FetchPlan:
        options = job.options
        wrong = headers_problem(options.headers) or route_problem(options, self._gateway, self._allows_insecure)
        headers = tuple(options.headers.items())
        # With a problem, no route is used.
        routes = job_routes(Options() if wrong else options, self._gateway, self._clients, self._guard)
        return FetchPlan(
            options=options,
            routes=tuple(self._robots.obeyed(job, route) for route in routes),
            headers=headers,
            plain_headers=with_codings(headers),
            successes=frozenset(options.success_statuses),
            connect=connect_step(options.connect_timeout),
            timeout=timedelta(seconds=min(options.timeout, MAX_TIMEOUT)),
            problem=wrong,
        )


def plain_request(plan: FetchPlan, url: str) -> OutgoingRequest:
    """Build the request of a task that is only a URL. Raises BadUrl or BadInput: the input may have been stored before
    today's checks."""
    if plan.problem is not None:
        raise BadInput(plan.problem)
    return OutgoingRequest("GET", parse_url(url), plan.plain_headers)


def first_request(plan: FetchPlan, task_input: FetchInput) -> OutgoingRequest:
    """Build the request of a task. Raises as `plain_request` does."""
    if is_plain(task_input):
        return plain_request(plan, task_input.url)
    if plan.problem is not None:
        raise BadInput(plan.problem)
    url = parse_url(task_input.url)
    wrong = problem(task_input)
    if wrong is not None:
        raise BadInput(wrong)
    return OutgoingRequest(
        task_input.method.upper(),
        url,
        with_codings(merge_headers(plan.headers, tuple(task_input.headers.items()))),
        body_bytes(task_input),
    )


def with_condition(request: OutgoingRequest, condition: Condition) -> OutgoingRequest:
    """The request with the validators of the page, if it goes to the URL that gave the page and has no condition of its
    own; else the same request."""
    validators = ((_IF_NONE_MATCH, condition.etag), (_IF_MODIFIED_SINCE, condition.last_modified))
    added = tuple([(name, value) for name, value in validators if value is not None])
    if not added or request.method != "GET" or str(request.url) != condition.url:
        return request
    if any(name.lower() in _CONDITIONS for name, _ in request.headers):
        return request
    return msgspec.structs.replace(request, headers=(*request.headers, *added))


def unchanged_outcome(request: OutgoingRequest, answer: ResponseHead) -> Outcome:
    """The outcome of a request to which the target answered that the task has the current page."""
    return Outcome(
        TaskStatus.SUCCEEDED,
        http_status=answer.status,
        final_url=str(request.url),
        headers=answer.pairs,
        unchanged=True,
    )


def build_request(request: OutgoingRequest, hop: Hop, timeout: timedelta) -> StreamRequest:
    """Build the request of one hop."""
    builder = hop.client.request(request.method, hop.url).timeout(timeout)
    sent = request.headers
    if request.cookies is not None or hop.headers:
        sent = merge_headers(headers_to_send(request), hop.headers)
    if sent:
        builder = builder.headers(sent)
    if request.body is not None:
        builder = builder.body_bytes(request.body)
    return builder.build_streamed()


def with_codings(headers: Pairs) -> Pairs:
    """Add the codings that the request accepts, unless it has its own. A part of an encoded body cannot be decoded, so
    a request for a range accepts none."""
    names = {name.lower() for name, _ in headers}
    if "accept-encoding" in names:
        return headers
    return (*headers, ("accept-encoding", "identity" if "range" in names else ACCEPTED))


def merge_headers(general: Pairs, special: Pairs) -> Pairs:
    """Merge two lists of headers. Where both have the same name, the special one counts."""
    if not general or not special:
        return general or special
    own = {name.lower() for name, _ in special}
    return (*(pair for pair in general if pair[0].lower() not in own), *special)


def host_of(text: str) -> str | None:
    """Return the host in the input of a task, which is its target; None if it has none."""
    plain = _PLAIN_URL.match(text)
    if plain is not None:
        return plain[2]
    try:
        return (parse_url(parse_fetch_input(text).url).host_str or "").rstrip(".") or None
    except (BadUrl, BadInput):
        return None


def input_origin(text: str) -> str | None:
    """Return the scheme, host and port in the input of a task; None if it has no URL."""
    plain = _PLAIN_URL.match(text)
    if plain is not None:
        return make_origin(plain[1], plain[2], int(plain[3]) if plain[3] else None)
    try:
        return origin_of(parse_url(parse_fetch_input(text).url))
    except (BadUrl, BadInput):
        return None
