"""Previews of lists, before a job is made of them."""

from litestar import Response, post

from conveyor.api import operations
from conveyor.api.creation import read_spec
from conveyor.api.dependencies import ApiRequest, SystemPart, TenantPart, answer
from conveyor.api.response_specs import problems, shaped
from conveyor.lists.preview import ListPreview, PreviewSpec, preview_list


@post(
    "/lists/preview",
    summary="Preview a list",
    status_code=200,
    operation_class=operations.takes(PreviewSpec),
    responses={**shaped(ListPreview), **problems(400, 413, 415)},
)
async def preview(request: ApiRequest, system: SystemPart, tenant: TenantPart) -> Response[bytes]:
    """The first tasks and invalid lines of a list, read as an ingest reads them. Nothing is stored."""
    spec = await read_spec(request, system.settings.max_request_bytes, PreviewSpec)
    return answer(await preview_list(spec))
