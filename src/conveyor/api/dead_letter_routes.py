"""Dead letters: list them, and redrive them."""

from typing import Annotated

import msgspec
from litestar import Response, get, post
from litestar.params import QueryParameter

from conveyor.accept.redrive import Redriven, redrive, redrive_all
from conveyor.api import operations
from conveyor.api.creation import read_spec
from conveyor.api.dependencies import MAX_LIMIT, ApiRequest, Cursor, Limit, SystemPart, TenantPart, answer, find_job
from conveyor.api.response_specs import answers, problems, shaped
from conveyor.api.schemas.dead_letter_shapes import DeadLettersPage
from conveyor.errors import InvalidField
from conveyor.jobs.dead_lettered_tasks import DeadLetterFilter
from conveyor.model import TenantId
from conveyor.read.dead_letter_pages import dead_letters_page
from conveyor.system import System

_MAX_CODE = 200

ErrorCodeOf = Annotated[str | None, QueryParameter(max_length=_MAX_CODE, description="The error code of the tasks.")]
OfJob = Annotated[str | None, QueryParameter(max_length=100, description="The id of a job.")]


class RedriveSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The dead letters to redrive: those with these ids, or all that match. `all` takes every one; `error_code` and
    `job_id` take those that have them. With `dry_run`, nothing changes: the response says what a redrive would do."""

    ids: Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_LIMIT)] | None = None
    all: bool = False
    error_code: Annotated[str, msgspec.Meta(min_length=1, max_length=_MAX_CODE)] | None = None
    job_id: str | None = None
    dry_run: bool = False


@get("/dead-letters", summary="List dead letters", responses=answers(DeadLettersPage, 400, 404))
async def list_letters(
    system: SystemPart,
    tenant: TenantPart,
    error_code: ErrorCodeOf = None,
    job_id: OfJob = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Response[bytes]:
    """Messages first, then dead-lettered tasks by run. A page may have fewer items than `limit` and still have a next
    page."""
    where = await _filter(system, tenant, job_id, error_code)
    page = await dead_letters_page(system.records, system.tasks, system.queue, tenant, where, limit, cursor)
    return answer({"items": page.items, "next_cursor": page.next_cursor})


@post(
    "/dead-letters/redrive",
    summary="Redrive dead letters",
    status_code=200,
    operation_class=operations.takes(RedriveSpec),
    responses={**shaped(Redriven), **problems(400, 404, 409, 413, 415)},
)
async def redrive_letters(request: ApiRequest, system: SystemPart, tenant: TenantPart) -> Response[bytes]:
    """Requeues messages, resumes failed ingests, and reruns dead-lettered tasks: `redrive` of each says which. Takes
    `ids`; or `all`, or all with an `error_code`, of a `job_id`, or both. Unknown ones, and those with nothing left to
    do, are skipped. 409 if none could be redriven because a run of the job is in progress. With `dry_run`, the response
    says what would happen, and nothing does."""
    spec = await read_spec(request, system.settings.max_request_bytes, RedriveSpec)
    by_match = spec.all or spec.error_code is not None or spec.job_id is not None
    if (spec.ids is None) != by_match:
        raise InvalidField("Give `ids`, or else `all`, `error_code` or `job_id`.", field="ids")
    if spec.ids is not None:
        return answer(await redrive(system, tenant, spec.ids, is_dry=spec.dry_run))
    where = await _filter(system, tenant, spec.job_id, spec.error_code)
    return answer(await redrive_all(system, tenant, where, is_dry=spec.dry_run))


async def _filter(system: System, tenant: TenantId, job_id: str | None, error_code: str | None) -> DeadLetterFilter:
    """Raises NotFound for an unknown job."""
    job = None if job_id is None else await find_job(system.records, tenant, job_id)
    return DeadLetterFilter(None if job is None else job.job_id, error_code)
