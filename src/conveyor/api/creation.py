"""Shared by every POST with a body: JSON of limited size, the Idempotency-Key, and a response that is the same for
every replay."""

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

# Decoding a larger body would block the event loop.
_BYTES_ON_LOOP = 256 * 1024
_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")


async def read_spec(request: ApiRequest, limit: int, shape: type[S]) -> S:
    """Decode the body as `shape`."""
    require_json(request)
    return await _decode((await read_body(request, limit)).data, shape)


async def read_keyed(request: ApiRequest, limit: int, shape: type[S], route: str) -> tuple[S, IdempotentRequest | None]:
    """Decode the body; with an Idempotency-Key, also return the idempotent request. A key is valid for one route."""
    require_json(request)
    key = _idempotency_key(request)
    body = await read_body(request, limit)
    spec = await _decode(body.data, shape)
    return spec, IdempotentRequest(route, key, body.fingerprint) if key else None


async def read_keyed_optional(
    request: ApiRequest, limit: int, shape: type[S], route: str
) -> tuple[S, IdempotentRequest | None]:
    """Like read_keyed; an empty body gives the defaults of `shape`."""
    key = _idempotency_key(request)
    body = await read_body(request, limit)
    idempotent = IdempotentRequest(route, key, body.fingerprint) if key else None
    if not body.data:
        return shape(), idempotent
    require_json(request)
    return await _decode(body.data, shape), idempotent


async def read_optional(request: ApiRequest, limit: int, shape: type[S]) -> S:
    """Like read_spec; an empty body gives the defaults of `shape`."""
    body = await read_body(request, limit)
    if not body.data:
        return shape()
    require_json(request)
    return await _decode(body.data, shape)


def accepted(outcome: Accepted, location: str | None = None) -> Response[bytes]:
    """The response to a creation, or to its replay."""
    headers = {} if location is None else {"Location": location}
    if outcome.replayed:
        headers["Idempotency-Replayed"] = "true"
    return Response(outcome.body, status_code=outcome.status, media_type="application/json", headers=headers)


def _idempotency_key(request: ApiRequest) -> str | None:
    headers = request.headers.getall("idempotency-key", [])
    if not headers:
        return None
    if len(headers) > 1 or not _IDEMPOTENCY_KEY.fullmatch(headers[0]):
        raise InvalidField(
            "Invalid `Idempotency-Key`. Send one header of 1 to 255 visible ASCII characters.", field="Idempotency-Key"
        )
    return headers[0]


async def _decode(body: bytearray, shape: type[S]) -> S:
    if len(body) <= _BYTES_ON_LOOP:
        return decode_body(body, shape)
    return await asyncio.to_thread(decode_body, body, shape)
