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
from tests.support.local_fetchers import LocalFetchers
from tests.support.small_fleet import Act, Fleet, Recording, failure, kill, open_fleet, succeed, success

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


def worker_of(fleet: Fleet, act: Act = succeed, *, remote: bool = False, system: Any = None, **settings: Any) -> Worker:
    """A worker whose lanes are of one kind or the other; the executor is the fleet's then."""
    fleet.executor = Recording(fleet.clock, act, target=one_host)
    executor: Any = LocalFetchers(fleet.executor) if remote else fleet.executor
    return fleet.worker(executor, system, **settings)


async def redelivered(fleet: Fleet, job: Job) -> None:
    """Have the run's messages come again, so that their starts are marked."""
    queue = run_queue(job.run.run_id)
    await fleet.system.queue.receive(queue, 10, LEASE)
    fleet.clock.advance(LEASE)


def held_for_targets(fleet: Fleet) -> dict[str, int]:
    """What the coordinator thinks is held of targets' slots."""
    coordinator: Any = fleet.system.coordinator
    holders = coordinator._holders.items()
    now = fleet.clock.monotonic()
    return {
        name: sum(count for count, until in held.values() if until > now)
        for name, held in holders
        if name.startswith("target:")
    }


async def a_start_that_could_not_be_marked(*, remote: bool) -> None:
    """The reference is back in line, and the lane tries again."""
    async with open_fleet(lease_seconds=LEASE) as fleet:
        job = await fleet.submit(30, chunk_size=10)
        await redelivered(fleet, job)
        queue = Flaky(fleet.system.queue, "mark_started", times=3)
        fleet.start(worker_of(fleet, remote=remote, system=dataclasses.replace(fleet.system, queue=queue)))
        await fleet.ended(job, within=SOON)
        await fleet.check(job)
        assert fleet.executor.count() == Counter(range(30))
        warnings = [entry for entry in fleet.logs if "the lane backs off" in entry["event"]]
        assert 1 <= len(warnings) <= 3
        assert all("for a moment" in entry["error"] for entry in warnings)


