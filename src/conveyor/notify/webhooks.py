"""Webhook endpoints of a tenant: the URL of each, the events that it gets, and the secrets that sign.

An endpoint is a document, changed on its version. Its secret is shown when it is created or rotated, and not again.
After a rotation the old secret also signs, for a while.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from conveyor.clock import iso_text
from conveyor.engines.records import Document, Records
from conveyor.errors import BadCursor, Conflict, InvalidField, LimitReached, NotFound
from conveyor.faults import crashpoint
from conveyor.jobs.event_names import WEBHOOK, check_events, check_target
from conveyor.jobs.idempotency import Accepted, Claim, Idempotency, IdempotentRequest
from conveyor.jobs.secrets import shown_url
from conveyor.model import Page, TenantId
from conveyor.notify.signatures import endpoint_secret
from conveyor.system import System

CREATED = 201
MAX_DESCRIPTION = 500

_ID = re.compile(r"webhook_[0-9a-z]{26}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_TRIES = 5
# The maximum number of secrets that sign at the same time.
_MAX_SECRETS = 3


class WebhookSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An endpoint to create. Without `events` it gets all events of all jobs; with an empty list, only those that jobs
    request in `notify`."""

    url: str
    events: list[str] | None = None
    description: str | None = None


class WebhookChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields to change. A missing field stays as it is."""

    url: str | msgspec.UnsetType = msgspec.UNSET
    events: list[str] | msgspec.UnsetType | None = msgspec.UNSET
    description: str | msgspec.UnsetType | None = msgspec.UNSET
    disabled: bool | msgspec.UnsetType = msgspec.UNSET


class Secret(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which secret signs, and until when; None: until it is rotated."""

    number: int
    until: float | None = None


class Endpoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of an endpoint's document, as JSON."""

    url: str
    created_at: float
    # Newest first.
    secrets: Sequence[Secret]
    events: Sequence[str] | None = None
    description: str | None = None
    disabled: bool = False
    # Why it was disabled, if not by a request.
    reason: str | None = None
    # Since when every attempt fails, and the error of the first of them.
    failing_since: float | None = None
    last_error: str | None = None


_endpoint = msgspec.json.Decoder(Endpoint)

Change = Callable[[Endpoint], Endpoint]


def endpoint_of(row: Document) -> Endpoint:
    return _endpoint.decode(row.body)


def valid_secrets(key: bytes, tenant: TenantId, webhook_id: str, endpoint: Endpoint, now: float) -> list[str]:
    """The secrets that sign now."""
    valid = [secret for secret in endpoint.secrets if secret.until is None or secret.until > now]
    return [endpoint_secret(key, tenant, webhook_id, secret.number) for secret in valid]


