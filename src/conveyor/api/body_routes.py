"""Bodies of results: with a key, or by a signed link."""

import re
from typing import Annotated, NamedTuple

from litestar import Response, get, head
from litestar.params import FromPath, QueryParameter
from litestar.response import Stream

from conveyor.api.content_codings import sends_gzip
from conveyor.api.dependencies import (
    ApiRequest,
    SystemPart,
    TenantPart,
    attachment,
    find_job,
    requested_range,
    stream,
)
from conveyor.api.response_specs import problems
from conveyor.auth.body_links import BODY, EXTRACTED, check_body_link
from conveyor.jobs.body_coding import gzip_length, stored_as
from conveyor.model import BodyRef, Task, TenantId
from conveyor.read.body_names import body_name
from conveyor.read.body_reader import as_extracted
from conveyor.read.results import body_ref, extracted_ref, stream_body, stream_gzip, stream_range
from conveyor.read.runs import locate_task
from conveyor.system import System

_VISIBLE = re.compile(r"[\x20-\x7e]{1,200}")

OfTenant = Annotated[str, QueryParameter(description="The tenant of the job, as in the link.")]
Expires = Annotated[str, QueryParameter(description="When the link expires, in seconds since 1970.")]
Signature = Annotated[str, QueryParameter(description="The signature of the link.")]


@get(
    "/jobs/{job_id:str}/tasks/{task_id:str}/body",
    summary="Get a task's result body",
    media_type="application/octet-stream",
    responses=problems(404, 416),
)
async def get_body(
    request: ApiRequest, job_id: FromPath[str], task_id: FromPath[str], system: SystemPart, tenant: TenantPart
) -> Stream:
    """The body. It comes from an untrusted server, so it is always an untyped download; its own type is in
    `X-Conveyor-Content-Type`, its sha256 in `ETag`. `Range` with `If-Range` requests one range. `Accept-Encoding: gzip`
    gets a body that is stored deflated as gzip, with `-gzip` at the end of its `ETag`."""
    return await _served(request, system, tenant, job_id, task_id)


@head("/jobs/{job_id:str}/tasks/{task_id:str}/body", include_in_schema=False)
async def describe_body(
    request: ApiRequest, job_id: FromPath[str], task_id: FromPath[str], system: SystemPart, tenant: TenantPart
) -> Response[None]:
    """The headers of the body."""
    return await _described(request, system, tenant, job_id, task_id)


@get(
    "/bodies/{job_id:str}/{task_id:str}",
    summary="Get a task's result body by its link",
    media_type="application/octet-stream",
    responses=problems(403, 404, 416, key=False),
    security=[],
)
async def get_linked_body(
    request: ApiRequest,
    job_id: FromPath[str],
    task_id: FromPath[str],
    system: SystemPart,
    tenant: OfTenant = "",
    expires: Expires = "",
    signature: Signature = "",
) -> Stream:
    """The same bytes, for whoever has the `body_url` of the task: it needs no key, and is valid for 24 hours."""
    _check_link(system, tenant, job_id, task_id, expires, signature)
    return await _served(request, system, TenantId(tenant), job_id, task_id)


@head("/bodies/{job_id:str}/{task_id:str}", include_in_schema=False)
async def describe_linked_body(
    request: ApiRequest,
    job_id: FromPath[str],
    task_id: FromPath[str],
    system: SystemPart,
    tenant: OfTenant = "",
    expires: Expires = "",
    signature: Signature = "",
) -> Response[None]:
    """The headers of the same bytes."""
    _check_link(system, tenant, job_id, task_id, expires, signature)
    return await _described(request, system, TenantId(tenant), job_id, task_id)


@get(
    "/jobs/{job_id:str}/tasks/{task_id:str}/extracted",
    summary="Get what was extracted for a task",
    media_type="application/octet-stream",
    responses=problems(404, 416),
)
async def get_extracted(
    request: ApiRequest, job_id: FromPath[str], task_id: FromPath[str], system: SystemPart, tenant: TenantPart
) -> Stream:
    """What the job's `extract` returned for the body of the task, as JSON, of any length. Ranges, `ETag` and gzip are
    as for the body."""
    task = await _find_task(system, tenant, job_id, task_id)
    return await _served_ref(request, system, as_extracted(task), extracted_ref(task))


