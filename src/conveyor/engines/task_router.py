"""Several task engines at once: each run is read and written on the engine that its job records.

The configured engine takes new jobs. Others are open beside it while they still hold jobs, as during a move from one
engine to another. An engine is known by an id that is stored in the engine itself, so that it stays the same engine
under another address. A run on an engine that is not open raises TasksElsewhere.

Jobs from before the record existed have none. With one engine open, it holds them. With several, the one that has rows
of the job holds it, the configured one first.
"""

import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from conveyor.engines.records import Document, DocumentRecords, JobRecords
from conveyor.engines.tasks import Finished, Scanned, TaskEvent, TaskFilter, Tasks
from conveyor.errors import EngineFailed, TasksElsewhere
from conveyor.model import (
    Counts,
    EventRecord,
    Job,
    JobId,
    Page,
    Replaced,
    RunKey,
    Task,
    TaskEnd,
    TaskId,
    TaskSeed,
    TenantId,
)

T = TypeVar("T")

# The kind, tenant and id of the document that holds the id of an engine.
STORE = "task_store"
STORE_TENANT = TenantId("~stores")
_STORE_ID = "tasks"

_MAX_KNOWN = 10_000


async def store_id(documents: DocumentRecords, scheme: str) -> str:
    """The id of a task engine. The first process that opens the engine chooses it: by real chance, because two engines
    must differ even where clocks are seeded alike."""
    for _ in range(2):
        row = await documents.document(STORE, STORE_TENANT, _STORE_ID)
        if row is not None:
            return row.body.decode()
        chosen = f"{scheme}-{secrets.token_hex(6)}"
        await documents.create_documents([Document(STORE, STORE_TENANT, _STORE_ID, chosen.encode())])
    raise EngineFailed("The id of a task engine was written and cannot be read.")


class TaskRouter:
    """Tasks on several engines. `engines` has the configured one first."""

    def __init__(self, engines: Mapping[str, Tasks]) -> None:
        self._engines = dict(engines)
        self._configured = next(iter(self._engines))

    @property
    def stores(self) -> list[str]:
        """The ids of all open engines, the configured one first."""
        return list(self._engines)

    @property
    def configured(self) -> Tasks:
        """The engine that takes the tasks of new jobs."""
        return self._engines[self._configured]

    @property
    def inline_bytes(self) -> int:
        return self.configured.inline_bytes

    def engine(self, store: str) -> Tasks:
        """An open engine, by its id."""
        return self._engines[store]

    def engine_of(self, run: RunKey) -> Tasks:
        """The engine that holds a run. Raises TasksElsewhere."""
        engine = self._engines.get(run.store or self._configured)
        if engine is None:
            raise TasksElsewhere(
                f"The tasks of this job are in the task engine {run.store}, which this server does not open; it opens "
                f"{', '.join(self._engines)}. Add the URL of {run.store} to CONVEYOR_OTHER_TASKS.",
                store=run.store,
            )
        return engine

    def __getattr__(self, name: str) -> Any:
        # What belongs to one engine alone, for tests and tools.
        return getattr(self._engines[self._configured], name)

    async def put(self, run: RunKey, seeds: Sequence[TaskSeed]) -> None:
        await self.engine_of(run).put(run, seeds)

    async def unfinished(self, run: RunKey, indexes: Sequence[int]) -> frozenset[int]:
        return await self.engine_of(run).unfinished(run, indexes)

    async def finish(self, run: RunKey, ends: Sequence[TaskEnd]) -> Finished:
        return await self.engine_of(run).finish(run, ends)

    async def cancel_pending(self, run: RunKey, limit: int, at: float) -> int:
        return await self.engine_of(run).cancel_pending(run, limit, at)

    async def counts(self, run: RunKey) -> Counts:
        return await self.engine_of(run).counts(run)

    async def recount(self, run: RunKey) -> Counts:
        return await self.engine_of(run).recount(run)

    async def error_codes(self, run: RunKey, limit: int) -> list[tuple[str, int]]:
        return await self.engine_of(run).error_codes(run, limit)

    async def replaced(self, run: RunKey) -> Replaced:
        return await self.engine_of(run).replaced(run)

    async def task(self, run: RunKey, task_id: TaskId) -> Task | None:
        return await self.engine_of(run).task(run, task_id)

    async def at(self, run: RunKey, indexes: Sequence[int]) -> list[Task]:
        return await self.engine_of(run).at(run, indexes)

    async def page(self, run: RunKey, shard: int, after: TaskId | None, limit: int, where: TaskFilter) -> list[Task]:
        return await self.engine_of(run).page(run, shard, after, limit, where)

    async def scan(self, run: RunKey, shard: int, after: TaskId | None, limit: int, where: TaskFilter) -> Scanned:
        return await self.engine_of(run).scan(run, shard, after, limit, where)

    async def note(self, run: RunKey, events: Sequence[TaskEvent]) -> None:
        await self.engine_of(run).note(run, events)

    async def events(self, run: RunKey, task_id: TaskId | None, cursor: str | None, limit: int) -> Page[EventRecord]:
        return await self.engine_of(run).events(run, task_id, cursor, limit)

    async def delete(self, run: RunKey, limit: int) -> int:
        """On all open engines: a run that was moved may have rows left on the engine that it came from."""
        self.engine_of(run)
        deleted = 0
        for engine in self._engines.values():
            if deleted < limit:
                deleted += await engine.delete(run, limit - deleted)
        return deleted

    async def holder_of(self, runs: Sequence[RunKey]) -> str:
        """The id of the engine that holds the runs of a job without a record."""
        for store, engine in self._engines.items():
            for run in runs:
                for shard in range(max(1, run.shard_count)):
                    if await engine.page(run, shard, None, 1, TaskFilter()):
                        return store
        return self._configured


