"""Uploads: a link to send a list to, and the list itself. The link is a right of its own: it needs no key."""

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
# What a host is made of; anything else is no part of a link.
_HOST = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?")
_LONGEST_HOST = 255

Signature = Annotated[str, QueryParameter(description="As it stands in the link.")]


@post(
    "/uploads",
    summary="Ask for a place for a list",
    operation_class=operations.takes(UploadSpec, operations.IDEMPOTENCY_KEY),
    responses={**shapes.shaped(UploadView, 201), **shapes.problems(400, 409, 413, 415, 429, 503)},
)
async def create_upload(
    request: ApiRequest, system: SystemPart, tenant: TenantPart, uploads: UploadsPart
) -> Response[bytes]:
    """A link that takes this one list, of this size and sha256, once. Then make a job of it with
    `source: {upload_id}`."""
    spec, asked = await read_keyed(request, system.settings.max_request_bytes, UploadSpec, ROUTE)
    base = _base_url(request)

    def link(upload_id: str, signature: str) -> str:
        return f"{base}/v1/uploads/{upload_id}/content?signature={signature}"

    given = await uploads.promise(tenant, spec, link, asked)
    return accepted(given, f"/v1/uploads/{given.subject}")


@get("/uploads/{upload_id:str}", summary="Show an upload", responses=shapes.answers(shapes.UploadShape, 404))
async def show_upload(upload_id: FromPath[str], tenant: TenantPart, uploads: UploadsPart) -> Response[bytes]:
    """Whether the list is there, and until when; if it is not, and goes to a store that signs links, a new one."""
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
    summary="Send the list",
    status_code=204,
    operation_class=operations.TakesBytes,
    responses=shapes.problems(400, 403, 409, key=False),
    security=[],
)
async def fill_upload(
    request: ApiRequest, upload_id: FromPath[str], uploads: UploadsPart, signature: Signature = ""
) -> None:
    """The bytes of the list, as they were announced. The signature in the link is the right to send them."""
    size, digest = announced_length(request), request.headers.get("x-content-sha256")
    await uploads.fill(upload_id, signature, size, digest, pieces(request))


def _base_url(request: ApiRequest) -> str:
    """Where the client reached this server, as it says itself: the link is for the same client."""
    given = request.headers.getall("host", [])
    if len(given) == 1 and len(given[0]) <= _LONGEST_HOST and _HOST.fullmatch(given[0]):
        return f"{request.scope['scheme']}://{given[0]}"
    host, port = request.scope["server"] or ("localhost", None)
    host = f"[{host}]" if ":" in host else host
    return f"{request.scope['scheme']}://{host}" + ("" if port is None else f":{port}")
