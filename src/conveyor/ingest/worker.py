"""Ingester: takes `ingest_job` messages from the control queue and runs the pipeline for each, under a lease."""

from collections.abc import Callable

import msgspec
import structlog

from conveyor.engines.queue import CONTROL, Delivery
from conveyor.errors import ConveyorError
from conveyor.ingest.pipeline import LEASE_SECONDS, Ingest
from conveyor.model import IngestJob, Job
from conveyor.states import ENDED, RunState

log = structlog.get_logger()

_IDLE = 0.25
_BUSY_ELSEWHERE = 5.0
_TRIES = 5

_messages = msgspec.json.Decoder(IngestJob)


class Ingester:
    """A role; one list at a time."""

    def __init__(self, ingest: Ingest, name: str) -> None:
        self.name = name
        self.wake: Callable[[], None] = lambda: None
        self._ingest = ingest

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
        job = await self._ingest.records.job(message.tenant, message.job_id)
        if job is None or job.run.run_id != message.run_id or job.state is not RunState.INGESTING:
            if job is not None and job.state in ENDED and not job.run.last_batch:
                await self._ingest.clear_up(job)
            await self._ingest.queue.ack(CONTROL, [delivery.receipt])
            return
        lease = await self._ingest.coordinator.lease(f"ingest:{message.run_id}", self.name, LEASE_SECONDS)
        if lease is None:
            await self._ingest.queue.release(CONTROL, [delivery.receipt], _BUSY_ELSEWHERE)
            return
        try:
            done = await self._ingest.run(job, message.source, lease)
        except (ConveyorError, ValueError) as error:
            await self._failed(job, delivery, error)
            return
        finally:
            await self._ingest.coordinator.release(lease)
        if done:
            await self._ingest.queue.ack(CONTROL, [delivery.receipt])

    async def _failed(self, job: Job, delivery: Delivery, error: Exception) -> None:
        """Try again a few times; then dead letters, and the run says why."""
        log.warning("ingest failed", job=job.job_id, attempt=delivery.receives, error=str(error))
        if delivery.receives < _TRIES:
            return
        reason = f"ingest failed {delivery.receives} times: {error}"
        counts = await self._ingest.tasks.counts(job.key)
        await self._ingest.lifecycle.move(job, RunState.FAILED, reason, counts)
        await self._ingest.queue.bury(CONTROL, [delivery.receipt], reason)
