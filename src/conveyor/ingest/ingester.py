"""Ingester: receives messages from the control queue, splits lists and ingests ranges, each under a lease."""

from collections.abc import Callable

import msgspec
import structlog

from conveyor.engines.coordinator import Coordinator, Lease, ingest_lease
from conveyor.engines.queue import CONTROL, Delivery
from conveyor.engines.tasks import is_reachable
from conveyor.errors import BadInput, ListUnreadable, is_outage
from conveyor.faults import crashpoint
from conveyor.ingest.handover import LOOK_SECONDS, Handover
from conveyor.ingest.pipeline import IngestPipeline
from conveyor.ingest.plan import LeaseLostError, Renew
from conveyor.ingest.turns import Message, Turn, decode_message, serve_others, tenant_of
from conveyor.model import INGEST_FAILED, IngestJob, IngestRange, Job, RunId, TenantId, is_resumable
from conveyor.states import ENDED, ReasonCode, RunState
from conveyor.telemetry import traces
from conveyor.telemetry.redact import redact

log = structlog.get_logger()

LEASE_SECONDS = 60.0

_IDLE = 0.1
# Seconds before the message of a range or list that another ingester has leased is redelivered.
_LEASED_DELAY = 2.0
# Seconds before the message of a job on another task engine is redelivered.
_ELSEWHERE_DELAY = 5.0
_MAX_ATTEMPTS = 5
_FIRST_BACKOFF = 1.0
# Seconds before the message of an ingest that an engine held up is redelivered.
_OUTAGE_DELAY = 5.0
# Ingests whose failures one ingester remembers.
_MAX_FAILING = 1000
# Messages that wait inside each other while an ingester serves other tenants: each is a list that is looked over.
_MAX_DEPTH = 4


