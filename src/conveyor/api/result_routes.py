"""Results: list tasks, show one, download all as a zip."""

import asyncio
import re
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Annotated, Any

import msgspec
from litestar import Response, get
from litestar.params import FromPath, QueryParameter
from litestar.response import Stream

from conveyor.api.dependencies import (
    NDJSON,
    ApiRequest,
    Cursor,
    Limit,
    SystemPart,
    TenantPart,
    answer,
    attachment,
    find_job,
    stream,
    wants_ndjson,
)
from conveyor.api.response_specs import answers, problems
from conveyor.api.schemas.task_shapes import ResultsPage, TaskShape
from conveyor.auth.body_links import body_path, extracted_path
from conveyor.coordination.in_progress import read_in_progress
from conveyor.engines.tasks import TaskFilter
from conveyor.errors import Conflict, InvalidField
from conveyor.export.direct import export_zip
from conveyor.lists.inputs import MAX_LABEL
from conveyor.model import Job, Task
from conveyor.read.body_reader import MAX_EXTRACTED, read_extracted
from conveyor.read.listing import listing_lines, listing_page, order_of
from conveyor.read.results import body_link, task_json, task_progress
from conveyor.read.runs import LATEST, LATEST_PER_TASK, chosen_runs, locate_task
from conveyor.read.transfers import progress_json, progress_of
from conveyor.states import ENDED, WORKABLE, TaskStatus
from conveyor.system import System

# Signing the links of a long page takes a tenth of a second, so the loop yields in between.
_SIGNED_AT_ONCE = 50
# What was extracted from all tasks of a page together, in bytes.
_PAGE_EXTRACTED = 8 * 1024 * 1024
_HTTP_STATUS = re.compile(r"[1-5][0-9]{2}", re.ASCII)
_STATUSES = {status.label: status for status in TaskStatus}

Status = Annotated[str | None, QueryParameter(description=f"One of {', '.join(_STATUSES)}.")]
ErrorCode = Annotated[str | None, QueryParameter(max_length=200)]
# As text: of an optional number, Litestar takes the text `null` for a filter that is absent, and returns everything.
HttpStatus = Annotated[str | None, QueryParameter(description="100 to 599.")]
Tag = Annotated[str | None, QueryParameter(max_length=MAX_LABEL, description="The tag of a task.")]
OfRun = Annotated[
    str | None,
    QueryParameter(
        name="run",
        description=f"`{LATEST_PER_TASK}` (the default): the latest outcome of each task over all runs. "
        f"Or one run: its id or number, or `{LATEST}`.",
    ),
]
Partial = Annotated[bool, QueryParameter(description="Export the results so far, while the run is unfinished.")]


