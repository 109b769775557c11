"""Open jobs: add batches of tasks, then close the job."""

from litestar import Response, post
from litestar.params import FromPath

from conveyor.accept.add_tasks import BatchView
from conveyor.accept.spec import TasksSpec
from conveyor.api import operations
from conveyor.api.creation import accepted, read_keyed, read_optional
from conveyor.api.dependencies import AddTasksPart, ApiRequest, SystemPart, TenantPart, answer, find_job
from conveyor.api.job_routes import full_job_json
from conveyor.api.response_specs import answers, problems, shaped
from conveyor.api.schemas.job_shapes import JobShape


@post(
    "/jobs/{job_id:str}/tasks",
    summary="Add tasks to an open job",
    status_code=202,
    operation_class=operations.takes(TasksSpec, operations.IDEMPOTENCY_KEY),
    responses={**shaped(BatchView, 202), **problems(400, 404, 409, 413, 415, 429, 503)},
)
async def add_tasks(
    request: ApiRequest, job_id: FromPath[str], system: SystemPart, tenant: TenantPart, adding: AddTasksPart
) -> Response[bytes]:
    """The server accepts a batch completely or not at all, but for invalid tasks, which it skips and counts in
    `invalid_lines` unless the job has `on_invalid: reject`; `last_batch` closes the job. With an `Idempotency-Key`, a
    repeated batch is added once."""
    job = await find_job(system.records, tenant, job_id)
    route = f"POST /v1/jobs/{job.job_id}/tasks"
    spec, idempotent = await read_keyed(request, system.settings.max_request_bytes, TasksSpec, route)
    return accepted(await adding.add(job, spec, idempotent))


@post(
    "/jobs/{job_id:str}/close",
    summary="Close an open job",
    status_code=200,
    operation_class=operations.takes(operations.Nothing, required=False),
    responses=answers(JobShape, 400, 404, 409),
)
async def close_job(
    request: ApiRequest, job_id: FromPath[str], system: SystemPart, tenant: TenantPart, adding: AddTasksPart
) -> Response[bytes]:
    """The job accepts no more tasks. Closing it again has no effect."""
    job = await find_job(system.records, tenant, job_id)
    await read_optional(request, system.settings.max_request_bytes, operations.Nothing)
    await adding.close(job)
    return answer(await full_job_json(system, await find_job(system.records, tenant, job_id)))