class SlowToMark:
    """A queue that takes its time to mark a start."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet.system.queue, name)

    async def mark_started(self, *args: Any) -> None:
        await self._fleet.clock.sleep(0.4)
        await self._fleet.system.queue.mark_started(*args)


async def turns_at_a_target_while_starts_are_marked(*, remote: bool) -> None:
    """A reference that waits for the mark keeps its slot of the lane, so that it can use the pass that it has."""
    async with open_fleet(lease_seconds=LEASE) as fleet:
        job = await fleet.submit(10, chunk_size=1, rate_per_host=1)
        await redelivered(fleet, job)
        queue: Any = SlowToMark(fleet)
        fleet.start(worker_of(fleet, remote=remote, system=dataclasses.replace(fleet.system, queue=queue)))
        await fleet.ended(job, within=14)
        await fleet.check(job)


async def limits_that_could_not_be_asked_for(method: str, *, remote: bool) -> None:
    async with open_fleet(lease_seconds=LEASE) as fleet:
        coordinator = Flaky(
            fleet.system.coordinator, method, "target:", times=5, error=RuntimeError("a broken coordinator")
        )
        job = await fleet.submit(30, concurrency_per_host=3, rate_per_host=20)
        system = dataclasses.replace(fleet.system, coordinator=coordinator)
        fleet.start(worker_of(fleet, remote=remote, system=system))
        await fleet.ended(job, within=SOON)
        await fleet.check(job)
        assert coordinator.calls > 5
        assert fleet.executor.count() == Counter(range(30))
        assert fleet.executor.most["host"] <= 3
        said = [entry for entry in fleet.logs if "target limits not available" in entry["event"]]
        assert len(said) == 1, "an error is said once"


async def a_canary_that_could_not_ask(*, remote: bool) -> None:
    """A half-open target: the call by which one task becomes its canary fails."""
    async with open_fleet(lease_seconds=LEASE, breaker_least=5) as fleet:
        down = True

        async def act(job: Job, ref: TaskRef) -> Outcome:
            return failure("connect_failed") if down else success()

        coordinator = Flaky(fleet.system.coordinator, "acquire", "canary:", times=1, error=RuntimeError("unforeseen"))
        job = await fleet.submit(20, attempts=20, backoff=Backoff(base=1, rate=1, jitter=False), concurrency=8)
        system = dataclasses.replace(fleet.system, coordinator=coordinator)
        fleet.start(worker_of(fleet, act, remote=remote, system=system))
        await fleet.until(lambda: any(entry["event"] == "breaker opened" for entry in fleet.logs), within=SOON)
        down = False
        await fleet.ended(job, within=4 * LEASE)
        assert coordinator.calls > 1
        assert (await fleet.counts(job)).succeeded == 20
        tasks = await fleet.check(job)
        assert len(tasks) == 20


async def late_references_leave_their_target(*, remote: bool) -> None:
    """One waits for its host until it is too late for it: the slot that it then has goes to the next."""
    async with open_fleet(lease_seconds=LEASE) as fleet:

        async def act(job: Job, ref: TaskRef) -> Outcome:
            if ref.index < 2 and ref.attempt == 1:
                return failure()
            await fleet.clock.sleep(5 if ref.index == 2 else 0.1)
            return success()

        options = {"concurrency_per_host": 1, "task_deadline": 3, "backoff": Backoff(base=0.5, rate=1, jitter=False)}
        job = await fleet.submit(10, **options)
        fleet.start(worker_of(fleet, act, remote=remote))
        await fleet.ended(job, within=SOON)
        tasks = await fleet.check(job)
        assert {index for index, task in tasks.items() if task.error_code == "deadline"} == {0, 1}
        await fleet.passing(1)
        assert not any(held_for_targets(fleet).values())


async def passes_are_not_lost_with_a_lane(*, remote: bool) -> None:
    """Those of a paused run are not reserved any more: it goes on at once when it is resumed."""
    async with open_fleet(lease_seconds=LEASE) as fleet:
        job = await fleet.submit(3000, rate_per_host=2, concurrency=64)
        fleet.start(worker_of(fleet, remote=remote))
        await fleet.passing(10)
        for _ in range(2):
            now = await fleet.job(job.job_id)
            await fleet.lifecycle.move(now, RunState.PAUSED, "by hand", await fleet.counts(job))
            await fleet.passing(2)
            now = await fleet.job(job.job_id)
            await fleet.lifecycle.move(now, RunState.RUNNING, "by hand", await fleet.counts(job))
            resumed, started = fleet.clock.now(), len(fleet.executor.starts)
            await fleet.passing(5)
            assert [start.at <= resumed + 2 for start in fleet.executor.starts[started:]][:2] == [True, True]
            assert len(fleet.executor.starts) - started <= 11, "nor more than the rate"


async def passes_of_a_worker_that_died() -> None:
    """They are a second's worth at most, and the next worker goes on."""
    async with open_fleet(lease_seconds=LEASE) as fleet:
        # More than one worker takes from the queue, and more at once than it runs.
        job = await fleet.submit(8000, rate_per_host=2, concurrency=1000)
        dead = worker_of(fleet)
        executor = fleet.executor
        await fleet.abandon(dead, lambda: len(executor.starts) >= 6)
        await kill(dead)
        died = fleet.clock.now()
        fleet.start(worker_of(fleet))
        await fleet.until(lambda: len(fleet.executor.starts) >= 2, within=4)
        assert fleet.clock.now() - died <= 3
        assert (await fleet.job(job.job_id)).state is RunState.RUNNING


async def patience_with_an_upstream() -> None:
    """Nothing of the run is fed while its upstream is down, but not for longer than its tasks have patience."""
    async with open_fleet(lease_seconds=LEASE, breaker_least=5) as fleet:

        async def act(job: Job, ref: TaskRef) -> Outcome:
            return failure("handler_raised")

        job = await fleet.submit(300, upstream="ledger", breaker=Breaking(patience=400), concurrency=4)
        fleet.start(worker_of(fleet, act))
        (job,) = await fleet.ended(job, within=450)
        codes = Counter(task.error_code for task in (await fleet.check(job)).values())
        assert set(codes) <= {"handler_raised", "target_down"}
        assert codes["target_down"] >= 280
        assert job.run.ended_at is not None
        assert job.run.ended_at - job.created_at >= 400


