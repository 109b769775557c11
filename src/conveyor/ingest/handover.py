"""Handover: before the first task of a job that replaces others is written, the others are cancelled and have drained.

The request that accepted the job has cancelled them already, unless its process died; the ingester makes sure of it."""

import structlog

from conveyor.coordination.waits import Wait, publish_wait
from conveyor.engines.coordinator import Coordinator
from conveyor.faults import crashpoint
from conveyor.ingest.pipeline import IngestPipeline
from conveyor.jobs.replacements import (
    REPLACEMENT,
    SUCCESSOR,
    Drain,
    ReplacedRun,
    Replacement,
    replacement_of,
    successor_of,
    with_replacement,
)
from conveyor.model import Job
from conveyor.states import ENDED

log = structlog.get_logger()

# How soon to look again, and how long the reason to wait is shown without another look.
LOOK_SECONDS = 0.5
_SHOWN_SECONDS = 5.0


class Handover:
    """Stops the jobs that a job replaces."""

    def __init__(self, ingest: IngestPipeline, coordinator: Coordinator) -> None:
        self._ingest = ingest
        self._records = ingest.records
        self._coordinator = coordinator
        self._drain = Drain(
            ingest.records, ingest.tasks, ingest.queue, coordinator, ingest.clock, ingest.settings.lease_seconds
        )

    async def is_over(self, job: Job) -> bool:
        """Whether the ingest of the job may begin: it replaces no job, or nothing of those is in flight."""
        if job.run.number > 1:
            return True
        row = await self._records.documents.document(REPLACEMENT, job.tenant, job.job_id)
        if row is None:
            return True
        replacement = replacement_of(row)
        if replacement.done:
            return True
        for replaced in replacement.runs:
            if not await self._is_ours(job, replaced):
                return False
            if not await self._is_stopped(job, replaced):
                detail = f"The job waits until {replaced.job_id}, which it replaces, has stopped."
                await publish_wait(self._coordinator, job.run.run_id, Wait("replacing", detail), _SHOWN_SECONDS)
                return False
        crashpoint("handover.done.before")
        await self._records.documents.replace_document(with_replacement(row, Replacement(replacement.runs, done=True)))
        crashpoint("handover.done.after")
        log.info("replaced jobs have stopped", job=job.job_id, replaced=[run.job_id for run in replacement.runs])
        return True

    async def _is_ours(self, job: Job, replaced: ReplacedRun) -> bool:
        """Cancel this job if another one took its place while it was being written."""
        if replaced.inherited:
            return True
        row = await self._records.documents.document(SUCCESSOR, job.tenant, replaced.job_id)
        if row is None or (successor := successor_of(row).job_id) == job.job_id:
            return True
        await self._ingest.lifecycle.cancel_replaced(job, successor)
        return False

    async def _is_stopped(self, job: Job, replaced: ReplacedRun) -> bool:
        old = await self._records.jobs.job(job.tenant, replaced.job_id)
        if old is not None and old.run.run_id == replaced.run_id and old.state not in ENDED:
            await self._ingest.lifecycle.cancel_replaced(old, job.job_id)
            return False
        return await self._drain.is_drained(job.tenant, replaced)