class ReachableJobs:
    """JobRecords for processes that open these task engines. Roles see only jobs whose tasks they can reach: another
    process runs the others. With several engines open, each job has its record, found once if it was missing."""

    def __init__(self, jobs: JobRecords, tasks: TaskRouter) -> None:
        self._jobs = jobs
        self._tasks = tasks
        self._found: dict[JobId, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jobs, name)

    async def job(self, tenant: TenantId, job_id: JobId) -> Job | None:
        job = await self._jobs.job(tenant, job_id)
        return None if job is None else await self._recorded(job)

    async def jobs_of(self, keys: Sequence[tuple[TenantId, JobId]]) -> list[Job]:
        """Those on an engine that is not open, too: who reads them has to know that they exist."""
        return [await self._recorded(job) for job in await self._jobs.jobs_of(keys)]

    async def jobs(self, tenant: TenantId, cursor: str | None, limit: int) -> Page[Job]:
        page = await self._jobs.jobs(tenant, cursor, limit)
        return Page([await self._recorded(job) for job in page.items], page.next_cursor)

    async def active_jobs(self, buckets: Collection[int] | None = None) -> list[Job]:
        return await self._reachable(await self._jobs.active_jobs(buckets))

    async def unswept_jobs(self, limit: int) -> list[Job]:
        return await self._first_reachable(self._jobs.unswept_jobs, limit)

    async def purgeable_jobs(self, before: float, limit: int) -> list[Job]:
        return await self._first_reachable(lambda limit: self._jobs.purgeable_jobs(before, limit), limit)

    async def _first_reachable(self, read: Callable[[int], Awaitable[list[Job]]], limit: int) -> list[Job]:
        """Read further than `limit` if jobs out of reach come first."""
        wanted = limit
        while True:
            jobs = await read(wanted)
            reachable = await self._reachable(jobs)
            if len(reachable) >= limit or len(jobs) < wanted:
                return reachable[:limit]
            wanted *= 2

    async def _reachable(self, jobs: Sequence[Job]) -> list[Job]:
        open_stores = frozenset(["", *self._tasks.stores])
        return [await self._recorded(job) for job in jobs if job.task_store in open_stores]

    async def _recorded(self, job: Job) -> Job:
        if job.task_store or len(self._tasks.stores) == 1:
            return job
        store = self._found.get(job.job_id)
        if store is None:
            runs = await self._jobs.runs(job.job_id) if job.run.number > 1 else [job.run]
            store = await self._tasks.holder_of([job.key_of(run) for run in runs])
            if len(self._found) >= _MAX_KNOWN:
                self._found.clear()
            self._found[job.job_id] = store
        return msgspec.structs.replace(job, task_store=store)
