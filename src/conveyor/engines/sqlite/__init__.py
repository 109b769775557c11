"""The embedded engine: Records, Tasks, Queue and Coordinator on one SQLite database that one process owns."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

from conveyor.clock import Clock
from conveyor.engines.queue import Outgoing, QueueName
from conveyor.engines.records import Document, IdempotencyClaim, Receipts, Records, RunFlush, RunFlushed
from conveyor.engines.sqlite.accepts import Acceptance, accept_jobs
from conveyor.engines.sqlite.access import SqliteAccess
from conveyor.engines.sqlite.coordinator import SqliteCoordinator
from conveyor.engines.sqlite.database import SqliteDatabase, open_database
from conveyor.engines.sqlite.documents import SqliteDocuments
from conveyor.engines.sqlite.flushes import flush
from conveyor.engines.sqlite.ingests import SqliteIngests
from conveyor.engines.sqlite.jobs import SqliteJobs
from conveyor.engines.sqlite.outbox import SqliteOutbox
from conveyor.engines.sqlite.queue import SqliteQueue
from conveyor.engines.sqlite.seed_rows import seed_rows
from conveyor.engines.sqlite.tasks import SqliteTasks
from conveyor.model import Job, OutboxEvent, TaskSeed


class SqliteEngine:
    """All four seams on one database, which accepts a job atomically, and records what workers did."""

    def __init__(self, database: SqliteDatabase, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        access = SqliteAccess(database, clock)
        self._held = access.held
        self.records = Records(
            jobs=SqliteJobs(database, clock),
            ingests=SqliteIngests(database, clock),
            access=access,
            documents=SqliteDocuments(database, clock),
            outbox=SqliteOutbox(database, clock),
        )
        self.tasks = SqliteTasks(database)
        self.queue = SqliteQueue(database, clock)
        self.coordinator = SqliteCoordinator(database, clock)

    @classmethod
    @asynccontextmanager
    async def open(cls, directory: Path, clock: Clock) -> AsyncIterator[Self]:
        """Take ownership of the directory, and release the messages and leases of the last owner."""
        async with open_database(directory) as database:
            engine = cls(database, clock)
            await engine.queue.release_all()
            await engine.coordinator.release_all()
            yield engine

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
        held = self._held
        is_held = answer is not None and held.holds(answer)
        tasks = seed_rows(job.key, seeds) if seeds else None
        item = Acceptance(job, notice, answer, is_held, tasks, queue, messages, rows, self._clock.now())
        standing = await self._database.write_jointly(accept_jobs, item)
        if answer is not None and is_held:
            held.answered(answer)
        return standing

    async def record_flush(self, runs: Sequence[RunFlush], acks: Receipts) -> list[RunFlushed]:
        now = self._clock.now()
        return await self._database.write(lambda db: flush(db, now, runs, acks))
