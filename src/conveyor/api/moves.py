"""Moves: what a client may do with a job that is there. Run what failed again, or delete it."""

from litestar import Response, delete, post
from litestar.params import FromPath

from conveyor.accept.resume import resume_ingest
from conveyor.api import operations, shapes
from conveyor.api.creation import read_optional
from conveyor.api.jobs import shown
from conveyor.api.parts import ApiRequest, SystemPart, TenantPart, answer, find_job
from conveyor.errors import NotFound


@post(
    "/jobs/{job_id:str}/rerun",
    summary="Run a failed ingest again",
    status_code=202,
    operation_class=operations.takes(operations.Nothing, required=False),
    responses={**shapes.shaped(shapes.JobShape, 202), **shapes.problems(400, 404, 409)},
)
async def rerun_job(
    request: ApiRequest, job_id: FromPath[str], system: SystemPart, tenant: TenantPart
) -> Response[bytes]:
    """A job whose list could not be ingested goes on where it stopped, once what stopped it is mended."""
    job = await find_job(system.records, tenant, job_id)
    await read_optional(request, system.settings.max_request_bytes, operations.Nothing)
    await resume_ingest(system, job)
    return answer(await shown(system, await find_job(system.records, tenant, job_id)), 202)


@delete("/jobs/{job_id:str}", summary="Delete a job", responses=shapes.problems(404))
async def delete_job(job_id: FromPath[str], system: SystemPart, tenant: TenantPart) -> None:
    """It is gone at once for every reader, and what runs of it stops; its rows and bodies are removed soon after."""
    job = await find_job(system.records, tenant, job_id)
    if not await system.records.hide_job(tenant, job.job_id):
        raise NotFound
