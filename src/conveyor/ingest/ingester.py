"""Ingester: takes messages from the control queue, splits lists and ingests ranges, each under a lease."""

from collections.abc import Callable

import msgspec
import structlog

from conveyor.engines.coordinator import Coordinator, Lease, ingest_lease
from conveyor.engines.queue import CONTROL, Delivery
from conveyor.errors import BadInput, ListUnreadable
from conveyor.faults import crashpoint
from conveyor.ingest.pipeline import IngestPipeline
from conveyor.ingest.plan import LeaseLostError
from conveyor.model import INGEST_FAILED, IngestJob, IngestRange, Job, resumable
from conveyor.states import ENDED, ReasonCode, RunState
from conveyor.telemetry import traces
from conveyor.telemetry.redact import redacted

log = structlog.get_logger()

LEASE_SECONDS = 60.0

_IDLE = 0.1
_BUSY_ELSEWHERE = 2.0
_TRIES = 5
_FIRST_PAUSE = 1.0

Message = IngestJob | IngestRange

_messages = msgspec.json.Decoder(Message)


class Ingester:
    """A role; one message at a time. Several share the work."""

    def __init__(self, ingest: IngestPipeline, coordinator: Coordinator, name: str) -> None:
        self.name = name
        self.wake: Callable[[], None] = lambda: None
        self.stopping = False
        self._ingest = ingest
        self._coordinator = coordinator

    async def tick(self) -> float:
        deliveries = await self._ingest.queue.receive(CONTROL, 1, LEASE_SECONDS)
        for delivery in deliveries:
            await self._handle(delivery)
        return 0.0 if deliveries else _IDLE

    async def close(self) -> None:
        """Nothing is held between ticks."""

    async def _handle(self, delivery: Delivery) -> None:
        try:
            message = _messages.decode(delivery.body)
        except msgspec.DecodeError as error:
            log.error("message can not be read", error=str(error))
            await self._ingest.queue.bury(CONTROL, [delivery.receipt], f"The message can not be read: {error}")
            return
        job = await self._job(message)
        if job is None or job.run.state is not RunState.INGESTING:
            if job is not None and job.run.state in ENDED and not job.run.last_batch and not resumable(job):
                await self._ingest.clear_up(job)
            await self._ingest.queue.ack(CONTROL, [delivery.receipt])
            return
        number = message.number if isinstance(message, IngestRange) else None
        lease = await self._coordinator.lease(ingest_lease(job.run.run_id, number), self.name, LEASE_SECONDS)
        if lease is None:
            await self._ingest.queue.release(CONTROL, [delivery.receipt], _BUSY_ELSEWHERE)
            return
        began, failure = self._ingest.clock.now(), None
        try:
            with structlog.contextvars.bound_contextvars(job=job.job_id, run=job.run.run_id):
                done = await self._work(message, job, lease, delivery)
        except LeaseLostError:
            done = False
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            await self._failed(job, delivery, error)
            return
        finally:
            await self._coordinator.release(lease)
            self._trace(job, number, began, failure)
        if done:
            crashpoint("ingester.ack.before")
            await self._ingest.queue.ack(CONTROL, [delivery.receipt])

    async def _job(self, message: Message) -> Job | None:
        """The job with the run that the message is of, which may not be its latest any more."""
        job = await self._ingest.records.job(message.tenant, message.job_id)
        if job is None or job.run.run_id == message.run_id:
            return job
        run = await self._ingest.records.run(job.job_id, message.run_id)
        return None if run is None else msgspec.structs.replace(job, run=run, state=run.state, reason=None)

    async def _work(self, message: Message, job: Job, lease: Lease, delivery: Delivery) -> bool:
        held_at = self._ingest.clock.monotonic()

        async def keep_hold() -> bool:
            nonlocal held_at
            if self.stopping:
                # What was checkpointed stands; whoever comes next goes on there.
                await self._ingest.queue.release(CONTROL, [delivery.receipt], 0.0)
                return False
            now = self._ingest.clock.monotonic()
            # Not with every batch: the fence keeps out who has lost it without knowing.
            if now - held_at < LEASE_SECONDS / 20:
                return True
            held_at = now
            stale = await self._ingest.queue.extend(CONTROL, [delivery.receipt], LEASE_SECONDS)
            return not stale and await self._coordinator.renew(lease, LEASE_SECONDS)

        if isinstance(message, IngestJob):
            await self._ingest.split(job, keep_hold)
            return True
        one = await self._ingest.records.range(job.run.run_id, message.number)
        if one is None or one.done:
            await self._ingest.finish(job)
            return True
        return await self._ingest.ingest_range(job, one, lease, keep_hold)

    def _trace(self, job: Job, number: int | None, began: float, failure: str | None) -> None:
        name = "ingest split" if number is None else "ingest range"
        about = {} if number is None else {"conveyor.range": number}
        traces.span(name, job.job_id, job.run.run_id, began, self._ingest.clock.now(), about, error=failure)

    async def _failed(self, job: Job, delivery: Delivery, error: Exception) -> None:
        """What no second try would mend, and what several did not, goes to the dead letters, and the run says why."""
        lasting = isinstance(error, BadInput)
        if not lasting and delivery.receives < _TRIES:
            log.warning(
                "ingest failed; it is tried again", job=job.job_id, attempt=delivery.receives, error=repr(error)
            )
            pause = _FIRST_PAUSE * 2 ** (delivery.receives - 1)
            await self._ingest.queue.extend(CONTROL, [delivery.receipt], pause)
            return
        cause = str(error) if lasting else f"{type(error).__name__}: {error} (tried {delivery.receives} times)"
        # It is shown with the job.
        reason = INGEST_FAILED + redacted(cause)
        # A bad list is its sender's affair, and no trouble of ours.
        say = log.info if lasting else log.error
        say("ingest given up", job=job.job_id, reason=reason)
        # The letter first: after a crash in between, the sweeper has the ingest tried and fail again, and a run that
        # shows as failed always has its letter.
        await self._ingest.queue.bury(CONTROL, [delivery.receipt], reason)
        crashpoint("ingester.bury.after")
        counts = await self._ingest.tasks.counts(job.key)
        await self._ingest.lifecycle.move(job, RunState.FAILED, reason, counts, keep=True, code=_code_of(error))


def _code_of(error: Exception) -> ReasonCode:
    """Whether the list is at fault, and how, or the ingest."""
    if not isinstance(error, BadInput):
        return ReasonCode.INGEST_FAILED
    return ReasonCode(error.code) if isinstance(error, ListUnreadable) else ReasonCode.LIST_UNREADABLE
