"""Jobs: submit, list, show, change."""

import asyncio
from typing import Annotated, Any

import structlog
from litestar import Response, get, patch, post
from litestar.background_tasks import BackgroundTask
from litestar.params import FromPath, QueryParameter

from conveyor.accept.answer import AcceptedView
from conveyor.accept.option_changes import Changes, change_options
from conveyor.accept.replace import SUBMIT_ROUTE
from conveyor.accept.spec import JobSpec
from conveyor.accept.submit import Submit
from conveyor.api import operations
from conveyor.api.creation import accepted, read_keyed, read_spec
from conveyor.api.dependencies import (
    ApiRequest,
    Cursor,
    Limit,
    SubmitPart,
    SystemPart,
    TenantPart,
    answer,
    check_job_cursor,
    find_job,
)
from conveyor.api.job_filters import CreatedAfter, CreatedBefore, JobText, Kind, MadeBy, State, job_filter
from conveyor.api.response_specs import answers, problems, shaped
from conveyor.api.schemas.job_shapes import JobShape, JobsPage
from conveyor.errors import ConveyorError
from conveyor.jobs.idempotency import Accepted
from conveyor.jobs.secrets import shown_options
from conveyor.model import Job
from conveyor.read.job_search import find_jobs
from conveyor.read.runs import LATEST, LATEST_PER_TASK, chosen_run
from conveyor.read.status import (
    hot_status_json,
    job_json,
    of_run,
    refresh_status,
    status_json,
)
from conveyor.read.verification import check_verifiable, verify_json
from conveyor.system import System

log = structlog.get_logger()

ROUTE = SUBMIT_ROUTE

Verify = Annotated[bool, QueryParameter(description="Count the rows, and report by how much the counters are wrong.")]
CountsOf = Annotated[
    str | None,
    QueryParameter(
        name="run",
        description=f"What `total`, `counts` and `top_errors` are of: `{LATEST_PER_TASK}` (the default), "
        f"or one run: its id or number, or `{LATEST}`.",
    ),
]


@post(
    "/jobs",
    summary="Submit a job",
    operation_class=operations.takes(JobSpec, operations.IDEMPOTENCY_KEY, operations.PREFER),
    responses={
        **shaped(AcceptedView, 201, 202),
        **problems(400, 403, 404, 409, 413, 415, 429, 503),
    },
)
async def submit_job(request: ApiRequest, system: SystemPart, submit: SubmitPart) -> Response[bytes]:
    """A small job is written in one transaction, and its tasks are readable at once: 201. Large and open jobs, jobs
    from an upload, and those with `Prefer: respond-async` are ingested: 202. Invalid tasks are skipped and counted in
    `invalid_lines`, unless `on_invalid` is `reject`, or no task is valid: 400. With an `Idempotency-Key`, a repeated
    request gets the same response and creates no second job."""
    outcome = await carry_out_submit(request, system, submit)
    return accepted(outcome, f"/v1/jobs/{outcome.subject}")


async def carry_out_submit(request: ApiRequest, system: System, submit: Submit) -> Accepted:
    """Read the job in an authenticated request, and accept it."""
    spec, idempotent = await read_keyed(request, system.settings.max_request_bytes, JobSpec, ROUTE)
    return await submit.submit(request.auth.tenant, spec, idempotent, _prefers_async(request))


@get("/jobs", summary="List jobs", responses=answers(JobsPage, 400))
async def list_jobs(
    system: SystemPart,
    tenant: TenantPart,
    text: JobText = None,
    job_state: State = None,
    kind: Kind = None,
    schedule_id: MadeBy = None,
    created_after: CreatedAfter = None,
    created_before: CreatedBefore = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Response[bytes]:
    """The tenant's jobs that match every filter, newest first. With a filter, a page reads about 2,000 jobs at most,
    counted in `read`, so it may have fewer items than `limit`, or none, and still have a next page."""
    check_job_cursor(cursor)
    where = job_filter(text, job_state, kind, schedule_id, created_after, created_before)
    found = await find_jobs(system.records.jobs, tenant, where, limit, cursor)
    items = await asyncio.gather(*(_listed_job_json(system, job) for job in found.page.items))
    return answer({"items": items, "next_cursor": found.page.next_cursor, "read": found.read})


@get("/jobs/{job_id:str}", summary="Show a job", responses=answers(JobShape, 400, 403, 404))
async def show_job(
    request: ApiRequest,
    job_id: FromPath[str],
    system: SystemPart,
    tenant: TenantPart,
    verify: Verify = False,
    run: CountsOf = None,
) -> Response[bytes]:
    """State, reason to wait, ingest progress, throughput, time left, latency, and all runs. `total`, `counts` and
    `top_errors` are by the latest outcome of each task over all runs, or of the run in `run`; `view` says which. With
    `verify`, the server also counts the rows and compares them with the counters; of a job with more than 100,000 rows
    it does so for an administrator's key only."""
    job = await find_job(system.records, tenant, job_id)
    if not verify and run in (None, LATEST_PER_TASK):
        return await _cached_status(system, job)
    verified = {}
    if verify:
        if not request.auth.admin:
            await check_verifiable(system.records, system.tasks, job)
        verified = {"verify": await verify_json(system.records, system.tasks, system.coordinator, job)}
        # The counts may have been repaired.
        await refresh_status(system.records, system.tasks, system.coordinator, system.clock, job)
    shown = await full_job_json(system, job)
    if run is not None and run != LATEST_PER_TASK:
        shown = await of_run(system.tasks, job, await chosen_run(system.records, job, run), shown)
    return answer({**shown, **verified})


@patch(
    "/jobs/{job_id:str}",
    summary="Change a job's options",
    operation_class=operations.takes(Changes),
    responses=answers(JobShape, 400, 404, 409, 415),
)
async def change_job(
    request: ApiRequest, job_id: FromPath[str], system: SystemPart, tenant: TenantPart
) -> Response[bytes]:
    """Replaces each given option as a whole; null clears it. Workers follow within a second; attempts in progress keep
    the options that they started with."""
    job = await find_job(system.records, tenant, job_id)
    changes = await read_spec(request, system.settings.max_request_bytes, dict[str, Any])
    return answer(await full_job_json(system, await change_options(system, job, changes)))


async def _cached_status(system: System, job: Job) -> Response[bytes]:
    """Respond with the cached status; a stale one is refreshed after the response."""
    parts = (system.records, system.tasks, system.coordinator, system.clock, job)
    status, is_stale = await hot_status_json(*parts)
    response = answer({**status, "options": shown_options(status["options"])})
    if is_stale:
        response.background = BackgroundTask(_refresh, *parts)
    return response


async def _refresh(*parts: Any) -> None:
    try:
        await refresh_status(*parts)
    except ConveyorError as error:
        log.warning("status refresh failed", error=str(error))


async def full_job_json(system: System, job: Job) -> dict[str, Any]:
    """The JSON of a job with all its runs, without secrets."""
    status = await status_json(system.records, system.tasks, system.coordinator, system.clock, job)
    return {**status, "options": shown_options(status["options"])}


async def _listed_job_json(system: System, job: Job) -> dict[str, Any]:
    view = await job_json(system.records, system.tasks, system.coordinator, system.clock, job)
    return {**view, "options": shown_options(view["options"])}


def _prefers_async(request: ApiRequest) -> bool:
    preferences = ",".join(request.headers.getall("prefer", [])).lower().split(",")
    return any(preference.partition(";")[0].strip() == "respond-async" for preference in preferences)
