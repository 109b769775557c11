"""Deliveries: one event on its way to one receiver. Each is a document, due at the next attempt, with the payload, the
status, and a log of the last attempts. It expires, and is removed with its job."""

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec

from conveyor.clock import iso_text
from conveyor.engines.event_targets import EVENT_BUS, STATE_MACHINE
from conveyor.engines.records import Document, Records
from conveyor.errors import BadCursor, Conflict, NotFound
from conveyor.faults import crashpoint
from conveyor.jobs.event_names import WEBHOOK
from conveyor.model import JobId, OutboxEvent, Page, TenantId
from conveyor.notify.webhooks import endpoint_of
from conveyor.settings import public_link
from conveyor.system import System

DELIVERY = "delivery"
# Attempts in the log.
LOGGED = 20
# How long the delivery of a test is kept.
TEST_SECONDS = 86_400.0
# Characters of an answer that the log keeps.
MAX_ANSWER = 500
# The event that a user asks for, to see whether an endpoint works.
TEST_EVENT = "webhook.test"

# A receiver (an endpoint, or a `notify` entry of a job) and an event.
_ID = re.compile(r"((?:webhook_[0-9a-z]{26}|job_[0-9a-z]{26}\.[0-9]{1,3})):([A-Za-z0-9_.-]{1,100})")
_TRIES = 5
_MAX_COUNTED = 1000


class DeliveryStatus(StrEnum):
    """The status of a delivery."""

    PENDING = "pending"
    DELIVERED = "delivered"
    # All attempts failed, or its endpoint was disabled.
    FAILED = "failed"


class DeliveryAttempt(msgspec.Struct, frozen=True, omit_defaults=True):
    """One attempt."""

    at: float
    seconds: float
    status: int | None = None
    error: str | None = None
    # The beginning of the answer's body, of the last attempt only.
    answer: str | None = None