class Ingester:
    """A role. It handles one message at a time, and serves other tenants in between when that takes long; any number of
    ingesters share the queue."""

    def __init__(self, ingest: IngestPipeline, coordinator: Coordinator, name: str) -> None:
        self.name = name
        self.wake: Callable[[], None] = lambda: None
        self.stopping = False
        self._ingest = ingest
        self._coordinator = coordinator
        self._handover = Handover(ingest, coordinator)
        self._turn = Turn(ingest.clock, None)
        # How often ingests failed here. Receives are not failures: a lost lease redelivers a message, too.
        self._failures: dict[tuple[RunId, int | None], int] = {}

    async def tick(self) -> float:
        deliveries = await self._ingest.queue.receive(CONTROL, 1, LEASE_SECONDS)
        for delivery in deliveries:
            tenant = tenant_of(delivery)
            if tenant != self._turn.tenant:
                self._turn = Turn(self._ingest.clock, tenant)
            await self._handle(delivery, self._turn)
            # Many messages of one tenant are one turn, too.
            if self._turn.step():
                self._turn = await self._serve_others(tenant, None, 0)
        return 0.0 if deliveries else _IDLE

    async def close(self) -> None:
        """Close the clients of its sources. No message is in flight between ticks."""
        await self._ingest.close()

    async def _handle(self, delivery: Delivery, turn: Turn, outer: Renew | None = None, depth: int = 0) -> None:
        """`outer` renews what the message waits in the middle of."""
        try:
            message = decode_message(delivery.body)
        except msgspec.DecodeError as error:
            log.error("invalid message dead-lettered", error=str(error))
            await self._ingest.queue.dead_letter(CONTROL, [delivery.receipt], f"The message cannot be read: {error}")
            return
        job = await self._job(message)
        is_left = job is not None and _is_left_by_ingest(job)
        if job is None or not (is_left or job.run.state is RunState.INGESTING):
            await self._ingest.queue.ack(CONTROL, [delivery.receipt])
            return
        if not is_reachable(self._ingest.tasks, job.key):
            # Another process opens the task engine of this job.
            await self._ingest.queue.release(CONTROL, [delivery.receipt], _ELSEWHERE_DELAY)
            return
        if is_left:
            await self._ingest.clear_up(job)
            await self._ingest.queue.ack(CONTROL, [delivery.receipt])
            return
        if not await self._handover.is_over(job):
            await self._ingest.queue.release(CONTROL, [delivery.receipt], LOOK_SECONDS)
            return
        number = message.number if isinstance(message, IngestRange) else None
        lease = await self._coordinator.lease(ingest_lease(job.run.run_id, number), self.name, LEASE_SECONDS)
        if lease is None:
            await self._ingest.queue.release(CONTROL, [delivery.receipt], _LEASED_DELAY)
            return
        began, failure = self._ingest.clock.now(), None
        try:
            with structlog.contextvars.bound_contextvars(job=job.job_id, run=job.run.run_id):
                done = await self._work(message, job, lease, delivery, turn, outer, depth)
        except LeaseLostError:
            done = False
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            await self._handle_failure(job, number, delivery, error)
            return
        finally:
            await self._coordinator.release(lease)
            self._trace(job, number, began, failure)
        if done:
            self._failures.pop((job.run.run_id, number), None)
            crashpoint("ingester.ack.before")
            await self._ingest.queue.ack(CONTROL, [delivery.receipt])

    async def _job(self, message: Message) -> Job | None:
        """The job with the run that the message names, which may no longer be its latest."""
        job = await self._ingest.records.jobs.job(message.tenant, message.job_id)
        if job is None or job.run.run_id == message.run_id:
            return job
        run = await self._ingest.records.jobs.run(job.job_id, message.run_id)
        return None if run is None else msgspec.structs.replace(job, run=run, state=run.state, reason=None)

    async def _work(
        self,
        message: Message,
        job: Job,
        lease: Lease,
        delivery: Delivery,
        turn: Turn,
        outer: Renew | None,
        depth: int,
    ) -> bool:
        clock, queue = self._ingest.clock, self._ingest.queue
        renewed_at = clock.monotonic()

        async def renew() -> bool:
            nonlocal renewed_at
            if outer is not None:
                await outer()
            if self.stopping:
                # The next ingester resumes at the checkpoint.
                await queue.release(CONTROL, [delivery.receipt], 0.0)
                return False
            now = clock.monotonic()
            # Not with every batch: the fence rejects checkpoints under an expired lease.
            if now - renewed_at < LEASE_SECONDS / 20:
                return True
            renewed_at = now
            stale = await queue.extend(CONTROL, [delivery.receipt], LEASE_SECONDS)
            return not stale and await self._coordinator.renew(lease, LEASE_SECONDS)

        began: float | None = clock.monotonic()

        async def take_turns() -> bool:
            nonlocal began, turn
            if began is not None and depth > 0:
                turn.allow(clock.monotonic() - began)
            began = None
            if turn.step():
                if depth > 0 and isinstance(message, IngestRange):
                    await queue.release(CONTROL, [delivery.receipt], 0.0)
                    return False
                if depth < _MAX_DEPTH:
                    turn = await self._serve_others(job.tenant, renew, depth)
                if depth == 0:
                    self._turn = turn
            return await renew()

        if isinstance(message, IngestJob):
            await self._ingest.split(job, take_turns)
            return True
        range_ = await self._ingest.records.ingests.range(job.run.run_id, message.number)
        if range_ is None or range_.done:
            await self._ingest.finish(job)
            return True
        return await self._ingest.ingest_range(job, range_, lease, renew, take_turns)

    async def _serve_others(self, tenant: TenantId | None, outer: Renew | None, depth: int) -> Turn:
        async def handle(delivery: Delivery, turn: Turn) -> None:
            await self._handle(delivery, turn, outer, depth + 1)

        return await serve_others(self._ingest.queue, self._ingest.clock, tenant, LEASE_SECONDS, handle)

    def _trace(self, job: Job, number: int | None, began: float, failure: str | None) -> None:
        name = "ingest split" if number is None else "ingest range"
        about = {} if number is None else {"conveyor.range": number}
        traces.span(name, job.job_id, job.run.run_id, began, self._ingest.clock.now(), about, error=failure)

    async def _handle_failure(self, job: Job, number: int | None, delivery: Delivery, error: Exception) -> None:
        """Retry after a backoff, for as long as an engine is away. Dead-letter the message and fail the run if no retry
        can help, or none is left."""
        if is_outage(error):
            log.warning("ingest held up by an engine, will retry", job=job.job_id, error=repr(error))
            await self._ingest.queue.release(CONTROL, [delivery.receipt], _OUTAGE_DELAY)
            return
        is_permanent = isinstance(error, BadInput)
        failures = self._count_failure(job.run.run_id, number)
        if not is_permanent and failures < _MAX_ATTEMPTS:
            log.warning("ingest failed, will retry", job=job.job_id, attempt=failures, error=repr(error))
            backoff = _FIRST_BACKOFF * 2 ** (failures - 1)
            await self._ingest.queue.extend(CONTROL, [delivery.receipt], backoff)
            return
        del self._failures[job.run.run_id, number]
        cause = str(error) if is_permanent else f"{type(error).__name__}: {error} ({failures} attempts)"
        # Users see it with the job.
        reason = INGEST_FAILED + redact(cause)
        # An invalid list is the user's error, not the operator's.
        write_log = log.info if is_permanent else log.error
        write_log("ingest failed", job=job.job_id, reason=reason)
        # The dead letter first: after a crash in between, the sweeper requeues the ingest and it fails again; so every
        # run that failed here has its dead letter.
        await self._ingest.queue.dead_letter(CONTROL, [delivery.receipt], reason)
        crashpoint("ingester.bury.after")
        counts = await self._ingest.tasks.counts(job.key)
        await self._ingest.lifecycle.move(job, RunState.FAILED, reason, counts, keep=True, code=_code_of(error))

    def _count_failure(self, run_id: RunId, number: int | None) -> int:
        """Count a failure of a range, or of the list. Returns how often it has failed in a row."""
        count = self._failures.pop((run_id, number), 0) + 1
        self._failures[run_id, number] = count
        if len(self._failures) > _MAX_FAILING:
            del self._failures[next(iter(self._failures))]
        return count


def _is_left_by_ingest(job: Job) -> bool:
    """Whether the run ended before its ingest did, for good: what the ingest wrote last is to be cleared up."""
    return job.run.state in ENDED and not job.run.last_batch and not is_resumable(job)


def _code_of(error: Exception) -> ReasonCode:
    """Whether the list is at fault, and how, or the ingest."""
    if not isinstance(error, BadInput):
        return ReasonCode.INGEST_FAILED
    return ReasonCode(error.code) if isinstance(error, ListUnreadable) else ReasonCode.LIST_UNREADABLE
