"""Schedules: jobs that are made again and again, by cron."""

from litestar import Response, delete, get, patch, post
from litestar.params import FromPath

from conveyor.accept.schedules import ScheduleChange, ScheduleSpec, schedule_json
from conveyor.api import operations
from conveyor.api import schemas as shapes
from conveyor.api.creation import accepted, read_keyed, read_spec
from conveyor.api.dependencies import ApiRequest, Cursor, Limit, SchedulesPart, SystemPart, TenantPart, answer

ROUTE = "POST /v1/schedules"


@post(
    "/schedules",
    summary="Make a schedule",
    operation_class=operations.takes(ScheduleSpec, operations.IDEMPOTENCY_KEY),
    responses={**shapes.shaped(shapes.ScheduleShape, 201), **shapes.problems(400, 404, 409, 413, 415)},
)
async def create_schedule(
    request: ApiRequest, system: SystemPart, tenant: TenantPart, schedules: SchedulesPart
) -> Response[bytes]:
    """`job` is what POST /v1/jobs takes, with its tasks, or with a `source` that is read at each fire: an upload, or a
    `url`. All of it is checked now."""
    spec, asked = await read_keyed(request, system.settings.max_request_bytes, ScheduleSpec, ROUTE)
    given = await schedules.create(tenant, spec, asked)
    return accepted(given, f"/v1/schedules/{given.subject}")


@get("/schedules", summary="List schedules", responses=shapes.answers(shapes.SchedulesPage, 400))
async def list_schedules(
    system: SystemPart, tenant: TenantPart, schedules: SchedulesPart, limit: Limit = 100, cursor: Cursor = None
) -> Response[bytes]:
    """Oldest first."""
    page = await schedules.page(tenant, cursor, limit)
    now = system.clock.now()
    return answer({"items": [schedule_json(row, now) for row in page.items], "next_cursor": page.next_cursor})


@get("/schedules/{schedule_id:str}", summary="Show a schedule", responses=shapes.answers(shapes.ScheduleShape, 404))
async def show_schedule(
    schedule_id: FromPath[str], system: SystemPart, tenant: TenantPart, schedules: SchedulesPart
) -> Response[bytes]:
    """When it fires next, and what came of its last fires."""
    return answer(schedule_json(await schedules.find(tenant, schedule_id), system.clock.now()))


@patch(
    "/schedules/{schedule_id:str}",
    summary="Change a schedule",
    operation_class=operations.takes(ScheduleChange),
    responses=shapes.answers(shapes.ScheduleShape, 400, 404, 409, 413, 415),
)
async def change_schedule(
    request: ApiRequest, schedule_id: FromPath[str], system: SystemPart, tenant: TenantPart, schedules: SchedulesPart
) -> Response[bytes]:
    """What is left out stays as it is; `job` is replaced whole. After a pause it fires from now on."""
    await schedules.find(tenant, schedule_id)
    change = await read_spec(request, system.settings.max_request_bytes, ScheduleChange)
    changed = await schedules.change(tenant, schedule_id, change)
    return answer(schedule_json(changed, system.clock.now()))


@delete("/schedules/{schedule_id:str}", summary="Remove a schedule", responses=shapes.problems(404, 409))
async def remove_schedule(schedule_id: FromPath[str], tenant: TenantPart, schedules: SchedulesPart) -> None:
    """The jobs that it made stay."""
    await schedules.remove(tenant, schedule_id)