class WebhookDelivery(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of the document, as JSON."""

    event_id: str
    event: str
    # The bytes that every attempt sends.
    payload: str
    # Deliveries of a lane share its concurrency: its endpoint, or the origin or ARN that a job named.
    lane: str
    created_at: float
    standing: DeliveryStatus = DeliveryStatus.PENDING
    # Attempts in this round; a redelivery starts another.
    tries: int = 0
    # All attempts; `log` has the last of them.
    attempts: int = 0
    log: Sequence[DeliveryAttempt] = ()


_delivery = msgspec.json.Decoder(WebhookDelivery)


def delivery_of(row: Document) -> WebhookDelivery:
    return _delivery.decode(row.body)


def delivery_document(
    event: OutboxEvent, receiver: str, lane: str, now: float, keep_seconds: float, public_url: str | None = None
) -> Document:
    """The document of an event and a receiver, the same for every dispatcher."""
    body = WebhookDelivery(event.notice_id, event.event, payload_of(event, public_url), lane, now)
    return Document(
        kind=DELIVERY,
        tenant=event.tenant,
        # The receiver first: the deliveries of a receiver are one range of ids.
        id=f"{receiver}:{event.notice_id}",
        body=msgspec.json.encode(body),
        due_at=now,
        expires_at=now + keep_seconds,
        job_id=event.job_id,
    )


def payload_of(event: OutboxEvent, public_url: str | None = None) -> str:
    """The payload, after the Standard Webhooks specification; with the public URL, it links to what it reports."""
    links = {} if public_url is None else {"links": _links(event, public_url)}
    data = {"job_id": event.job_id, "run_id": event.run_id, **event.data, **links}
    payload = {"type": event.event, "id": event.notice_id, "timestamp": iso_text(event.at), "data": data}
    return msgspec.json.encode(payload).decode()


def _links(event: OutboxEvent, public_url: str) -> dict[str, str]:
    links = {"job": public_link(public_url, f"/v1/jobs/{event.job_id}")}
    if "export_id" in event.data:
        links["export"] = public_link(public_url, f"/v1/exports/{event.data['export_id']}")
    return links


def event_time(delivery: WebhookDelivery) -> str:
    """When the event happened, as its payload says."""
    timestamp: str = msgspec.json.decode(delivery.payload)["timestamp"]
    return timestamp


def receiver_of(row: Document) -> str:
    """The endpoint, or the `notify` entry of the job, that a delivery goes to."""
    return row.id.partition(":")[0]


def is_delivery_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


class Deliveries:
    """Shows deliveries, and redelivers."""

    def __init__(self, system: System) -> None:
        self._records: Records = system.records
        self._clock = system.clock

    async def find(self, tenant: TenantId, delivery_id: str) -> Document:
        """The tenant's delivery. Raises NotFound."""
        row = (
            await self._records.documents.document(DELIVERY, tenant, delivery_id)
            if is_delivery_id(delivery_id)
            else None
        )
        if row is None:
            raise NotFound
        return row

    async def of_endpoint(self, tenant: TenantId, webhook_id: str, cursor: str | None, limit: int) -> Page[Document]:
        """The deliveries of an endpoint, oldest first."""
        _check_cursor(cursor, webhook_id)
        page = await self._records.documents.documents(DELIVERY, tenant, cursor or f"{webhook_id}:", limit)
        own = [row for row in page.items if receiver_of(row) == webhook_id]
        return Page(own, page.next_cursor if len(own) == len(page.items) else None)

    async def counts(self, tenant: TenantId, webhook_id: str) -> dict[str, int]:
        """How many deliveries of an endpoint have each status, of the first thousand."""
        page = await self.of_endpoint(tenant, webhook_id, None, _MAX_COUNTED)
        counts = dict.fromkeys(map(str, DeliveryStatus), 0)
        for row in page.items:
            counts[delivery_of(row).standing] += 1
        return counts

    async def of_job(self, tenant: TenantId, job_id: JobId, cursor: str | None, limit: int) -> Page[Document]:
        """The deliveries of a job's events, by receiver."""
        _check_cursor(cursor, None)
        return await self._records.documents.documents(DELIVERY, tenant, cursor, limit, job_id)

    async def test(self, endpoint: Document) -> Document:
        """Send an endpoint an event that reports nothing. Raises Conflict if it is disabled."""
        if endpoint_of(endpoint).disabled:
            raise Conflict("The endpoint is disabled. Enable it first.")
        now, event_id = self._clock.now(), self._clock.new_id("evt")
        data = {"webhook_id": endpoint.id}
        payload = {"type": TEST_EVENT, "id": event_id, "timestamp": iso_text(now), "data": data}
        body = WebhookDelivery(event_id, TEST_EVENT, msgspec.json.encode(payload).decode(), endpoint.id, now)
        document = Document(
            kind=DELIVERY,
            tenant=endpoint.tenant,
            id=f"{endpoint.id}:{event_id}",
            body=msgspec.json.encode(body),
            due_at=now,
            expires_at=now + TEST_SECONDS,
        )
        await self._records.documents.create_documents([document])
        return document

    async def redeliver(self, tenant: TenantId, delivery_id: str) -> Document:
        """Have it sent again at once, with the same event id. Raises Conflict if its endpoint is disabled."""
        for _ in range(_TRIES):
            row = await self.find(tenant, delivery_id)
            endpoint = await self._records.documents.document(WEBHOOK, tenant, receiver_of(row))
            if endpoint is not None and endpoint_of(endpoint).disabled:
                raise Conflict("The endpoint is disabled. Enable it first.")
            redelivery = msgspec.structs.replace(delivery_of(row), standing=DeliveryStatus.PENDING, tries=0)
            body = msgspec.json.encode(redelivery)
            crashpoint("delivery.again.before")
            changed = await self._records.documents.replace_document(
                msgspec.structs.replace(row, body=body, due_at=self._clock.now())
            )
            crashpoint("delivery.again.after")
            if changed is not None:
                return changed
        raise Conflict("The delivery is in progress. Try again.")


def delivery_json(row: Document) -> dict[str, Any]:
    """A delivery as the API shows it, without the payload."""
    delivery = delivery_of(row)
    receiver = receiver_of(row)
    return {
        "id": row.id,
        "webhook_id": receiver if receiver.startswith("webhook_") else None,
        "type": _type_of(delivery),
        "job_id": row.job_id,
        "event_id": delivery.event_id,
        "event": delivery.event,
        "status": delivery.standing,
        "created_at": iso_text(delivery.created_at),
        "next_attempt_at": None if row.due_at is None else iso_text(row.due_at),
        "attempts": delivery.attempts,
        "log": [
            {
                "at": iso_text(attempt.at),
                "status": attempt.status,
                "error": attempt.error,
                "seconds": round(attempt.seconds, 3),
                "answer": attempt.answer,
            }
            for attempt in delivery.log
        ],
    }


def _type_of(delivery: WebhookDelivery) -> str:
    """The `type` of its receiver. A lane is an ARN only if the receiver is one."""
    if STATE_MACHINE.fullmatch(delivery.lane):
        return "start_execution"
    return "eventbridge" if EVENT_BUS.fullmatch(delivery.lane) else "webhook"


def payload_json(row: Document) -> Any:
    """The payload, as a value."""
    return msgspec.json.decode(delivery_of(row).payload)


def _check_cursor(cursor: str | None, receiver: str | None) -> None:
    match = _ID.fullmatch(cursor) if cursor is not None else None
    if cursor is not None and (match is None or receiver not in (None, match[1])):
        raise BadCursor
