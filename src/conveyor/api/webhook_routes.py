"""Webhooks: endpoints of a tenant, their deliveries, and redelivery."""

from litestar import Response, delete, get, patch, post
from litestar.params import FromPath

from conveyor.api import operations
from conveyor.api.creation import accepted, read_keyed, read_optional, read_spec
from conveyor.api.dependencies import (
    ApiRequest,
    Cursor,
    DeliveriesPart,
    Limit,
    SystemPart,
    TenantPart,
    WebhooksPart,
    answer,
    find_job,
)
from conveyor.api.response_specs import answers, problems, shaped
from conveyor.api.schemas.webhook_shapes import (
    DeliveriesPage,
    DeliveryDetailShape,
    DeliveryShape,
    NewWebhookShape,
    SecretShape,
    WebhookDetailShape,
    WebhookShape,
    WebhooksPage,
)
from conveyor.engines.records import Document
from conveyor.model import Page
from conveyor.notify.deliveries import delivery_json, payload_json
from conveyor.notify.signatures import tenant_secret
from conveyor.notify.webhooks import WebhookChange, WebhookSpec, webhook_json

ROUTE = "POST /v1/webhooks"


@post(
    "/webhooks",
    summary="Create an endpoint",
    operation_class=operations.takes(WebhookSpec, operations.IDEMPOTENCY_KEY),
    responses={**shaped(NewWebhookShape, 201), **problems(400, 409, 413, 415)},
)
async def create_webhook(
    request: ApiRequest, system: SystemPart, tenant: TenantPart, webhooks: WebhooksPart
) -> Response[bytes]:
    """The endpoint gets the events of all jobs, or those that `events` names. Only this response contains its secret,
    which signs each delivery by the Standard Webhooks specification."""
    spec, idempotent = await read_keyed(request, system.settings.max_request_bytes, WebhookSpec, ROUTE)
    outcome = await webhooks.create(tenant, spec, idempotent)
    return accepted(outcome, f"/v1/webhooks/{outcome.subject}")


@get("/webhooks", summary="List endpoints", responses=answers(WebhooksPage, 400))
async def list_webhooks(
    tenant: TenantPart, webhooks: WebhooksPart, limit: Limit = 100, cursor: Cursor = None
) -> Response[bytes]:
    """Oldest first, without secrets."""
    page = await webhooks.page(tenant, cursor, limit)
    return answer({"items": [webhook_json(row) for row in page.items], "next_cursor": page.next_cursor})


@get("/webhooks/secret", summary="Show the secret for URLs in jobs", responses=answers(SecretShape))
async def show_secret(system: SystemPart, tenant: TenantPart) -> Response[bytes]:
    """Signs the deliveries to URLs that jobs name in `notify`; the same for all jobs of the tenant."""
    return answer({"secret": tenant_secret(system.signing_key, tenant)})


@get("/webhooks/{webhook_id:str}", summary="Show an endpoint", responses=answers(WebhookDetailShape, 404))
async def show_webhook(
    webhook_id: FromPath[str], tenant: TenantPart, webhooks: WebhooksPart, deliveries: DeliveriesPart
) -> Response[bytes]:
    """The endpoint, without its secret, and how many of its deliveries succeeded."""
    row = await webhooks.find(tenant, webhook_id)
    return answer({**webhook_json(row), "deliveries": await deliveries.counts(tenant, webhook_id)})


@post(
    "/webhooks/{webhook_id:str}/test",
    summary="Test an endpoint",
    status_code=202,
    operation_class=operations.takes(operations.Nothing, required=False),
    responses={**shaped(DeliveryShape, 202), **problems(400, 404, 409)},
)
async def test_webhook(
    request: ApiRequest,
    webhook_id: FromPath[str],
    system: SystemPart,
    tenant: TenantPart,
    webhooks: WebhooksPart,
    deliveries: DeliveriesPart,
) -> Response[bytes]:
    """Sends a signed `webhook.test` event, whatever `events` names. Look at the delivery for the outcome."""
    row = await webhooks.find(tenant, webhook_id)
    await read_optional(request, system.settings.max_request_bytes, operations.Nothing)
    return answer(delivery_json(await deliveries.test(row)), 202)


