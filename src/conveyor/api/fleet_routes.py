"""The fleet, as a tenant may see it: breakers, paces of hosts, unfinished runs, workers."""

from typing import Annotated

import msgspec
from litestar import Response, get, post
from litestar.params import QueryParameter

from conveyor.api import operations
from conveyor.api.creation import read_optional
from conveyor.api.dependencies import ApiRequest, Cursor, Limit, SystemPart, TenantPart, answer, check_job_cursor
from conveyor.api.response_specs import answers, problems, shaped
from conveyor.api.schemas.fleet_shapes import BreakersPage, HostsPage, LanesPage, LoadShape, ResetBreakers, WorkersShape
from conveyor.coordination.breaker_states import reset_breakers as close_breakers
from conveyor.errors import Forbidden
from conveyor.model import TenantId
from conveyor.read.fleet import breakers_json, hosts_json, lanes_json, load_json, workers_json

_MAX_TARGETS = 1000

AllTenants = Annotated[bool, QueryParameter(description="Those of all tenants. Needs an administrator's key.")]


class ResetSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The breakers to reset: those of some targets, or all; of the key's tenant, or of all tenants."""

    targets: Annotated[list[str], msgspec.Meta(min_length=1, max_length=_MAX_TARGETS)] | None = None
    all_tenants: bool = False


@get("/breakers", summary="List breakers", responses=answers(BreakersPage, 403))
async def list_breakers(
    request: ApiRequest, system: SystemPart, tenant: TenantPart, all_tenants: AllTenants = False
) -> Response[bytes]:
    """Breakers that are open or half-open; at most 100 of a tenant, and 1,000 of all."""
    owner = _owner(request, tenant, all_tenants)
    return answer({"items": await breakers_json(system, owner), "next_cursor": None})


@post(
    "/breakers/reset",
    summary="Reset breakers",
    status_code=200,
    operation_class=operations.takes(ResetSpec, required=False),
    responses={**shaped(ResetBreakers), **problems(400, 403, 413, 415, 503)},
)
async def reset_breakers(request: ApiRequest, system: SystemPart, tenant: TenantPart) -> Response[bytes]:
    """Closes breakers whose targets are back. Tasks that wait for them start at once; failures before the reset no
    longer count. Without `targets`, all breakers of the tenant. `all_tenants` needs an administrator's key."""
    spec = await read_optional(request, system.settings.max_request_bytes, ResetSpec)
    owner = _owner(request, tenant, spec.all_tenants)
    closed = await close_breakers(system.coordinator, system.clock, owner, spec.targets)
    return answer({"reset": [{"tenant": tenant, "target": target} for tenant, target in closed]})


def _owner(request: ApiRequest, tenant: TenantId, all_tenants: bool) -> TenantId | None:
    """The tenant whose breakers the request is about; None for all. Raises Forbidden."""
    if not all_tenants:
        return tenant
    if not request.auth.admin:
        raise Forbidden
    return None


@get("/hosts", summary="List hosts", responses=answers(HostsPage))
async def list_hosts(system: SystemPart, tenant: TenantPart) -> Response[bytes]:
    """The pace of the hosts that jobs with `pace: auto` sent requests to in the last hour; at most 200, those used
    last."""
    return answer({"items": await hosts_json(system, tenant), "next_cursor": None})


@get("/load", summary="Show the load over time", responses=answers(LoadShape))
async def show_load(system: SystemPart, tenant: TenantPart) -> Response[bytes]:
    """Finished tasks, retried attempts, and tasks that waited and ran, over all jobs: by minute for four hours, by hour
    for a week. The sampler adds to it every `CONVEYOR_SAMPLE_SECONDS`."""
    return answer(await load_json(system, tenant))


@get("/lanes", summary="List lanes", responses=answers(LanesPage, 400))
async def list_lanes(
    system: SystemPart, tenant: TenantPart, limit: Limit = 50, cursor: Cursor = None
) -> Response[bytes]:
    """Unfinished runs, newest job first, with the messages in their queues. A message carries up to `chunk_size`
    tasks."""
    check_job_cursor(cursor)
    return answer(await lanes_json(system, tenant, cursor, limit))


@get("/workers", summary="Show the workers", responses=answers(WorkersShape))
async def show_workers(system: SystemPart, tenant: TenantPart) -> Response[bytes]:
    """The number of worker loops that are alive, and those that run long tasks of the tenant."""
    return answer(await workers_json(system, tenant))
