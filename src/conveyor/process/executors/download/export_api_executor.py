"""The export_download executor, for APIs that make a file on request. Gets references whose input fills the templates
of the job's `export`, and returns the file that the API made.

    create the export → store its id → poll its state → not ready: wait in the queue → ready: download it

The task's progress document holds the state: once the id is in it, every later attempt resumes that export. Only a
crash between the response to `create` and that write makes a second request, with the same Idempotency-Key. A task that
waits is in the queue with a delay; it takes no slot and spends no attempt, however long the API takes.

The target is the host of the API: its limits and its breaker apply. With `rate_per_host` an attempt makes one request
to the API and then waits for its next pass, so that the rate is one of requests. The file may be on another host; if
that one is down, the breaker of the API does not open.

Error codes besides those of a download:

| Code | Meaning |
|---|---|
| export_failed | the export reached a state that means failure |
| export_timeout | it was not ready within `poll.timeout` |
| export_api_failed | a call failed more often than the policy retries it |
| bad_answer | a response is not JSON, or lacks a value that the job names |
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from pyreqwest.http import Url

from conveyor.clock import Clock
from conveyor.egress.failures import Failure
from conveyor.egress.origins import origin_of
from conveyor.egress.redirects import OutgoingRequest, is_sensitive
from conveyor.egress.responses import read_body
from conveyor.egress.target_guard import BadUrl, TargetGuard, parse_url
from conveyor.engines.blobs import Blobs
from conveyor.engines.records import Records
from conveyor.errors import BadInput
from conveyor.faults import crashpoint
from conveyor.lists.inputs import MAX_TIMEOUT, headers_problem
from conveyor.lists.templates import (
    IDEMPOTENCY_KEY,
    Unfillable,
    Values,
    fill_json,
    fill_text,
    fill_url,
    is_call,
    look_up,
    scalar,
)
from conveyor.model import (
    Backoff,
    ExportApi,
    ExportCall,
    ExportRetry,
    Job,
    Outcome,
    TaskError,
    TaskRef,
    task_id,
)
from conveyor.process.executors import LocalExecutor
from conveyor.process.executors.download.exchange import ExchangePlan, Pairs, merge_headers
from conveyor.process.executors.download.long_tasks import LongTasks, outcome_of
from conveyor.process.executors.download.ranges import RemoteFile
from conveyor.process.executors.download.transfer import DownloadRequest, TargetError, check_lost
from conveyor.process.retry import backoff_delay, is_retryable
from conveyor.process.task_progress import Superseded, Track
from conveyor.settings import Settings
from conveyor.states import TaskStatus

_MAX_RESPONSE = 1024 * 1024
# Statuses of a link that has expired; how often in a row to request a fresh one.
_EXPIRED = frozenset({401, 403, 404, 410})
_MAX_LINKS = 5
_LINK_PAUSE = 1.0
_SHOWN = 100


class State(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of one export, in the task's progress document."""

    id: str | None = None
    created_at: float = 0.0
    polls: int = 0
    # Failed calls in a row, and expired links in a row.
    failures: int = 0
    links: int = 0
    # With a rate: the export is ready, and the link to its file, if the API gave one.
    ready: bool = False
    link: str | None = None
    file: RemoteFile | None = None


_state = msgspec.json.Decoder(State | None)


