"""Lanes, of both kinds: what they hold for their targets comes back, whatever call fails, whoever stops or dies."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from conveyor.accept.option_changes import change_options
from conveyor.engines.queue import run_queue
from conveyor.errors import EngineFailed
from conveyor.model import Backoff, Breaking, Gateway, Job, JobKind, Outcome, TaskRef
from conveyor.process.worker import Worker
from conveyor.states import RunState
from tests.flow.belt import Act, Belt, Recording, failure, kill, open_belt, succeed, success
from tests.flow.local_fetchers import LocalFetchers

LEASE = 60.0
# Well before a message would be delivered again because its lease is over.
SOON = 0.5 * LEASE

both_lanes = pytest.mark.parametrize("remote", [False, True], ids=["lane", "remote lane"])


class Flaky:
    """Stands before an engine and fails the first calls of one method whose first argument begins so. `calls` counts
    all of them."""

    def __init__(
        self, engine: Any, method: str, prefix: str = "", times: int = 0, error: Exception | None = None
    ) -> None:
        self._engine = engine
        self._method = method
        self._prefix = prefix
        self._left = times
        self._error = error or EngineFailed("for a moment")
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        if name != self._method:
            return found

        async def call(first: str, *args: Any, **options: Any) -> Any:
            if not first.startswith(self._prefix):
                return await found(first, *args, **options)
            self.calls += 1
            if self._left > 0:
                self._left -= 1
                raise self._error
            return await found(first, *args, **options)

        return call


def one_host(ref: TaskRef) -> str:
    return "host"


def worker_of(belt: Belt, act: Act = succeed, *, remote: bool = False, system: Any = None, **settings: Any) -> Worker:
    """A worker whose lanes are of one kind or the other; the executor is the belt's then."""
    belt.executor = Recording(belt.clock, act, target=one_host)
    executor: Any = LocalFetchers(belt.executor) if remote else belt.executor
    return belt.worker(executor, system, **settings)


async def redelivered(belt: Belt, job: Job) -> None:
    """Have the run's messages come again, so that their starts are marked."""
    queue = run_queue(job.run.run_id)
    await belt.system.queue.receive(queue, 10, LEASE)
    belt.clock.advance(LEASE)


def held_for_targets(belt: Belt) -> dict[str, int]:
    """What the coordinator thinks is held of targets' slots."""
    coordinator: Any = belt.system.coordinator
    holders = coordinator._holders.items()
    now = belt.clock.monotonic()
    return {
        name: sum(count for count, until in held.values() if until > now)
        for name, held in holders
        if name.startswith("target:")
    }


async def a_start_that_could_not_be_marked(*, remote: bool) -> None:
    """The reference is back in line, and the lane tries again."""
    async with open_belt(lease_seconds=LEASE) as belt:
        job = await belt.submit(30, chunk_size=10)
        await redelivered(belt, job)
        queue = Flaky(belt.system.queue, "mark_started", times=3)
        belt.start(worker_of(belt, remote=remote, system=dataclasses.replace(belt.system, queue=queue)))
        await belt.ended(job, within=SOON)
        await belt.check(job)
        assert belt.executor.count() == Counter(range(30))
        warnings = [entry for entry in belt.logs if "the lane backs off" in entry["event"]]
        assert 1 <= len(warnings) <= 3
        assert all("for a moment" in entry["error"] for entry in warnings)


async def limits_that_could_not_be_asked_for(method: str, *, remote: bool) -> None:
    async with open_belt(lease_seconds=LEASE) as belt:
        coordinator = Flaky(
            belt.system.coordinator, method, "target:", times=5, error=RuntimeError("a broken coordinator")
        )
        job = await belt.submit(30, concurrency_per_host=3, rate_per_host=20)
        system = dataclasses.replace(belt.system, coordinator=coordinator)
        belt.start(worker_of(belt, remote=remote, system=system))
        await belt.ended(job, within=SOON)
        await belt.check(job)
        assert coordinator.calls > 5
        assert belt.executor.count() == Counter(range(30))
        assert belt.executor.most["host"] <= 3
        said = [entry for entry in belt.logs if "target limits not available" in entry["event"]]
        assert len(said) == 1, "an error is said once"


async def a_canary_that_could_not_ask(*, remote: bool) -> None:
    """A half-open target: the call by which one task becomes its canary fails."""
    async with open_belt(lease_seconds=LEASE, breaker_least=5) as belt:
        down = True

        async def act(job: Job, ref: TaskRef) -> Outcome:
            return failure("connect_failed") if down else success()

        coordinator = Flaky(belt.system.coordinator, "acquire", "canary:", times=1, error=RuntimeError("unforeseen"))
        job = await belt.submit(20, attempts=20, backoff=Backoff(base=1, rate=1, jitter=False), concurrency=8)
        system = dataclasses.replace(belt.system, coordinator=coordinator)
        belt.start(worker_of(belt, act, remote=remote, system=system))
        await belt.until(lambda: any(entry["event"] == "breaker opened" for entry in belt.logs), within=SOON)
        down = False
        await belt.ended(job, within=4 * LEASE)
        assert coordinator.calls > 1
        assert (await belt.counts(job)).succeeded == 20
        tasks = await belt.check(job)
        assert len(tasks) == 20


