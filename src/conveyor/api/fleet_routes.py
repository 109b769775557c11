"""The fleet, as a tenant may see it: breakers, unfinished runs, workers."""

from litestar import Response, get

from conveyor.api import schemas as shapes
from conveyor.api.dependencies import Cursor, Limit, SystemPart, TenantPart, answer, check_job_cursor
from conveyor.read.fleet import breakers_json, lanes_json, workers_json


@get("/breakers", summary="List breakers", responses=shapes.answers(shapes.BreakersPage))
async def list_breakers(system: SystemPart, tenant: TenantPart) -> Response[bytes]:
    """Breakers that are open or half-open; at most 100."""
    return answer({"items": await breakers_json(system, tenant), "next_cursor": None})


@get("/lanes", summary="List lanes", responses=shapes.answers(shapes.LanesPage, 400))
async def list_lanes(
    system: SystemPart, tenant: TenantPart, limit: Limit = 50, cursor: Cursor = None
) -> Response[bytes]:
    """Unfinished runs, newest job first, with the messages in their queues. A message carries up to `chunk_size`
    tasks."""
    check_job_cursor(cursor)
    return answer(await lanes_json(system, tenant, cursor, limit))


@get("/workers", summary="Show the workers", responses=shapes.answers(shapes.WorkersShape))
async def show_workers(system: SystemPart, tenant: TenantPart) -> Response[bytes]:
    """The number of worker loops that are alive, and those that run long tasks of the tenant."""
    return answer(await workers_json(system, tenant))
