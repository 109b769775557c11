"""Statistics of a run, and search in its tasks."""

from typing import Annotated

from litestar import Response, get
from litestar.params import FromPath, QueryParameter

from conveyor.api.dependencies import Cursor, Limit, SystemPart, TenantPart, answer, find_job
from conveyor.api.response_specs import answers
from conveyor.api.result_routes import ErrorCode, HttpStatus, OfRun, Status, Tag, running_tasks_json, task_filter
from conveyor.api.schemas.statistics_shapes import StatisticsShape
from conveyor.api.schemas.task_shapes import TaskSearchPage
from conveyor.read.listing import order_of
from conveyor.read.runs import LATEST_PER_TASK, chosen_run, chosen_runs
from conveyor.read.search import search_page
from conveyor.read.statistics import statistics_json

Text = Annotated[
    str, QueryParameter(min_length=1, max_length=200, description="Text in the input, or an index or task_id.")
]
OfOneRun = Annotated[
    str | None,
    QueryParameter(
        name="run",
        description="The id or number of a run, or `latest`. Default: counts and latency of the latest run, and errors "
        "by the latest outcome of each task over all runs.",
    ),
]


@get(
    "/jobs/{job_id:str}/statistics",
    summary="Show statistics of a run",
    responses=answers(StatisticsShape, 400, 404),
)
async def show_statistics(
    job_id: FromPath[str], system: SystemPart, tenant: TenantPart, run: OfOneRun = None
) -> Response[bytes]:
    """Counts and attempts over time and latency, of one run; and the 100 most frequent errors, by the latest outcome of
    each task over all runs unless `run` chooses one. `series` is kept with the run. The coordinator keeps finer samples
    and the latency of last attempts for a day; after that, and if it lost them, they are made of what is kept."""
    job = await find_job(system.records, tenant, job_id)
    chosen = None
    if run is not None and run != LATEST_PER_TASK:
        chosen = await chosen_run(system.records, job, run)
    return answer(await statistics_json(system.records, system.tasks, system.coordinator, system.clock, job, chosen))


@get(
    "/jobs/{job_id:str}/search",
    summary="Search for tasks",
    responses=answers(TaskSearchPage, 400, 404),
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
    """Tasks whose input contains the text, ignoring case; first the task with this index or task_id. A page reads a few
    thousand rows at most, counted in `read`, so it may have fewer items than `limit`, or none, and still have a next
    page."""
    where = task_filter(status, error_code, http_status, tag)
    job = await find_job(system.records, tenant, job_id)
    runs = await chosen_runs(system.records, job, run)
    matches = await search_page(system.tasks, runs, where, text, limit, cursor)
    items = await running_tasks_json(system, job, matches.page.items)
    order = order_of(system.tasks, runs, cursor)
    return answer({"items": items, "next_cursor": matches.page.next_cursor, "read": matches.read, "order": order})
