"""The embedded engine: Records, Tasks, Queue and Coordinator on one SQLite database that one process owns."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import apsw

from conveyor.clock import Clock
from conveyor.engines.queue import Outgoing, QueueName
from conveyor.engines.records import Document, IdempotencyClaim, Receipts, Records, RunFlush, RunFlushed
from conveyor.engines.sqlite.access import SqliteAccess
from conveyor.engines.sqlite.coordinator import SqliteCoordinator
from conveyor.engines.sqlite.database import SqliteDatabase, open_database
from conveyor.engines.sqlite.documents import SqliteDocuments
from conveyor.engines.sqlite.flushes import flush
from conveyor.engines.sqlite.ingests import SqliteIngests
from conveyor.engines.sqlite.jobs import SqliteJobs, insert_job
from conveyor.engines.sqlite.outbox import SqliteOutbox
from conveyor.engines.sqlite.queue import SqliteQueue, insert_messages
from conveyor.engines.sqlite.tasks import SqliteTasks, insert_tasks, seed_rows
from conveyor.model import Job, OutboxEvent, TaskSeed


class SqliteEngine:
    """All four seams on one database, which accepts a job atomically, and records what workers did."""

    def __init__(self, database: SqliteDatabase, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self.records = Records(
            jobs=SqliteJobs(database, clock),
            ingests=SqliteIngests(database, clock),
            access=SqliteAccess(database, clock),
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
        now = self._clock.now()
        tasks = seed_rows(job.key, seeds)

        def work(db: apsw.Connection) -> IdempotencyClaim | None:
            standing = insert_job(db, job, notice, answer, rows, now)
            if standing is None:
                if seeds:
                    insert_tasks(db, job.key, [tasks])
                insert_messages(db, now, queue, messages)
            return standing

        return await self._database.write(work)

    async def record_flush(self, runs: Sequence[RunFlush], acks: Receipts) -> list[RunFlushed]:
        now = self._clock.now()
        return await self._database.write(lambda db: flush(db, now, runs, acks))