async def patience_with_a_gateway() -> None:
    async with open_fleet(lease_seconds=LEASE, breaker_least=5) as fleet:

        async def act(job: Job, ref: TaskRef) -> Outcome:
            return failure("gateway_failed")

        gateway = Gateway(url="https://gateway.example/?u={url}")
        urls = [f"https://host{number}.example/" for number in range(300)]
        options: dict[str, Any] = {"gateway": gateway, "breaker": Breaking(patience=400), "concurrency": 4}
        job = await fleet.submit(urls, kind=JobKind.FETCH, handler=None, **options)
        fleet.start(worker_of(fleet, act, remote=True))
        await fleet.ended(job, within=450)
        codes = Counter(task.error_code for task in (await fleet.check(job)).values())
        assert codes["target_down"] >= 250
        assert set(codes) <= {"gateway_failed", "target_down"}


async def no_pass_is_needed_once_patience_is_over(*, remote: bool) -> None:
    """A breaker that opened again fails tasks that wait for a pass of its target: at this rate the last of them would
    get one after two minutes. Only probes need passes."""
    breaker: dict[str, Any] = {"breaker_least": 3, "breaker_seconds": 2.0, "breaker_longest": 6.0}
    async with open_fleet(lease_seconds=LEASE, **breaker) as fleet:

        async def act(job: Job, ref: TaskRef) -> Outcome:
            return failure("connect_failed")

        patience = Breaking(patience=20)
        job = await fleet.submit(60, upstream="ledger", rate_per_host=0.5, breaker=patience, concurrency=64)
        fleet.start(worker_of(fleet, act, remote=remote))
        # Three attempts open the breaker, in 4 s. A probe needs a pass, and after it nobody waits: within 2 s.
        (job,) = await fleet.ended(job, within=4 + 20 + 6 + 2)
        codes = Counter(task.error_code for task in (await fleet.check(job)).values())
        assert codes["target_down"] >= 55


async def what_was_begun_keeps_its_permit(*, remote: bool) -> None:
    """A lane that gives slots to another one goes on with what it has begun: another worker must not begin as many."""
    async with open_fleet(lease_seconds=LEASE) as fleet:
        running, most = Counter[str](), Counter[str]()

        async def act(job: Job, ref: TaskRef) -> Outcome:
            running[job.job_id] += 1
            most[job.job_id] = max(most[job.job_id], running[job.job_id])
            await fleet.clock.sleep(10.0)
            running[job.job_id] -= 1
            return success()

        large, small = await fleet.submit(400, concurrency=5), await fleet.submit(400, concurrency=1)
        fleet.start(worker_of(fleet, act, remote=remote, worker_concurrency=4))
        await fleet.until(lambda: (running[large.job_id], running[small.job_id]) == (3, 1))
        fleet.start(worker_of(fleet, act, remote=remote, worker_concurrency=8))
        await fleet.until(lambda: running[large.job_id] == 5, within=60)
        # The first worker now has two slots for each of them.
        await change_options(fleet.system, small, {"concurrency": 4})
        await fleet.passing(30)
        assert most[large.job_id] == 5


async def slots_are_handed_on_without_a_call(*, remote: bool) -> None:
    """Thousands of tasks to one host: what is asked of the coordinator does not grow with those that wait."""
    async with open_fleet(lease_seconds=LEASE) as fleet:

        async def act(job: Job, ref: TaskRef) -> Outcome:
            await fleet.clock.sleep(0.1)
            return success()

        coordinator = Flaky(fleet.system.coordinator, "acquire", "target:")
        await fleet.submit(2000, concurrency_per_host=4, concurrency=64)
        system = dataclasses.replace(fleet.system, coordinator=coordinator)
        fleet.start(worker_of(fleet, act, remote=remote, system=system))
        await fleet.passing(10)
        assert len(fleet.executor.starts) >= 360
        assert fleet.executor.most["host"] == 4
        assert coordinator.calls <= 10


