"""Uploads: a signed link to send a list to, and the list itself. The link needs no key."""

import re
from typing import Annotated

from litestar import Response, get, post, put
from litestar.params import FromPath, QueryParameter

from conveyor.api import operations
from conveyor.api import schemas as shapes
from conveyor.api.creation import accepted, read_keyed
from conveyor.api.dependencies import ApiRequest, SystemPart, TenantPart, UploadsPart, answer
from conveyor.api.request_bodies import announced_length, pieces
from conveyor.clock import iso_text
from conveyor.lists.uploads import UploadSpec, UploadView

ROUTE = "POST /v1/uploads"
# A valid host; anything else must not become part of a link.
_HOST = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?")
_MAX_HOST_LENGTH = 255

Signature = Annotated[str, QueryParameter(description="The signature of the link.")]


@post(
    "/uploads",
    summary="Create an upload",
    operation_class=operations.takes(UploadSpec, operations.IDEMPOTENCY_KEY),
    responses={**shapes.shaped(UploadView, 201), **shapes.problems(400, 409, 413, 415, 429, 503)},
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


@get("/uploads/{upload_id:str}", summary="Show an upload", responses=shapes.answers(shapes.UploadShape, 404))
async def show_upload(upload_id: FromPath[str], tenant: TenantPart, uploads: UploadsPart) -> Response[bytes]:
    """Whether the list is stored, and when it expires; with a fresh link, if it is not stored and goes to an object
    store."""
    upload = await uploads.find(tenant, upload_id)
    stored, link = await uploads.state(upload)
    return answer(
        {
            "upload_id": upload.upload_id,
            "size": upload.size,
            "sha256": upload.sha256,
            "stored": stored,
            "expires_at": iso_text(upload.expires_at),
            **({} if link is None else {"url": link.url, "method": link.method, "headers": link.headers}),
        }
    )


@put(
    "/uploads/{upload_id:str}/content",
    summary="Send the content of an upload",
    status_code=204,
    operation_class=operations.TakesBytes,
    responses=shapes.problems(400, 403, 409, key=False),
    security=[],
)
async def fill_upload(
    request: ApiRequest, upload_id: FromPath[str], uploads: UploadsPart, signature: Signature = ""
) -> None:
    """The bytes of the list, as announced. The signature of the link authorizes the request."""
    size, digest = announced_length(request), request.headers.get("x-content-sha256")
    await uploads.fill(upload_id, signature, size, digest, pieces(request))


def _base_url(request: ApiRequest) -> str:
    """The URL by which the client reached this server, by its Host header: only the same client gets the link."""
    hosts = request.headers.getall("host", [])
    if len(hosts) == 1 and len(hosts[0]) <= _MAX_HOST_LENGTH and _HOST.fullmatch(hosts[0]):
        return f"{request.scope['scheme']}://{hosts[0]}"
    host, port = request.scope["server"] or ("localhost", None)
    host = f"[{host}]" if ":" in host else host
    return f"{request.scope['scheme']}://{host}" + ("" if port is None else f":{port}")
