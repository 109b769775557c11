"""Uploads: a signed link to send a list to, and the list itself. The link needs no key."""

from typing import Annotated, Any

import msgspec
from litestar import Response, get, post, put
from litestar.params import FromPath, QueryParameter

from conveyor.api import operations
from conveyor.api.creation import accepted, read_keyed, read_spec
from conveyor.api.dependencies import ApiRequest, SystemPart, TenantPart, UploadsPart, answer
from conveyor.api.request_bodies import announced_length, pieces
from conveyor.api.response_specs import answers, problems, shaped
from conveyor.api.schemas.list_shapes import UploadShape
from conveyor.clock import iso_text
from conveyor.engines.blobs import Presigned
from conveyor.lists.multipart_uploads import CompletionSpec, MultipartUploads, PartsSpec, PartsView
from conveyor.lists.uploads import UploadSpec, UploadView
from conveyor.model import UploadRecord

ROUTE = "POST /v1/uploads"

Signature = Annotated[str, QueryParameter(description="The signature of the link.")]


@post(
    "/uploads",
    summary="Create an upload",
    operation_class=operations.takes(UploadSpec, operations.IDEMPOTENCY_KEY),
    responses={**shaped(UploadView, 201), **problems(400, 409, 413, 415, 429, 503)},
)
async def create_upload(
    request: ApiRequest, system: SystemPart, tenant: TenantPart, uploads: UploadsPart
) -> Response[bytes]:
    """Returns a link that accepts one list of this size and sha256, once. Then create a job with `source:
    {upload_id}`."""
    spec, idempotent = await read_keyed(request, system.settings.max_request_bytes, UploadSpec, ROUTE)
    base = _base_url(request)

    def link(upload_id: str, signature: str) -> str:
        return f"{base}/v1/uploads/{upload_id}/content?signature={signature}"

    outcome = await uploads.promise(tenant, spec, link, idempotent)
    return accepted(outcome, f"/v1/uploads/{outcome.subject}")


@get("/uploads/{upload_id:str}", summary="Show an upload", responses=answers(UploadShape, 404))
async def show_upload(upload_id: FromPath[str], tenant: TenantPart, uploads: UploadsPart) -> Response[bytes]:
    """Whether the list is stored, and when it expires; with a fresh link, if it is not stored and goes to an object
    store."""
    upload = await uploads.find(tenant, upload_id)
    stored, link = await uploads.state(upload)
    return answer(_shown(upload, stored, link))


@post(
    "/uploads/{upload_id:str}/parts",
    summary="Sign requests for parts of an upload",
    status_code=200,
    operation_class=operations.takes(PartsSpec),
    responses={**shaped(PartsView, 200), **problems(400, 404, 409, 413, 415, 503)},
)
async def sign_parts(
    request: ApiRequest, upload_id: FromPath[str], system: SystemPart, tenant: TenantPart, uploads: UploadsPart
) -> Response[bytes]:
    """For a list whose creation answered `part_bytes`. The first request has no `multipart_id` and begins an upload in
    parts; one that is never completed expires."""
    spec = await read_spec(request, system.settings.max_request_bytes, PartsSpec)
    upload = await uploads.find(tenant, upload_id)
    return answer(msgspec.to_builtins(await MultipartUploads(system).parts(upload, spec)))


@post(
    "/uploads/{upload_id:str}/complete",
    summary="Complete an upload in parts",
    status_code=200,
    operation_class=operations.takes(CompletionSpec),
    responses=answers(UploadShape, 400, 404, 409, 413, 415, 503),
)
async def complete_upload(
    request: ApiRequest, upload_id: FromPath[str], system: SystemPart, tenant: TenantPart, uploads: UploadsPart
) -> Response[bytes]:
    """All parts must be stored. May be repeated."""
    spec = await read_spec(request, system.settings.max_request_bytes, CompletionSpec)
    upload = await uploads.find(tenant, upload_id)
    await MultipartUploads(system).complete(upload, spec)
    return answer(_shown(upload, True, None))


@put(
    "/uploads/{upload_id:str}/content",
    summary="Send the content of an upload",
    status_code=204,
    operation_class=operations.TakesBytes,
    responses=problems(400, 403, 409, key=False),
    security=[],
)
async def fill_upload(
    request: ApiRequest, upload_id: FromPath[str], uploads: UploadsPart, signature: Signature = ""
) -> None:
    """The bytes of the list, as announced. The signature of the link authorizes the request."""
    size, digest = announced_length(request), request.headers.get("x-content-sha256")
    await uploads.fill(upload_id, signature, size, digest, pieces(request))


def _shown(upload: UploadRecord, stored: bool, link: Presigned | None) -> dict[str, Any]:
    return {
        "upload_id": upload.upload_id,
        "size": upload.size,
        "sha256": upload.sha256,
        "stored": stored,
        "expires_at": iso_text(upload.expires_at),
        **({} if link is None else {"url": link.url, "method": link.method, "headers": link.headers}),
    }


def _base_url(request: ApiRequest) -> str:
    """The URL by which the client reached this server, by its Host header: only the same client gets the link."""
    # HTTP/1.0 has requests without one.
    if "host" in request.headers:
        return f"{request.scope['scheme']}://{request.headers['host']}"
    host, port = request.scope["server"] or ("localhost", None)
    host = f"[{host}]" if ":" in host else host
    return f"{request.scope['scheme']}://{host}" + ("" if port is None else f":{port}")
