"""The documents part of Records: small versioned records of many kinds."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from conveyor.engines.access_records import IdempotencyClaim
from conveyor.model import JobId, OutboxEvent, Page, TenantId


class Document(msgspec.Struct, frozen=True):
    """A small versioned record of one kind: a schedule, a webhook endpoint, a delivery, an export, a callback, the
    progress of a long task. Its owner defines the body; the store knows its id, its version and its times."""

    kind: str
    tenant: TenantId
    id: str
    body: bytes
    # Every write adds one.
    version: int = 1
    # When its owner next acts on it; None: never.
    due_at: float | None = None
    # Readers do not see it from this time on.
    expires_at: float | None = None
    # The job that it belongs to.
    job_id: JobId | None = None
    # The upload that it refers to. The upload does not expire while the document exists.
    upload_id: str | None = None


class DocumentRecords(Protocol):
    """Stores documents. Each write names the version that it replaces; `due_at` is the one index over all tenants."""

    async def create_documents(
        self, rows: Sequence[Document], notice: OutboxEvent | None = None, answer: IdempotencyClaim | None = None
    ) -> IdempotencyClaim | None:
        """Write up to 25 documents, the outbox event and the answer to the claimed request. A document that already
        exists stays as it is. With an answer or an event, all is one transaction. If the caller lost the claim, write
        nothing and return the stored claim."""

    async def document(self, kind: str, tenant: TenantId, id: str) -> Document | None:
        """A document that has not expired."""

    async def replace_document(self, row: Document, notice: OutboxEvent | None = None) -> Document | None:
        """Replace the document that has the same version, and write the outbox event in the same transaction. Returns
        the document with its new version; None, and nothing written, if the version is stale or the document has
        expired. An upload that nothing refers to any more expires at once."""

    async def remove_document(self, row: Document) -> bool:
        """Remove a document if it still has this version. An upload that nothing refers to any more expires at
        once."""

    async def documents(
        self, kind: str, tenant: TenantId, cursor: str | None, limit: int, job_id: JobId | None = None
    ) -> Page[Document]:
        """The tenant's documents of a kind, or those of one of its jobs, in order of id."""

    async def due_documents(self, kind: str, by: float, limit: int, after: float = 0.0) -> list[Document]:
        """Documents of all tenants whose `due_at` is at or before `by` and not before `after`, soonest first, expired
        ones included: an owner that set both times finishes its work on them."""
