"""A fleet on a virtual clock: real workers, each with a real SQS engine of its own as in a process of its own, over the
services of fleet_services.py. It runs on the code that is importable as `conveyor`, of this revision or an earlier one.

`quiet` is a fleet whose runs have nothing to do: open jobs without tasks, runs whose tasks are all delayed, paused
runs. `steady` gets tasks at a part of what its slots can do; small jobs arrive, and some workers die. `crowded` has
more tasks than slots from the beginning.
"""

import asyncio
import gc
import logging
import random
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import structlog

from bench.fleet_services import (
    DYNAMODB_SECONDS,
    REDIS_SECONDS,
    Bill,
    DocumentTable,
    Far,
    IngestTable,
    JobTable,
    Process,
    SqsService,
    TaskTable,
)

SLOTS = 4
CHUNK = 10
CONCURRENCY = 64
SHORTEST, LONGEST = 0.5, 2.0
# Of the slots, how many the tasks of `steady` keep busy.
LOAD = 0.6
# Half of the runs are one tenant's, the others have a tenant each.
BIG = "big"
# A small job that arrives, and how many arrive in a second.
SMALL_TASKS = 5
ARRIVALS = 2.0
DYING = 10
# The longest delay of SQS is 900 s.
_DELAYED = 890.0
_STEP = 0.5