@get(
    "/extracted/{job_id:str}/{task_id:str}",
    summary="Get what was extracted for a task by its link",
    media_type="application/octet-stream",
    responses=problems(403, 404, 416, key=False),
    security=[],
)
async def get_linked_extracted(
    request: ApiRequest,
    job_id: FromPath[str],
    task_id: FromPath[str],
    system: SystemPart,
    tenant: OfTenant = "",
    expires: Expires = "",
    signature: Signature = "",
) -> Stream:
    """The same bytes, for whoever has the `extracted_url` of the task: it needs no key, and is valid for 24 hours."""
    _check_link(system, tenant, job_id, task_id, expires, signature, EXTRACTED)
    task = await _find_task(system, TenantId(tenant), job_id, task_id)
    return await _served_ref(request, system, as_extracted(task), extracted_ref(task))


def _check_link(
    system: System, tenant: str, job_id: str, task_id: str, expires: str, signature: str, part: str = BODY
) -> None:
    before = system.settings.previous_signing_key
    keys = [system.signing_key] if before is None else [system.signing_key, before.encode()]
    check_body_link(keys, tenant, job_id, task_id, expires, signature, system.clock.now(), part)


async def _served(request: ApiRequest, system: System, tenant: TenantId, job_id: str, task_id: str) -> Stream:
    task = await _find_task(system, tenant, job_id, task_id)
    return await _served_ref(request, system, task, body_ref(task))


async def _served_ref(request: ApiRequest, system: System, task: Task, ref: BodyRef) -> Stream:
    version = _chosen_version(request, ref, has_range="range" in request.headers)
    headers, length = _headers(task, ref, version), version.length
    part = requested_range(request.headers.get("range"), request.headers.get("if-range"), version.etag, length)
    start, end = part or (0, length)
    if version.is_gzip:
        pieces = stream_gzip(system.blobs, ref, start, end)
    elif part is None:
        pieces = stream_body(system.blobs, ref)
    else:
        pieces = stream_range(system.blobs, ref, start, end)
    status = None
    if part is not None:
        headers |= {"Content-Length": str(end - start), "Content-Range": f"bytes {start}-{end - 1}/{length}"}
        status = 206
    return await stream(pieces, "application/octet-stream", headers, status)


async def _described(
    request: ApiRequest, system: System, tenant: TenantId, job_id: str, task_id: str
) -> Response[None]:
    """The headers of the whole body: ranges are for GET alone."""
    task = await _find_task(system, tenant, job_id, task_id)
    ref = body_ref(task)
    headers = _headers(task, ref, _chosen_version(request, ref, has_range=False))
    return Response(None, headers={**headers, "Content-Type": "application/octet-stream"})


async def _find_task(system: System, tenant: TenantId, job_id: str, task_id: str) -> Task:
    job = await find_job(system.records, tenant, job_id)
    _, task = await locate_task(system.records, system.tasks, job, task_id)
    return task


def _headers(task: Task, ref: BodyRef, version: "_Version") -> dict[str, str]:
    headers = {
        "Accept-Ranges": "bytes",
        "Content-Length": str(version.length),
        "Content-Security-Policy": "sandbox; default-src 'none'; frame-ancestors 'none'",
        "ETag": version.etag,
        **attachment(body_name(task).rpartition("/")[2]),
    }
    if ref.stored is not None:
        headers["Vary"] = "Accept-Encoding"
    if version.is_gzip:
        headers["Content-Encoding"] = "gzip"
    if _VISIBLE.fullmatch(task.detail.content_type or ""):
        headers["X-Conveyor-Content-Type"] = task.detail.content_type or ""
    return headers


class _Version(NamedTuple):
    """A body as it is, or as gzip: each has its own length and ETag."""

    is_gzip: bool
    length: int
    etag: str


def _chosen_version(request: ApiRequest, ref: BodyRef, has_range: bool) -> _Version:
    stored = stored_as(ref)
    if stored is not None:
        etag = f'"{ref.sha256}-gzip"'
        if_range = request.headers.get("if-range", "").strip()
        if sends_gzip(request.headers.getall("accept-encoding", []), has_range, if_range == etag):
            return _Version(True, gzip_length(stored), etag)
    return _Version(False, ref.length, f'"{ref.sha256}"')
