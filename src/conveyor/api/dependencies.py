"""What handlers are given, and how they answer. The parts come with each request and are handed in by name; nothing
here is global."""

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
from conveyor.auth.keys import KeySource
from conveyor.auth.sessions import Sessions
from conveyor.engines.records import Records
from conveyor.errors import BadCursor, NotFound, RangeRefused, UnknownField
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

# Where they are in the scope of a request.
PARTS = "conveyor"


class Dependencies(msgspec.Struct, frozen=True):
    """What there is of one system."""

    system: System
    keys: KeySource
    sessions: Sessions
    submit: Submit
    adding: AddTasks
    uploads: Uploads
    webhooks: Webhooks
    deliveries: Deliveries
    schedules: Schedules
    exports: Exports
    streams: Streams


def parts_of(scope: Any) -> Dependencies:
    """For a guard, to which nothing is handed."""
    found: Dependencies = scope[PARTS]
    return found


NDJSON = "application/x-ndjson"
MAX_LIMIT = 1000
Limit = Annotated[int, QueryParameter(ge=1, le=MAX_LIMIT, description="Most items of a page.")]
Cursor = Annotated[str | None, QueryParameter(description="`next_cursor` of the page before.")]

_RANGE = re.compile(r"bytes=(?=-?\d)(\d{0,18})-(\d{0,18})", re.ASCII)
_JOB_ID = re.compile(r"job_[0-9a-z]{26}")
_SHOWN = 100


def answer(value: Any, status: int = 200) -> Response[bytes]:
    """JSON."""
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


async def stream(
    pieces: AsyncIterator[bytes], media_type: str, headers: dict[str, str], status: int | None = None
) -> Stream:
    """The first piece is taken before the answer starts: what fails until then can still be told."""
    first = await anext(pieces, b"")

    async def all_pieces() -> AsyncIterator[bytes]:
        yield first
        async for piece in pieces:
            yield piece

    return Stream(all_pieces(), media_type=media_type, headers=headers, status_code=status)


def wants_lines(request: ApiRequest) -> bool:
    """Whether all of a listing is asked for, a line each."""
    ranges = request.headers.get("accept", "").lower().split(",")
    return any(each.partition(";")[0].strip() == NDJSON for each in ranges)


def asked_range(asked: str | None, condition: str | None, etag: str, length: int) -> tuple[int, int] | None:
    """First byte and the one after the last of the range that is asked for; None for all. Raises RangeRefused. What is
    not one range of bytes is passed over, as is one for another version."""
    match = _RANGE.fullmatch((asked or "").strip())
    if match is None or (condition is not None and condition.strip() != etag):
        return None
    first, last = match[1], match[2]
    if not first:
        start, end = max(0, length - int(last)), length
    elif last and int(last) < int(first):
        return None
    else:
        start, end = int(first), min(length, int(last) + 1) if last else length
    if start >= end:
        raise RangeRefused(f"The body has {length} bytes; there are none of them in this range.", length=length)
    return start, end


def attachment(name: str) -> dict[str, str]:
    """`name` is one of ours: letters, digits, dots, dashes and underscores."""
    return {"Content-Disposition": f'attachment; filename="{name}"'}


async def find_job(records: Records, tenant: TenantId, job_id: str) -> Job:
    """The tenant's job. An id that never was, one that is gone and one of another tenant are the same NotFound."""
    job = await records.jobs.job(tenant, JobId(job_id)) if _JOB_ID.fullmatch(job_id) else None
    if job is None:
        raise NotFound
    return job


def check_job_cursor(cursor: str | None) -> None:
    """The cursor of the list of jobs is the last id of a page."""
    if cursor is not None and not _JOB_ID.fullmatch(cursor):
        raise BadCursor


async def refuse_unknown_parameters(request: ApiRequest) -> None:
    """A filter with a typing error would otherwise answer with everything."""
    known = request.route_handler.parsed_fn_signature.parameters
    for name in request.query_params:
        if name not in known or name in request.route_handler.resolve_dependencies():
            raise UnknownField(f"There is no parameter `{name[:_SHOWN]}` on this route.", field=name[:_SHOWN])
