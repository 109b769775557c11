"""The Postgres engine: Records, Tasks and Queue in one schema, shared by any number of processes."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Self

from conveyor.clock import Clock
from conveyor.engines.postgres.accepts import accept, accept_values
from conveyor.engines.postgres.access import PostgresAccess
from conveyor.engines.postgres.database import PostgresDatabase, PostgresSession, open_database
from conveyor.engines.postgres.doctor import Finding, run_checks
from conveyor.engines.postgres.documents import PostgresDocuments
from conveyor.engines.postgres.flushes import flush, read_counts
from conveyor.engines.postgres.ingests import PostgresIngests
from conveyor.engines.postgres.jobs import PostgresJobs, insert_job
from conveyor.engines.postgres.outbox import PostgresOutbox, insert_event, is_own
from conveyor.engines.postgres.queue import PostgresQueue, insert_messages
from conveyor.engines.postgres.schema import check_version, migrate
from conveyor.engines.postgres.seeds import copy_tasks, highest
from conveyor.engines.postgres.tables import OWN_FROM
from conveyor.engines.postgres.tasks import PostgresTasks
from conveyor.engines.postgres.url import PostgresPlace, parse_url
from conveyor.engines.postgres.wakes import Wake, Waker, listening
from conveyor.engines.queue import Outgoing, QueueName
from conveyor.engines.records import Document, IdempotencyClaim, Receipts, Records, RunFlush, RunFlushed
from conveyor.engines.tasks import Finished
from conveyor.model import Counts, Job, OutboxEvent, TaskSeed

__all__ = ["PostgresEngine", "migrate"]


class PostgresEngine:
    """Three seams on one database, which accepts a job atomically, and records what workers did."""

    def __init__(self, place: PostgresPlace, database: PostgresDatabase, clock: Clock, own_from: int) -> None:
        self._place = place
        self._database = database
        self._clock = clock
        self._can_listen = not database.shares_sessions or place.direct is not None
        self.records = Records(
            jobs=PostgresJobs(database, clock),
            ingests=PostgresIngests(database, clock),
            access=PostgresAccess(database, clock),
            documents=PostgresDocuments(database, clock),
            outbox=PostgresOutbox(database, clock),
        )
        self._own_from = own_from
        self.tasks = PostgresTasks(database, own_from)
        self.queue = PostgresQueue(database, clock, Waker(database, clock, place.channel if self._can_listen else None))

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
        if rows or highest(seeds) >= self._own_from:
            standing = await self._accept_in_steps(job, notice, answer, seeds, queue, messages, rows, now)
        else:
            values = accept_values(job, notice, answer, seeds, queue, messages, now)
            standing = await self._database.step(lambda db: accept(db, notice, answer, values))
        if standing is None:
            await self.queue.wake(queue, messages)
        return standing

    async def _accept_in_steps(
        self,
        job: Job,
        notice: OutboxEvent,
        answer: IdempotencyClaim | None,
        seeds: Sequence[TaskSeed],
        queue: QueueName,
        messages: Sequence[Outgoing],
        rows: Sequence[Document],
        now: float,
    ) -> IdempotencyClaim | None:
        """Accept a job that has documents, or needs tables of its own, in a transaction of several statements."""

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

        return await self._database.write(work)

    async def record_flush(self, runs: Sequence[RunFlush], acks: Receipts) -> list[RunFlushed]:
        now = self._clock.now()
        flushed = await self._database.write(lambda db: flush(db, now, self._own_from, runs, acks))
        for run in runs:
            if run.queue is not None and run.messages:
                await self.queue.wake(run.queue, run.messages)
        return await self._counted(runs, flushed)

    async def _counted(self, runs: Sequence[RunFlush], flushed: list[RunFlushed]) -> list[RunFlushed]:
        """With the counts after the commit: of several concurrent writers of the last tasks, one sees all of them."""
        still = [run.job.run.run_id for run, done in zip(runs, flushed, strict=True) if run.ends and done.moved is None]
        if not still:
            return flushed
        counts = await self._database.step(lambda db: read_counts(db, still))
        return [
            done
            if done.moved is not None
            else RunFlushed(Finished(done.finished.moved, counts.get(run.job.run.run_id, Counts())), None)
            for run, done in zip(runs, flushed, strict=True)
        ]

    def wakes(self, wake: Wake) -> AbstractAsyncContextManager[None]:
        """Inside the block, call `wake` with the name of each queue that any process sends to. Does nothing without a
        session to listen in."""
        return listening(self._place, self._clock, wake) if self._can_listen else nullcontext()

    async def checks(self) -> list[Finding]:
        """The name of each check, and what to fix, or None."""
        return await run_checks(self._database, self._clock, self._place)
