"""The Postgres engine: Records, Tasks and Queue in one schema, shared by any number of processes."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Self

from conveyor.clock import Clock
from conveyor.engines.postgres.access import PostgresAccess
from conveyor.engines.postgres.database import PostgresDatabase, PostgresSession, open_database
from conveyor.engines.postgres.doctor import Finding, run_checks
from conveyor.engines.postgres.documents import PostgresDocuments
from conveyor.engines.postgres.ingests import PostgresIngests
from conveyor.engines.postgres.jobs import PostgresJobs, insert_job
from conveyor.engines.postgres.outbox import PostgresOutbox, insert_event, is_own
from conveyor.engines.postgres.queue import PostgresQueue, insert_messages
from conveyor.engines.postgres.schema import check_version, migrate
from conveyor.engines.postgres.seeds import copy_tasks
from conveyor.engines.postgres.tables import OWN_FROM
from conveyor.engines.postgres.tasks import PostgresTasks
from conveyor.engines.postgres.url import PostgresPlace, parse_url
from conveyor.engines.postgres.wakes import Wake, listening
from conveyor.engines.queue import Outgoing, QueueName
from conveyor.engines.records import Document, IdempotencyClaim, Records
from conveyor.model import Job, OutboxEvent, TaskSeed

__all__ = ["PostgresEngine", "migrate"]


class PostgresEngine:
    """Three seams on one database, which accepts a job atomically."""

    def __init__(self, place: PostgresPlace, database: PostgresDatabase, clock: Clock, own_from: int) -> None:
        self._place = place
        self._database = database
        self._clock = clock
        self.records = Records(
            jobs=PostgresJobs(database, clock),
            ingests=PostgresIngests(database, clock),
            access=PostgresAccess(database, clock),
            documents=PostgresDocuments(database, clock),
            outbox=PostgresOutbox(database, clock),
        )
        self.tasks = PostgresTasks(database, own_from)
        self.queue = PostgresQueue(database, clock, place.channel)

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, clock: Clock, own_from: int = OWN_FROM) -> AsyncIterator[Self]:
        """Connect. Raises InvalidSetting for an invalid URL, and EngineFailed if the server is unreachable or its
        schema has another version. `own_from` is for tests (tables.py)."""
        place = parse_url(url)
        async with open_database(place, clock) as database:
            await check_version(database)
            yield cls(place, database, clock, own_from)

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

        async def work(db: PostgresSession) -> IdempotencyClaim | None:
            if await is_own(db, notice):
                return None
            standing = await insert_job(db, job, answer, rows, now)
            if standing is not None:
                return standing
            if seeds:
                await copy_tasks(db, job.key, await self.tasks.number(db, job.key, seeds), seeds)
            if messages:
                await insert_messages(db, now, queue, messages)
            await insert_event(db, notice)
            return None

        standing = await self._database.write(work)
        if messages and standing is None:
            await self.queue.wake(queue)
        return standing

    def wakes(self, wake: Wake) -> AbstractAsyncContextManager[None]:
        """Inside the block, call `wake` with the name of each queue that any process sends to."""
        return listening(self._place, self._clock, wake)

    async def checks(self) -> list[Finding]:
        """The name of each check, and what to fix, or None."""
        return await run_checks(self._database, self._clock, self._place.connections)
