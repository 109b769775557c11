"""Jobs, claims, ranges and uploads that the suites of the five parts of Records start from."""

import msgspec

from conveyor.engines.records import IdempotencyClaim, Records
from conveyor.model import (
    ApiKey,
    Compression,
    Job,
    ListFormat,
    Range,
    Source,
    TenantId,
    UploadRecord,
)
from conveyor.states import RunState, sources_of
from tests.support.clocks import ManualClock
from tests.support.make_jobs import ACME, make_job, make_notice

CALLERS = 20


LEASE = 10.0


LIST = Source("uploads/acme/one", 1000, "0" * 64)


def make_claim(
    clock: ManualClock, key: str = "k1", tenant: TenantId = ACME, route: str = "POST /v1/jobs", ttl: float = 60.0
) -> IdempotencyClaim:
    """A claim as a request makes it, with an id of its own for what it is to make."""
    now = clock.now()
    return IdempotencyClaim(tenant, route, key, f"sha of {key}", clock.new_id("job"), now + LEASE, now + ttl)


def answered(claim: IdempotencyClaim, body: bytes = b"the answer\0\xff") -> IdempotencyClaim:
    return msgspec.structs.replace(claim, status=201, body=body)


async def created(records: Records, clock: ManualClock, **fields: object) -> Job:
    job = make_job(clock, **fields)  # type: ignore[arg-type]
    assert await records.jobs.create_job(job, make_notice(clock, job), None) is None
    return job


async def in_state(records: Records, clock: ManualClock, state: RunState) -> Job:
    """A job in this state, brought there by legal moves only; latched unless it is ingesting."""
    paths = {
        RunState.INGESTING: [],
        RunState.RUNNING: [],
        RunState.PAUSED: [RunState.PAUSED],
        RunState.COMPLETED: [RunState.COMPLETED],
        RunState.FAILED: [RunState.FAILED],
        RunState.CANCELLED: [RunState.CANCELLED],
    }
    start = RunState.INGESTING if state is RunState.INGESTING else RunState.RUNNING
    job = await created(records, clock, state=start, latched=state is not RunState.INGESTING)
    for target in paths[state]:
        assert await records.jobs.move_run(job.job_id, job.run.run_id, sources_of(target), target, None, None)
    return job


async def stored(records: Records, job: Job) -> Job:
    found = await records.jobs.job(job.tenant, job.job_id)
    assert found is not None
    return found


async def events(records: Records, job: Job) -> list[str]:
    page = await records.outbox.events(job.tenant, job.job_id, None, 1000)
    return [event.event for event in page.items]


def part(number: int, start: int, end: int | None, **fields: object) -> Range:
    plain = {"format": ListFormat.TEXT, "compression": Compression.NONE, "source": LIST, "header": None}
    first = number * 10
    return Range(number=number, start=start, end=end, first_index=first, index=first, offset=start, **plain | fields)  # type: ignore[arg-type]


def moved(one: Range, tasks: int, offset: int, invalid: int = 0, done: bool = False) -> Range:
    return msgspec.structs.replace(
        one, index=one.first_index + tasks + invalid, offset=offset, tasks=tasks, invalid=invalid, done=done
    )


async def ingesting(records: Records, clock: ManualClock, *ranges: Range, **fields: object) -> Job:
    job = await created(records, clock, latched=False, state=RunState.INGESTING, **fields)
    if ranges:
        assert await records.ingests.split(job.job_id, job.run.run_id, ranges)
    return job


def upload(clock: ManualClock, upload_id: str = "upload_1", tenant: TenantId = ACME, ttl: float = 60.0) -> UploadRecord:
    now = clock.now()
    return UploadRecord(tenant, upload_id, f"uploads/{tenant}/{upload_id}", 7, "0" * 64, now, now + ttl)


def key(clock: ManualClock, key_id: str, tenant: TenantId = ACME, **fields: object) -> ApiKey:
    return ApiKey(key_id, tenant, f"name of {key_id}", "0" * 64, clock.now(), **fields)  # type: ignore[arg-type]
