"""The Records seam: low volume, point reads, conditional writes, in five parts with a file each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from conveyor.engines.access_records import AccessRecords, Claimed, HoldsClaims, IdempotencyClaim, upload_of
from conveyor.engines.document_records import Document, DocumentRecords
from conveyor.engines.flush_records import AtomicFlush, Receipts, RunFlush, RunFlushed, RunMove
from conveyor.engines.ingest_records import IngestRecords
from conveyor.engines.job_records import JobRecords
from conveyor.engines.outbox_records import OutboxRecords
from conveyor.engines.queue import Outgoing, QueueName
from conveyor.model import Job, OutboxEvent, TaskSeed

__all__ = [
    "AccessRecords",
    "AtomicAccept",
    "AtomicFlush",
    "Claimed",
    "Document",
    "DocumentRecords",
    "HoldsClaims",
    "IdempotencyClaim",
    "IngestRecords",
    "JobRecords",
    "OutboxRecords",
    "Receipts",
    "Records",
    "RunFlush",
    "RunFlushed",
    "RunMove",
    "upload_of",
]


@dataclass(frozen=True)
class Records:
    """The five parts, on one database. A missing record is None or False, never an exception, and a tenant's records
    are found only through the tenant."""

    jobs: JobRecords
    ingests: IngestRecords
    access: AccessRecords
    documents: DocumentRecords
    outbox: OutboxRecords


class AtomicAccept(Protocol):
    """A capability: records, tasks and queue are one database, so one transaction accepts a small job."""

    async def accept_atomically(
        self,
        job: Job,
        notice: OutboxEvent,
        answer: IdempotencyClaim | None,
        seeds: Sequence[TaskSeed],
        queue: QueueName,
        messages: Sequence[Outgoing],
        rows: Sequence[Document] = (),
    ) -> IdempotencyClaim | None:
        """Write the job as `create_job` does, its tasks, and its messages on a queue, all or nothing. The answer may be
        to a claim that is held in memory."""
