"""Replace: finds the job that a new one replaces, and puts the new one in its place (jobs/replacements.py).

`replaces` is the id of a job, or the idempotency key of a request that may have made one. Both lead to the job that is
in that place now: the successors are followed. A key that made no job leads to none, and the new job takes its place.
"""

import re
from collections.abc import Sequence
from hashlib import sha256

import msgspec
import structlog

from conveyor.clock import CLOCK_SLACK, seconds_since
from conveyor.engines.records import Document, IdempotencyClaim
from conveyor.errors import AlreadyReplaced, ConveyorError, InvalidField, NotFound, ReplacementInFlight
from conveyor.faults import crashpoint
from conveyor.jobs.replacements import (
    REPLACEMENT,
    SUCCESSOR,
    Drain,
    ReplacedRun,
    key_name,
    replacement_of,
    successor_document,
    successor_of,
)
from conveyor.lifecycle import Lifecycle
from conveyor.model import Job, JobId, TenantId
from conveyor.states import ENDED
from conveyor.system import System

log = structlog.get_logger()

# The routes under which jobs have idempotency keys, and the form of a key there.
SUBMIT_ROUTE = "POST /v1/jobs"
INTAKE_ROUTE = "intake"

_NAME = re.compile(r"[\x21-\x7e]{1,255}")
_JOB_ID = re.compile(r"job_[0-9a-z]{26}")
_MAX_STEPS = 1000


def intake_key(key: str) -> str:
    """The idempotency key of a message with a key of its own."""
    return sha256(f"key:{key}".encode()).hexdigest()


def check_replaces(name: str | None, field: str = "replaces") -> None:
    """Raise InvalidField for a text that is neither the id of a job nor an idempotency key."""
    if name is not None and not _NAME.fullmatch(name):
        raise InvalidField(
            f"`{field}` must be the id of a job or an idempotency key: 1 to 255 visible ASCII characters.", field=field
        )


class Place(msgspec.Struct, frozen=True):
    """A place that a new job takes: that of a job, or of a key that made none."""

    # The id of its successor document.
    name: str
    job: Job | None
    # The key, where no job was made under it.
    key: str | None = None
    # The document to replace: it names a job that was never written.
    abandoned: Document | None = None


class ReplacedJobs(msgspec.Struct, frozen=True):
    """What a new job replaces."""

    places: Sequence[Place] = ()
    # The runs to wait for.
    runs: Sequence[ReplacedRun] = ()

    @property
    def jobs(self) -> list[Job]:
        return [place.job for place in self.places if place.job is not None]

    @property
    def active(self) -> list[Job]:
        return [job for job in self.jobs if job.state not in ENDED]


NOTHING = ReplacedJobs()


