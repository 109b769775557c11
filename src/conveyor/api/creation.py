"""Creation: what every POST with a body shares. JSON under a cap, the client's own key for the request, and an answer
that is the same for every replay."""

import asyncio
import re
from typing import TypeVar

from litestar import Response

from conveyor.accept.spec import decode_body
from conveyor.api.dependencies import ApiRequest
from conveyor.api.request_bodies import read_body, require_json
from conveyor.errors import InvalidField
from conveyor.jobs.idempotency import Accepted, IdempotentRequest

S = TypeVar("S")

# Past this, decoding would hold up everyone else on the loop.
_BYTES_ON_LOOP = 256 * 1024
_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")


async def read_spec(request: ApiRequest, limit: int, shape: type[S]) -> S:
    """The body, as this shape."""
    require_json(request)
    return await _decode((await read_body(request, limit)).data, shape)


async def read_keyed(request: ApiRequest, limit: int, shape: type[S], route: str) -> tuple[S, IdempotentRequest | None]:
    """The body, and the request under the client's key if it gave one. A key is good for one route."""
    require_json(request)
    key = _idempotency_key(request)
    body = await read_body(request, limit)
    spec = await _decode(body.data, shape)
    return spec, IdempotentRequest(route, key, body.fingerprint) if key else None


async def read_keyed_optional(
    request: ApiRequest, limit: int, shape: type[S], route: str
) -> tuple[S, IdempotentRequest | None]:
    """As read_keyed; no body at all is the shape's defaults."""
    key = _idempotency_key(request)
    body = await read_body(request, limit)
    asked = IdempotentRequest(route, key, body.fingerprint) if key else None
    if not body.data:
        return shape(), asked
    require_json(request)
    return await _decode(body.data, shape), asked


async def read_optional(request: ApiRequest, limit: int, shape: type[S]) -> S:
    """As read_spec; no body at all is the shape's defaults."""
    body = await read_body(request, limit)
    if not body.data:
        return shape()
    require_json(request)
    return await _decode(body.data, shape)


def accepted(given: Accepted, location: str | None = None) -> Response[bytes]:
    """The answer to what was made, now or before."""
    headers = {} if location is None else {"Location": location}
    if given.replayed:
        headers["Idempotency-Replayed"] = "true"
    return Response(given.body, status_code=given.status, media_type="application/json", headers=headers)


def _idempotency_key(request: ApiRequest) -> str | None:
    given = request.headers.getall("idempotency-key", [])
    if not given:
        return None
    if len(given) > 1 or not _IDEMPOTENCY_KEY.fullmatch(given[0]):
        raise InvalidField(
            "`Idempotency-Key` must be one header of 1 to 255 visible ASCII characters.", field="Idempotency-Key"
        )
    return given[0]


async def _decode(body: bytearray, shape: type[S]) -> S:
    if len(body) <= _BYTES_ON_LOOP:
        return decode_body(body, shape)
    return await asyncio.to_thread(decode_body, body, shape)
