"""Responses about webhook endpoints and deliveries."""

from typing import Any

from conveyor.api.schemas.shape import Shape
from conveyor.model import JobId


class WebhookShape(Shape, frozen=True):
    """An endpoint, without its secrets."""

    id: str
    url: str
    # Null: all events. Empty: only events that jobs request.
    events: list[str] | None
    description: str | None
    disabled: bool
    # Why the server disabled it; null if a user did.
    reason: str | None
    # Since when attempts fail, and the error of the first of them; null if the last attempt succeeded.
    failing_since: str | None
    error: str | None
    created_at: str


class DeliveryCounts(Shape, frozen=True):
    """The stored deliveries of an endpoint, by status: of the first 1,000."""

    delivered: int
    failed: int
    pending: int


class WebhookDetailShape(WebhookShape, frozen=True):
    """An endpoint, with the numbers of its deliveries."""

    deliveries: DeliveryCounts


class NewWebhookShape(WebhookShape, frozen=True):
    """A new endpoint, with its secret."""

    secret: str


class SecretShape(Shape, frozen=True):
    """A secret that signs webhooks."""

    secret: str


class AttemptShape(Shape, frozen=True):
    """One attempt of a delivery: the status of the response, or the error."""

    at: str
    status: int | None
    error: str | None
    seconds: float
    # The first 500 characters of the response's body, in the last attempt only.
    answer: str | None


class DeliveryShape(Shape, frozen=True):
    """A delivery of one event to one receiver, with its latest attempts."""

    id: str
    # Null for a receiver that only the job names.
    webhook_id: str | None
    # webhook, start_execution or eventbridge.
    type: str
    # Null for a test.
    job_id: JobId | None
    event_id: str
    event: str
    # pending, delivered or failed.
    status: str
    created_at: str
    next_attempt_at: str | None
    attempts: int
    log: list[AttemptShape]


class DeliveryDetailShape(DeliveryShape, frozen=True):
    """A delivery, with its payload."""

    payload: dict[str, Any]


class WebhooksPage(Shape, frozen=True):
    """Endpoints, oldest first."""

    items: list[WebhookShape]
    next_cursor: str | None


class DeliveriesPage(Shape, frozen=True):
    """Deliveries, by receiver and then oldest first."""

    items: list[DeliveryShape]
    next_cursor: str | None
