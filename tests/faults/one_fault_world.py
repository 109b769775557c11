"""A small system with every role, for one scenario with at most one fault in it; and what came of it.

All roles see the system through the injector. Whoever looks at the end state does not.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import pytest
from structlog.testing import capture_logs

from conveyor.accept import scheduler
from conveyor.embedded import Embedded
from conveyor.engines.queue import CONTROL, run_queues
from conveyor.engines.sqlite import coordinator as sqlite_coordinator
from conveyor.errors import EngineFailed, IdempotencyInFlight, Unavailable
from conveyor.export import exporter
from conveyor.ingest import ingester as ingest_worker
from conveyor.jobs import active_jobs
from conveyor.jobs.idempotency import Accepted, IdempotentRequest
from conveyor.lists import reader as lists
from conveyor.model import WORKERS, Job, JobId, JobKind, Run, RunKey
from conveyor.notify import deliverer, progress_notifier
from conveyor.notify import dispatcher as notify
from conveyor.process import feeder, worker
from conveyor.read.invalid_lines import invalid_lines
from conveyor.recover import retention, sweeper
from conveyor.settings import Settings
from conveyor.states import ENDED
from conveyor.system import System, migrate, open_system
from tests.faults.one_fault import Injector
from tests.support.clocks import ManualClock
from tests.support.dead_letters import dead_letters
from tests.support.make_jobs import ACME
from tests.support.places import quick_place
from tests.support.small_fleet import Fleet, Recording

T = TypeVar("T")

EMBEDDED = "embedded"

# Seconds of the clock within which everything has to come to its end. Longer than any lease or pause.
PATIENCE = 400.0

# A little before the hour, at which the schedule fires.
START = 1_800_000_000.0 - 12.0

# Roles look less often than they do, and all at the same moments: a run has fewer calls then, and each step of the
# clock has more of them.
_PACE: list[tuple[Any, str, float]] = [
    # 13 lines are then 3 batches of 5, and what is left of them after the first is 2 of 4.
    (lists, "BATCH", 6),
    (ingest_worker, "_IDLE", 1.0),
    (worker, "_LOOK_FOR_RUNS", 1.0),
    (feeder, "_LONGEST_POLL", 2.0),
    (sweeper, "_EVERY", 4.0),
    (active_jobs, "FRESH_SECONDS", 0.0),
    (sweeper, "_STALLED", 6.0),
    (retention, "_EVERY", 4.0),
    (retention, "SETTLE_SECONDS", 3.0),
    (deliverer, "_IDLE", 2.0),
    (notify, "_IDLE", 2.0),
    (progress_notifier, "_EVERY", 8.0),
    (exporter, "_IDLE", 2.0),
    (scheduler, "_EVERY", 4.0),
]
SETTINGS: dict[str, Any] = {
    "flush_seconds": 0.0,
    "lease_seconds": 12.0,
    "idempotency_lease_seconds": 5.0,
    "ingesters": 1,
    "sample_seconds": 1000.0,
    "monitor_seconds": 8.0,
    "stuck_after": 30.0,
    "failure_notice_seconds": 0.0,
    "allow_private_targets": True,
}
# The semaphore that says which workers are there.
_PRESENT = {WORKERS}

# Events whose number depends on how long a run takes.
_BY_TIME = {"run.progress", "tasks.failed"}

State = dict[str, Any]


@contextmanager
def paced() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in _PACE:
            patch.setattr(module, name, value)
        yield patch


class Stuck(AssertionError):
    """It does not come to its end."""


class World:
    """`system` is what the roles and clients have; `fleet` looks at what is behind it."""

    def __init__(self, fleet: Fleet, system: System, stack: str) -> None:
        self.fleet = fleet
        self._stack = stack
        self.system = system
        self.embedded = Embedded(system)
        self.notes: State = {}

    @property
    def executor(self) -> Recording:
        return self.fleet.executor

    def start(self, executor: Any = None) -> None:
        """Every role goes to work, with one executor or one for each kind."""
        executors = executor if isinstance(executor, dict) else dict.fromkeys(JobKind, executor or self.fleet.executor)
        for roles in self.embedded._roles(executors).values():
            for role in roles:
                self.fleet.start(role)

    async def ask(self, key: str, send: Callable[[IdempotentRequest], Awaitable[Accepted]]) -> Accepted:
        """As a client does: the same request under the same key, until it has an answer."""
        return await self.insist(lambda: send(IdempotentRequest("POST /v1", key, f"fingerprint of {key}")))

    async def insist(self, send: Callable[[], Awaitable[T]]) -> T:
        """Send what may be sent again until it has an answer."""
        end = self.fleet.clock.now() + PATIENCE
        while True:
            sending = asyncio.ensure_future(send())
            while not sending.done():
                await self.fleet.step()
            try:
                return sending.result()
            except (Unavailable, IdempotencyInFlight):
                if self.fleet.clock.now() > end:
                    raise Stuck("a client got no answer") from None
                await self.fleet.step()

    async def job(self, job_id: str) -> Job:
        """As a client sees it."""

        async def found() -> Job:
            job = await self.system.records.jobs.job(ACME, JobId(job_id))
            assert job is not None
            return job

        return await self.insist(found)

    async def until(self, condition: Callable[[], Awaitable[object]], what: str) -> None:
        end = self.fleet.clock.now() + PATIENCE
        while not await condition():
            if self.fleet.clock.now() > end:
                raise Stuck(f"it does not come to this: {what}")
            await self.fleet.step()

    async def ended(self, job_id: str) -> None:
        """Until the latest run of the job has ended."""

        async def look() -> bool:
            return (await self.fleet.job(JobId(job_id))).state in ENDED

        await self.until(look, f"{job_id} ends")

    async def settled(self) -> None:
        """Until nothing of any job is left to do, and nobody holds anything."""
        await self.until(self._is_settled, "everything is settled")

    async def _is_settled(self) -> bool:
        system = self.fleet.system
        if await system.records.jobs.active_jobs() or await system.records.jobs.unswept_jobs(1):
            return False
        if (await system.queue.depth(CONTROL)).total or await system.records.outbox.undispatched(1) or self.held():
            return False
        for job in (await system.records.jobs.jobs(ACME, None, 100)).items:
            for run in await system.records.jobs.runs(job.job_id):
                for queue in run_queues(run.run_id):
                    if (await system.queue.depth(queue)).total:
                        return False
        return True

    def held(self) -> dict[str, Any]:
        """Semaphores that somebody holds, beside the one that says who is there. Known of the embedded one alone."""
        if self._stack != EMBEDDED:
            return {}
        parts: Any = self.fleet.system
        coordinator: sqlite_coordinator.SqliteCoordinator = parts.coordinator._engine
        now = self.fleet.clock.monotonic()
        held = {name: coordinator._live(name, now) for name in coordinator._holders if name not in _PRESENT}
        return {name: holders for name, holders in held.items() if holders}

    async def end_state(self) -> State:
        """All that a user can see of the jobs, without times and ids."""
        system = self.fleet.system
        state: State = {"notes": self.notes}
        page = await system.records.jobs.jobs(ACME, None, 100)
        for number, job in enumerate(sorted(page.items, key=lambda job: (job.name or "", job.created_at))):
            state[f"{number} {job.name}"] = await self._job_state(job)
        state["letters"] = Counter(letter["reason"] for letter in await dead_letters(system))
        return state

    async def _job_state(self, job: Job) -> State:
        system = self.fleet.system
        notices = (await system.records.outbox.events(ACME, job.job_id, None, 1000)).items
        runs = await system.records.jobs.runs(job.job_id)
        lines = b"".join([line async for line in invalid_lines(system.blobs, job)])
        return {
            "state": (job.state, job.reason),
            "events": Counter(event.event for event in notices if event.event not in _BY_TIME),
            "invalid": lines.decode().splitlines(),
            "runs": {run.number: await self._run_state(job, run) for run in runs},
        }

    async def _run_state(self, job: Job, run: Run) -> State:
        system = self.fleet.system
        key = RunKey(job.tenant, job.job_id, run.run_id, job.task_shard_count)
        kept = await system.tasks.counts(key)
        counted = await system.tasks.recount(key)
        tasks = {}
        for task in await system.tasks.at(key, range(100)):
            body = None if task.detail.body is None else sha256(await self.fleet.body(task)).hexdigest()
            tasks[task.index] = (task.status.label, task.error_code, task.http_status, body)
        return {
            "state": (run.state, run.total, run.invalid, run.last_batch),
            "counts": (kept, kept == counted),
            "tasks": tasks,
            "trail": await self._trail(key),
        }

    async def _trail(self, key: RunKey) -> Counter[tuple[int | None, str, int]]:
        """What was noted of the ends of tasks: index, event and attempt. How often one is retried depends on the time
        that its run takes."""
        page = await self.fleet.system.tasks.events(key, None, None, 1000)
        ends = [event for event in page.items if event.event != "task.retried"]
        return Counter((event.index, event.event, event.data["attempt"]) for event in ends)

    async def removed(self) -> State:
        """Delete all jobs, and say what is left of them once they were removed."""
        system = self.fleet.system
        for job in (await system.records.jobs.jobs(ACME, None, 100)).items:
            await self.insist(lambda job=job: self.system.records.jobs.mark_deleted(ACME, job.job_id))  # type: ignore[misc]

        async def gone() -> bool:
            return not await system.records.jobs.purgeable_jobs(self.fleet.clock.now() + 1e6, 1)

        await self.until(gone, "all jobs are removed")
        return {"blobs": [info.key async for info in system.blobs.listing("")], "rows": await self._rows()}

    async def _rows(self) -> dict[str, int]:
        """How many rows each table has that has any. Known of the embedded one alone."""
        if self._stack != EMBEDDED:
            return {}
        parts: Any = self.fleet.system

        def count(db: Any) -> dict[str, int]:
            named = "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
            tables = [name for (name,) in db.execute(named)]
            counts = {name: db.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0] for name in tables}
            # The note of a submit whose answer was lost goes when nobody can repeat the request any more.
            # Of the load, a sample may be missing.
            (notes,) = db.execute("SELECT count(*) FROM documents WHERE kind IN ('orphans', 'load')").fetchone()
            counts["documents"] -= notes
            return {name: count for name, count in counts.items() if count}

        rows: dict[str, int] = await parts.records.jobs._database.read(count)
        return rows


@asynccontextmanager
async def open_world(injector: Injector, stack: str = EMBEDDED, **settings: Any) -> AsyncIterator[World]:
    clock = ManualClock(START)
    with paced() as patch, quick_place() as place, capture_logs() as logs, _server_clock(stack, clock):
        chosen = Settings.load({}, data=place, **{**SETTINGS, **settings, **_urls(stack, place)})
        if stack != EMBEDDED:
            await migrate(chosen, clock)
        async with open_system(chosen, clock) as system:
            # The clock stands while a call is under way, or a thread is at work.
            fleet = Fleet(system, clock, logs, injector)
            patch.setattr(asyncio, "to_thread", injector.counted(asyncio.to_thread))
            try:
                yield World(fleet, injector.over(system), stack)
            finally:
                # A role says so when it can not give something back. What that is lapses.
                with suppress(EngineFailed):
                    await fleet.close()


def _urls(stack: str, place: Path) -> dict[str, Any]:
    """Of servers that are started when they are first asked for."""
    if stack == EMBEDDED:
        return {}
    from tests.servers import dynamodb, postgres, redis, s3, sqs

    coordinator = f"{redis.redis().url}?prefix={place.name}"
    if stack == "postgres":
        database = postgres.url_of(place)
        return {"records": database, "tasks": database, "queue": database, "coordinator": coordinator}
    tables = dynamodb.url_for(place)
    return {
        "records": tables,
        "tasks": tables,
        "queue": sqs.url_of(place),
        "coordinator": coordinator,
        "blobs": s3.url_of(place),
    }


def _server_clock(stack: str, clock: ManualClock) -> AbstractContextManager[None]:
    """The emulator of SQS goes by the same clock."""
    if stack != "aws":
        return nullcontext()
    from tests.servers.sqs import together

    return together(clock)
