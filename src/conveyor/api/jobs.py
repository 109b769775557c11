"""Jobs: accept one, list them, show one."""

import asyncio
import re
from typing import Any

from litestar import Response, get, post
from litestar.params import FromPath

from conveyor.accept.answer import AcceptedView
from conveyor.accept.spec import JobSpec, decode_spec
from conveyor.accept.submit import Accepted, Idempotency
from conveyor.api import shapes
from conveyor.api.bodies import read_body, require_json
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
from conveyor.errors import InvalidField
from conveyor.model import Job
from conveyor.serve.progress import job_json
from conveyor.system import System

ROUTE = "POST /v1/jobs"
# Past this, decoding would hold up everyone else on the loop.
_BYTES_ON_LOOP = 256 * 1024
_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_HIDDEN = "[hidden]"


@post(
    "/jobs",
    summary="Submit a job",
    operation_class=shapes.SubmitOperation,
    responses={**shapes.shaped(AcceptedView, 201), **shapes.problems(400, 409, 413, 415)},
)
async def submit_job(
    request: ApiRequest, system: SystemPart, tenant: TenantPart, submit: SubmitPart
) -> Response[bytes]:
    """Validate and write a job whole; its tasks are readable at once. With an `Idempotency-Key`, the same request
    sent again gets the same answer, and no second job."""
    require_json(request)
    key = _idempotency_key(request)
    body = await read_body(request, system.settings.max_request_bytes)
    idempotency = Idempotency(ROUTE, key, body.fingerprint) if key else None
    if idempotency and (earlier := await submit.replay(tenant, idempotency)):
        return _accepted(earlier)
    spec = await _decode(body.data)
    return _accepted(await submit.submit(tenant, spec, idempotency))


@get("/jobs", summary="List jobs", responses=shapes.answers(shapes.JobsPage, 400))
async def list_jobs(
    system: SystemPart, tenant: TenantPart, limit: Limit = 50, cursor: Cursor = None
) -> Response[bytes]:
    """The tenant's jobs, newest first."""
    check_job_cursor(cursor)
    page = await system.records.jobs(tenant, cursor, limit)
    items = await asyncio.gather(*(_shown(system, job) for job in page.items))
    return answer({"items": items, "next_cursor": page.next_cursor})


@get("/jobs/{job_id:str}", summary="Show a job", responses=shapes.answers(shapes.JobShape, 404))
async def show_job(job_id: FromPath[str], system: SystemPart, tenant: TenantPart) -> Response[bytes]:
    """State, live counts, rate, time left and the most frequent errors."""
    return answer(await _shown(system, await find_job(system.records, tenant, job_id)))


def _idempotency_key(request: ApiRequest) -> str | None:
    given = request.headers.getall("idempotency-key", [])
    if not given:
        return None
    if len(given) > 1 or not _IDEMPOTENCY_KEY.fullmatch(given[0]):
        raise InvalidField(
            "`Idempotency-Key` must be one header of 1 to 255 visible ASCII characters.", field="Idempotency-Key"
        )
    return given[0]


async def _decode(body: bytearray) -> JobSpec:
    if len(body) <= _BYTES_ON_LOOP:
        return decode_spec(body)
    return await asyncio.to_thread(decode_spec, body)


def _accepted(accepted: Accepted) -> Response[bytes]:
    headers = {"Location": f"/v1/jobs/{accepted.job_id}"}
    if accepted.replayed:
        headers["Idempotency-Replayed"] = "true"
    return Response(accepted.body, status_code=accepted.status, media_type="application/json", headers=headers)


async def _shown(system: System, job: Job) -> dict[str, Any]:
    shown = await job_json(system.tasks, system.coordinator, system.clock, job)
    shown["options"] = _without_secrets(shown["options"])
    return shown


def _without_secrets(options: dict[str, Any]) -> dict[str, Any]:
    """Headers and gateways carry passwords: who may look at a job need not know them."""
    hidden = dict(options)
    if "headers" in hidden:
        hidden["headers"] = dict.fromkeys(hidden["headers"], _HIDDEN)
    if hidden.get("gateway"):
        hidden["gateway"] = {name: _HIDDEN for name, value in hidden["gateway"].items() if value}
    return hidden
