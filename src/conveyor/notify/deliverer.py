"""Deliverer: takes deliveries that are due, each with a lease on its document, makes one attempt, and records its
outcome. 2xx is success; 410 disables the endpoint; anything else is retried with backoff, and fails after the last
retry. A delivery to a state machine or an event bus is a call of AWS instead of a request, and otherwise the same.

No redirect is followed, and every attempt passes the target guard. Each lane (an endpoint, or the origin or ARN that a
job named) has a limited number of attempts in progress, and so has each tenant: a slow receiver delays no other. The
first attempts for the events of one job at one receiver are made one after the other, in the order in which they are
due; a retry holds nothing back.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.coordination.buckets import ALL_BUCKETS, Buckets
from conveyor.coordination.isolation import Isolation
from conveyor.coordination.parallel import at_once
from conveyor.egress.outbound import Outbound, OutboundFailed
from conveyor.egress.responses import retry_after
from conveyor.engines.event_targets import EventMessage, EventTargets, NoEventTargets, SendOutcome
from conveyor.engines.records import Document, Records
from conveyor.errors import EventTargetRefused
from conveyor.faults import crashpoint
from conveyor.jobs.event_names import NOTIFY, WEBHOOK, WebhookNotify, notify_of, target_arn
from conveyor.model import JobId, TenantId
from conveyor.notify.deliveries import (
    DELIVERY,
    LOGGED,
    MAX_ANSWER,
    DeliveryAttempt,
    DeliveryStatus,
    WebhookDelivery,
    delivery_of,
    event_time,
    receiver_of,
)
from conveyor.notify.signatures import signed_headers, tenant_secret
from conveyor.notify.webhooks import Endpoint, change_endpoint, endpoint_of, valid_secrets
from conveyor.settings import Settings
from conveyor.telemetry import metrics, traces

log = structlog.get_logger()

GONE = 410

_IDLE = 0.5
_BUSY = 0.02
_WINDOW = 200
_LEASE_MARGIN = 15.0
_CLOSE_SECONDS = 5.0
# The longest wait that a receiver may ask for, and the longest time for which a delivery of a full lane is postponed.
_LONGEST_WAIT = 86_400.0
_LONGEST_DEFERRAL = 300.0
_JITTER = 0.2
# What a delivery of a lane is taken to last that none runs in.
_UNKNOWN = 0.5

LaneKey = tuple[TenantId, str]
# A receiver and a job. Its deliveries take turns at their first attempts.
Turn = tuple[TenantId, str, JobId | None]


class Target(msgspec.Struct, frozen=True):
    """The URL of a delivery, and the secrets that sign it."""

    url: str
    secrets: list[str]
    # Whether the last attempt at this endpoint failed.
    is_failing: bool = False


class AwsTarget(msgspec.Struct, frozen=True):
    """The state machine or the event bus of a delivery."""

    arn: str


def longest_pause(settings: Settings) -> float:
    """For how many seconds a delivery waits at most."""
    retries = [float(text) * (1 + _JITTER) for text in settings.webhook_retries.split()]
    return max(*retries, _LONGEST_WAIT, _LONGEST_DEFERRAL, settings.webhook_timeout + _LEASE_MARGIN)


class EndpointLane(msgspec.Struct):
    """The deliveries that share a concurrency limit."""

    running: int = 0
    # The moving average of how long a delivery is in progress, and when the last one ended, or the first one began.
    seconds: float = 0.0
    moved_at: float = 0.0
    # When the last postponed delivery is due.
    deferred_to: float = 0.0


class Deliverer:
    """A role. Several share the work."""

    def __init__(
        self,
        settings: Settings,
        records: Records,
        clock: Clock,
        signing_key: bytes,
        outbound: Outbound,
        event_targets: EventTargets | None = None,
        buckets: Buckets = ALL_BUCKETS,
    ) -> None:
        self.name = "deliverer"
        self.wake: Callable[[], None] = lambda: None
        self.stopping = False
        self._settings = settings
        self._records = records
        self._clock = clock
        self._key = signing_key
        self._outbound = outbound
        self._event_targets = event_targets or NoEventTargets()
        self._isolation = Isolation(self.name, clock, buckets)
        self._pauses = [float(text) for text in settings.webhook_retries.split()]
        # No tenant gets all slots, however many endpoints it has.
        self._share = max(settings.webhook_concurrency, settings.webhook_slots // 4)
        self._lanes: dict[LaneKey, EndpointLane] = {}
        self._running: dict[asyncio.Task[None], tuple[TenantId, str]] = {}
        # Turns of first attempts in progress.
        self._turns: set[Turn] = set()
        # More were due than could be started: look again when one finishes.
        self._more = False

    async def tick(self) -> float:
        """Start deliveries that are due, as far as there are slots."""
        limit = _WINDOW + self._isolation.skipped
        window = await self._records.documents.due_documents(DELIVERY, self._clock.now(), limit)
        in_progress = set(self._running.values())
        shares = Counter(tenant for tenant, _ in in_progress)
        waiting: dict[LaneKey, list[Document]] = {}
        taken = set(self._turns)
        started = 0
        # By receiver, so that one process keeps the limit of an endpoint.
        for row in self._isolation.own(window, _name, receiver_of):
            if (row.tenant, row.id) in in_progress:
                continue
            if len(self._running) >= self._settings.webhook_slots:
                break
            delivery = await self._decoded(row)
            if delivery is None:
                continue
            key, turn = (row.tenant, delivery.lane), _turn(row, delivery)
            lane = self._lanes.setdefault(key, EndpointLane())
            is_full = lane.running >= self._settings.webhook_concurrency or shares[row.tenant] >= self._share
            if is_full or turn in taken:
                waiting.setdefault(key, []).append(row)
            else:
                self._start(row, key, lane, turn)
                shares[row.tenant] += 1
                started += 1
            if turn is not None:
                # Whether it starts or waits: those after it wait for it.
                taken.add(turn)
        full = len(window) == limit
        self._more = full or bool(waiting) or len(self._running) >= self._settings.webhook_slots
        if full and not started:
            await self._defer(waiting)
        return _BUSY if started else _IDLE

    async def close(self) -> None:
        """Attempts in progress have a few seconds to finish; the rest is delivered again when their leases expire."""
        if self._running:
            _, late = await asyncio.wait(set(self._running), timeout=_CLOSE_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._outbound.close()

    async def _decoded(self, row: Document) -> WebhookDelivery | None:
        """The delivery; None for a document that cannot be decoded, which is then never due again."""
        try:
            return delivery_of(row)
        except msgspec.MsgspecError as error:
            log.error("delivery cannot be decoded", tenant=row.tenant, delivery=row.id, error=str(error))
            await self._records.documents.replace_document(msgspec.structs.replace(row, due_at=None))
            return None

    def _start(self, row: Document, key: LaneKey, lane: EndpointLane, turn: Turn | None) -> None:
        began = self._clock.monotonic()
        if lane.running == 0:
            lane.moved_at = began
        lane.running += 1
        if turn is not None:
            self._turns.add(turn)
        task = asyncio.create_task(self._deliver(row), name=f"deliver {row.id}")
        self._running[task] = (row.tenant, row.id)
        task.add_done_callback(lambda task: self._ended(task, key, lane, turn, began))

    def _ended(
        self, task: asyncio.Task[None], key: LaneKey, lane: EndpointLane, turn: Turn | None, began: float
    ) -> None:
        lane.moved_at = self._clock.monotonic()
        lane.seconds += (lane.moved_at - began - lane.seconds) / 4
        self._running.pop(task, None)
        if turn is not None:
            self._turns.discard(turn)
        lane.running -= 1
        if lane.running == 0 and lane.deferred_to <= self._clock.now():
            self._lanes.pop(key, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the engine fails for all deliveries", exc_info=error)
        if self._more:
            self.wake()

    async def _deliver(self, row: Document) -> None:
        """One attempt. If it raises, the delivery is retried after a pause, or when its lease expires."""
        with self._isolation.item(_name(row)):
            await self._attempt(row)

    async def _attempt(self, row: Document) -> None:
        """Claim, send, record."""
        if row.expires_at is not None and row.expires_at <= self._clock.now():
            await self._records.documents.remove_document(row)
            return
        claimed = await self._claim(row)
        if claimed is None:
            return
        target = await self._target(claimed)
        if target is None:
            # The receiver was removed.
            await self._records.documents.remove_document(claimed)
            return
        if isinstance(target, str):
            await self._fail(claimed, DeliveryAttempt(self._clock.now(), 0.0, error=target))
            return
        if isinstance(target, AwsTarget):
            attempt, wait = await self._send(claimed, target), 0.0
        else:
            attempt, wait = await self._try(delivery_of(claimed), target)
        _measure(claimed, attempt)
        crashpoint("delivery.sent.after")
        if isinstance(target, Target) and attempt.status == GONE:
            await self._disable(claimed)
            await self._fail(claimed, attempt)
        else:
            await self._record(claimed, attempt, wait)
        if isinstance(target, Target) and target.is_failing != (attempt.error is not None):
            await self._note_health(claimed, attempt)

    async def _claim(self, row: Document) -> Document | None:
        """Lease it for as long as an attempt can take; None if another deliverer was first."""
        until = self._clock.now() + self._settings.webhook_timeout + _LEASE_MARGIN
        crashpoint("delivery.claim.before")
        claimed = await self._records.documents.replace_document(msgspec.structs.replace(row, due_at=until))
        crashpoint("delivery.claim.after")
        return claimed

    async def _target(self, row: Document) -> Target | AwsTarget | str | None:
        """Where it goes; None if the receiver was removed, an error code if it is disabled."""
        receiver = receiver_of(row)
        if receiver.startswith("job_"):
            named = await self._records.documents.document(NOTIFY, row.tenant, receiver)
            if named is None:
                return None
            entry = notify_of(named)
            if not isinstance(entry, WebhookNotify):
                return AwsTarget(target_arn(entry))
            return None if entry.url is None else Target(entry.url, [tenant_secret(self._key, row.tenant)])
        document = await self._records.documents.document(WEBHOOK, row.tenant, receiver)
        if document is None:
            return None
        endpoint = endpoint_of(document)
        if endpoint.disabled:
            return "endpoint_disabled"
        secrets = valid_secrets(self._key, row.tenant, receiver, endpoint, self._clock.now())
        return Target(endpoint.url, secrets, endpoint.failing_since is not None)

    async def _try(self, delivery: WebhookDelivery, target: Target) -> tuple[DeliveryAttempt, float]:
        """The outcome, and the wait in seconds that the receiver asked for."""
        at, started = self._clock.now(), self._clock.monotonic()
        body = delivery.payload.encode()
        headers = [
            ("content-type", "application/json"),
            *signed_headers(target.secrets, delivery.event_id, int(at), body),
        ]
        status: int | None = None
        error: str | None = None
        said: str | None = None
        wait = 0.0
        try:
            reply = await self._outbound.post(target.url, headers, body, self._settings.webhook_timeout)
            status = reply.status
            wait = min(retry_after(reply.retry_after, at) or 0.0, _LONGEST_WAIT)
            error = None if _is_success(status) else f"http_{status}"
            said = reply.body[: 4 * MAX_ANSWER].decode(errors="replace")[:MAX_ANSWER] or None
        except OutboundFailed as failed:
            error = failed.code
        return DeliveryAttempt(at, self._clock.monotonic() - started, status, error, said), wait

    async def _send(self, row: Document, target: AwsTarget) -> DeliveryAttempt:
        """Call the state machine or the event bus. Whether the tenant may use it is checked in each attempt."""
        at, started = self._clock.now(), self._clock.monotonic()
        try:
            async with asyncio.timeout(self._settings.webhook_timeout):
                outcome = await self._event_targets.send(row.tenant, target.arn, _message(delivery_of(row)))
        except EventTargetRefused as refused:
            outcome = SendOutcome(error=refused.code)
        except TimeoutError:
            outcome = SendOutcome(error="timeout")
        return DeliveryAttempt(at, self._clock.monotonic() - started, outcome.status, outcome.error)

    async def _record(self, row: Document, attempt: DeliveryAttempt, wait: float) -> None:
        delivery = _with(delivery_of(row), attempt)
        if attempt.error is None:
            await self._write(row, msgspec.structs.replace(delivery, standing=DeliveryStatus.DELIVERED), None)
            return
        if delivery.tries > len(self._pauses):
            metrics.WEBHOOKS_FAILED.add(1)
            log.info("webhook delivery failed", tenant=row.tenant, delivery=row.id, tries=delivery.tries)
            await self._write(row, msgspec.structs.replace(delivery, standing=DeliveryStatus.FAILED), None)
            return
        spread = 1 - _JITTER + 2 * _JITTER * self._clock.jitter()
        pause = max(self._pauses[delivery.tries - 1] * spread, wait)
        await self._write(row, delivery, self._clock.now() + pause)

    async def _fail(self, row: Document, attempt: DeliveryAttempt) -> None:
        metrics.WEBHOOKS_FAILED.add(1)
        delivery = _with(delivery_of(row), attempt)
        await self._write(row, msgspec.structs.replace(delivery, standing=DeliveryStatus.FAILED), None)

    async def _write(self, row: Document, delivery: WebhookDelivery, due_at: float | None) -> None:
        """Write the outcome, unless another deliverer has claimed the document or a redelivery was requested."""
        crashpoint("delivery.record.before")
        body = msgspec.json.encode(delivery)
        await self._records.documents.replace_document(msgspec.structs.replace(row, body=body, due_at=due_at))
        crashpoint("delivery.record.after")

    async def _disable(self, row: Document) -> None:
        receiver = receiver_of(row)
        log.info("webhook endpoint is gone", tenant=row.tenant, receiver=receiver)
        if receiver.startswith("job_"):
            named = await self._records.documents.document(NOTIFY, row.tenant, receiver)
            if named is not None:
                # Its job has no other use for it.
                await self._records.documents.remove_document(named)
            return
        await change_endpoint(self._records, row.tenant, receiver, _gone)

    async def _note_health(self, row: Document, attempt: DeliveryAttempt) -> None:
        """Note on the endpoint that it began to fail, or works again: only then, not in each attempt. Where attempts
        at the same time note the same, one write is enough; a note that is lost is made by the next attempt."""
        document = await self._records.documents.document(WEBHOOK, row.tenant, receiver_of(row))
        if document is None:
            return
        endpoint = endpoint_of(document)
        if (endpoint.failing_since is None) == (attempt.error is None):
            return
        since = None if attempt.error is None else attempt.at
        noted = msgspec.structs.replace(endpoint, failing_since=since, last_error=attempt.error)
        body = msgspec.json.encode(noted)
        await self._records.documents.replace_document(msgspec.structs.replace(document, body=body))

    async def _defer(self, waiting: dict[LaneKey, list[Document]]) -> None:
        """Full lanes fill the page: postpone their deliveries until a slot is likely to be free, so that the next page
        has others. Those that a lane can start within a few seconds stay."""
        now, concurrency = self._clock.now(), self._settings.webhook_concurrency
        deferred: list[Document] = []
        for key, rows in waiting.items():
            lane = self._lanes.setdefault(key, EndpointLane())
            # One that answers nothing is as slow as it has been silent; of one that may not start nothing is known.
            silent = self._clock.monotonic() - lane.moved_at if lane.running else _UNKNOWN
            interval = max(lane.seconds, silent, 0.001) / concurrency
            for row in rows[max(concurrency, int(_IDLE * 4 / interval)) :]:
                lane.deferred_to = min(max(lane.deferred_to, now) + interval, now + _LONGEST_DEFERRAL)
                deferred.append(msgspec.structs.replace(row, due_at=lane.deferred_to))
        await at_once(deferred, self._postpone)

    async def _postpone(self, row: Document) -> None:
        with self._isolation.item(_name(row)):
            await self._records.documents.replace_document(row)


def _name(row: Document) -> str:
    return f"{row.tenant} {row.id}"


def _turn(row: Document, delivery: WebhookDelivery) -> Turn | None:
    """The turn of a first attempt; None for a retry."""
    return None if delivery.attempts else (row.tenant, receiver_of(row), row.job_id)


def _message(delivery: WebhookDelivery) -> EventMessage:
    return EventMessage(delivery.event_id, delivery.event, event_time(delivery), delivery.payload)


def _measure(row: Document, attempt: DeliveryAttempt) -> None:
    metrics.WEBHOOKS.add(1, "delivered" if attempt.error is None else metrics.family_of(attempt.error))
    metrics.WEBHOOK_SECONDS.observe(attempt.seconds)
    if row.job_id is not None:
        ended, event = attempt.at + attempt.seconds, {"conveyor.event": delivery_of(row).event}
        traces.span("webhook", row.job_id, None, attempt.at, ended, event, error=attempt.error)


def _with(delivery: WebhookDelivery, attempt: DeliveryAttempt) -> WebhookDelivery:
    earlier = [msgspec.structs.replace(each, answer=None) for each in delivery.log]
    log_: Sequence[DeliveryAttempt] = [*earlier, attempt][-LOGGED:]
    return msgspec.structs.replace(delivery, tries=delivery.tries + 1, attempts=delivery.attempts + 1, log=log_)


def _gone(endpoint: Endpoint) -> Endpoint:
    return msgspec.structs.replace(endpoint, disabled=True, reason=f"it answered {GONE}: gone")


def _is_success(status: int) -> bool:
    return 200 <= status < 300