class World:
    """The services, the fleet, and whoever submits."""

    def __init__(self, workers: int, loop: Any, queue_limit: int) -> None:
        from conveyor.engines.sqlite.coordinator import SqliteCoordinator
        from conveyor.process.worker import Worker
        from conveyor.service import Service
        from tests.machine.loop import LoopClock

        self.clock = LoopClock(loop)
        self.is_before = not hasattr(Worker, "on_ready")
        self.bill = Bill()
        self.sqs = SqsService(self.bill)
        self.jobs = JobTable(self.bill, self.clock, is_before=self.is_before)
        self.documents = DocumentTable(self.bill)
        self.tasks = TaskTable(self.bill, self.clock)
        self.coordinator = SqliteCoordinator(None, self.clock)  # type: ignore[arg-type]  # leases, which nobody takes
        self.first_starts: dict[str, float] = {}
        self.started: Counter[str] = Counter()
        self.chance = random.Random(14)
        self.task_seconds = SHORTEST, LONGEST
        self._queue_limit = queue_limit
        self.processes: list[Process] = []
        self.api = self._engines(self._process())
        self.housekeeping = self._engines(self._process())
        self._services = [Service(self._worker(), self.clock) for _ in range(workers)]
        self._services.append(Service(self._sweeper(), self.clock))
        self._running: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._running = [asyncio.create_task(service.run()) for service in self._services]

    async def submit(self, job: Any, count: int, *, delay: float | None = None) -> None:
        """Store a job and send references of `count` tasks: now, or as retries."""
        from conveyor.engines.queue import recovery_queue, run_queue

        self.jobs.add(job)
        await self.api.sqs.queues.to_send(run_queue(job.run.run_id))
        if count:
            name = (run_queue if delay is None else recovery_queue)(job.run.run_id)
            await self.send(job, range(count), delay or 0.0, name)

    async def send(self, job: Any, indexes: Iterable[int], delay: float = 0.0, name: Any = None) -> None:
        from conveyor.engines.queue import run_queue
        from conveyor.jobs.chunks import encode
        from conveyor.model import Chunk, TaskRef

        refs = [TaskRef(index, '"x"') for index in indexes]  # type: ignore[arg-type]  # an input is JSON
        chunks = [Chunk(job.key, refs[start : start + CHUNK]) for start in range(0, len(refs), CHUNK)]
        queue = name or run_queue(job.run.run_id)
        await self.api.queue.send(queue, [encode(chunk, delay) for chunk in chunks])

    def note_start(self, job: Any) -> None:
        self.first_starts.setdefault(job.run.run_id, self.clock.monotonic())
        self.started[job.tenant] += 1

    def kill(self, count: int) -> list[tuple[Any, int]]:
        """Let workers vanish. Returns the tasks that ran there."""
        busy = sorted((each for each in self.processes if not each.is_dead), key=lambda each: -len(each.running))
        for process in busy[:count]:
            process.is_dead = True
        return [task for process in busy[:count] for task in process.running]

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        # What dead processes wait for never comes, and cancelled roles try to give back what they hold.
        for _ in range(3):
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            if others:
                await asyncio.wait(others, timeout=1.0)

    def _process(self) -> Process:
        process = Process(len(self.processes))
        self.processes.append(process)
        return process

    def _engines(self, process: Process) -> Any:
        """The engines as this process has them."""
        from conveyor.engines.sqs.address import SqsAddress
        from conveyor.engines.sqs.calls import Calls
        from conveyor.engines.sqs.queue import SqsQueue

        documents: Any = Far(self.documents, process, DYNAMODB_SECONDS)
        calls = Calls(self.sqs.client(process), self.clock)
        sqs = SqsQueue(calls, SqsAddress("eu-west-1", "fleet"), self.clock, documents, self._queue_limit)
        coordinator = Far(self.coordinator, process, REDIS_SECONDS, self.bill)
        jobs: Any = Far(self.jobs, process, DYNAMODB_SECONDS)
        tasks = Far(self.tasks, process, DYNAMODB_SECONDS)
        ingests = Far(IngestTable(self.bill), process, DYNAMODB_SECONDS)
        queue: Any = sqs
        marks = None
        if not self.is_before:
            from conveyor.coordination.ready_marks import ReadyMarks, marking_jobs, marking_queue

            marks = ReadyMarks(coordinator, self.clock)
            queue, jobs = marking_queue(sqs, marks), marking_jobs(jobs, marks)
        records = SimpleNamespace(jobs=jobs, documents=documents, ingests=ingests)
        return SimpleNamespace(
            process=process, sqs=sqs, queue=queue, coordinator=coordinator, records=records, tasks=tasks, marks=marks
        )

    def _worker(self) -> Any:
        from conveyor.lifecycle import Lifecycle
        from conveyor.model import JobKind
        from conveyor.process.body_store import BodyStore
        from conveyor.process.worker import Worker
        from conveyor.settings import Settings

        process = self._process()
        engines = self._engines(process)
        settings = Settings.load({}, worker_concurrency=SLOTS)
        lifecycle = Lifecycle(engines.records, engines.tasks, self.clock)
        # No task has a body. The design of before passes no tasks to it.
        given: Any = (None, engines.tasks, self.clock) if engines.marks is not None else (None, self.clock)
        bodies = BodyStore(*given)
        worker = Worker(
            settings,
            self.clock,
            engines.records,
            engines.tasks,
            engines.queue,
            engines.coordinator,
            bodies,
            lifecycle,
            {JobKind.PYTHON: _sleeper(self, process)},
        )
        if engines.marks is not None:
            engines.marks.listeners.append(worker.on_ready)
            engines.sqs.wake = worker.on_message
            engines.sqs.offer = worker.on_offer
            # A revision without it tells nobody.
            engines.sqs.on_returned = getattr(engines.marks, "note_returned", None)
        return worker

    def _sweeper(self) -> Any:
        from conveyor.lifecycle import Lifecycle
        from conveyor.recover.sweeper import Sweeper

        engines = self.housekeeping
        lifecycle = Lifecycle(engines.records, engines.tasks, self.clock)
        given = (engines.records, engines.tasks, engines.queue, lifecycle, self.clock)
        if self.is_before:
            return Sweeper(*given)
        from conveyor.coordination.buckets import ALL_BUCKETS
        from conveyor.coordination.ready_runs import RunRestorer
        from conveyor.jobs import active_jobs

        active = active_jobs.ActiveJobs(engines.records.jobs, self.clock, ALL_BUCKETS, active_jobs.FRESH_SECONDS)
        restorer = RunRestorer(engines.coordinator, self.clock)
        return Sweeper(*given, 0.0, active, restorer=restorer)


