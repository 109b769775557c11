"""What is known of a run beside its counts now, and which of its tasks have a text in them."""

from typing import Annotated

from litestar import Response, get
from litestar.params import FromPath, QueryParameter

from conveyor.api import schemas as shapes
from conveyor.api.dependencies import Cursor, Limit, SystemPart, TenantPart, answer, find_job
from conveyor.api.result_routes import ErrorCode, HttpStatus, OfRun, Status, Tag, shown_tasks, task_filter
from conveyor.errors import NotFound
from conveyor.read.runs import chosen_runs
from conveyor.read.search import search_page
from conveyor.read.statistics import statistics_json

Text = Annotated[
    str, QueryParameter(min_length=1, max_length=200, description="A text in the input, or an index or task_id.")
]
OfOneRun = Annotated[str | None, QueryParameter(name="run", description="The id or number of a run; else the latest.")]


@get(
    "/jobs/{job_id:str}/statistics",
    summary="Show how a run went",
    responses=shapes.answers(shapes.StatisticsShape, 400, 404),
)
async def show_statistics(
    job_id: FromPath[str], system: SystemPart, tenant: TenantPart, run: OfOneRun = None
) -> Response[bytes]:
    """Its counts over time, how long tasks took in their last attempts, and the 100 most frequent errors. Times and
    counts are kept by the coordinator, for a day; what it lost, or nobody counted, is left out."""
    job = await find_job(system.records, tenant, job_id)
    key = (await chosen_runs(system.records, job, run))[-1]
    found = await system.records.jobs.run(job.job_id, key.run_id)
    if found is None:
        raise NotFound
    return answer(await statistics_json(system.records, system.tasks, system.coordinator, system.clock, job, found))


@get(
    "/jobs/{job_id:str}/search",
    summary="Search for tasks",
    responses=shapes.answers(shapes.FoundPage, 400, 404),
)
async def search_tasks(
    job_id: FromPath[str],
    system: SystemPart,
    tenant: TenantPart,
    text: Text,
    status: Status = None,
    error_code: ErrorCode = None,
    http_status: HttpStatus = None,
    tag: Tag = None,
    run: OfRun = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Response[bytes]:
    """Tasks with the text in their input, whatever the case; first the one whose index or task_id it is. Some thousand
    rows are read for a page, `read` says how many: it may have fewer items than asked for, or none, and still have a
    next one."""
    where = task_filter(status, error_code, http_status, tag)
    job = await find_job(system.records, tenant, job_id)
    runs = await chosen_runs(system.records, job, run)
    found = await search_page(system.tasks, runs, where, text, limit, cursor)
    items = await shown_tasks(system, job, found.page.items)
    return answer({"items": items, "next_cursor": found.page.next_cursor, "read": found.read})
