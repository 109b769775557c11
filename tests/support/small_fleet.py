"""A small fleet for tests: a real system on SQLite with roles around it, on a clock that the test moves.

`until` moves the clock in small steps and lets the database catch up with each, so that a slow machine makes a test
slower and not different.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any, Protocol

import msgspec
import pytest
from structlog.testing import capture_logs

from conveyor.accept.spec import JobSpec
from conveyor.accept.submit import Submit
from conveyor.coordination.ready_runs import RunRestorer
from conveyor.engines.queue import Depth, run_queues
from conveyor.engines.tasks import TaskFilter
from conveyor.ingest.ingester import Ingester
from conveyor.ingest.pipeline import IngestPipeline
from conveyor.lifecycle import Lifecycle
from conveyor.model import (
    Counts,
    EventRecord,
    Job,
    JobKind,
    ListFormat,
    Outcome,
    Source,
    Task,
    TaskError,
    TaskRef,
    TenantId,
)
from conveyor.process import worker as worker_module
from conveyor.process.body_store import BodyStore
from conveyor.process.executors import Executor, LocalExecutor
from conveyor.process.worker import Worker
from conveyor.read.results import read_body
from conveyor.recover.sweeper import Sweeper
from conveyor.service import Role, Service
from conveyor.settings import Settings
from conveyor.states import ENDED, RunState, TaskStatus
from conveyor.system import System, open_system
from tests.support.clocks import ManualClock
from tests.support.make_jobs import ACME
from tests.support.places import quick_place

STEP = 0.05
# Turns of the loop without work for a thread, after which everybody waits for the clock.
_IDLE_ROUNDS = 12

Act = Callable[[Job, TaskRef], Awaitable[Outcome]]


def success(body: bytes | None = None) -> Outcome:
    return Outcome(TaskStatus.SUCCEEDED, body=body, content_type=None if body is None else "text/plain")


def failure(code: str = "handler_raised", message: str = "it went wrong") -> Outcome:
    return Outcome(TaskStatus.FAILED, error=TaskError(code, message))


async def succeed(job: Job, ref: TaskRef) -> Outcome:
    return success(f"body of {ref.index}".encode())


async def fail(job: Job, ref: TaskRef) -> Outcome:
    return failure()


class Start(msgspec.Struct, frozen=True):
    """One attempt as the executor saw it begin."""

    index: int
    attempt: int
    at: float
    target: str | None


class Recording(LocalExecutor):
    """An executor that does what it is told for each task, and remembers when each attempt began and what ran beside
    what. Several workers may share one."""

    def __init__(
        self, clock: ManualClock, act: Act = succeed, *, grain: int = 1, target: Callable[[TaskRef], str] | None = None
    ) -> None:
        self._clock = clock
        self._grain = grain
        self._target = target
        self.act = act
        self.starts: list[Start] = []
        self.running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    def grain(self, job: Job) -> int:
        return self._grain

    def target(self, ref: TaskRef) -> str | None:
        return self._target(ref) if self._target else None

    async def attempt(self, job: Job, refs: Sequence[TaskRef]) -> list[Outcome]:
        outcomes = []
        for ref in refs:
            target = self.target(ref)
            self.starts.append(Start(ref.index, ref.attempt, self._clock.now(), target))
            keys = ["all", job.run.run_id, *([target] if target else [])]
            self.running.update(keys)
            self.most |= self.running
            try:
                outcomes.append(await self.act(job, ref))
            finally:
                self.running.subtract(keys)
        return outcomes

    async def close(self) -> None:
        pass

    def times(self, index: int) -> list[float]:
        return [start.at for start in self.starts if start.index == index]

    def count(self) -> Counter[int]:
        """How often each task was started."""
        return Counter(start.index for start in self.starts)


class Busy(Protocol):
    """Says how much is under way that the clock has to wait for."""

    busy: int


class Threads:
    """How much the threads of the embedded system have to do: those that read and write the database, and blobs."""

    def __init__(self, system: System) -> None:
        self.busy = 0
        parts: Any = system
        database, blobs = parts.records.jobs._database, parts.blobs._engine
        for owner, name in ((database, "write"), (database, "write_jointly"), (database, "read"), (blobs, "_run")):
            setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def counted(*given: Any) -> Any:
            self.busy += 1
            try:
                return await call(*given)
            finally:
                self.busy -= 1

        return counted


class Fleet:
    """The system, and the roles that the test starts on it."""

    def __init__(self, system: System, clock: ManualClock, logs: list[Any], busy: Busy | None = None) -> None:
        self._threads = busy or Threads(system)
        self.system = system
        self.logs = logs
        self.clock = clock
        self.blobs = system.blobs
        self.lifecycle = Lifecycle(system.records, system.tasks, clock)
        restorer = RunRestorer(system.coordinator, clock)
        self.sweeper = Sweeper(system.records, system.tasks, system.queue, self.lifecycle, clock, restorer=restorer)
        self.executor = Recording(clock)
        self._services: list[tuple[Service, asyncio.Task[None]]] = []
        self._abandoned: list[Worker] = []

    async def submit(self, inputs: int | Iterable[Any], *, tenant: TenantId = ACME, **spec: Any) -> Job:
        """Accept a job of Python tasks, as the API does."""
        values = [f"input {number}" for number in range(inputs)] if isinstance(inputs, int) else list(inputs)
        tasks = [msgspec.Raw(json.dumps(value).encode()) for value in values]
        asked = JobSpec(**{"kind": JobKind.PYTHON, "handler": "anything", "tasks": tasks, **spec})
        accepted = await Submit(self.system).submit(tenant, asked)
        return await self.job(accepted.subject, tenant)

    async def stage(self, lines: Iterable[str], **spec: Any) -> Job:
        """Accept a job of a staged list."""
        return await self.stage_bytes("".join(f"{line}\n" for line in lines).encode(), ListFormat.JSONL, **spec)

    async def stage_bytes(
        self, data: bytes, form: ListFormat | None = None, *, tenant: TenantId = ACME, **spec: Any
    ) -> Job:
        """Accept a job of a list given as bytes, of any form; without one it is found from them."""
        key = f"lists/{tenant}/{self.clock.new_id('list')}"
        await self.blobs.put(key, data)
        source = Source(key, len(data), sha256(data).hexdigest(), form)
        asked = msgspec.convert({"kind": "python", "handler": "anything", **spec}, JobSpec)
        return await Submit(self.system).submit_source(tenant, asked, source)

    def worker(
        self,
        executor: Executor | None = None,
        system: System | None = None,
        kinds: Iterable[JobKind] = JobKind,
        **settings: Any,
    ) -> Worker:
        """A worker that nobody drives yet."""
        system = system or self.system
        changed = msgspec.structs.replace(system.settings, **settings)
        executors = dict.fromkeys(kinds, executor or self.executor)
        bodies = BodyStore(self.blobs, system.tasks, self.clock)
        lifecycle = Lifecycle(system.records, system.tasks, self.clock)
        return Worker(
            changed,
            self.clock,
            system.records,
            system.tasks,
            system.queue,
            system.coordinator,
            bodies,
            lifecycle,
            executors,
            system.atomic_flush,
        )

    def ingester(self, name: str = "ingester") -> Ingester:
        system = self.system
        ingest = IngestPipeline(
            system.settings, self.clock, system.records, system.tasks, system.queue, self.blobs, self.lifecycle
        )
        return Ingester(ingest, system.coordinator, name)

    def start(self, role: Role) -> Service:
        service = Service(role, self.clock)
        self._services.append((service, asyncio.create_task(service.run(), name=role.name)))
        return service

    async def stop(self, service: Service) -> None:
        """Stop one service and wait until its role is closed."""
        task = next(task for each, task in self._services if each is service)
        self._services = [(each, running) for each, running in self._services if each is not service]
        service.stop()
        while not task.done():
            await self.step()
        await task

    async def abandon(self, worker: Worker, until: Callable[[], bool]) -> None:
        """Drive a worker by hand until so much was done, then leave it where it is, as a crash does: it never ticks
        again, so that it neither gives back nor keeps what it holds."""
        self._abandoned.append(worker)
        for _ in range(2000):
            await worker.tick()
            await self.breathe()
            if until():
                await self.quiet()
                await worker.halt()
                return
            self.clock.advance(STEP)
        raise AssertionError("the worker did not get there")

    async def until(self, condition: Callable[[], Any], *, within: float = 900.0) -> None:
        """Let time pass until the condition, plain or async, holds."""
        end = self.clock.now() + within
        while True:
            found = condition()
            if found if not asyncio.iscoroutine(found) else await found:
                return
            assert self.clock.now() < end, f"not within {within} seconds of the clock"
            await self.step()

    async def passing(self, seconds: float) -> None:
        """Let so much time pass, with everybody at work."""
        end = self.clock.now() + seconds
        while (left := end - self.clock.now()) > 0:
            await self.breathe()
            self.clock.advance(min(left, max(STEP, self.clock.next_wake() or 0.0)))
        await self.quiet()

    async def step(self) -> None:
        """Let everybody act, then let time pass until somebody wants to act again."""
        await self.breathe()
        self.clock.advance(max(STEP, self.clock.next_wake() or 0.0))

    async def breathe(self) -> None:
        """Let everybody act, until nobody has anything to do before the clock moves."""
        idle = 0
        while idle < _IDLE_ROUNDS:
            # A real moment for the threads, where there is something for them to do.
            await asyncio.sleep(0.0001 if self._threads.busy else 0)
            idle = 0 if self._threads.busy else idle + 1

    async def quiet(self) -> None:
        """Let what is under way come to an end, without moving the clock."""
        for _ in range(20):
            await self.breathe()

    async def ended(self, *jobs: Job, within: float = 900.0) -> list[Job]:
        """Wait until the jobs have ended; as they then are."""

        async def all_ended() -> bool:
            return all([(await self.job(job.job_id, job.tenant)).state in ENDED for job in jobs])

        await self.until(all_ended, within=within)
        return [await self.job(job.job_id, job.tenant) for job in jobs]

    async def job(self, job_id: Any, tenant: TenantId = ACME) -> Job:
        found = await self.system.records.jobs.job(tenant, job_id)
        assert found is not None
        return found

    async def move(self, job: Job, target: RunState) -> None:
        moved = await self.lifecycle.move(job, target, "by hand", await self.counts(job))
        assert moved is target

    async def counts(self, job: Job) -> Counts:
        return await self.system.tasks.counts(job.key)

    async def tasks(self, job: Job) -> dict[int, Task]:
        """All tasks of a job, by index."""
        found: list[Task] = []
        for shard in range(max(1, job.task_shard_count)):
            after = None
            while page := await self.system.tasks.page(job.key, shard, after, 5000, TaskFilter()):
                found += page
                after = page[-1].task_id
        return {task.index: task for task in found}

    async def depth(self, job: Job) -> Depth:
        """Of both queues of its run."""
        ready, held, delayed = 0, 0, 0
        for queue in run_queues(job.run.run_id):
            depth = await self.system.queue.depth(queue)
            ready, held, delayed = ready + depth.ready, held + depth.held, delayed + depth.delayed
        return Depth(ready, held, delayed)

    async def notices(self, job: Job) -> list[str]:
        page = await self.system.records.outbox.events(job.tenant, job.job_id, None, 1000)
        return [event.event for event in page.items]

    async def events(self, job: Job) -> list[EventRecord]:
        return (await self.system.tasks.events(job.key, None, None, 10_000)).items

    async def check(self, job: Job, state: RunState = RunState.COMPLETED) -> dict[int, Task]:
        """What holds of every run that has ended and was swept, whatever happened to it on the way."""
        found = await self.job(job.job_id, job.tenant)
        tasks = await self.tasks(job)
        counts = await self.counts(job)
        assert found.state is found.run.state is state
        assert sorted(tasks) == list(range(found.run.total))
        assert counts == await self.system.tasks.recount(job.key)
        assert counts.ended == found.run.total
        ended = [
            event for event in await self.notices(job) if event in ("run.completed", "run.failed", "run.cancelled")
        ]
        assert ended == [f"run.{state}"]
        for task in tasks.values():
            assert task.status is not TaskStatus.PENDING
            if task.detail.body is not None:
                assert sha256(await self.body(task)).hexdigest() == task.detail.body.sha256
        return tasks

    async def body(self, task: Task) -> bytes:
        return await read_body(self.system.blobs, task)

    async def close(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            # Real seconds, for attempts that wait for what a test that failed never did.
            patch.setattr(worker_module, "_DRAIN_SECONDS", 0.0)
            for service, _ in self._services:
                service.stop()
            while any(not task.done() for _, task in self._services):
                await self.step()
            await asyncio.gather(*(task for _, task in self._services))
        await asyncio.gather(*(kill(worker) for worker in self._abandoned))


async def kill(worker: Worker) -> None:
    """End what an abandoned worker left running, without a word to the queue."""
    tasks = [task for lane in worker._lanes.values() for task in lane._running]
    tasks += [worker._recording] if worker._recording else []
    await worker.halt()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def open_fleet(**settings: Any) -> AsyncIterator[Fleet]:
    clock = ManualClock()
    with quick_place() as place, capture_logs() as logs:
        # Jobs of the size that these tests need are written in the request: only `stage` has them ingested.
        given = {"data": place, "flush_seconds": 0.0, "sync_task_limit": 100_000, **settings}
        chosen = Settings.load({}, **given)
        async with open_system(chosen, clock) as system:
            fleet = Fleet(system, clock, logs)
            try:
                yield fleet
            finally:
                await fleet.close()
