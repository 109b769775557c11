"""Events of a job, or of one of its tasks."""

from typing import Annotated

from litestar import Response, get
from litestar.params import FromPath, QueryParameter

from conveyor.api.dependencies import Cursor, Limit, SystemPart, TenantPart, answer, find_job
from conveyor.api.response_specs import answers
from conveyor.api.schemas.task_shapes import EventsPage
from conveyor.model import EventRecord, Job, Page
from conveyor.read.event_pages import event_json, task_events
from conveyor.read.runs import locate_task
from conveyor.system import System

OfTask = Annotated[
    str | None, QueryParameter(description="A task_id. Lists the events of this task instead of the job's.")
]


@get("/jobs/{job_id:str}/events", summary="List events", responses=answers(EventsPage, 400, 404))
async def list_events(
    job_id: FromPath[str],
    system: SystemPart,
    tenant: TenantPart,
    task: OfTask = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Response[bytes]:
    """Events of the job, oldest first, with the same ids as in webhooks and in the stream; with `task`, the failed
    attempts and the outcome of that task."""
    job = await find_job(system.records, tenant, job_id)
    page = await _events(system, job, task, cursor, limit)
    return answer({"items": [event_json(event) for event in page.items], "next_cursor": page.next_cursor})


async def _events(system: System, job: Job, task_id: str | None, cursor: str | None, limit: int) -> Page[EventRecord]:
    if task_id is None:
        return await system.records.outbox.events(job.tenant, job.job_id, cursor, limit)
    run, task = await locate_task(system.records, system.tasks, job, task_id)
    return await task_events(system.tasks, run, task, cursor, limit)