@patch(
    "/webhooks/{webhook_id:str}",
    summary="Change an endpoint",
    operation_class=operations.takes(WebhookChange),
    responses=answers(WebhookShape, 400, 404, 409, 413, 415),
)
async def change_webhook(
    request: ApiRequest, webhook_id: FromPath[str], system: SystemPart, tenant: TenantPart, webhooks: WebhooksPart
) -> Response[bytes]:
    """Omitted fields stay as they are. `disabled: false` enables an endpoint again, also one that responded 410."""
    await webhooks.find(tenant, webhook_id)
    change = await read_spec(request, system.settings.max_request_bytes, WebhookChange)
    return answer(webhook_json(await webhooks.change(tenant, webhook_id, change)))


@delete("/webhooks/{webhook_id:str}", summary="Delete an endpoint", responses=problems(404, 409))
async def remove_webhook(webhook_id: FromPath[str], tenant: TenantPart, webhooks: WebhooksPart) -> None:
    """Its pending deliveries are dropped."""
    await webhooks.remove(tenant, webhook_id)


@post(
    "/webhooks/{webhook_id:str}/rotate",
    summary="Rotate an endpoint's secret",
    status_code=200,
    operation_class=operations.takes(operations.Nothing, required=False),
    responses=answers(NewWebhookShape, 400, 404, 409),
)
async def rotate_secret(
    request: ApiRequest, webhook_id: FromPath[str], system: SystemPart, tenant: TenantPart, webhooks: WebhooksPart
) -> Response[bytes]:
    """For a day, both the old and the new secret sign deliveries, so that the receiver can switch at any time."""
    await webhooks.find(tenant, webhook_id)
    await read_optional(request, system.settings.max_request_bytes, operations.Nothing)
    row, secret = await webhooks.rotate(tenant, webhook_id)
    return answer({**webhook_json(row), "secret": secret})


@get(
    "/webhooks/{webhook_id:str}/deliveries",
    summary="List an endpoint's deliveries",
    responses=answers(DeliveriesPage, 400, 404),
)
async def list_deliveries(
    webhook_id: FromPath[str],
    tenant: TenantPart,
    webhooks: WebhooksPart,
    deliveries: DeliveriesPart,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Response[bytes]:
    """Oldest event first, each with its latest attempts."""
    await webhooks.find(tenant, webhook_id)
    return _listed(await deliveries.of_endpoint(tenant, webhook_id, cursor, limit))


@get(
    "/jobs/{job_id:str}/deliveries",
    summary="List a job's deliveries",
    responses=answers(DeliveriesPage, 400, 404),
)
async def list_job_deliveries(
    job_id: FromPath[str],
    system: SystemPart,
    tenant: TenantPart,
    deliveries: DeliveriesPart,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Response[bytes]:
    """Deliveries to endpoints, and to the URLs, state machines and event buses that the job names."""
    job = await find_job(system.records, tenant, job_id)
    return _listed(await deliveries.of_job(tenant, job.job_id, cursor, limit))


@get(
    "/webhooks/deliveries/{delivery_id:str}",
    summary="Show a delivery",
    responses=answers(DeliveryDetailShape, 404),
)
async def show_delivery(delivery_id: FromPath[str], tenant: TenantPart, deliveries: DeliveriesPart) -> Response[bytes]:
    """The latest attempts, and the payload."""
    row = await deliveries.find(tenant, delivery_id)
    return answer({**delivery_json(row), "payload": payload_json(row)})


@post(
    "/webhooks/deliveries/{delivery_id:str}/redeliver",
    summary="Redeliver",
    status_code=202,
    operation_class=operations.takes(operations.Nothing, required=False),
    responses={**shaped(DeliveryShape, 202), **problems(400, 404, 409)},
)
async def redeliver(
    request: ApiRequest, delivery_id: FromPath[str], system: SystemPart, tenant: TenantPart, deliveries: DeliveriesPart
) -> Response[bytes]:
    """Sends the event again now, under the same `webhook-id`; a failure is retried as for a new delivery."""
    await deliveries.find(tenant, delivery_id)
    await read_optional(request, system.settings.max_request_bytes, operations.Nothing)
    return answer(delivery_json(await deliveries.redeliver(tenant, delivery_id)), 202)


def _listed(page: Page[Document]) -> Response[bytes]:
    return answer({"items": [delivery_json(row) for row in page.items], "next_cursor": page.next_cursor})