class ExportDownloadExecutor(LocalExecutor):
    """Runs tasks of kind export_download. One for each event loop."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        guard: TargetGuard,
        records: Records,
        blobs: Blobs,
        *,
        root_certificate: bytes | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._long = LongTasks(settings, clock, guard, records, blobs, root_certificate)
        self._retry = ExportRetry(
            settings.export_retries,
            settings.export_retry_base,
            settings.export_retry_rate,
            settings.export_retry_cap,
        )

    def target(self, ref: TaskRef) -> str | None:
        return None

    def targets(self, job: Job) -> Callable[[TaskRef], str | None]:
        url = _api_url(job.options.export)
        host = None if url is None else (url.host_str or "").rstrip(".") or None
        return lambda _: host

    def origins(self, job: Job) -> Callable[[TaskRef], str | None]:
        url = _api_url(job.options.export)
        origin = None if url is None else origin_of(url)
        return lambda _: origin

    async def attempt(self, job: Job, refs: Sequence[TaskRef]) -> list[Outcome]:
        return await self.attempt_through(0, job, refs)

    async def attempt_through(self, gateway: int, job: Job, refs: Sequence[TaskRef]) -> list[Outcome]:
        return list(await asyncio.gather(*(self._attempt(job, ref, gateway) for ref in refs)))

    async def close(self) -> None:
        await self._long.exchange.close()

    async def _attempt(self, job: Job, ref: TaskRef, gateway: int) -> Outcome:
        async def step(plan: ExchangePlan, track: Track) -> Outcome:
            if job.options.export is None:
                raise BadInput("the job has no `export`")
            return await self._advance(_ExportAttempt(job, ref, job.options.export, plan, track))

        return await self._long.attempt(job, ref, step, gateway)

    async def _advance(self, work: "_ExportAttempt") -> Outcome:
        """Advance the export as far as it goes now."""
        if work.state.file is None:
            check_lost(work.track, self._settings)
        try:
            if work.state.id is None:
                await self._create(work)
                if work.is_paced:
                    return await self._pause(work, "the export is requested")
            if work.state.ready:
                wanted = self._download_request(work, work.state.link)
            else:
                answer, request = await self._call(work, work.export.status, "GET")
                state = scalar(look_up(answer, work.export.state), "the state of the export")
                if state in work.export.failed:
                    raise Failure("export_failed", f"the export ended as {state[:_SHOWN]!r}")
                if state not in work.export.ready:
                    return await self._wait(work, state)
                await work.keep(failures=0)
                link = _link_in(work.export, answer)
                wanted = self._download_request(work, link, request)
                if work.is_paced and wanted.request.url.origin_ascii == request.url.origin_ascii:
                    return await self._pause(work, "the export is ready", ready=True, link=link)
        except Unfillable as error:
            raise Failure("bad_answer", f"the response of the API cannot be used: {error}") from None
        except (BadInput, Superseded):
            raise
        except Exception as error:
            return await self._after_failure(work, error)
        return await self._download(work, wanted)

    async def _create(self, work: "_ExportAttempt") -> None:
        # A second request, after a crash before the id was stored, means the same export.
        key = ((IDEMPOTENCY_KEY, f"conveyor-{task_id(work.job.run.run_id, work.ref.index)}"),)
        answer, _ = await self._call(work, work.export.create, "POST", key)
        export_id = scalar(look_up(answer, work.export.id), "the id of the export")
        crashpoint("export.create.before")
        await work.keep(id=export_id, created_at=self._clock.now(), failures=0)
        crashpoint("export.create.after")

    async def _wait(self, work: "_ExportAttempt", api_state: str) -> Outcome:
        poll, state = work.export.poll, work.state
        if await self._long.deadline_now() - state.created_at >= poll.timeout:
            raise Failure("export_timeout", f"the export was not ready within {poll.timeout:g} seconds")
        # A clock that was ahead may have set it.
        created_at = min(state.created_at, self._clock.now())
        await work.rest(
            f"the export is {api_state[:_SHOWN]!r}", polls=state.polls + 1, failures=0, created_at=created_at
        )
        pace = Backoff(poll.first, poll.rate, poll.cap, jitter=False)
        delay = backoff_delay(pace, state.polls + 1, 0.0, None)
        return Outcome(TaskStatus.PENDING, work.http_status, retry_after=delay, spends_attempt=False)

    async def _pause(self, work: "_ExportAttempt", note: str, **changed: Any) -> Outcome:
        """End the attempt; the next one makes the next request, when the rate has a pass for it."""
        await work.rest(note, **changed)
        return Outcome(TaskStatus.PENDING, work.http_status, retry_after=0.0, spends_attempt=False)

    async def _after_failure(self, work: "_ExportAttempt", error: Exception) -> Outcome:
        """Retry a failed call later, by the policy for such calls."""
        outcome = outcome_of(error, work.plan.route.gateway_codes)
        # Without the query: the description of an API may have keys in it.
        outcome.final_url = (outcome.final_url or work.url or "").partition("?")[0] or None
        failed = work.state.failures + 1
        retry = work.export.retry or self._retry
        if not is_retryable(work.job.options, outcome):
            await work.rest(None, failures=failed)
            return outcome
        assert outcome.error is not None
        if failed > retry.retries:
            await work.rest(None, failures=failed)
            outcome.error = TaskError(
                "export_api_failed", f"a call failed {failed} times, at last: {outcome.error.message}"
            )
            return outcome
        await work.rest(f"a call failed: {outcome.error.message}", failures=failed)
        pace = Backoff(retry.base, retry.rate, retry.cap, jitter=False)
        outcome.retry_after = backoff_delay(pace, failed, 0.0, outcome.retry_after)
        outcome.spends_attempt = False
        return outcome

    async def _download(self, work: "_ExportAttempt", wanted: DownloadRequest) -> Outcome:
        linked = is_call(work.export.download) is None and work.state.links < _MAX_LINKS
        spare = _EXPIRED if linked else frozenset()
        outcome = await self._long.take(
            work.job, work.ref, work.plan, work.track, wanted, work.state.file, work.remember, spare
        )
        if outcome.status is TaskStatus.FAILED:
            outcome.final_url = outcome.final_url or str(wanted.request.url)
        if outcome.status is TaskStatus.FAILED and outcome.http_status in spare:
            # The next attempt polls the state again, and with it gets a fresh link.
            links = work.state.links + 1
            await work.rest("the link to the file has expired", links=links, ready=False, link=None)
            outcome.retry_after = _LINK_PAUSE * 2**work.state.links
            outcome.spends_attempt = False
        return outcome

    def _download_request(
        self, work: "_ExportAttempt", link: str | None, status: OutgoingRequest | None = None
    ) -> DownloadRequest:
        """Build the request for the file. `status` is the request that `link` answers; a link in the state is one to
        the same origin."""
        patience = min(work.job.options.timeout, MAX_TIMEOUT)
        call = is_call(work.export.download)
        if call is not None:
            return DownloadRequest(self._request(work, call, "GET", ()), patience)
        assert link is not None
        url = parse_url(link)
        # The job's headers are for the API. A link to another origin gets what a redirect there would.
        same_origin = status is None or url.origin_ascii == status.url.origin_ascii
        headers = tuple(pair for pair in work.plan.headers if same_origin or not is_sensitive(pair[0]))
        return DownloadRequest(OutgoingRequest("GET", url, headers), patience)

    async def _call(
        self, work: "_ExportAttempt", call: ExportCall, method: str, more: Pairs = ()
    ) -> tuple[Any, OutgoingRequest]:
        """Make a call. Returns the JSON of the response, and the request that it answers, after redirects."""
        request = self._request(work, call, method, more)
        work.url, work.http_status = str(request.url), None
        patience = min(work.job.options.timeout, MAX_TIMEOUT)
        async with self._long.exchange.open(work.plan, request, patience) as answer:
            work.http_status = answer.head.status
            if not 200 <= answer.head.status < 300:
                raise TargetError(answer, self._clock.now())
            try:
                async with asyncio.timeout(patience):
                    body = await read_body(answer.response, answer.head, request.method, _MAX_RESPONSE)
            except TimeoutError:
                raise Failure("timeout", f"the response was not complete within {patience:g} seconds") from None
        try:
            return msgspec.json.decode(body), answer.request
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            raise Failure("bad_answer", "the response of the API is not JSON", answer.head.status) from None

    def _request(self, work: "_ExportAttempt", call: ExportCall, method: str, more: Pairs) -> OutgoingRequest:
        """Build the request of a call. Raises BadInput if the task's input lacks a value that the template needs."""
        try:
            url = parse_url(fill_url(call.url, work.values))
            own = {name: fill_text(value, work.values) for name, value in call.headers.items()}
            body, kind = _body(call.body, work.values)
        except Unfillable as error:
            raise BadInput(str(error)) from None
        except UnicodeError:
            raise BadInput("a value has a lone surrogate") from None
        wrong = headers_problem(own)
        if wrong is not None:
            raise BadInput(wrong)
        headers = merge_headers(merge_headers(kind, work.plan.headers), merge_headers(tuple(own.items()), more))
        return OutgoingRequest((call.method or method).upper(), url, (*headers, ("accept-encoding", "identity")), body)


