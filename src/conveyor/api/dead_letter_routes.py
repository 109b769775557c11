"""Dead letters: list them, and redrive them."""

from typing import Annotated

import msgspec
from litestar import Response, get, post

from conveyor.accept.redrive import Redriven, redrive
from conveyor.api import operations
from conveyor.api import schemas as shapes
from conveyor.api.creation import read_spec
from conveyor.api.dependencies import MAX_LIMIT, ApiRequest, Cursor, Limit, SystemPart, TenantPart, answer
from conveyor.jobs.dead_letters import plan_redrives
from conveyor.read.dead_letter_pages import dead_letter_json, dead_letters_page


class RedriveSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The dead letters to redrive."""

    ids: Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_LIMIT)]


@get("/dead-letters", summary="List dead letters", responses=shapes.answers(shapes.DeadLettersPage, 400))
async def list_letters(
    system: SystemPart, tenant: TenantPart, limit: Limit = 100, cursor: Cursor = None
) -> Response[bytes]:
    """Oldest first. A page may have fewer items than `limit` and still have a next page."""
    page = await dead_letters_page(system.queue, tenant, limit, cursor)
    plans = await plan_redrives(system.records, system.tasks, page.items)
    return answer(
        {"items": [dead_letter_json(letter, plan) for letter, plan in plans], "next_cursor": page.next_cursor}
    )


@post(
    "/dead-letters/redrive",
    summary="Redrive dead letters",
    status_code=200,
    operation_class=operations.takes(RedriveSpec),
    responses={**shapes.shaped(Redriven), **shapes.problems(400, 409, 413, 415)},
)
async def redrive_letters(request: ApiRequest, system: SystemPart, tenant: TenantPart) -> Response[bytes]:
    """Requeues messages, resumes failed ingests, and reruns dead-lettered tasks: `redrive` of each says which. Unknown
    ones, and those with nothing left to do, are skipped. 409 if none could be redriven because a run of the job is in
    progress."""
    spec = await read_spec(request, system.settings.max_request_bytes, RedriveSpec)
    return answer(await redrive(system, tenant, spec.ids))
