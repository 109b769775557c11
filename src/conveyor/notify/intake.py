"""Intake: jobs that come in by queue, from a state machine that waits for them or from anybody who may send there.

A message is JSON, `{"job": {…}, "task_token": "…"}`, the job as it would be posted. It becomes a job once: under its
task token, or its own id where it has none. A message that can not become one goes to the dead letters, and who waits
for it is told why. While there is no room for its job it stays in the queue, and who waits gets a heartbeat.
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
from conveyor.engines.queue import Arrived, Inbox
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
# Longer than taking a job in can last.
_VISIBILITY = 60.0
_LONGEST_PAUSE = 60.0
# Deliveries after which a message that fails on our side, and not for want of room, is given up.
_TRIES = 20
# A message may come again for as long as SQS keeps it.
_KEEP_SECONDS = 15 * 86_400.0
_SEALED_FOR = "intake"
_NO_ROOM = (429, 503)


class IntakeMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is sent. All but the job is for a state machine that waits; `retry_count` is its own affair."""

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
        """What was received and not taken in comes again."""

    async def run_once(self) -> IntakePass:
        """Take in what is there now, a bounded part of each queue."""
        taken = IntakePass()
        for inbox in self._inboxes:
            if self.stopping:
                break
            arrived = await inbox.arrived(_AT_ONCE, _VISIBILITY)
            crashpoint("intake.receive.after")
            takes = [self._take(inbox, message, taken) for message in arrived]
            # One that fails does not keep the others out; it comes again.
            for came in await asyncio.gather(*takes, return_exceptions=True):
                if came is not None:
                    raise came
        return taken

    async def _take(self, inbox: Inbox, message: Arrived, taken: IntakePass) -> None:
        waits = _token_in(message.body)
        try:
            given = decode_body(message.body, IntakeMessage)
            spec = _spec_of(given)
            if await self._is_stale(message, given):
                log.info("nobody waits any more for a job that came in by queue", message=message.message_id)
                taken.stale += 1
                await inbox.done(message)
                return
            accepted = await self._submit.submit(self._tenant, spec, _request(message, given))
        except IdempotencyMismatch as error:
            # The token is another job's, and will be answered by that one.
            await self._bury(inbox, message, error, taken)
        except IdempotencyInFlight:
            await self._put_off(inbox, message, waits, self._in_flight, taken)
        except ConveyorError as error:
            if error.status in _NO_ROOM:
                await self._put_off(inbox, message, waits, _pause(message, error), taken)
            elif error.status < 500:
                await self._refuse(inbox, message, waits, INVALID_JOB, error, taken)
            else:
                await self._failed(inbox, message, waits, error, taken)
        except Exception as error:
            log.exception("a job that came in by queue could not be taken in", message=message.message_id)
            await self._failed(inbox, message, waits, error, taken)
        else:
            crashpoint("intake.job.after")
            await inbox.done(message)
            crashpoint("intake.done.after")
            if accepted.replayed:
                taken.again += 1
            else:
                taken.jobs += 1
                log.info("job came in by queue", job=accepted.subject, retry_count=given.retry_count)

    async def _is_stale(self, message: Arrived, given: IntakeMessage) -> bool:
        """Whether the state machine gave up while the message waited: it may have sent another since. One that has not
        waited long is not asked after."""
        if self._waiters is None or given.task_token is None or message.sent_at is None:
            return False
        patience = (given.heartbeat_seconds or self._heartbeat_seconds) / 2
        if self._clock.now() - message.sent_at < patience:
            return False
        return await self._heartbeat(self._waiters, given.task_token) is CallOutcome.GONE

    async def _put_off(
        self, inbox: Inbox, message: Arrived, token: str | None, pause: float, taken: IntakePass
    ) -> None:
        """Leave it in the queue. Who waits is told that it is not forgotten."""
        if self._waiters is not None and token is not None:
            await self._heartbeat(self._waiters, token)
        await inbox.put_off(message, pause)
        taken.put_off += 1

    async def _failed(
        self, inbox: Inbox, message: Arrived, token: str | None, error: Exception, taken: IntakePass
    ) -> None:
        if message.receives < _TRIES:
            await self._put_off(inbox, message, token, _pause(message, error), taken)
        else:
            await self._refuse(inbox, message, token, SUBMIT_FAILED, error, taken)

    async def _refuse(
        self, inbox: Inbox, message: Arrived, token: str | None, code: str, error: Exception, taken: IntakePass
    ) -> None:
        """Tell who waits, then give the message up: after a crash in between it is told once more, and not heard."""
        if self._waiters is not None and token is not None:
            sealed = self._waiters.seal(token, _SEALED_FOR)
            cause = msgspec.json.encode(_cause(error)).decode()
            crashpoint("intake.refuse.before")
            told = await self._waiters.fail(sealed, _SEALED_FOR, code, cause)
            crashpoint("intake.refuse.after")
            if told in (CallOutcome.LATER, CallOutcome.UNKNOWN):
                await inbox.put_off(message, _pause(message, error))
                taken.put_off += 1
                return
        await self._bury(inbox, message, error, taken)

    async def _bury(self, inbox: Inbox, message: Arrived, error: Exception, taken: IntakePass) -> None:
        log.warning("a message is no job", message=message.message_id, reason=str(error))
        await inbox.bury(message, str(error))
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


def _request(message: Arrived, given: IntakeMessage) -> IdempotentRequest:
    name = message.message_id if given.task_token is None else f"token:{given.task_token}"
    return IdempotentRequest(_ROUTE, sha256(name.encode()).hexdigest(), sha256(bytes(given.job)).hexdigest())


def _token_in(body: bytes) -> str | None:
    """The token of a message, whatever else is wrong with it."""
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


def _pause(message: Arrived, error: Exception) -> float:
    """What the refusal says, or twice as long each time."""
    after = error.details.get("retry_after") if isinstance(error, ConveyorError) else None
    if isinstance(after, int | float):
        return min(max(1.0, after), _LONGEST_PAUSE)
    return float(min(2 ** min(message.receives, 10), _LONGEST_PAUSE))
