"""Comparison of two runs of a job."""

from typing import Annotated

from litestar import Response, get
from litestar.params import FromPath, QueryParameter

from conveyor.api.dependencies import Cursor, Limit, SystemPart, TenantPart, answer, find_job
from conveyor.api.response_specs import answers
from conveyor.api.result_routes import tasks_json
from conveyor.api.schemas.task_shapes import TaskSearchPage
from conveyor.errors import InvalidField
from conveyor.read.listing import order_of
from conveyor.read.run_comparison import Change, compared_page
from conveyor.read.runs import LATEST, LATEST_PER_TASK, chosen_run

_CHANGES = ", ".join(Change)

OneRun = Annotated[str, QueryParameter(name="run", description="The later run: its id or number, or `latest`.")]
OtherRun = Annotated[str, QueryParameter(name="with", description="The earlier run: its id or number.")]
HowChanged = Annotated[str, QueryParameter(description=f"One of {_CHANGES}.")]


@get(
    "/jobs/{job_id:str}/comparison",
    summary="Compare two runs",
    responses=answers(TaskSearchPage, 400, 404),
)
async def compare_runs(
    job_id: FromPath[str],
    system: SystemPart,
    tenant: TenantPart,
    with_run: OtherRun,
    change: HowChanged,
    run: OneRun = LATEST,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Response[bytes]:
    """Tasks of both runs that failed in the earlier one and succeeded in the later (`fixed`), the other way round
    (`newly_failed`), or failed in both (`still_failed`), each with its result in the later run. A page reads a few
    thousand rows at most, counted in `read`, so it may have fewer items than `limit`, or none, and still have a next
    page."""
    if change not in list(Change):
        raise InvalidField(f"`change` must be one of {_CHANGES}.", field="change")
    if LATEST_PER_TASK in (run, with_run):
        raise InvalidField("`run` and `with` must each be one run: its id or number, or `latest`.", field="run")
    job = await find_job(system.records, tenant, job_id)
    later, earlier = [job.key_of(await chosen_run(system.records, job, which)) for which in (run, with_run)]
    page = await compared_page(system.tasks, earlier, later, Change(change), limit, cursor)
    items = await tasks_json(system, job, page.items)
    order = order_of(system.tasks, [later], cursor)
    return answer({"items": items, "next_cursor": page.next_cursor, "read": page.read, "order": order})
