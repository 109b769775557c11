"""Schedules: jobs that cron creates repeatedly."""

import asyncio
from functools import partial
from typing import Any

from litestar import Response, delete, get, patch, post
from litestar.params import FromPath

from conveyor.accept.schedules import ScheduleChange, ScheduleSpec, schedule_json
from conveyor.api import operations
from conveyor.api.creation import accepted, read_keyed, read_optional, read_spec
from conveyor.api.dependencies import ApiRequest, Cursor, Limit, SchedulesPart, SystemPart, TenantPart, answer
from conveyor.api.response_specs import answers, problems, shaped
from conveyor.api.schemas.schedule_shapes import ScheduleDetail, ScheduleShape, SchedulesPage, StartedFire
from conveyor.clock import iso_text
from conveyor.model import JobId, TenantId
from conveyor.read.status import job_json
from conveyor.system import System

ROUTE = "POST /v1/schedules"
# What a fire shows of its job.
_OF_JOB = ("name", "state", "total", "counts", "invalid_lines")


@post(
    "/schedules",
    summary="Create a schedule",
    operation_class=operations.takes(ScheduleSpec, operations.IDEMPOTENCY_KEY),
    responses={**shaped(ScheduleShape, 201), **problems(400, 403, 404, 409, 413, 415)},
)
async def create_schedule(
    request: ApiRequest, system: SystemPart, tenant: TenantPart, schedules: SchedulesPart
) -> Response[bytes]:
    """`job` is a body of POST /v1/jobs, with its tasks, or with a `source` that each fire reads: an upload or a `url`.
    The server validates it now; `invalid_lines` counts the invalid ones of its tasks, which each fire skips."""
    spec, idempotent = await read_keyed(request, system.settings.max_request_bytes, ScheduleSpec, ROUTE)
    outcome = await schedules.create(tenant, spec, idempotent)
    return accepted(outcome, f"/v1/schedules/{outcome.subject}")


@get("/schedules", summary="List schedules", responses=answers(SchedulesPage, 400))
async def list_schedules(
    system: SystemPart, tenant: TenantPart, schedules: SchedulesPart, limit: Limit = 100, cursor: Cursor = None
) -> Response[bytes]:
    """All schedules of the tenant, oldest first."""
    page = await schedules.page(tenant, cursor, limit)
    now = system.clock.now()
    return answer({"items": [schedule_json(row, now) for row in page.items], "next_cursor": page.next_cursor})


@get("/schedules/{schedule_id:str}", summary="Show a schedule", responses=answers(ScheduleDetail, 404))
async def show_schedule(
    schedule_id: FromPath[str], system: SystemPart, tenant: TenantPart, schedules: SchedulesPart
) -> Response[bytes]:
    """The schedule, with its next fires, and its latest ones with the state and counts of their jobs."""
    shown = schedule_json(await schedules.find(tenant, schedule_id), system.clock.now())
    outcomes = await _outcomes(system, tenant, [fire["job_id"] for fire in shown["fires"] if fire["job_id"]])
    fires = [{**fire, "outcome": outcomes.get(fire["job_id"])} for fire in shown["fires"]]
    return answer({**shown, "fires": fires})


async def _outcomes(system: System, tenant: TenantId, job_ids: list[JobId]) -> dict[JobId, dict[str, Any]]:
    """What the jobs have come to. One read for all of them: a schedule knows few fires."""
    jobs = await system.records.jobs.jobs_of([(tenant, job_id) for job_id in job_ids])
    read = partial(job_json, system.records, system.tasks, system.coordinator, system.clock)
    shown = await asyncio.gather(*(read(job) for job in jobs))
    return {job["id"]: {name: job[name] for name in _OF_JOB} for job in shown}


@patch(
    "/schedules/{schedule_id:str}",
    summary="Change a schedule",
    operation_class=operations.takes(ScheduleChange),
    responses=answers(ScheduleShape, 400, 403, 404, 409, 413, 415),
)
async def change_schedule(
    request: ApiRequest, schedule_id: FromPath[str], system: SystemPart, tenant: TenantPart, schedules: SchedulesPart
) -> Response[bytes]:
    """Omitted fields stay as they are; `job` is replaced as a whole, `job_changes` replaces fields of it. A resumed
    schedule does not catch up."""
    await schedules.find(tenant, schedule_id)
    change = await read_spec(request, system.settings.max_request_bytes, ScheduleChange)
    changed = await schedules.change(tenant, schedule_id, change)
    return answer(schedule_json(changed, system.clock.now()))


@post(
    "/schedules/{schedule_id:str}/run",
    summary="Fire a schedule now",
    status_code=202,
    operation_class=operations.takes(operations.Nothing, required=False),
    responses={**shaped(StartedFire, 202), **problems(400, 404, 409)},
)
async def run_schedule(
    request: ApiRequest, schedule_id: FromPath[str], system: SystemPart, tenant: TenantPart, schedules: SchedulesPart
) -> Response[bytes]:
    """One fire beside its times, also while it is paused. The scheduler makes the job within a second or two, under the
    id of the response; `fires` of the schedule has the error if it cannot. 409 while another fire is in progress."""
    await schedules.find(tenant, schedule_id)
    await read_optional(request, system.settings.max_request_bytes, operations.Nothing)
    fire = await schedules.run_now(tenant, schedule_id)
    return answer({"at": iso_text(fire.at), "job_id": fire.job_id}, 202)


@delete("/schedules/{schedule_id:str}", summary="Delete a schedule", responses=problems(404, 409))
async def remove_schedule(schedule_id: FromPath[str], tenant: TenantPart, schedules: SchedulesPart) -> None:
    """Its jobs stay."""
    await schedules.remove(tenant, schedule_id)