class _ExportAttempt:
    """One attempt at one export: the task, the API's description, and the state in the progress document."""

    def __init__(self, job: Job, ref: TaskRef, export: ExportApi, plan: ExchangePlan, track: Track) -> None:
        self.job = job
        self.ref = ref
        self.export = export
        self.plan = plan
        self.track = track
        self.state = _state.decode(track.state) or State()
        # The last call, and the status of its response.
        self.url: str | None = None
        self.http_status: int | None = None
        self._input = msgspec.json.decode(ref.input)

    @property
    def is_paced(self) -> bool:
        """Whether the job limits the rate of requests, so that each needs an attempt of its own."""
        return self.job.options.rate_per_host is not None

    @property
    def values(self) -> Values:
        known = {"input": self._input, "task_id": task_id(self.job.run.run_id, self.ref.index)}
        return known if self.state.id is None else {**known, "id": self.state.id}

    def remember(self, file: RemoteFile | None) -> msgspec.Raw:
        self.state = msgspec.structs.replace(self.state, file=file)
        return _raw(self.state)

    async def keep(self, **changed: Any) -> None:
        """Store the state now; the attempt goes on."""
        state = msgspec.structs.replace(self.state, **changed)
        if state != self.state:
            self.state = state
            await self.track.save(self.track.done, None, state=_raw(state))

    async def rest(self, note: str | None, **changed: Any) -> None:
        """Store the state; the attempt ends."""
        self.state = msgspec.structs.replace(self.state, **changed)
        await self.track.rest(state=_raw(self.state), note=note)


def _api_url(export: ExportApi | None) -> Url | None:
    """Return where exports are created; None if the job describes no API. Templates have no values in the host."""
    try:
        return None if export is None else parse_url(export.create.url)
    except BadUrl:
        return None


def _link_in(export: ExportApi, answer: Any) -> str | None:
    """Return the link to the file in the response to `status`; None if the job describes a call."""
    if is_call(export.download) is not None:
        return None
    assert isinstance(export.download, str)
    return scalar(look_up(answer, export.download), "the link to the file")


def _raw(state: State) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(state))


def _body(template: Any, values: Values) -> tuple[bytes | None, Pairs]:
    """Return the body of a request and the header that goes with it."""
    if template is None:
        return None, ()
    if isinstance(template, str):
        return fill_text(template, values).encode(), ()
    return msgspec.json.encode(fill_json(template, values)), (("content-type", "application/json"),)
