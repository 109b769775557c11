"""Search over a tenant's jobs. No engine has an index over names and states, so a page reads jobs, newest first, a
bounded number of them: it may be empty and still not be the last."""

import msgspec

from conveyor.clock import sortable_id
from conveyor.engines.records import JobRecords
from conveyor.jobs.fire_ids import is_fire_of
from conveyor.model import Job, JobKind, Page, TenantId
from conveyor.states import RunState

# Jobs of one read, and about how many one page reads at most.
_ROWS = 250
_MAX_ROWS = 2000
# A job is created after the time in its id: the time of a schedule's fire, or that of a clock which was slightly off.
_LATE_SECONDS = 86_400.0
_AHEAD_SECONDS = 60.0


class JobFilter(msgspec.Struct, frozen=True):
    """Which jobs a listing returns. Every field that is set must match."""

    # In the name, ignoring case, or in the id.
    text: str | None = None
    states: frozenset[RunState] | None = None
    kind: JobKind | None = None
    # The id of the schedule that made the job.
    schedule: str | None = None
    created_after: float | None = None
    created_before: float | None = None


class JobsFound(msgspec.Struct, frozen=True):
    """A page of matching jobs, and how many jobs were read for it."""

    page: Page[Job]
    read: int


async def find_jobs(jobs: JobRecords, tenant: TenantId, where: JobFilter, limit: int, cursor: str | None) -> JobsFound:
    """Up to `limit` matching jobs, newest first."""
    if where == JobFilter():
        page = await jobs.jobs(tenant, cursor, limit)
        return JobsFound(page, len(page.items))
    before = _newest(where)
    cursor = min(filter(None, (cursor, before)), default=None)
    oldest = "" if where.created_after is None else _id_at(where.created_after - _LATE_SECONDS)
    items: list[Job] = []
    read = 0
    while len(items) < limit and read < _MAX_ROWS:
        page = await jobs.jobs(tenant, cursor, _ROWS)
        for job in page.items:
            if job.job_id < oldest:
                return JobsFound(Page(items, None), read)
            read += 1
            if matches_job(job, where):
                items.append(job)
                if len(items) == limit:
                    is_last = page.next_cursor is None and job is page.items[-1]
                    return JobsFound(Page(items, None if is_last else job.job_id), read)
        cursor = page.next_cursor
        if cursor is None:
            break
    return JobsFound(Page(items, cursor), read)


def matches_job(job: Job, where: JobFilter) -> bool:
    """Whether a job matches the filter."""
    return (
        (where.states is None or job.state in where.states)
        and (where.kind is None or job.kind is where.kind)
        and (where.created_after is None or job.created_at >= where.created_after)
        and (where.created_before is None or job.created_at < where.created_before)
        and (where.text is None or _has_text(job, where.text.casefold()))
        and (where.schedule is None or is_fire_of(job.tenant, where.schedule, job.job_id))
    )


def _has_text(job: Job, text: str) -> bool:
    return text in (job.name or "").casefold() or text in job.job_id


def _newest(where: JobFilter) -> str | None:
    return None if where.created_before is None else _id_at(where.created_before + _AHEAD_SECONDS)


def _id_at(at: float) -> str:
    """Smaller than the id of any job from this time on."""
    return sortable_id("job", max(at, 0.0), 0)
