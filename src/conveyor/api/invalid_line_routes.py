"""Invalid lines of a job's list, with line number and reason."""

from typing import Any

from litestar import Response, get
from litestar.params import FromPath

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
from conveyor.api.response_specs import answers
from conveyor.api.schemas.list_shapes import InvalidLinesPage
from conveyor.read.invalid_lines import invalid_lines, invalid_page
from conveyor.read.runs import with_first_run


@get(
    "/jobs/{job_id:str}/invalid",
    summary="List invalid lines",
    responses=answers(InvalidLinesPage, 400, 404),
)
async def list_invalid(
    request: ApiRequest,
    job_id: FromPath[str],
    system: SystemPart,
    tenant: TenantPart,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Response[Any]:
    """In the order of the list. `Accept: application/x-ndjson` returns all of them as a download, one per line."""
    job = await with_first_run(system.records, await find_job(system.records, tenant, job_id))
    if wants_ndjson(request):
        return await stream(invalid_lines(system.blobs, job), NDJSON, attachment(f"{job.job_id}-invalid.jsonl"))
    page = await invalid_page(system.blobs, job, limit, cursor)
    return answer({"items": page.items, "next_cursor": page.next_cursor})
