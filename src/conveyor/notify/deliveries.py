"""Deliveries: one event on its way to one receiver. A row each, due when the next try is; its body has the payload, how
it stands, and a log of the last tries. It goes with its job, and expires."""

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec

from conveyor.clock import iso_text
from conveyor.engines.records import Document, Records
from conveyor.errors import BadCursor, Conflict, NotFound
from conveyor.faults import crashpoint
from conveyor.jobs.event_names import WEBHOOK
from conveyor.model import JobId, OutboxEvent, Page, TenantId
from conveyor.notify.webhooks import endpoint_of
from conveyor.system import System

DELIVERY = "delivery"
# Tries that the log shows.
LOGGED = 20

# A receiver (an endpoint, or what a job named) and an event.
_ID = re.compile(r"((?:webhook_[0-9a-z]{26}|job_[0-9a-z]{26}\.[0-9]{1,3})):([A-Za-z0-9_.-]{1,100})")
_TRIES = 5


class DeliveryStatus(StrEnum):
    """How a delivery stands."""

    PENDING = "pending"
    DELIVERED = "delivered"
    # Given up, or its endpoint was disabled.
    FAILED = "failed"


class DeliveryAttempt(msgspec.Struct, frozen=True, omit_defaults=True):
    """One try."""

    at: float
    seconds: float
    status: int | None = None
    error: str | None = None


class WebhookDelivery(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of the row, as JSON."""

    event_id: str
    event: str
    # Exactly what is sent, each time.
    payload: str
    # What it shares its turns with: its endpoint, or where the URL of a job leads.
    lane: str
    created_at: float
    standing: DeliveryStatus = DeliveryStatus.PENDING
    # Tries in this round; sending it again begins another.
    tries: int = 0
    # All tries there ever were; `log` has the last of them.
    attempts: int = 0
    log: Sequence[DeliveryAttempt] = ()


_delivery = msgspec.json.Decoder(WebhookDelivery)


def delivery_of(row: Document) -> WebhookDelivery:
    return _delivery.decode(row.body)


def delivery_row(notice: OutboxEvent, receiver: str, lane: str, now: float, keep_seconds: float) -> Document:
    """The row of an event and a receiver, the same whoever makes it."""
    body = WebhookDelivery(notice.notice_id, notice.event, payload_of(notice), lane, now)
    return Document(
        kind=DELIVERY,
        tenant=notice.tenant,
        # The receiver first: what one of them was sent is one range of ids.
        id=f"{receiver}:{notice.notice_id}",
        body=msgspec.json.encode(body),
        due_at=now,
        expires_at=now + keep_seconds,
        job_id=notice.job_id,
    )


def payload_of(notice: OutboxEvent) -> str:
    """What is sent, after the Standard Webhooks specification."""
    data = {"job_id": notice.job_id, "run_id": notice.run_id, **notice.data}
    payload = {"type": notice.event, "id": notice.notice_id, "timestamp": iso_text(notice.at), "data": data}
    return msgspec.json.encode(payload).decode()


def receiver_of(row: Document) -> str:
    """The endpoint, or the row of a job's own, that a delivery goes to."""
    return row.id.partition(":")[0]


def is_delivery_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


class Deliveries:
    """Shows deliveries, and sends one again."""

    def __init__(self, system: System) -> None:
        self._records: Records = system.records
        self._clock = system.clock

    async def find(self, tenant: TenantId, delivery_id: str) -> Document:
        """The tenant's delivery, or NotFound."""
        row = (
            await self._records.documents.document(DELIVERY, tenant, delivery_id)
            if is_delivery_id(delivery_id)
            else None
        )
        if row is None:
            raise NotFound
        return row

    async def of_endpoint(self, tenant: TenantId, webhook_id: str, cursor: str | None, limit: int) -> Page[Document]:
        """What an endpoint was sent, oldest first."""
        _check_cursor(cursor, webhook_id)
        page = await self._records.documents.documents(DELIVERY, tenant, cursor or f"{webhook_id}:", limit)
        own = [row for row in page.items if receiver_of(row) == webhook_id]
        return Page(own, page.next_cursor if len(own) == len(page.items) else None)

    async def of_job(self, tenant: TenantId, job_id: JobId, cursor: str | None, limit: int) -> Page[Document]:
        """What was sent of a job, to whomever, by receiver."""
        _check_cursor(cursor, None)
        return await self._records.documents.documents(DELIVERY, tenant, cursor, limit, job_id)

    async def redeliver(self, tenant: TenantId, delivery_id: str) -> Document:
        """Have it sent again, now, under the same event id. Raises Conflict if its endpoint takes nothing."""
        for _ in range(_TRIES):
            row = await self.find(tenant, delivery_id)
            endpoint = await self._records.documents.document(WEBHOOK, tenant, receiver_of(row))
            if endpoint is not None and endpoint_of(endpoint).disabled:
                raise Conflict("The endpoint is disabled; enable it first.")
            again = msgspec.structs.replace(delivery_of(row), standing=DeliveryStatus.PENDING, tries=0)
            body = msgspec.json.encode(again)
            crashpoint("delivery.again.before")
            changed = await self._records.documents.replace_row(
                msgspec.structs.replace(row, body=body, due_at=self._clock.now())
            )
            crashpoint("delivery.again.after")
            if changed is not None:
                return changed
        raise Conflict("It is being delivered at this moment; try again.")


def delivery_json(row: Document) -> dict[str, Any]:
    """A delivery as the API shows it. The payload is what the event's own entry says."""
    delivery = delivery_of(row)
    receiver = receiver_of(row)
    return {
        "id": row.id,
        "webhook_id": receiver if receiver.startswith("webhook_") else None,
        "job_id": row.job_id,
        "event_id": delivery.event_id,
        "event": delivery.event,
        "status": delivery.standing,
        "created_at": iso_text(delivery.created_at),
        "next_attempt_at": None if row.due_at is None else iso_text(row.due_at),
        "attempts": delivery.attempts,
        "log": [
            {"at": iso_text(each.at), "status": each.status, "error": each.error, "seconds": round(each.seconds, 3)}
            for each in delivery.log
        ],
    }


def payload_json(row: Document) -> Any:
    """What is sent, as a value."""
    return msgspec.json.decode(delivery_of(row).payload)


def _check_cursor(cursor: str | None, receiver: str | None) -> None:
    match = _ID.fullmatch(cursor) if cursor is not None else None
    if cursor is not None and (match is None or receiver not in (None, match[1])):
        raise BadCursor
