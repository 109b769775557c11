"""The outbox part of Records: the events that were stored with the changes that they report."""

from collections.abc import Sequence
from typing import Protocol

from conveyor.model import EventRecord, JobId, OutboxEvent, Page, TenantId


class OutboxRecords(Protocol):
    """Reads the outbox. Other parts write an event in the transaction of the change that it reports."""

    async def events(self, tenant: TenantId, job_id: JobId, cursor: str | None, limit: int) -> Page[EventRecord]:
        """The events of a job, oldest first, dispatched ones included."""

    async def undispatched(self, limit: int) -> list[OutboxEvent]:
        """Events of all tenants that were not dispatched yet, oldest first; those of one job in the order in which they
        were stored."""

    async def mark_dispatched(self, notices: Sequence[OutboxEvent]) -> None:
        """Mark these events as dispatched to every subscriber."""
