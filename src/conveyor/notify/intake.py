"""Intake: accepts jobs from a queue, sent by a state machine that waits for them or by any other sender.

A message is JSON, `{"job": {…}, "task_token": "…"}`, with the body of POST /v1/jobs. It makes one job: its task
token, or its message id, is the idempotency key. An invalid message is dead-lettered, and the state machine gets an
error. While there is no capacity the message stays in the queue, and the state machine gets a heartbeat.
"""

import asyncio
import dataclasses
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import msgspec
import structlog

from conveyor.accept.spec import JobSpec, decode_body, decode_spec
from conveyor.accept.submit import Submit
from conveyor.auth.keys import check_tenant
from conveyor.engines.queue import Inbox, InboxMessage
from conveyor.engines.step_functions import CallOutcome, StepFunctions
from conveyor.errors import ConveyorError, IdempotencyInFlight, IdempotencyMismatch, InvalidField, InvalidSetting
from conveyor.faults import crashpoint
from conveyor.jobs.event_names import StepFunctionsNotify
from conveyor.jobs.idempotency import IdempotentRequest
from conveyor.model import TenantId
from conveyor.settings import Settings
from conveyor.system import System

log = structlog.get_logger()

INVALID_JOB = "INVALID_JOB"
SUBMIT_FAILED = "SUBMIT_FAILED"

_ROUTE = "intake"
_IDLE = 0.5
_AT_ONCE = 10
# Longer than accepting a job can take.
_VISIBILITY = 60.0
_LONGEST_PAUSE = 60.0
# Deliveries after which a message is dead-lettered that fails with a server error other than a lack of capacity.
_TRIES = 20
# SQS may redeliver a message for as long as it keeps it.
_KEEP_SECONDS = 15 * 86_400.0
_SEALED_FOR = "intake"
_NO_CAPACITY = (429, 503)


class IntakeMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message. All fields but `job` are for a waiting state machine; `retry_count` is only logged."""

    job: msgspec.Raw
    task_token: str | None = None
    heartbeat_seconds: float | None = None
    stuck_after: float | None = None
    export: str | None = None
    retry_count: int = 0


class IntakePass(msgspec.Struct):
    """What one pass did."""

    jobs: int = 0
    again: int = 0
    refused: int = 0
    stale: int = 0
    put_off: int = 0


class Intake:
    """A role."""

    def __init__(self, system: System) -> None:
        self.name = "intake"
        self.wake: Callable[[], None] = lambda: None
        self.stopping = False
        settings = system.settings
        self._tenant = _tenant(settings)
        self._inboxes = system.inboxes
        self._waiters = system.step_functions
        self._clock = system.clock
        self._heartbeat_seconds = settings.callback_heartbeat_seconds
        keep = max(settings.idempotency_seconds, _KEEP_SECONDS)
        remembering = msgspec.structs.replace(settings, idempotency_seconds=keep)
        self._in_flight = settings.idempotency_lease_seconds
        self._submit = Submit(dataclasses.replace(system, settings=remembering))

    async def tick(self) -> float:
        taken = await self.run_once()
        return _IDLE if taken == IntakePass() else 0.0

    async def close(self) -> None:
        """Messages in flight are redelivered."""

    async def run_once(self) -> IntakePass:
        """Accept the jobs in the queues, a bounded number from each."""
        taken = IntakePass()
        for inbox in self._inboxes:
            if self.stopping:
                break
            arrived = await inbox.receive(_AT_ONCE, _VISIBILITY)
            crashpoint("intake.receive.after")
            takes = [self._take(inbox, message, taken) for message in arrived]
            # A message that fails does not stop the others; it is redelivered.
            for came in await asyncio.gather(*takes, return_exceptions=True):
                if came is not None:
                    raise came
        return taken

    async def _take(self, inbox: Inbox, message: InboxMessage, taken: IntakePass) -> None:
        waits = _token_in(message.body)
        try:
            given = decode_body(message.body, IntakeMessage)
            spec = _spec_of(given)
            if await self._is_stale(message, given):
                log.info("nobody waits any more for a job that came in by queue", message=message.message_id)
                taken.stale += 1
                await inbox.ack(message)
                return
            accepted = await self._submit.submit(self._tenant, spec, _request(message, given))
        except IdempotencyMismatch as error:
            # The token belongs to another job, which will answer it.
            await self._bury(inbox, message, error, taken)
        except IdempotencyInFlight:
            await self._put_off(inbox, message, waits, self._in_flight, taken)
        except ConveyorError as error:
            if error.status in _NO_CAPACITY:
                await self._put_off(inbox, message, waits, _pause(message, error), taken)
            elif error.status < 500:
                await self._refuse(inbox, message, waits, INVALID_JOB, error, taken)
            else:
                await self._failed(inbox, message, waits, error, taken)
        except Exception as error:
            log.exception("job from the queue could not be accepted", message=message.message_id)
            await self._failed(inbox, message, waits, error, taken)
        else:
            crashpoint("intake.job.after")
            await inbox.ack(message)
            crashpoint("intake.done.after")
            if accepted.replayed:
                taken.again += 1
            else:
                taken.jobs += 1
                log.info("job accepted from the queue", job=accepted.subject, retry_count=given.retry_count)

    async def _is_stale(self, message: InboxMessage, given: IntakeMessage) -> bool:
        """Whether the state machine stopped waiting while the message was in the queue: it may have sent another since.
        A recent message is not checked."""
        if self._waiters is None or given.task_token is None or message.sent_at is None:
            return False
        patience = (given.heartbeat_seconds or self._heartbeat_seconds) / 2
        if self._clock.now() - message.sent_at < patience:
            return False
        return await self._heartbeat(self._waiters, given.task_token) is CallOutcome.GONE

    async def _put_off(
        self, inbox: Inbox, message: InboxMessage, token: str | None, pause: float, taken: IntakePass
    ) -> None:
        """Leave it in the queue, and send a heartbeat to the state machine."""
        if self._waiters is not None and token is not None:
            await self._heartbeat(self._waiters, token)
        await inbox.delay(message, pause)
        taken.put_off += 1

    async def _failed(
        self, inbox: Inbox, message: InboxMessage, token: str | None, error: Exception, taken: IntakePass
    ) -> None:
        if message.receives < _TRIES:
            await self._put_off(inbox, message, token, _pause(message, error), taken)
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
                await inbox.delay(message, _pause(message, error))
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


def _spec_of(given: IntakeMessage) -> JobSpec:
    spec = decode_spec(bytes(given.job))
    if given.task_token is None:
        return spec
    entry = StepFunctionsNotify(given.task_token, given.heartbeat_seconds, given.stuck_after, given.export)
    return msgspec.structs.replace(spec, notify=[*spec.notify, entry])


def _request(message: InboxMessage, given: IntakeMessage) -> IdempotentRequest:
    name = message.message_id if given.task_token is None else f"token:{given.task_token}"
    return IdempotentRequest(_ROUTE, sha256(name.encode()).hexdigest(), sha256(bytes(given.job)).hexdigest())


def _token_in(body: bytes) -> str | None:
    """The token of a message, even if the rest is invalid."""
    try:
        value: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None
    token = value.get("task_token") if isinstance(value, dict) else None
    return token if isinstance(token, str) and token else None


def _cause(error: Exception) -> dict[str, str]:
    if isinstance(error, ConveyorError):
        return {"code": error.code, "reason": error.message}
    return {"code": "internal_error", "reason": type(error).__name__}


def _pause(message: InboxMessage, error: Exception) -> float:
    """The `retry_after` of the refusal, or a backoff that doubles."""
    after = error.details.get("retry_after") if isinstance(error, ConveyorError) else None
    if isinstance(after, int | float):
        return min(max(1.0, after), _LONGEST_PAUSE)
    return float(min(2 ** min(message.receives, 10), _LONGEST_PAUSE))
