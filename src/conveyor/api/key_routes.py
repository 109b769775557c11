"""API keys: an administrator creates, lists and revokes them. A secret is shown once, at creation."""

import re
from typing import Annotated, Any

import msgspec
from litestar import Response, delete, get, post
from litestar.params import FromPath, QueryParameter

from conveyor.api import operations
from conveyor.api import schemas as shapes
from conveyor.api.creation import read_spec
from conveyor.api.dependencies import ApiRequest, Cursor, Limit, SystemPart, answer
from conveyor.auth.keys import check_tenant, make_key
from conveyor.errors import BadCursor, NotFound
from conveyor.model import ApiKey
from conveyor.read.results import iso_time

_KEY_ID = re.compile(r"[0-9a-z]{26}")

OfTenant = Annotated[str | None, QueryParameter(description="List only the keys of this tenant.")]


class KeySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The key to create."""

    tenant: str
    name: str | None = None


@post(
    "/",
    summary="Create a key",
    operation_class=operations.takes(KeySpec),
    responses={**shapes.shaped(shapes.NewKeyShape, 201), **shapes.problems(400, 403, 413, 415)},
)
async def create_key(request: ApiRequest, system: SystemPart) -> Response[bytes]:
    """Administrators only. Only this response contains the key itself."""
    spec = await read_spec(request, system.settings.max_request_bytes, KeySpec)
    text, key = make_key(system.clock, spec.tenant, spec.name)
    await system.records.access.create_key(key)
    return answer({"key": text, "key_id": key.key_id, "tenant": key.tenant}, 201)


@get("/", summary="List keys", responses=shapes.answers(shapes.KeysPage, 400, 403))
async def list_keys(
    system: SystemPart, tenant: OfTenant = None, limit: Limit = 100, cursor: Cursor = None
) -> Response[bytes]:
    """Administrators only. Oldest first, without secrets."""
    if cursor is not None and not _KEY_ID.fullmatch(cursor):
        raise BadCursor
    owner = None if tenant is None else check_tenant(tenant)
    keys = sorted(await system.records.access.keys(owner), key=lambda key: key.key_id)
    rest = [key for key in keys if key.key_id > (cursor or "")]
    items = rest[:limit]
    more = len(rest) > limit
    return answer({"items": [_shown(key) for key in items], "next_cursor": items[-1].key_id if more else None})


@delete("/{key_id:str}", summary="Revoke a key", responses=shapes.problems(403, 404))
async def revoke_key(key_id: FromPath[str], system: SystemPart) -> None:
    """Administrators only. The server refuses the key within two seconds."""
    known = _KEY_ID.fullmatch(key_id) and await system.records.access.revoke_key(key_id, system.clock.now())
    if not known:
        raise NotFound


def _shown(key: ApiKey) -> dict[str, Any]:
    return {
        "key_id": key.key_id,
        "tenant": key.tenant,
        "name": key.name,
        "admin": key.admin,
        "created_at": iso_time(key.created_at),
        "expires_at": iso_time(key.expires_at),
        "revoked_at": iso_time(key.revoked_at),
    }
