"""Exports: create one, show its progress, download its parts."""

from typing import Any

from litestar import Response, delete, get, post
from litestar.params import FromPath
from litestar.response import Stream

from conveyor.api import operations
from conveyor.api.creation import accepted, read_keyed
from conveyor.api.dependencies import (
    ApiRequest,
    Cursor,
    ExportsPart,
    Limit,
    SystemPart,
    TenantPart,
    answer,
    attachment,
    find_job,
    requested_range,
    stream,
)
from conveyor.api.response_specs import answers, problems, shaped
from conveyor.api.schemas.export_shapes import ExportManifestShape, ExportShape, ExportsPage
from conveyor.errors import Conflict, NotFound
from conveyor.export.exports import ExportState, StoredExport, export_json, manifest_json, part_name, part_range
from conveyor.export.request import ExportSpec, media_type_of
from conveyor.system import System


@post(
    "/jobs/{job_id:str}/exports",
    summary="Create an export",
    status_code=202,
    operation_class=operations.takes(ExportSpec, operations.IDEMPOTENCY_KEY),
    responses={**shaped(ExportShape, 202), **problems(400, 403, 404, 409, 413, 415)},
)
async def create_export(
    request: ApiRequest, job_id: FromPath[str], system: SystemPart, tenant: TenantPart, exports: ExportsPart
) -> Response[bytes]:
    """Exports all results, or those that match `select`, as zip (a file for each body), jsonl, csv or Parquet. The
    server makes the files in the background: `GET /v1/exports/{id}` shows the progress, and the event `export.ready`
    reports the end. `to`, below a place that the operator lists for the tenant, has the server write the files there,
    with its own credentials."""
    job = await find_job(system.records, tenant, job_id)
    route = f"POST /v1/jobs/{job.job_id}/exports"
    spec, idempotent = await read_keyed(request, system.settings.max_request_bytes, ExportSpec, route)
    outcome = await exports.create(job, spec, idempotent)
    return accepted(outcome, f"/v1/exports/{outcome.subject}")


@get(
    "/jobs/{job_id:str}/exports",
    summary="List a job's exports",
    responses=answers(ExportsPage, 400, 404),
)
async def list_exports(
    job_id: FromPath[str],
    system: SystemPart,
    tenant: TenantPart,
    exports: ExportsPart,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Response[bytes]:
    """Exports that have not expired, oldest first."""
    job = await find_job(system.records, tenant, job_id)
    page = await exports.page(job, cursor, limit)
    items = [await _shown(system, stored) for stored in page.items]
    return answer({"items": items, "next_cursor": page.next_cursor})


@get("/exports/{export_id:str}", summary="Show an export", responses=answers(ExportShape, 404))
async def show_export(
    export_id: FromPath[str], system: SystemPart, tenant: TenantPart, exports: ExportsPart
) -> Response[bytes]:
    """State, progress and parts of the export, each part with size, sha256 and a link. Every listed part is complete,
    also while later parts are written."""
    return answer(await _shown(system, await exports.find(tenant, export_id)))


@delete("/exports/{export_id:str}", summary="Delete an export", responses=problems(404))
async def delete_export(export_id: FromPath[str], tenant: TenantPart, exports: ExportsPart) -> None:
    """The export disappears at once, and stops if it is in progress. Its files are purged soon after."""
    await exports.delete(tenant, export_id)


@get(
    "/exports/{export_id:str}/manifest",
    summary="Get an export's manifest",
    responses=answers(ExportManifestShape, 404, 409),
)
async def get_manifest(export_id: FromPath[str], tenant: TenantPart, exports: ExportsPart) -> Response[bytes]:
    """The parts of a finished export, with counts and sha256."""
    row, export = await exports.find(tenant, export_id)
    if export.state is not ExportState.READY:
        raise Conflict(f"The export is {export.state}. Only a ready export has a manifest.", state=export.state)
    return answer(manifest_json(row, export))


@get(
    "/exports/{export_id:str}/parts/{number:int}",
    summary="Download a part of an export",
    responses=problems(404, 416),
)
async def get_part(
    request: ApiRequest,
    export_id: FromPath[str],
    number: FromPath[int],
    system: SystemPart,
    tenant: TenantPart,
    exports: ExportsPart,
) -> Stream:
    """The file, as a download; the `ETag` is its sha256. `Range` with `If-Range` requests one range, to resume a
    download."""
    row, export = await exports.find(tenant, export_id)
    if not 1 <= number <= len(export.parts):
        raise NotFound
    part = export.parts[number - 1]
    headers = {
        "Accept-Ranges": "bytes",
        "Content-Length": str(part.size),
        "Content-Security-Policy": "sandbox; default-src 'none'; frame-ancestors 'none'",
        "ETag": f'"{part.sha256}"',
        **attachment(part_name(row, export, number)),
    }
    span = requested_range(request.headers.get("range"), request.headers.get("if-range"), headers["ETag"], part.size)
    start, end = span or (0, part.size)
    if span is not None:
        headers |= {"Content-Length": str(end - start), "Content-Range": f"bytes {start}-{end - 1}/{part.size}"}
    pieces = part_range(system.blobs, part, start, end)
    media_type = media_type_of(export.format, export.compression)
    return await stream(pieces, media_type, headers, 200 if span is None else 206)


async def _shown(system: System, stored: StoredExport) -> dict[str, Any]:
    return await export_json(system.blobs, stored.row, stored.export, system.clock.now())