async def late_references_leave_their_target(*, remote: bool) -> None:
    """One waits for its host until it is too late for it: the slot that it then has goes to the next."""
    async with open_belt(lease_seconds=LEASE) as belt:

        async def act(job: Job, ref: TaskRef) -> Outcome:
            if ref.index < 2 and ref.attempt == 1:
                return failure()
            await belt.clock.sleep(5 if ref.index == 2 else 0.1)
            return success()

        options = {"concurrency_per_host": 1, "task_deadline": 3, "backoff": Backoff(base=0.5, rate=1, jitter=False)}
        job = await belt.submit(10, **options)
        belt.start(worker_of(belt, act, remote=remote))
        await belt.ended(job, within=SOON)
        tasks = await belt.check(job)
        assert {index for index, task in tasks.items() if task.error_code == "deadline"} == {0, 1}
        await belt.passing(1)
        assert not any(held_for_targets(belt).values())


async def passes_are_not_lost_with_a_lane(*, remote: bool) -> None:
    """Those of a paused run are not reserved any more: it goes on at once when it is resumed."""
    async with open_belt(lease_seconds=LEASE) as belt:
        job = await belt.submit(3000, rate_per_host=2, concurrency=64)
        belt.start(worker_of(belt, remote=remote))
        await belt.passing(10)
        for _ in range(2):
            now = await belt.job(job.job_id)
            await belt.lifecycle.move(now, RunState.PAUSED, "by hand", await belt.counts(job))
            await belt.passing(2)
            now = await belt.job(job.job_id)
            await belt.lifecycle.move(now, RunState.RUNNING, "by hand", await belt.counts(job))
            resumed, started = belt.clock.now(), len(belt.executor.starts)
            await belt.passing(5)
            assert [start.at <= resumed + 2 for start in belt.executor.starts[started:]][:2] == [True, True]
            assert len(belt.executor.starts) - started <= 11, "nor more than the rate"


async def passes_of_a_worker_that_died() -> None:
    """They are a second's worth at most, and the next worker goes on."""
    async with open_belt(lease_seconds=LEASE) as belt:
        # More than one worker takes from the queue, and more at once than it runs.
        job = await belt.submit(8000, rate_per_host=2, concurrency=1000)
        dead = worker_of(belt)
        executor = belt.executor
        await belt.abandon(dead, lambda: len(executor.starts) >= 6)
        await kill(dead)
        died = belt.clock.now()
        belt.start(worker_of(belt))
        await belt.until(lambda: len(belt.executor.starts) >= 2, within=4)
        assert belt.clock.now() - died <= 3
        assert (await belt.job(job.job_id)).state is RunState.RUNNING


async def patience_with_an_upstream() -> None:
    """Nothing of the run is fed while its upstream is down, but not for longer than its tasks have patience."""
    async with open_belt(lease_seconds=LEASE, breaker_least=5) as belt:

        async def act(job: Job, ref: TaskRef) -> Outcome:
            return failure("handler_raised")

        job = await belt.submit(300, upstream="ledger", breaker=Breaking(patience=400), concurrency=4)
        belt.start(worker_of(belt, act))
        (job,) = await belt.ended(job, within=450)
        codes = Counter(task.error_code for task in (await belt.check(job)).values())
        assert set(codes) <= {"handler_raised", "target_down"}
        assert codes["target_down"] >= 280
        assert job.run.ended_at is not None
        assert job.run.ended_at - job.created_at >= 400


async def patience_with_a_gateway() -> None:
    async with open_belt(lease_seconds=LEASE, breaker_least=5) as belt:

        async def act(job: Job, ref: TaskRef) -> Outcome:
            return failure("gateway_failed")

        gateway = Gateway(url="https://gateway.example/?u={url}")
        urls = [f"https://host{number}.example/" for number in range(300)]
        options: dict[str, Any] = {"gateway": gateway, "breaker": Breaking(patience=400), "concurrency": 4}
        job = await belt.submit(urls, kind=JobKind.FETCH, handler=None, **options)
        belt.start(worker_of(belt, act, remote=True))
        await belt.ended(job, within=450)
        codes = Counter(task.error_code for task in (await belt.check(job)).values())
        assert codes["target_down"] >= 250
        assert set(codes) <= {"gateway_failed", "target_down"}


async def slots_are_handed_on_without_a_call(*, remote: bool) -> None:
    """Thousands of tasks to one host: what is asked of the coordinator does not grow with those that wait."""
    async with open_belt(lease_seconds=LEASE) as belt:

        async def act(job: Job, ref: TaskRef) -> Outcome:
            await belt.clock.sleep(0.1)
            return success()

        coordinator = Flaky(belt.system.coordinator, "acquire", "target:")
        await belt.submit(2000, concurrency_per_host=4, concurrency=64)
        system = dataclasses.replace(belt.system, coordinator=coordinator)
        belt.start(worker_of(belt, act, remote=remote, system=system))
        await belt.passing(10)
        assert len(belt.executor.starts) >= 360
        assert belt.executor.most["host"] == 4
        assert coordinator.calls <= 10


