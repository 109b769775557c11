"""Jobs: accept one, list them, show one."""

import asyncio
from typing import Any

from litestar import Response, get, post
from litestar.params import FromPath

from conveyor.accept.answer import AcceptedView
from conveyor.accept.spec import JobSpec
from conveyor.api import operations, shapes
from conveyor.api.creation import accepted, read_keyed
from conveyor.api.parts import (
    ApiRequest,
    Cursor,
    Limit,
    SubmitPart,
    SystemPart,
    TenantPart,
    answer,
    check_job_cursor,
    find_job,
)
from conveyor.model import Job
from conveyor.serve.progress import job_json
from conveyor.system import System

ROUTE = "POST /v1/jobs"
_HIDDEN = "[hidden]"


@post(
    "/jobs",
    summary="Submit a job",
    operation_class=operations.takes(JobSpec, operations.IDEMPOTENCY_KEY, operations.PREFER),
    responses={
        **shapes.shaped(AcceptedView, 201, 202),
        **shapes.problems(400, 404, 409, 413, 415),
    },
)
async def submit_job(
    request: ApiRequest, system: SystemPart, tenant: TenantPart, submit: SubmitPart
) -> Response[bytes]:
    """Small jobs are written whole and their tasks are readable at once: 201. Large, open and uploaded ones, and those
    with `Prefer: respond-async`, are ingested: 202. With an `Idempotency-Key`, the same request sent again gets the
    same answer, and no second job."""
    spec, asked = await read_keyed(request, system.settings.max_request_bytes, JobSpec, ROUTE)
    given = await submit.submit(tenant, spec, asked, _prefers_async(request))
    return accepted(given, f"/v1/jobs/{given.subject}")


@get("/jobs", summary="List jobs", responses=shapes.answers(shapes.JobsPage, 400))
async def list_jobs(
    system: SystemPart, tenant: TenantPart, limit: Limit = 50, cursor: Cursor = None
) -> Response[bytes]:
    """The tenant's jobs, newest first."""
    check_job_cursor(cursor)
    page = await system.records.jobs(tenant, cursor, limit)
    items = await asyncio.gather(*(shown(system, job) for job in page.items))
    return answer({"items": items, "next_cursor": page.next_cursor})


@get("/jobs/{job_id:str}", summary="Show a job", responses=shapes.answers(shapes.JobShape, 404))
async def show_job(job_id: FromPath[str], system: SystemPart, tenant: TenantPart) -> Response[bytes]:
    """State, live counts, how far its list is, rate, time left and the most frequent errors."""
    return answer(await shown(system, await find_job(system.records, tenant, job_id)))


async def shown(system: System, job: Job) -> dict[str, Any]:
    """A job as a client sees it."""
    found = await job_json(system.records, system.tasks, system.coordinator, system.clock, job)
    found["options"] = _without_secrets(found["options"])
    return found


def _prefers_async(request: ApiRequest) -> bool:
    wishes = ",".join(request.headers.getall("prefer", [])).lower().split(",")
    return any(wish.partition(";")[0].strip() == "respond-async" for wish in wishes)


def _without_secrets(options: dict[str, Any]) -> dict[str, Any]:
    """Headers and gateways carry passwords: who may look at a job need not know them."""
    hidden = dict(options)
    if "headers" in hidden:
        hidden["headers"] = dict.fromkeys(hidden["headers"], _HIDDEN)
    if hidden.get("gateway"):
        hidden["gateway"] = {name: _HIDDEN for name, value in hidden["gateway"].items() if value}
    return hidden
