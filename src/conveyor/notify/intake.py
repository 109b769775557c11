"""Intake: accepts jobs from a queue, sent by a state machine that waits for them or by any other sender.

A message is JSON, `{"job": {…}, "task_token": "…"}`, with the body of POST /v1/jobs. It makes one job: its task
token, or its message id, is the idempotency key. An invalid message is dead-lettered, and the state machine gets an
error. While there is no capacity the message stays in the queue, and the state machine gets heartbeats.

The first queue has priority: a batch comes from the first queue that has messages, but a queue that several batches
have passed by goes first once.
"""

import asyncio
import dataclasses
from collections.abc import Callable
from enum import StrEnum
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec
import structlog

from conveyor.accept.replace import INTAKE_ROUTE, Replace, check_replaces, intake_key
from conveyor.accept.spec import JobSpec, decode_body, decode_spec
from conveyor.accept.submit import Submit
from conveyor.accept.subscriptions import check_notify
from conveyor.auth.keys import check_tenant
from conveyor.engines.queue import Inbox, InboxMessage
from conveyor.engines.step_functions import CallOutcome, StepFunctions
from conveyor.errors import (
    AlreadyReplaced,
    ConveyorError,
    IdempotencyInFlight,
    IdempotencyMismatch,
    InvalidField,
    InvalidSetting,
    ReplacementInFlight,
)
from conveyor.faults import crashpoint
from conveyor.jobs.event_names import StepFunctionsNotify
from conveyor.jobs.idempotency import IdempotentRequest
from conveyor.model import JobId, TenantId
from conveyor.notify.callback_answers import StepAnswers
from conveyor.settings import Settings
from conveyor.states import RunState
from conveyor.system import System

log = structlog.get_logger()

INVALID_JOB = "INVALID_JOB"
SUBMIT_FAILED = "SUBMIT_FAILED"

_IDLE = 0.5
# The semaphore that all intakes share, and seconds after which the permits of one that died expire.
ROLE = "role:intake"
_PERMIT_SECONDS = 60.0
# Longer than accepting a job can take.
_VISIBILITY = 60.0
_LONGEST_PAUSE = 60.0
# Failures after which a message is dead-lettered that fails with a server error other than a lack of capacity.
_TRIES = 20
# The part of HeartbeatSeconds after which a message that waits for capacity is received again for a heartbeat.
_BEAT = 0.4
# SQS may redeliver a message for as long as it keeps it.
_KEEP_SECONDS = 15 * 86_400.0
_SEALED_FOR = "intake"
_NO_CAPACITY = (429, 503)


class Takeover(StrEnum):
    """How a message takes over the job that it replaces."""

    CANCEL = "cancel"
    ATTACH = "attach"


class IntakeMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message. `idempotency_key` and `replaces` are as for POST /v1/jobs; the other fields but `job` are for a
    waiting state machine; `retry_count` is only logged."""

    job: msgspec.Raw
    task_token: str | None = None
    heartbeat_seconds: float | None = None
    stuck_after: float | None = None
    export: str | None = None
    retry_count: int = 0
    idempotency_key: str | None = None
    replaces: str | None = None
    # What to do with the job that is replaced, if it is still running or has completed: cancel it, or attach the task
    # token to it and make no job.
    takeover: Takeover = Takeover.CANCEL

    @property
    def entry(self) -> StepFunctionsNotify | None:
        """The state machine that waits."""
        if self.task_token is None:
            return None
        return StepFunctionsNotify(self.task_token, self.heartbeat_seconds, self.stuck_after, self.export)


class IntakePass(msgspec.Struct):
    """What one pass did."""

    jobs: int = 0
    again: int = 0
    refused: int = 0
    stale: int = 0
    put_off: int = 0
    # Task tokens that were attached to jobs that exist.
    attached: int = 0


class IntakeBatch(NamedTuple):
    """Messages of one queue."""

    inbox: Inbox
    messages: list[InboxMessage]


class Intake:
    """A role."""

    def __init__(self, system: System) -> None:
        self.name = "intake"
        self.wake: Callable[[], None] = lambda: None
        self.stopping = False
        settings = system.settings
        self._tenant = _tenant(settings)
        self._inboxes = system.inboxes
        self._coordinator = system.coordinator
        self._holder = system.clock.new_id("intake")
        self._batch_size = settings.intake_batch_size
        self._concurrency = settings.intake_concurrency
        self._ratio = settings.intake_priority_ratio
        self._delay_seconds = settings.intake_delay_seconds
        # Batches that queues of higher priority took since the last batch of each queue.
        self._passed_by = [0] * len(system.inboxes)
        self._waiters = system.step_functions
        self._clock = system.clock
        self._heartbeat_seconds = settings.callback_heartbeat_seconds
        keep = max(settings.idempotency_seconds, _KEEP_SECONDS)
        remembering = msgspec.structs.replace(settings, idempotency_seconds=keep)
        self._in_flight = settings.idempotency_lease_seconds
        self._system = system
        self._submit = Submit(dataclasses.replace(system, settings=remembering))
        self._replace = Replace(system)
        self._answers = StepAnswers(system)

    async def tick(self) -> float:
        taken = await self.run_once()
        return _IDLE if taken == IntakePass() else 0.0

    async def close(self) -> None:
        """Messages in flight are redelivered."""

    async def run_once(self) -> IntakePass:
        """Accept the jobs in the queues, a bounded number of batches at once."""
        taken = IntakePass()
        empty: set[int] = set()
        batch = await self._next_batch(empty)
        if batch is None:
            return taken
        batches = [batch]
        try:
            permits = await self._coordinator.acquire(
                ROLE, self._holder, self._concurrency, self._concurrency, _PERMIT_SECONDS
            )
            if permits == 0:
                # Other intakes have all of them.
                await asyncio.gather(*(batch.inbox.delay(message, _IDLE) for message in batch.messages))
                return taken
            while len(batches) < permits and (batch := await self._next_batch(empty)) is not None:
                batches.append(batch)
            takes = [self._take(batch.inbox, message, taken) for batch in batches for message in batch.messages]
            # A message that fails does not stop the others; it is redelivered.
            for came in await asyncio.gather(*takes, return_exceptions=True):
                if came is not None:
                    raise came
        finally:
            await self._coordinator.acquire(ROLE, self._holder, 0, self._concurrency, _PERMIT_SECONDS)
        return taken

    async def _next_batch(self, empty: set[int]) -> IntakeBatch | None:
        """A batch from the first queue that has messages. A queue that enough batches passed by goes before."""
        numbers = [number for number in range(len(self._inboxes)) if number not in empty]
        overdue = [number for number in numbers if self._passed_by[number] >= self._ratio]
        for number in [*overdue, *(number for number in numbers if number not in overdue)]:
            if self.stopping:
                return None
            inbox = self._inboxes[number]
            arrived = await inbox.receive(self._batch_size, _VISIBILITY)
            crashpoint("intake.receive.after")
            self._passed_by[number] = 0
            if arrived:
                for lower in range(number + 1, len(self._inboxes)):
                    self._passed_by[lower] += 1
                return IntakeBatch(inbox, arrived)
            empty.add(number)
        return None

    async def _take(self, inbox: Inbox, message: InboxMessage, taken: IntakePass) -> None:
        waits = _token_in(message.body)
        if message.receives > 1 and (until := await self._put_off_until(message)) > self._clock.now():
            await self._put_off(inbox, message, waits, until - self._clock.now(), taken)
            return
        try:
            await self._accept(inbox, message, taken)
        except IdempotencyMismatch as error:
            if _value_in(message.body, "idempotency_key") is None:
                # The token belongs to another job, which will answer it.
                await self._bury(inbox, message, error, taken)
            else:
                await self._refuse(inbox, message, waits, INVALID_JOB, error, taken)
        except AlreadyReplaced:
            await self._drop_stale(inbox, message, taken)
        except (IdempotencyInFlight, ReplacementInFlight):
            await self._put_off(inbox, message, waits, self._in_flight, taken)
        except ConveyorError as error:
            if error.status in _NO_CAPACITY:
                await self._put_off(inbox, message, waits, self._delay_seconds, taken)
            elif error.status < 500:
                await self._refuse(inbox, message, waits, INVALID_JOB, error, taken)
            else:
                await self._failed(inbox, message, waits, error, taken)
        except Exception as error:
            log.exception("job from the queue could not be accepted", message=message.message_id)
            await self._failed(inbox, message, waits, error, taken)

    async def _accept(self, inbox: Inbox, message: InboxMessage, taken: IntakePass) -> None:
        order = decode_body(message.body, IntakeMessage)
        spec = _spec_of(order)
        await self._check(order)
        if await self._is_stale(message, order):
            await self._drop_stale(inbox, message, taken)
            return
        if await self._attach(order):
            await inbox.ack(message)
            taken.attached += 1
            return
        request = _request(message, order)
        if order.idempotency_key is None:
            accepted = await self._submit.submit(self._tenant, spec, request)
        else:
            accepted = await self._submit.submit_untaken(self._tenant, spec, request, order.idempotency_key)
        crashpoint("intake.job.after")
        await self._attach_to(JobId(accepted.subject), order)
        await inbox.ack(message)
        crashpoint("intake.done.after")
        if accepted.replayed:
            taken.again += 1
        else:
            taken.jobs += 1
            log.info("job accepted from the queue", job=accepted.subject, retry_count=order.retry_count)

    async def _check(self, order: IntakeMessage) -> None:
        """Check the fields beside `job`, of which not all become part of the job."""
        check_replaces(order.replaces)
        check_replaces(order.idempotency_key, "idempotency_key")
        if order.entry is not None:
            await check_notify(self._system, self._tenant, [order.entry])

    async def _is_stale(self, message: InboxMessage, order: IntakeMessage) -> bool:
        """Whether the state machine stopped waiting while the message was in the queue: it may have sent another since.
        A recent message is not checked."""
        if self._waiters is None or order.task_token is None:
            return False
        if not self._is_old(message, order.heartbeat_seconds or self._heartbeat_seconds):
            return False
        return await self._heartbeat(self._waiters, order.task_token) is CallOutcome.GONE

    async def _attach(self, order: IntakeMessage) -> bool:
        """Attach the token to the job that the message would replace, if it wants that and the job is not lost."""
        if order.replaces is None or order.takeover is not Takeover.ATTACH or order.entry is None:
            return False
        job = await self._replace.holder(self._tenant, order.replaces)
        if job is None or job.state in (RunState.FAILED, RunState.CANCELLED):
            return False
        await self._answers.attach(job, order.entry)
        log.info("task token attached to the job that it waits for", job=job.job_id, retry_count=order.retry_count)
        return True

    async def _attach_to(self, job_id: JobId, order: IntakeMessage) -> None:
        """Attach the token of a message with an idempotency key to the job under that key: another message, with
        another token, may have made it."""
        if order.idempotency_key is None or order.entry is None:
            return
        job = await self._system.records.jobs.job(self._tenant, job_id)
        if job is not None:
            await self._answers.attach(job, order.entry)

    def _is_old(self, message: InboxMessage, heartbeat_seconds: float) -> bool:
        """Whether the state machine may have stopped waiting for it."""
        return message.sent_at is not None and self._clock.now() - message.sent_at >= heartbeat_seconds / 2

    async def _put_off(
        self, inbox: Inbox, message: InboxMessage, token: str | None, pause: float, taken: IntakePass
    ) -> None:
        """Leave it in the queue, and send a heartbeat to the state machine. If the pause is longer than the state
        machine waits for a heartbeat, the message is received in between for the next one."""
        if self._waiters is None or token is None:
            await inbox.delay(message, pause)
            taken.put_off += 1
            return
        outcome = await self._heartbeat(self._waiters, token)
        patience = _heartbeat_in(message.body, self._heartbeat_seconds)
        if outcome is CallOutcome.GONE and self._is_old(message, patience):
            await self._drop_stale(inbox, message, taken)
            return
        beat = max(1.0, _BEAT * patience)
        if pause > beat:
            until = self._clock.now() + pause
            await self._coordinator.cache(_pause_key(message), str(until).encode(), pause + _VISIBILITY)
        await inbox.delay(message, min(pause, beat))
        taken.put_off += 1

    async def _put_off_until(self, message: InboxMessage) -> float:
        return float(await self._coordinator.cached(_pause_key(message)) or 0.0)

    async def _drop_stale(self, inbox: Inbox, message: InboxMessage, taken: IntakePass) -> None:
        log.info("no state machine waits for this message any more", message=message.message_id)
        taken.stale += 1
        await inbox.ack(message)

    async def _failed(
        self, inbox: Inbox, message: InboxMessage, token: str | None, error: Exception, taken: IntakePass
    ) -> None:
        # Not its deliveries: a message that waited for capacity has many.
        counts = await self._coordinator.add_counters(f"intake:failed:{message.message_id}", {"": 1}, _KEEP_SECONDS)
        failures = counts[""]
        if failures < _TRIES:
            await self._put_off(inbox, message, token, _pause(failures, error), taken)
        else:
            await self._refuse(inbox, message, token, SUBMIT_FAILED, error, taken)

    async def _refuse(
        self, inbox: Inbox, message: InboxMessage, token: str | None, code: str, error: Exception, taken: IntakePass
    ) -> None:
        """Answer the state machine, then dead-letter the message. After a crash, it ignores the second answer."""
        if self._waiters is not None and token is not None:
            sealed = self._waiters.seal(token, _SEALED_FOR)
            cause = msgspec.json.encode(_cause(error)).decode()
            crashpoint("intake.refuse.before")
            outcome = await self._waiters.fail(sealed, _SEALED_FOR, code, cause)
            crashpoint("intake.refuse.after")
            if outcome in (CallOutcome.LATER, CallOutcome.UNKNOWN):
                await inbox.delay(message, _pause(message.receives, error))
                taken.put_off += 1
                return
        await self._bury(inbox, message, error, taken)

    async def _bury(self, inbox: Inbox, message: InboxMessage, error: Exception, taken: IntakePass) -> None:
        log.warning("invalid message in the queue", message=message.message_id, reason=str(error))
        await inbox.dead_letter(message, str(error))
        crashpoint("intake.bury.after")
        taken.refused += 1

    async def _heartbeat(self, waiters: StepFunctions, token: str) -> CallOutcome:
        return await waiters.heartbeat(waiters.seal(token, _SEALED_FOR), _SEALED_FOR)


def _tenant(settings: Settings) -> TenantId:
    try:
        return check_tenant(settings.intake_tenant)
    except InvalidField as error:
        raise InvalidSetting(f"CONVEYOR_INTAKE_TENANT: {error.message}") from None


def _spec_of(order: IntakeMessage) -> JobSpec:
    spec = decode_spec(bytes(order.job))
    if order.replaces is not None:
        spec = msgspec.structs.replace(spec, replaces=order.replaces)
    if order.entry is None or order.idempotency_key is not None:
        return spec
    return msgspec.structs.replace(spec, notify=[*spec.notify, order.entry])


def _request(message: InboxMessage, order: IntakeMessage) -> IdempotentRequest:
    fingerprint = sha256(bytes(order.job)).hexdigest()
    if order.idempotency_key is not None:
        return IdempotentRequest(INTAKE_ROUTE, intake_key(order.idempotency_key), fingerprint)
    name = message.message_id if order.task_token is None else f"token:{order.task_token}"
    return IdempotentRequest(INTAKE_ROUTE, sha256(name.encode()).hexdigest(), fingerprint)


def _token_in(body: bytes) -> str | None:
    """The token of a message, even if the rest is invalid."""
    token = _value_in(body, "task_token")
    return token if isinstance(token, str) and token else None


def _heartbeat_in(body: bytes, default: float) -> float:
    """The HeartbeatSeconds of a message."""
    seconds = _value_in(body, "heartbeat_seconds")
    return float(seconds) if isinstance(seconds, int | float) and seconds > 0 else default


def _value_in(body: bytes, name: str) -> Any:
    try:
        value: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None
    return value.get(name) if isinstance(value, dict) else None


def _pause_key(message: InboxMessage) -> str:
    return f"intake:put-off:{message.message_id}"


def _cause(error: Exception) -> dict[str, str]:
    if isinstance(error, ConveyorError):
        return {"code": error.code, "reason": error.message}
    return {"code": "internal_error", "reason": type(error).__name__}


def _pause(failures: int, error: Exception) -> float:
    """The `retry_after` of the refusal, or a backoff that doubles."""
    after = error.details.get("retry_after") if isinstance(error, ConveyorError) else None
    if isinstance(after, int | float):
        return min(max(1.0, after), _LONGEST_PAUSE)
    return float(min(2 ** min(failures, 10), _LONGEST_PAUSE))