def _sleeper(world: World, process: Process) -> Any:
    """An executor whose tasks take a while and do nothing."""
    from conveyor.model import Outcome
    from conveyor.process.executors import LocalExecutor
    from conveyor.states import TaskStatus

    class Sleeper(LocalExecutor):
        def grain(self, job: Any) -> int:
            return 1

        def target(self, ref: Any) -> str | None:
            return None

        async def attempt(self, job: Any, refs: Sequence[Any]) -> list[Any]:
            tasks = {(job.run.run_id, ref.index) for ref in refs}
            world.note_start(job)
            process.running |= tasks
            await process.spend(world.chance.uniform(*world.task_seconds))
            process.running -= tasks
            return [Outcome(TaskStatus.SUCCEEDED) for _ in refs]

        async def close(self) -> None:
            pass

    return Sleeper()


def on_virtual_loop(work: Any, **arguments: Any) -> Any:
    from tests.machine.loop import VirtualLoop

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    loop = VirtualLoop()
    loop.set_exception_handler(lambda *_: None)
    asyncio.set_event_loop(loop)
    # A hundred workers in one process have a hundred times the objects of one: to look at all of them again and again
    # took a third of the time.
    thresholds = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    running: Coroutine[Any, Any, Any] = work(loop=loop, **arguments)
    try:
        return loop.run_until_complete(running)
    finally:
        gc.set_threshold(*thresholds)
        asyncio.set_event_loop(None)
        loop.close()


def quiet(place: str, **arguments: Any) -> dict[str, Any]:
    result: dict[str, Any] = on_virtual_loop(_quiet, **arguments)
    return result


def steady(place: str, **arguments: Any) -> dict[str, Any]:
    result: dict[str, Any] = on_virtual_loop(_steady, **arguments)
    return result


def crowded(place: str, **arguments: Any) -> dict[str, Any]:
    result: dict[str, Any] = on_virtual_loop(_crowded, **arguments)
    return result


async def _quiet(workers: int, runs: int, warm: float, seconds: float, queue_limit: int, loop: Any) -> dict[str, Any]:
    from conveyor.states import RunState

    world = World(workers, loop, queue_limit)
    kinds = [
        lambda number: world.submit(_open_job(world, number, runs), 0),
        lambda number: world.submit(fleet_job(world, number, runs, total=CHUNK), CHUNK, delay=_DELAYED),
        lambda number: world.submit(fleet_job(world, number, runs, total=CHUNK, state=RunState.PAUSED), 0),
    ]
    await _all(kinds[number % 3](number) for number in range(runs))
    world.start()
    await asyncio.sleep(warm)
    world.bill.clear()
    await asyncio.sleep(seconds)
    result = _spent(world, seconds)
    await world.close()
    return result


async def _steady(
    workers: int,
    runs: int,
    warm: float,
    seconds: float,
    queue_limit: int,
    loop: Any,
    dying: int = DYING,
    arrivals: float = ARRIVALS,
) -> dict[str, Any]:
    world = World(workers, loop, queue_limit)
    jobs = [_open_job(world, number, runs) for number in range(runs)]
    await _all(world.submit(job, 0) for job in jobs)
    world.start()
    feeding = asyncio.create_task(_feed(world, jobs, workers, arrivals))
    await asyncio.sleep(warm)
    world.bill.clear()
    before = _ended(world)
    submitted = await _arrivals(world, seconds, arrivals)
    spent = _spent(world, seconds)
    done, repeated = _ended(world) - before, world.sqs.repeated
    waits = [world.first_starts.get(run_id, world.clock.monotonic()) - at for run_id, at in submitted.items()]
    recovered = await _recovery(world, dying)
    feeding.cancel()
    await world.close()
    return {**spent, "tasks": done, "first_start": _spread(waits), "repeated": repeated, "recovery": recovered}


async def _crowded(
    workers: int,
    runs: int,
    warm: float,
    seconds: float,
    queue_limit: int,
    loop: Any,
    shortest: float = SHORTEST,
    longest: float = LONGEST,
) -> dict[str, Any]:
    """Fairness: how many tasks of each tenant started, while all of them had some waiting."""
    world = World(workers, loop, queue_limit)
    world.task_seconds = shortest, longest
    jobs = [fleet_job(world, number, runs) for number in range(runs)]
    # Of a tenant with one run, twice as many tasks as its share of the slots can do.
    share = SLOTS * workers * (warm + seconds) / len({job.tenant for job in jobs})
    backlog = CHUNK + int(2 * share / ((shortest + longest) / 2))
    await _all(world.submit(job, backlog) for job in jobs)
    world.start()
    await asyncio.sleep(warm)
    world.bill.clear()
    world.started.clear()
    before = _ended(world)
    await asyncio.sleep(seconds)
    spent, done = _spent(world, seconds), _ended(world) - before
    shares = [world.started[tenant] for tenant in {job.tenant for job in jobs}]
    await world.close()
    fairness = sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))
    return {
        **spent,
        "tasks": done,
        "fairness": fairness,
        "tenants": len(shares),
        "least": min(shares),
        "big": world.started[BIG],
    }