@get("/jobs/{job_id:str}/results", summary="List results", responses=answers(ResultsPage, 400, 404))
async def list_results(
    request: ApiRequest,
    job_id: FromPath[str],
    system: SystemPart,
    tenant: TenantPart,
    status: Status = None,
    error_code: ErrorCode = None,
    http_status: HttpStatus = None,
    tag: Tag = None,
    run: OfRun = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Response[Any]:
    """The tasks of the job that match every filter, each with its latest outcome over all runs; a pending or cancelled
    task of a later run hides no outcome. `run` chooses one run. `order` says how they are sorted. `Accept:
    application/x-ndjson` returns all tasks after the cursor as a download, one per line, sorted alike; if the
    stream fails, its last line says so."""
    where = task_filter(status, error_code, http_status, tag)
    job = await find_job(system.records, tenant, job_id)
    runs = await chosen_runs(system.records, job, run)
    if wants_ndjson(request):
        lines = listing_lines(system.tasks, runs, where, cursor, partial(tasks_json, system, job))
        return await stream(lines, NDJSON, attachment(f"{job.job_id}.jsonl"))
    page = await listing_page(system.tasks, runs, where, limit, cursor)
    items = await running_tasks_json(system, job, page.items)
    order = order_of(system.tasks, runs, cursor)
    return answer({"items": items, "next_cursor": page.next_cursor, "order": order})


@get("/jobs/{job_id:str}/tasks/{task_id:str}", summary="Show a task", responses=answers(TaskShape, 404))
async def show_task(
    job_id: FromPath[str], task_id: FromPath[str], system: SystemPart, tenant: TenantPart
) -> Response[bytes]:
    """A task and its result, of any run of the job; with its progress, if it is running and reports any."""
    job = await find_job(system.records, tenant, job_id)
    run, task = await locate_task(system.records, system.tasks, job, task_id)
    [shown] = await tasks_json(system, job, [task])
    progress = await task_progress(system.records, run, task)
    if task.detail.first_byte > 0:
        shown["first_byte"] = task.detail.first_byte
    if task.detail.worker:
        shown["worker"] = task.detail.worker
    attempted = await _in_progress(system, job, [task])
    if task.index in attempted:
        shown |= {"running": True, "worker": attempted[task.index]}
    return answer(shown if progress is None else {**shown, "progress": progress})


@get(
    "/jobs/{job_id:str}/export",
    summary="Download all results",
    media_type="application/zip",
    responses=problems(404, 409),
)
async def export_job(
    job_id: FromPath[str], system: SystemPart, tenant: TenantPart, partial: Partial = False, run: OfRun = None
) -> Stream:
    """A zip of all bodies, with `manifest.jsonl`: one line for each task, with its latest outcome."""
    job = await find_job(system.records, tenant, job_id)
    runs = await chosen_runs(system.records, job, run)
    if job.state not in ENDED and not partial:
        raise Conflict(
            "The job has not finished. Wait for it, or pass `partial=true` for the results so far.", state=job.state
        )
    pieces = export_zip(system.tasks, system.blobs, job, spool_dir=system.settings.data, runs=runs)
    return await stream(pieces, "application/zip", attachment(f"{job.job_id}.zip"))


def task_filter(status: str | None, error_code: str | None, http_status: str | None, tag: str | None) -> TaskFilter:
    """The filter that the query parameters describe. Raises InvalidField."""
    return TaskFilter(_status(status), error_code, _http_status(http_status), tag)


def _status(label: str | None) -> TaskStatus | None:
    if label is None:
        return None
    if label not in _STATUSES:
        raise InvalidField(f"`status` must be one of {', '.join(_STATUSES)}.", field="status")
    return _STATUSES[label]


def _http_status(text: str | None) -> int | None:
    if text is None:
        return None
    if not _HTTP_STATUS.fullmatch(text):
        raise InvalidField("`http_status` must be a number from 100 to 599.", field="http_status")
    return int(text)


def _within_budget(tasks: Sequence[Task]) -> list[Task]:
    """The tasks, without what was extracted from those past the budget of a page: their links have it."""
    lengths = [
        0 if task.detail.extracted is None else min(task.detail.extracted.length, MAX_EXTRACTED) for task in tasks
    ]
    return [
        task if total <= _PAGE_EXTRACTED or not length else _without_extracted(task)
        for task, length, total in zip(tasks, lengths, accumulate(lengths), strict=True)
    ]


def _without_extracted(task: Task) -> Task:
    return msgspec.structs.replace(task, detail=msgspec.structs.replace(task.detail, extracted=None))


async def running_tasks_json(system: System, job: Job, tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """The JSON of a page of tasks; those that an attempt has now say so, and have their progress."""
    shown, progress, attempted = await asyncio.gather(
        tasks_json(system, job, tasks),
        progress_of(system.records.documents, system.tasks, job, tasks),
        _in_progress(system, job, tasks),
    )
    return [
        {
            **task,
            **({"progress": progress_json(progress[task["index"]])} if task["index"] in progress else {}),
            **({"running": True} if task["index"] in attempted or task["index"] in progress else {}),
        }
        for task in shown
    ]


async def _in_progress(system: System, job: Job, tasks: Sequence[Task]) -> dict[int, str]:
    """The tasks among these that the latest run attempts now, with their workers."""
    pending = {task.index for task in tasks if task.status is TaskStatus.PENDING}
    if not pending or job.run.state not in WORKABLE:
        return {}
    attempted = await read_in_progress(system.coordinator, job.run.run_id, system.clock.now())
    return {index: worker for index, worker in attempted.items() if index in pending}


async def tasks_json(system: System, job: Job, tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """The JSON of tasks, with links to their bodies, and with what was extracted from these."""
    shown = []
    now = system.clock.now()
    extracted = await read_extracted(system.blobs, _within_budget(tasks), MAX_EXTRACTED)
    for number, (task, value) in enumerate(zip(tasks, extracted, strict=True), start=1):
        path = link = None
        if task.detail.body is not None:
            path = body_path(system.signing_key, job.tenant, job.job_id, task.task_id, now)
        if task.detail.extracted is not None:
            link = extracted_path(system.signing_key, job.tenant, job.job_id, task.task_id, now)
        shown_task = task_json(task, await body_link(system.blobs, task, path))
        shown_task["extracted"] = None if value is None else msgspec.Raw(bytes(value))
        shown_task["extracted_url"] = link
        shown.append(shown_task)
        if number % _SIGNED_AT_ONCE == 0:
            await asyncio.sleep(0)
    return shown