class Replace:
    """Replaces jobs by others."""

    def __init__(self, system: System) -> None:
        self._records = system.records
        self._clock = system.clock
        self._in_flight_seconds = system.settings.idempotency_lease_seconds
        self._lifecycle = Lifecycle(system.records, system.tasks, system.clock)
        self._drain = Drain(
            system.records,
            system.tasks,
            system.queue,
            system.coordinator,
            system.clock,
            system.settings.lease_seconds,
        )

    async def find(self, tenant: TenantId, name: str | None, job_id: JobId) -> ReplacedJobs:
        """What the job `job_id` is to replace. Raises NotFound and ReplacementInFlight."""
        if name is None:
            return NOTHING
        starts = await self._starts(tenant, name, job_id)
        places = [await self._current(tenant, start, job_id) for start in starts]
        # A key and the place of a key may lead to the same job.
        unique = list({place.name: place for place in places}.values())
        runs = [run for place in unique if place.job is not None for run in await self._runs(tenant, place.job)]
        return ReplacedJobs(unique, [run for run in runs if not await self._drain.is_drained(tenant, run)])

    async def holder(self, tenant: TenantId, name: str) -> Job | None:
        """The job that is in that place now."""
        jobs = (await self.find(tenant, name, JobId(""))).jobs
        return max(jobs, key=lambda job: job.created_at, default=None)

    async def check_untaken(self, tenant: TenantId, key: str) -> None:
        """Raise AlreadyReplaced if another job took the place of a key before its own request made one. To be called
        with the key claimed: either this sees that job, or `take` sees the claim."""
        if await self._records.documents.document(SUCCESSOR, tenant, key_name(key)) is not None:
            raise AlreadyReplaced

    async def take(self, tenant: TenantId, replaced: ReplacedJobs, job_id: JobId) -> None:
        """Write the new job as the successor of each. Raises ReplacementInFlight if another one was first."""
        for place in replaced.places:
            if not await self._take(tenant, place, job_id):
                await self._leave(tenant, replaced, job_id)
                raise ReplacementInFlight

    async def _take(self, tenant: TenantId, place: Place, job_id: JobId) -> bool:
        row = successor_document(tenant, place.name, job_id, self._clock.now())
        crashpoint("replace.take.before")
        if place.abandoned is None:
            await self._records.documents.create_documents([row])
        else:
            changed = msgspec.structs.replace(row, version=place.abandoned.version)
            await self._records.documents.replace_document(changed)
        crashpoint("replace.take.after")
        stored = await self._records.documents.document(SUCCESSOR, tenant, place.name)
        if stored is None or successor_of(stored).job_id != job_id:
            return False
        return place.key is None or not await self._claims(tenant, place.key, job_id)

    async def _leave(self, tenant: TenantId, replaced: ReplacedJobs, job_id: JobId) -> None:
        """Remove what `take` has written: the next request need not wait until it counts as abandoned."""
        for place in replaced.places:
            row = await self._records.documents.document(SUCCESSOR, tenant, place.name)
            if row is not None and successor_of(row).job_id == job_id:
                await self._records.documents.remove_document(row)

    async def cancel(self, replaced: ReplacedJobs, job_id: JobId) -> None:
        """Cancel what is replaced. The new job is accepted already: if this fails, its ingest cancels them."""
        for job in replaced.active:
            try:
                crashpoint("replace.cancel.before")
                await self._lifecycle.cancel_replaced(job, job_id)
                crashpoint("replace.cancel.after")
            except ConveyorError:
                log.exception("replaced job not cancelled yet", job=job.job_id, successor=job_id)

    async def _starts(self, tenant: TenantId, name: str, job_id: JobId) -> list[Place]:
        """Where to start: the job with this id, the jobs made under this key, and the place of the key."""
        job = await self._records.jobs.job(tenant, JobId(name)) if _JOB_ID.fullmatch(name) else None
        if job is not None:
            return [Place(job.job_id, job)]
        claims = await self._claims(tenant, name, job_id)
        made = [await self._made(tenant, claim) for claim in claims]
        starts = [Place(job.job_id, job) for job in made if job is not None]
        if not starts and _JOB_ID.fullmatch(name):
            raise NotFound("The job to replace was not found, or has expired.")
        place = key_name(name)
        if not starts or await self._records.documents.document(SUCCESSOR, tenant, place) is not None:
            starts.append(Place(place, None, None if claims else name))
        return starts

    async def _claims(self, tenant: TenantId, key: str, job_id: JobId) -> list[IdempotencyClaim]:
        """The claims of requests for another job under this key."""
        claims = [
            await self._records.access.stored_claim(tenant, SUBMIT_ROUTE, key),
            await self._records.access.stored_claim(tenant, INTAKE_ROUTE, intake_key(key)),
        ]
        return [claim for claim in claims if claim is not None and claim.subject != job_id]

    async def _made(self, tenant: TenantId, claim: IdempotencyClaim) -> Job | None:
        left = claim.lease_until - self._clock.now()
        if claim.status == 0 and 0 < left <= self._in_flight_seconds + CLOCK_SLACK:
            raise ReplacementInFlight("The request with the key to replace is still in progress. Retry in a moment.")
        return await self._records.jobs.job(tenant, JobId(claim.subject))

    async def _current(self, tenant: TenantId, place: Place, job_id: JobId) -> Place:
        """Follow the successors to the job that is in the place now."""
        for _ in range(_MAX_STEPS):
            row = await self._records.documents.document(SUCCESSOR, tenant, place.name)
            if row is None or (successor := successor_of(row)).job_id == job_id:
                return place
            job = await self._records.jobs.job(tenant, successor.job_id)
            if job is None:
                if seconds_since(successor.at, self._clock.now()) < self._in_flight_seconds:
                    raise ReplacementInFlight
                return msgspec.structs.replace(place, abandoned=row)
            place = Place(job.job_id, job)
        raise ReplacementInFlight

    async def _runs(self, tenant: TenantId, job: Job) -> list[ReplacedRun]:
        """The run of a job, and those that it waits for itself."""
        row = await self._records.documents.document(REPLACEMENT, tenant, job.job_id)
        before = None if row is None else replacement_of(row)
        inherited = [] if before is None or before.done else before.runs
        return [
            ReplacedRun(job.job_id, job.run.run_id),
            *(msgspec.structs.replace(run, inherited=True) for run in inherited),
        ]