async def a_slot_that_could_not_be_freed() -> None:
    """The call by which a lane gives slots back fails: it is made again, and others need not wait until they expire."""
    async with open_belt(lease_seconds=LEASE) as belt:
        hold = belt.system.coordinator.acquire
        failed = 0

        class Failing(Flaky):
            def __getattr__(self, name: str) -> Any:
                return call if name == "acquire" else super().__getattr__(name)

        async def call(semaphore: str, holder: str, want: int, *args: Any) -> int:
            nonlocal failed
            if semaphore.startswith("target:") and want == 0 and failed < 3:
                failed += 1
                raise EngineFailed("for a moment")
            return await hold(semaphore, holder, want, *args)

        await belt.submit(1, concurrency_per_host=1)
        other = await belt.submit(1, rate_per_host=0.1)
        system = dataclasses.replace(belt.system, coordinator=Failing(belt.system.coordinator, ""))  # type: ignore[arg-type]  # a stand-in
        belt.start(worker_of(belt, system=system))
        await belt.until(lambda: failed == 3, within=5)
        await belt.passing(5)
        assert not any(held_for_targets(belt).values())
        await belt.ended(other)


@both_lanes
async def test_a_start_that_could_not_be_marked(remote: bool) -> None:
    await a_start_that_could_not_be_marked(remote=remote)


@both_lanes
@pytest.mark.parametrize("method", ["acquire", "reserve"])
async def test_limits_that_could_not_be_asked_for(method: str, remote: bool) -> None:
    await limits_that_could_not_be_asked_for(method, remote=remote)


@both_lanes
async def test_a_canary_that_could_not_ask(remote: bool) -> None:
    await a_canary_that_could_not_ask(remote=remote)


@both_lanes
async def test_late_references_leave_their_target(remote: bool) -> None:
    await late_references_leave_their_target(remote=remote)


@both_lanes
async def test_passes_are_not_lost_with_a_lane(remote: bool) -> None:
    await passes_are_not_lost_with_a_lane(remote=remote)


@both_lanes
async def test_slots_are_handed_on_without_a_call(remote: bool) -> None:
    await slots_are_handed_on_without_a_call(remote=remote)


@pytest.mark.parametrize(
    "scenario",
    [
        passes_of_a_worker_that_died,
        patience_with_an_upstream,
        patience_with_a_gateway,
        a_slot_that_could_not_be_freed,
    ],
    ids=lambda scenario: scenario.__name__,
)
async def test_scenario(scenario: Callable[[], Any]) -> None:
    await scenario()


async def test_two_workers_take_turns_with_a_host() -> None:
    """The first one there has all slots, and work for hours: the other gets its share all the same."""
    async with open_belt(lease_seconds=LEASE) as belt:

        async def act(job: Job, ref: TaskRef) -> Outcome:
            await belt.clock.sleep(0.2)
            return success()

        workers = [Recording(belt.clock, act, target=one_host) for _ in range(2)]
        await belt.submit(20_000, concurrency_per_host=2, concurrency=50)
        belt.start(belt.worker(workers[0]))
        await belt.passing(3)
        belt.start(belt.worker(workers[1]))
        await belt.passing(60)
        counts = [len(worker.starts) for worker in workers]
        assert min(counts) >= 50, counts
        assert sum(counts) >= 450, "a slot is not long without a task"


@both_lanes
async def test_a_lane_that_is_dropped_frees_its_slots(remote: bool) -> None:
    async with open_belt(lease_seconds=LEASE) as belt:

        async def act(job: Job, ref: TaskRef) -> Outcome:
            await belt.clock.sleep(1000)
            return success()

        job = await belt.submit(20, concurrency_per_host=5)
        belt.start(worker_of(belt, act, remote=remote))
        await belt.until(lambda: belt.executor.running["host"] == 5)
        await belt.lifecycle.move(await belt.job(job.job_id), RunState.CANCELLED, "by hand", await belt.counts(job))
        await belt.passing(2)
        assert not any(held_for_targets(belt).values())


@both_lanes
async def test_limits_that_come_and_go_while_tasks_wait(remote: bool) -> None:
    async with open_belt(lease_seconds=LEASE) as belt:

        async def act(job: Job, ref: TaskRef) -> Outcome:
            await belt.clock.sleep(0.1)
            return success()

        job = await belt.submit(2000, concurrency_per_host=2, concurrency=20)
        worker = worker_of(belt, act, remote=remote)
        belt.start(worker)
        await belt.passing(2)
        changes: list[dict[str, Any]] = [
            {"rate_per_host": 5},
            {"concurrency_per_host": None},
            {"rate_per_host": 10},
            {"concurrency_per_host": 3, "rate_per_host": None},
            {"concurrency_per_host": None},
        ]
        for change in changes:
            await change_options(belt.system, await belt.job(job.job_id), change)
            await belt.passing(1)
        await belt.ended(job, within=60)
        await belt.check(job)
        assert belt.executor.count() == Counter(range(2000))
        await belt.passing(1)
        assert not any(held_for_targets(belt).values())
