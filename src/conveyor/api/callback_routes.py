"""Callbacks: state machines that wait for a job, and the answers that they got."""

from litestar import Response, get
from litestar.params import FromPath

from conveyor.api.dependencies import SystemPart, TenantPart, answer, find_job
from conveyor.api.response_specs import answers
from conveyor.api.schemas.callback_shapes import CallbacksPage
from conveyor.jobs.callbacks import callback_json
from conveyor.notify.callback_answers import callbacks_of


@get(
    "/jobs/{job_id:str}/callbacks",
    summary="List a job's callbacks",
    responses=answers(CallbacksPage, 400, 404),
)
async def list_callbacks(job_id: FromPath[str], system: SystemPart, tenant: TenantPart) -> Response[bytes]:
    """State machines that wait with a task token for the job to finish: the status of each callback, its last
    heartbeat, and its answer. Tokens are not shown."""
    job = await find_job(system.records, tenant, job_id)
    rows = await callbacks_of(system.records, tenant, job.job_id)
    return answer({"items": [callback_json(row) for row in rows], "next_cursor": None})
