"""Control of a job: rerun, duplicate, cancel, pause, resume, delete."""

from collections.abc import Awaitable, Callable

from litestar import Response, delete, post
from litestar.params import FromPath

from conveyor.accept.answer import AcceptedView
from conveyor.accept.control import Control
from conveyor.accept.duplicate import Duplicate, DuplicateSpec
from conveyor.accept.rerun import Rerun, RerunSpec
from conveyor.api import operations
from conveyor.api.creation import accepted, read_keyed_optional, read_optional
from conveyor.api.dependencies import ApiRequest, SubmitPart, SystemPart, TenantPart, answer, find_job
from conveyor.api.job_routes import full_job_json
from conveyor.api.response_specs import answers, problems, shaped
from conveyor.api.schemas.job_shapes import JobShape
from conveyor.errors import NotFound
from conveyor.model import Job, TenantId
from conveyor.system import System

_RESPONSES = answers(JobShape, 400, 404, 409)
_takes_nothing = operations.takes(operations.Nothing, required=False)


@post(
    "/jobs/{job_id:str}/rerun",
    summary="Rerun tasks",
    status_code=202,
    operation_class=operations.takes(RerunSpec, operations.IDEMPOTENCY_KEY, required=False),
    responses={**shaped(AcceptedView, 202), **problems(400, 404, 409, 415, 429, 503)},
)
async def rerun_job(
    request: ApiRequest, job_id: FromPath[str], system: SystemPart, tenant: TenantPart
) -> Response[bytes]:
    """Starts a new run over the job's failed tasks, over all tasks, or over those that match a filter on their latest
    result. Indexes and the results of earlier runs stay. If the ingest of the job's list failed, it resumes instead."""
    job = await find_job(system.records, tenant, job_id)
    route = f"POST /v1/jobs/{job.job_id}/rerun"
    spec, idempotent = await read_keyed_optional(request, system.settings.max_request_bytes, RerunSpec, route)
    return accepted(await Rerun(system).rerun(job, spec, idempotent), f"/v1/jobs/{job.job_id}")


@post(
    "/jobs/{job_id:str}/duplicate",
    summary="Duplicate a job",
    operation_class=operations.takes(DuplicateSpec, operations.IDEMPOTENCY_KEY, required=False),
    responses={**shaped(AcceptedView, 201, 202), **problems(400, 403, 404, 409, 413, 415, 429, 503)},
)
async def duplicate_job(
    request: ApiRequest, job_id: FromPath[str], system: SystemPart, submit: SubmitPart, tenant: TenantPart
) -> Response[bytes]:
    """Submits a new job with the same list, kind, options and receivers of events, secrets included; `name` and
    `options` replace those of the original. An open job becomes a closed one with the tasks that it has so far. Tokens
    of state machines are not copied. Responds as a submit does."""
    job = await find_job(system.records, tenant, job_id)
    route = f"POST /v1/jobs/{job.job_id}/duplicate"
    spec, idempotent = await read_keyed_optional(request, system.settings.max_request_bytes, DuplicateSpec, route)
    outcome = await Duplicate(system, submit).duplicate(job, spec, idempotent)
    return accepted(outcome, f"/v1/jobs/{outcome.subject}")


@post(
    "/jobs/{job_id:str}/cancel",
    summary="Cancel a job",
    status_code=200,
    operation_class=_takes_nothing,
    responses=_RESPONSES,
)
async def cancel_job(
    request: ApiRequest, job_id: FromPath[str], system: SystemPart, tenant: TenantPart
) -> Response[bytes]:
    """No further task starts, and running attempts are aborted. Unfinished tasks are cancelled in the background;
    `pending` counts those that remain."""
    return await _control(request, system, tenant, job_id, Control(system).cancel)


@post(
    "/jobs/{job_id:str}/pause",
    summary="Pause a job",
    status_code=200,
    operation_class=_takes_nothing,
    responses=_RESPONSES,
)
async def pause_job(
    request: ApiRequest, job_id: FromPath[str], system: SystemPart, tenant: TenantPart
) -> Response[bytes]:
    """No further task starts until the job is resumed. Running attempts are aborted, and start again then."""
    return await _control(request, system, tenant, job_id, Control(system).pause)


@post(
    "/jobs/{job_id:str}/resume",
    summary="Resume a paused job",
    status_code=200,
    operation_class=_takes_nothing,
    responses=_RESPONSES,
)
async def resume_job(
    request: ApiRequest, job_id: FromPath[str], system: SystemPart, tenant: TenantPart
) -> Response[bytes]:
    """Tasks start again where the job was paused."""
    return await _control(request, system, tenant, job_id, Control(system).resume)


@delete("/jobs/{job_id:str}", summary="Delete a job", responses=problems(404))
async def delete_job(job_id: FromPath[str], system: SystemPart, tenant: TenantPart) -> None:
    """The job disappears at once, and its running tasks stop; its rows and bodies are purged soon after."""
    job = await find_job(system.records, tenant, job_id)
    if not await system.records.jobs.mark_deleted(tenant, job.job_id):
        raise NotFound


async def _control(
    request: ApiRequest, system: System, tenant: TenantId, job_id: str, control: Callable[[Job], Awaitable[Job]]
) -> Response[bytes]:
    job = await find_job(system.records, tenant, job_id)
    await read_optional(request, system.settings.max_request_bytes, operations.Nothing)
    return answer(await full_job_json(system, await control(job)))