def fleet_job(world: World, number: int, runs: int, **more: Any) -> Any:
    from tests.support.make_jobs import make_job

    tenant: Any = BIG if number < runs // 2 else f"tenant-{number}"
    given = {"total": 1 << 30, "concurrency": CONCURRENCY, "chunk_size": CHUNK, **more}
    return make_job(world.clock, tenant=tenant, **given)


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """One after the other for the first, which makes what all share; then all at once."""
    first, *others = work
    await first
    await asyncio.gather(*others)


def _open_job(world: World, number: int, runs: int) -> Any:
    """A job to which tasks are added as they come."""
    from conveyor.model import Mode
    from conveyor.states import RunState

    return fleet_job(world, number, runs, state=RunState.INGESTING, latched=False, mode=Mode.OPEN)


async def _feed(world: World, jobs: Sequence[Any], workers: int, arrivals: float) -> None:
    """Send chunks to random runs, at a rate that keeps a part of the slots busy, with the small jobs that arrive."""
    mean = (SHORTEST + LONGEST) / 2
    rate = max(0.0, LOAD * workers * SLOTS / mean - arrivals * SMALL_TASKS) / CHUNK
    next_index: Counter[str] = Counter()
    owed = 0.0
    while True:
        owed += rate * _STEP
        sends = []
        for _ in range(int(owed)):
            job = world.chance.choice(jobs)
            first = next_index[job.job_id]
            next_index[job.job_id] += CHUNK
            sends.append(world.send(job, range(first, first + CHUNK)))
        owed -= len(sends)
        at = world.clock.monotonic() + _STEP
        await asyncio.gather(*sends)
        await asyncio.sleep(max(0.0, at - world.clock.monotonic()))


async def _arrivals(world: World, seconds: float, arrivals: float) -> dict[str, float]:
    """Submit so many small jobs of new tenants in a second. Returns when each was submitted, by run."""
    submitted: dict[str, float] = {}
    began = world.clock.monotonic()
    for number in range(int(seconds * arrivals)):
        job = fleet_job(world, 1 << 20 | number, 2, total=SMALL_TASKS)
        submitted[job.run.run_id] = world.clock.monotonic()
        await world.submit(job, SMALL_TASKS)
        at = submitted[job.run.run_id] + 1 / arrivals
        await asyncio.sleep(max(0.0, at - world.clock.monotonic()))
    await asyncio.sleep(max(0.0, began + seconds - world.clock.monotonic()))
    return submitted


async def _recovery(world: World, dying: int) -> dict[str, float]:
    """Let workers die, and wait until all tasks that ran there have ended elsewhere."""
    if not dying:
        return {}
    died_at = world.clock.monotonic()
    world.tasks.awaited = dict.fromkeys(world.kill(dying))
    tasks = len(world.tasks.awaited)
    for _ in range(240):
        if all(at is not None for at in world.tasks.awaited.values()):
            break
        await asyncio.sleep(_STEP)
    now = world.clock.monotonic()
    return {"tasks": tasks, **_spread([(now if at is None else at) - died_at for at in world.tasks.awaited.values()])}


def _ended(world: World) -> int:
    return sum(len(ended) for ended in world.tasks.ended.values())


def _spent(world: World, seconds: float) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "units": {name: count / seconds for name, count in sorted(world.bill.units.items())},
        "calls": {name: round(count / seconds, 3) for name, count in world.bill.calls.most_common(20)},
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values) or [0.0]
    return {"p50": ordered[len(ordered) // 2], "p99": ordered[int(len(ordered) * 0.99)], "most": ordered[-1]}
