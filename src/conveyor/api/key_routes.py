"""API keys: an administrator creates, lists and revokes them, and lists the tenants that have them. A secret is shown
once, at creation."""

import re
from collections import defaultdict
from functools import partial
from typing import Annotated, Any

import msgspec
from litestar import Response, delete, get, post
from litestar.params import FromPath, QueryParameter

from conveyor.api import operations
from conveyor.api.creation import accepted, read_keyed
from conveyor.api.dependencies import ApiRequest, Cursor, Limit, SystemPart, answer
from conveyor.api.response_specs import answers, problems, shaped
from conveyor.api.schemas.key_shapes import KeysPage, NewKeyShape, TenantsPage
from conveyor.auth.keys import check_tenant, make_key, new_key_id, revoke
from conveyor.errors import BadCursor, InvalidField, NotFound
from conveyor.faults import crashpoint
from conveyor.jobs.idempotency import Accepted, Claim, Idempotency
from conveyor.model import ApiKey, TenantId
from conveyor.read.results import iso_time
from conveyor.system import System

_KEY_ID = re.compile(r"[0-9a-z]{26}")

ROUTE = "POST /v1/keys"

OfTenant = Annotated[str | None, QueryParameter(description="List only the keys of this tenant.")]


class KeySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The key to create."""

    tenant: str
    name: str | None = None


@post(
    "/keys",
    summary="Create a key",
    operation_class=operations.takes(KeySpec, operations.IDEMPOTENCY_KEY),
    responses={**shaped(NewKeyShape, 201), **problems(400, 403, 409, 413, 415)},
)
async def create_key(request: ApiRequest, system: SystemPart) -> Response[bytes]:
    """Administrators only. Only this response contains the key itself: for a repeated `Idempotency-Key`, `key` is null.
    If the response was lost, revoke the key by its id and create another."""
    spec, idempotent = await read_keyed(request, system.settings.max_request_bytes, KeySpec, ROUTE)
    idempotency = Idempotency(system.settings, system.clock, system.records)
    carry_out = partial(_create, system, spec)
    return accepted(await idempotency.once(request.auth.tenant, idempotent, new_key_id(system.clock), carry_out))


async def _create(system: System, spec: KeySpec, claim: Claim) -> Accepted:
    text, key = make_key(system.clock, spec.tenant, spec.name, key_id=claim.subject)
    shown = {"key": text, "key_id": key.key_id, "tenant": key.tenant}
    # The secret is stored nowhere, not even for a replay.
    reply = claim.answer(201, msgspec.json.encode({**shown, "key": None}))
    crashpoint("key.create.before")
    existing = await system.records.access.create_key(key, reply.row)
    crashpoint("key.create.after")
    if existing is not None:
        return reply.unless_lost(existing)
    return reply.accepted._replace(body=msgspec.json.encode(shown))


@get("/keys", summary="List keys", responses=answers(KeysPage, 400, 403))
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


@get("/tenants", summary="List tenants", responses=answers(TenantsPage, 400, 403))
async def list_tenants(system: SystemPart, limit: Limit = 100, cursor: Cursor = None) -> Response[bytes]:
    """Administrators only. All tenants that have or had a key, by name."""
    after = None if cursor is None else _tenant_cursor(cursor)
    found: defaultdict[TenantId, list[ApiKey]] = defaultdict(list)
    for key in await system.records.access.keys(None):
        found[key.tenant].append(key)
    names = [tenant for tenant in sorted(found) if after is None or tenant > after]
    now = system.clock.now()
    items = [_shown_tenant(tenant, found[tenant], now) for tenant in names[:limit]]
    return answer({"items": items, "next_cursor": names[limit - 1] if len(names) > limit else None})


def _tenant_cursor(cursor: str) -> TenantId:
    try:
        return check_tenant(cursor)
    except InvalidField:
        raise BadCursor from None


def _shown_tenant(tenant: TenantId, keys: list[ApiKey], now: float) -> dict[str, Any]:
    active = [key for key in keys if key.revoked_at is None and (key.expires_at is None or key.expires_at > now)]
    return {
        "tenant": tenant,
        "active_keys": len(active),
        "keys": len(keys),
        "created_at": iso_time(min(key.created_at for key in keys)),
    }


@delete("/keys/{key_id:str}", summary="Revoke a key", responses=problems(403, 404, 409))
async def revoke_key(key_id: FromPath[str], system: SystemPart) -> None:
    """Administrators only. The server refuses the key within two seconds. The last administrator's key cannot be
    revoked."""
    if not _KEY_ID.fullmatch(key_id):
        raise NotFound
    await revoke(system.records.access, system.records.documents, system.clock, key_id)


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