class Webhooks:
    """Creates, shows, changes and removes endpoints."""

    def __init__(self, system: System) -> None:
        self._records = system.records
        self._clock = system.clock
        self._settings = system.settings
        self._key = system.signing_key
        self._idempotency = Idempotency(system.settings, system.clock, system.records)

    async def create(self, tenant: TenantId, spec: WebhookSpec, request: IdempotentRequest | None = None) -> Accepted:
        """Create an endpoint. The answer has its secret, which is stored nowhere, not even in the answer for replay."""
        webhook_id = self._clock.new_id("webhook")
        accepted = await self._idempotency.once(tenant, request, webhook_id, partial(self._create, tenant, spec))
        return self._with_secret(tenant, accepted)

    async def _create(self, tenant: TenantId, spec: WebhookSpec, claim: Claim) -> Accepted:
        self._check(spec.url, spec.events, spec.description)
        await self._check_number(tenant)
        endpoint = Endpoint(spec.url, self._clock.now(), [Secret(1)], spec.events, spec.description)
        document = Document(WEBHOOK, tenant, claim.subject, msgspec.json.encode(endpoint))
        answer = claim.answer(CREATED, msgspec.json.encode(webhook_json(document)))
        crashpoint("webhook.create.before")
        existing = await self._records.documents.create_documents([document], None, answer.row)
        crashpoint("webhook.create.after")
        return answer.unless_lost(existing)

    async def find(self, tenant: TenantId, webhook_id: str) -> Document:
        """The tenant's endpoint. Raises NotFound for an unknown one, a removed one and one of another tenant."""
        row = await self._records.documents.document(WEBHOOK, tenant, webhook_id) if _ID.fullmatch(webhook_id) else None
        if row is None:
            raise NotFound
        return row

    async def page(self, tenant: TenantId, cursor: str | None, limit: int) -> Page[Document]:
        """Endpoints, oldest first."""
        if cursor is not None and not _ID.fullmatch(cursor):
            raise BadCursor
        return await self._records.documents.documents(WEBHOOK, tenant, cursor, limit)

    async def change(self, tenant: TenantId, webhook_id: str, change: WebhookChange) -> Document:
        """Change an endpoint. Enabling it clears the reason for which it was disabled."""
        await self.find(tenant, webhook_id)
        fields = {field: value for field, value in msgspec.structs.asdict(change).items() if value is not msgspec.UNSET}
        self._check(fields.get("url"), fields.get("events"), fields.get("description"))
        if "disabled" in fields:
            fields["reason"] = None
        if not {"disabled", "url"}.isdisjoint(fields):
            fields |= {"failing_since": None, "last_error": None}
        changed = await change_endpoint(
            self._records, tenant, webhook_id, lambda endpoint: msgspec.structs.replace(endpoint, **fields)
        )
        if changed is None:
            raise NotFound
        return changed

    async def rotate(self, tenant: TenantId, webhook_id: str) -> tuple[Document, str]:
        """Give the endpoint a new secret; the present one also signs, for a while."""
        await self.find(tenant, webhook_id)
        changed = await change_endpoint(self._records, tenant, webhook_id, self._rotated)
        if changed is None:
            raise NotFound
        number = endpoint_of(changed).secrets[0].number
        return changed, endpoint_secret(self._key, tenant, webhook_id, number)

    async def remove(self, tenant: TenantId, webhook_id: str) -> None:
        """Remove an endpoint. Its pending deliveries are dropped."""
        for _ in range(_TRIES):
            row = await self.find(tenant, webhook_id)
            crashpoint("webhook.remove.before")
            if await self._records.documents.remove_document(row):
                crashpoint("webhook.remove.after")
                return
        raise _contended()

    def _rotated(self, endpoint: Endpoint) -> Endpoint:
        now = self._clock.now()
        until = now + self._settings.webhook_overlap_seconds
        newest, *older = endpoint.secrets
        valid = [secret for secret in older if secret.until is not None and secret.until > now]
        secrets = [Secret(newest.number + 1), Secret(newest.number, until), *valid][:_MAX_SECRETS]
        return msgspec.structs.replace(endpoint, secrets=secrets)

    def _with_secret(self, tenant: TenantId, accepted: Accepted) -> Accepted:
        """The answer with the first secret, which is derived and so the same in a replay."""
        shown = msgspec.json.decode(accepted.body)
        shown["secret"] = endpoint_secret(self._key, tenant, accepted.subject, 1)
        return accepted._replace(body=msgspec.json.encode(shown))

    def _check(self, url: str | None, events: Sequence[str] | None, description: str | None) -> None:
        if url is not None:
            check_target(url, self._settings.allow_private_targets)
        check_events(events)
        if description is not None and (len(description) > MAX_DESCRIPTION or _CONTROL.search(description)):
            raise InvalidField(
                f"`description` must be at most {MAX_DESCRIPTION} characters, without control characters.",
                field="description",
            )

    async def _check_number(self, tenant: TenantId) -> None:
        limit = self._settings.max_webhooks
        if len((await self._records.documents.documents(WEBHOOK, tenant, None, limit + 1)).items) >= limit:
            raise LimitReached(f"The tenant has {limit} endpoints already, the maximum.", limit=limit)


async def change_endpoint(records: Records, tenant: TenantId, webhook_id: str, change: Change) -> Document | None:
    """Change an endpoint on its version, and retry on concurrent changes; None if it was removed."""
    for _ in range(_TRIES):
        row = await records.documents.document(WEBHOOK, tenant, webhook_id)
        if row is None:
            return None
        crashpoint("webhook.change.before")
        body = msgspec.json.encode(change(endpoint_of(row)))
        changed = await records.documents.replace_document(msgspec.structs.replace(row, body=body))
        crashpoint("webhook.change.after")
        if changed is not None:
            return changed
    raise _contended()


def webhook_json(row: Document) -> dict[str, Any]:
    """An endpoint as the API shows it, without its secrets."""
    endpoint = endpoint_of(row)
    return {
        "id": row.id,
        "url": shown_url(endpoint.url),
        "events": endpoint.events,
        "description": endpoint.description,
        "disabled": endpoint.disabled,
        "reason": endpoint.reason,
        "failing_since": None if endpoint.failing_since is None else iso_text(endpoint.failing_since),
        "error": endpoint.last_error,
        "created_at": iso_text(endpoint.created_at),
    }


def _contended() -> Conflict:
    return Conflict("Other requests changed the endpoint at the same time. Try again.")
