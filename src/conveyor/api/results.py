"""Results: tasks in pages, one task, its body, and everything in one archive."""

import re
from typing import Annotated

from litestar import Response, get
from litestar.params import FromPath, QueryParameter
from litestar.response import Stream

from conveyor.api import shapes
from conveyor.api.parts import Cursor, Limit, SystemPart, TenantPart, answer, attachment, find_job, stream
from conveyor.engines.tasks import TaskFilter, Tasks
from conveyor.errors import Conflict, InvalidField, NotFound
from conveyor.model import Job, Task, TaskId
from conveyor.serve.export import export_zip
from conveyor.serve.names import body_name
from conveyor.serve.results import body_ref, result_page, stream_body, task_json
from conveyor.states import ENDED, TaskStatus

_TASK_ID = re.compile(r"[0-9a-f]{64}")
_VISIBLE = re.compile(r"[\x20-\x7e]{1,200}")
_STATUSES = {status.label: status for status in TaskStatus}

Status = Annotated[str | None, QueryParameter(description=f"One of {', '.join(_STATUSES)}.")]
ErrorCode = Annotated[str | None, QueryParameter(max_length=200)]
HttpStatus = Annotated[int | None, QueryParameter(ge=100, le=599)]
Partial = Annotated[bool, QueryParameter(description="Take what is there while the run goes on.")]


@get("/jobs/{job_id:str}/results", summary="List results", responses=shapes.answers(shapes.ResultsPage, 400, 404))
async def list_results(
    job_id: FromPath[str],
    system: SystemPart,
    tenant: TenantPart,
    status: Status = None,
    error_code: ErrorCode = None,
    http_status: HttpStatus = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Response[bytes]:
    """Tasks of the job's latest run, in order of task_id; those that match every filter."""
    where = TaskFilter(_status(status), error_code, http_status)
    job = await find_job(system.records, tenant, job_id)
    page = await result_page(system.tasks, job.key, where, limit, cursor)
    items = [task_json(task, _body_url(job, task)) for task in page.items]
    return answer({"items": items, "next_cursor": page.next_cursor})


@get("/jobs/{job_id:str}/tasks/{task_id:str}", summary="Show a task", responses=shapes.answers(shapes.TaskShape, 404))
async def show_task(
    job_id: FromPath[str], task_id: FromPath[str], system: SystemPart, tenant: TenantPart
) -> Response[bytes]:
    """One task and its result."""
    job = await find_job(system.records, tenant, job_id)
    task = await find_task(system.tasks, job, task_id)
    return answer(task_json(task, _body_url(job, task)))


@get(
    "/jobs/{job_id:str}/tasks/{task_id:str}/body",
    summary="Get a task's result body",
    media_type="application/octet-stream",
    responses=shapes.problems(404),
)
async def get_body(job_id: FromPath[str], task_id: FromPath[str], system: SystemPart, tenant: TenantPart) -> Stream:
    """The bytes as they were stored. They come from strangers, so they are never served as what they say they are:
    always a download, of no type; the stored type is in `X-Conveyor-Content-Type`, the sha256 in `ETag`."""
    job = await find_job(system.records, tenant, job_id)
    task = await find_task(system.tasks, job, task_id)
    ref = body_ref(task)
    headers = {
        "Content-Length": str(ref.length),
        "Content-Security-Policy": "sandbox; default-src 'none'; frame-ancestors 'none'",
        "ETag": f'"{ref.sha256}"',
        **attachment(body_name(task).rpartition("/")[2]),
    }
    if _VISIBLE.fullmatch(task.detail.content_type or ""):
        headers["X-Conveyor-Content-Type"] = task.detail.content_type or ""
    return await stream(stream_body(system.blobs, ref), "application/octet-stream", headers)


@get(
    "/jobs/{job_id:str}/export",
    summary="Download everything",
    media_type="application/zip",
    responses=shapes.problems(404, 409),
)
async def export_job(job_id: FromPath[str], system: SystemPart, tenant: TenantPart, partial: Partial = False) -> Stream:
    """A zip of every body, with `manifest.jsonl`: one line for each task."""
    job = await find_job(system.records, tenant, job_id)
    if job.state not in ENDED and not partial:
        raise Conflict(
            "The job has not ended. Wait for it, or ask with `partial=true` for what is there now.", state=job.state
        )
    pieces = export_zip(system.tasks, system.blobs, job, spool_dir=system.settings.data)
    return await stream(pieces, "application/zip", attachment(f"{job.job_id}.zip"))


async def find_task(tasks: Tasks, job: Job, task_id: str) -> Task:
    """A task of the job's latest run."""
    task = await tasks.task(job.key, TaskId(task_id)) if _TASK_ID.fullmatch(task_id) else None
    if task is None:
        raise NotFound
    return task


def _status(label: str | None) -> TaskStatus | None:
    if label is None:
        return None
    if label not in _STATUSES:
        raise InvalidField(f"`status` must be one of {', '.join(_STATUSES)}.", field="status")
    return _STATUSES[label]


def _body_url(job: Job, task: Task) -> str:
    return f"/v1/jobs/{job.job_id}/tasks/{task.task_id}/body"
