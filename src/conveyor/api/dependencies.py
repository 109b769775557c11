"""Dependencies of the handlers, and helpers for their responses. The dependencies travel in the scope of a request and
are injected by name; nothing here is global."""

import re
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from litestar import Request, Response
from litestar.di import NamedDependency
from litestar.params import QueryParameter, SkipValidation
from litestar.response import Stream

from conveyor.accept.add_tasks import AddTasks
from conveyor.accept.schedules import Schedules
from conveyor.accept.submit import Submit
from conveyor.auth.failed_keys import FailedKeys
from conveyor.auth.keys import KeySource
from conveyor.auth.sessions import Sessions
from conveyor.engines.records import Records
from conveyor.errors import BadCursor, InvalidField, NotFound, RangeRefused, UnknownField
from conveyor.export.exports import Exports
from conveyor.lists.uploads import Uploads
from conveyor.model import ApiKey, Job, JobId, TenantId
from conveyor.notify.deliveries import Deliveries
from conveyor.notify.webhooks import Webhooks
from conveyor.read.job_stream import Streams
from conveyor.system import System

ApiRequest = Request[Any, ApiKey, Any]
SystemPart = NamedDependency[SkipValidation[System]]
SubmitPart = NamedDependency[SkipValidation[Submit]]
AddTasksPart = NamedDependency[SkipValidation[AddTasks]]
UploadsPart = NamedDependency[SkipValidation[Uploads]]
WebhooksPart = NamedDependency[SkipValidation[Webhooks]]
DeliveriesPart = NamedDependency[SkipValidation[Deliveries]]
SchedulesPart = NamedDependency[SkipValidation[Schedules]]
ExportsPart = NamedDependency[SkipValidation[Exports]]
StreamsPart = NamedDependency[SkipValidation[Streams]]
SessionsPart = NamedDependency[SkipValidation[Sessions]]
TenantPart = NamedDependency[SkipValidation[TenantId]]

# Key of the dependencies in the scope of a request.
SCOPE_KEY = "conveyor"


class Dependencies(msgspec.Struct, frozen=True):
    """The services of one system that handlers use."""

    system: System
    keys: KeySource
    failed_keys: FailedKeys
    sessions: Sessions
    submit: Submit
    adding: AddTasks
    uploads: Uploads
    webhooks: Webhooks
    deliveries: Deliveries
    schedules: Schedules
    exports: Exports
    streams: Streams


def dependencies_of(scope: Any) -> Dependencies:
    """The dependencies, for guards, which get no injection."""
    dependencies: Dependencies = scope[SCOPE_KEY]
    return dependencies


NDJSON = "application/x-ndjson"
MAX_LIMIT = 1000
Limit = Annotated[int, QueryParameter(ge=1, le=MAX_LIMIT, description="Maximum number of items in a page.")]
Cursor = Annotated[str | None, QueryParameter(description="`next_cursor` of the previous page.")]

# Query parameters whose names Litestar or Python keep for themselves, by their names in a handler.
RENAMED = {"job_state": "state", "with_run": "with"}

_RANGE = re.compile(r"bytes=(?=-?\d)(\d{0,18})-(\d{0,18})", re.ASCII)
_JOB_ID = re.compile(r"job_[0-9a-z]{26}")
_SHOWN = 100


def answer(value: Any, status: int = 200) -> Response[bytes]:
    """A JSON response."""
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


async def stream(
    pieces: AsyncIterator[bytes], media_type: str, headers: dict[str, str], status: int | None = None
) -> Stream:
    """A streamed response. It reads the first piece before it starts, so that an early failure gets its own status."""
    first = await anext(pieces, b"")

    async def all_pieces() -> AsyncIterator[bytes]:
        yield first
        async for piece in pieces:
            yield piece

    return Stream(all_pieces(), media_type=media_type, headers=headers, status_code=status)


def wants_ndjson(request: ApiRequest) -> bool:
    """Whether the client asks for the whole listing as NDJSON."""
    media_types = request.headers.get("accept", "").lower().split(",")
    return any(media_type.partition(";")[0].strip() == NDJSON for media_type in media_types)


def requested_range(range_header: str | None, if_range: str | None, etag: str, length: int) -> tuple[int, int] | None:
    """The start and end of the requested range; None for the whole body. Raises RangeRefused. A header that is not one
    byte range, or whose If-Range names another version, is ignored."""
    match = _RANGE.fullmatch((range_header or "").strip())
    if match is None or (if_range is not None and if_range.strip() != etag):
        return None
    first, last = match[1], match[2]
    if not first:
        start, end = max(0, length - int(last)), length
    elif last and int(last) < int(first):
        return None
    else:
        start, end = int(first), min(length, int(last) + 1) if last else length
    if start >= end:
        raise RangeRefused(f"The range is outside the body, which has {length} bytes.", length=length)
    return start, end


def attachment(name: str) -> dict[str, str]:
    """Headers of a download. `name` must be safe: letters, digits, dots, dashes and underscores."""
    return {"Content-Disposition": f'attachment; filename="{name}"'}


async def find_job(records: Records, tenant: TenantId, job_id: str) -> Job:
    """The tenant's job. Raises the same NotFound for an unknown id, a deleted job and another tenant's job."""
    job = await records.jobs.job(tenant, JobId(job_id)) if _JOB_ID.fullmatch(job_id) else None
    if job is None:
        raise NotFound
    return job


def check_job_cursor(cursor: str | None) -> None:
    """Raise BadCursor unless the cursor is a job id: the last one of a page."""
    if cursor is not None and not _JOB_ID.fullmatch(cursor):
        raise BadCursor


async def refuse_unknown_parameters(request: ApiRequest) -> None:
    """Raise UnknownField for unknown query parameters: a misspelled filter would return everything. Raise InvalidField
    for a repeated one: all but one of its values would be ignored."""
    known = {RENAMED.get(name, name) for name in request.route_handler.parsed_fn_signature.parameters}
    names = [name for name, _ in request.query_params.multi_items()]
    for name in names:
        if name not in known or name in request.route_handler.resolve_dependencies():
            raise UnknownField(
                f"Unknown parameter `{name[:_SHOWN]}`. `/v1/openapi.json` lists those of this route.",
                field=name[:_SHOWN],
            )
        if names.count(name) > 1:
            raise InvalidField(f"`{name}` is repeated. Send it once.", field=name)