async def a_slot_that_could_not_be_freed() -> None:
    """The call by which a lane gives slots back fails: it is made again, and others need not wait until they expire."""
    async with open_fleet(lease_seconds=LEASE) as fleet:
        hold = fleet.system.coordinator.acquire
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

        await fleet.submit(1, concurrency_per_host=1)
        other = await fleet.submit(1, rate_per_host=0.1)
        system = dataclasses.replace(fleet.system, coordinator=Failing(fleet.system.coordinator, ""))  # type: ignore[arg-type]  # a stand-in
        fleet.start(worker_of(fleet, system=system))
        await fleet.until(lambda: failed == 3, within=5)
        await fleet.passing(5)
        assert not any(held_for_targets(fleet).values())
        await fleet.ended(other)


@both_lanes
async def test_a_start_that_could_not_be_marked(remote: bool) -> None:
    await a_start_that_could_not_be_marked(remote=remote)


@both_lanes
async def test_turns_at_a_target_while_starts_are_marked(remote: bool) -> None:
    await turns_at_a_target_while_starts_are_marked(remote=remote)


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
async def test_no_pass_is_needed_once_patience_is_over(remote: bool) -> None:
    await no_pass_is_needed_once_patience_is_over(remote=remote)


@both_lanes
async def test_what_was_begun_keeps_its_permit(remote: bool) -> None:
    await what_was_begun_keeps_its_permit(remote=remote)


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
    async with open_fleet(lease_seconds=LEASE) as fleet:

        async def act(job: Job, ref: TaskRef) -> Outcome:
            await fleet.clock.sleep(0.2)
            return success()

        workers = [Recording(fleet.clock, act, target=one_host) for _ in range(2)]
        job = await fleet.submit(20_000, concurrency_per_host=2, concurrency=50)
        first = fleet.worker(workers[0])
        fleet.start(first)
        # Until it holds no more of the run's slots than it can use.
        await fleet.passing(10)
        fleet.start(fleet.worker(workers[1]))
        first._seats.ask_help(job.run.run_id)
        await fleet.passing(60)
        counts = [len(worker.starts) for worker in workers]
        assert min(counts) >= 50, counts
        assert sum(counts) >= 450, "a slot is not long without a task"


@both_lanes
async def test_a_lane_that_is_dropped_frees_its_slots(remote: bool) -> None:
    async with open_fleet(lease_seconds=LEASE) as fleet:

        async def act(job: Job, ref: TaskRef) -> Outcome:
            await fleet.clock.sleep(1000)
            return success()

        job = await fleet.submit(20, concurrency_per_host=5)
        fleet.start(worker_of(fleet, act, remote=remote))
        await fleet.until(lambda: fleet.executor.running["host"] == 5)
        await fleet.lifecycle.move(await fleet.job(job.job_id), RunState.CANCELLED, "by hand", await fleet.counts(job))
        await fleet.passing(2)
        assert not any(held_for_targets(fleet).values())


@both_lanes
async def test_limits_that_come_and_go_while_tasks_wait(remote: bool) -> None:
    async with open_fleet(lease_seconds=LEASE) as fleet:

        async def act(job: Job, ref: TaskRef) -> Outcome:
            await fleet.clock.sleep(0.1)
            return success()

        job = await fleet.submit(2000, concurrency_per_host=2, concurrency=20)
        worker = worker_of(fleet, act, remote=remote)
        fleet.start(worker)
        await fleet.passing(2)
        changes: list[dict[str, Any]] = [
            {"rate_per_host": 5},
            {"concurrency_per_host": None},
            {"rate_per_host": 10},
            {"concurrency_per_host": 3, "rate_per_host": None},
            {"concurrency_per_host": None},
        ]
        for change in changes:
            await change_options(fleet.system, await fleet.job(job.job_id), change)
            await fleet.passing(1)
        await fleet.ended(job, within=60)
        await fleet.check(job)
        assert fleet.executor.count() == Counter(range(2000))
        await fleet.passing(1)
        assert not any(held_for_targets(fleet).values())
