"""What is kept in memory goes with the jobs that it was kept for: tables are as large after 400 jobs as after 200."""

from collections import Counter
from contextlib import suppress

import pytest

from conveyor.accept.add_tasks import AddTasks
from conveyor.accept.control import Control
from conveyor.accept.rerun import Rerun, RerunSpec
from conveyor.accept.spec import JobSpec, TasksSpec
from conveyor.accept.submit import Submit
from conveyor.coordination.waits import Wait
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.postgres.queries import made_for
from conveyor.engines.queue import run_queue
from conveyor.errors import JobEnded
from conveyor.export.exports import Exports, ExportState
from conveyor.export.request import ExportFormat, ExportSpec
from conveyor.jobs.chunks import messages
from conveyor.model import Job, JobId, JobKind, Mode, Outcome, RunId, TaskRef
from conveyor.process.executors.download import exchange
from conveyor.process.worker import Worker
from conveyor.read import body_names
from conveyor.states import ENDED, RunState
from tests.faults.one_fault import Injector
from tests.faults.one_fault_scenarios import Pieces, host_of, job_spec, raw
from tests.faults.one_fault_world import World, open_world
from tests.support.make_jobs import ACME, seeds
from tests.support.memory_sizes import growth, live_objects, sizes_of
from tests.support.small_fleet import Recording, failure, open_fleet, success

JOBS = 200
AT_ONCE = 20
# Longer than anything is kept that is kept for a while.
LONG_AFTER = 3 * 86_400.0


async def act(job: Job, ref: TaskRef) -> Outcome:
    """Hosts named `down` are away the first time that a task asks, and some tasks fail for good."""
    if "down" in ref.input and ref.attempt == 1:
        return failure("connect_failed")
    return failure("result_not_json") if ref.index == 2 else success(b"a body")


def spec_of(number: int) -> JobSpec:
    """One of each kind in turn; no two jobs have a host in common."""
    limits = {"rate_per_host": 50.0, "concurrency_per_host": 2}
    hosts = [f"http://{'down' if task == 1 else 'up'}{number}.example/{task}" for task in range(3)]
    fetch = {"kind": JobKind.FETCH, "handler": None, "name": f"{number}"}
    match number % 5:
        case 0:
            return job_spec(*range(3), name=f"{number}", chunk_size=2)
        case 1:
            return job_spec(*hosts, **fetch, **limits)
        case 2:
            return job_spec(*hosts, **fetch)
        case 3:
            return job_spec(name=f"{number}", mode=Mode.OPEN, idle_timeout=3600.0)
        case _:
            return job_spec(hosts[0], kind=JobKind.DOWNLOAD, handler=None, name=f"{number}")


async def run_jobs(world: World, first: int, count: int) -> None:
    """Submit jobs, add to those that are open, cancel some, export some, run some again; then delete them all."""
    submit, add, control = Submit(world.system), AddTasks(world.system), Control(world.system)
    exports, again = Exports(world.system), Rerun(world.system)
    jobs: dict[int, JobId] = {}
    for number in range(first, first + count):
        accepted = await submit.submit(ACME, spec_of(number))
        jobs[number] = JobId(accepted.subject)
        if number % 5 == 3:
            job = await world.job(jobs[number])
            await world.insist(lambda job=job: add.add(job, TasksSpec(raw(1, 2, 3), last_batch=True)))
        if number % 10 == 5:
            with suppress(JobEnded):
                await control.cancel(await world.job(jobs[number]))
    await world.until(lambda: all_ended(world, jobs), "all jobs end")
    for number, job_id in jobs.items():
        if number % 10 == 0:
            await world.insist(lambda job_id=job_id: rerun(world, again, job_id))
        if number % 10 == 6:
            job = await world.job(job_id)
            await world.insist(lambda job=job: exports.create(job, ExportSpec(format=ExportFormat.JSONL)))
    await world.settled()
    await world.until(lambda: all_ready(world, jobs), "all exports are ready")
    for job_id in jobs.values():
        await world.system.records.jobs.mark_deleted(ACME, job_id)
    await world.removed()


async def rerun(world: World, again: Rerun, job_id: JobId) -> None:
    await again.rerun(await world.job(job_id), RerunSpec("all"))


async def all_ended(world: World, jobs: dict[int, JobId]) -> bool:
    return all([(await world.fleet.job(job_id)).state in ENDED for job_id in jobs.values()])


async def all_ready(world: World, jobs: dict[int, JobId]) -> bool:
    exports = Exports(world.fleet.system)
    for job_id in jobs.values():
        page = await exports.page(await world.fleet.job(job_id), None, 10)
        if any(found.export.state is not ExportState.READY for found in page.items):
            return False
    return True


async def throw_out(coordinator: Coordinator) -> None:
    """What has expired goes with later writes, a few with each."""
    for _ in range(JOBS):
        await coordinator.cache("last", b"", 1.0)
        await coordinator.add_counters("last", {"one": 1}, 1.0)
        await coordinator.reserve("last", 1, 1000.0, 1)


async def test_tables_rest_at_the_same_size_after_more_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is kept of so many jobs at most is full before the first look.
    monkeypatch.setattr(exchange, "MAX_PLANS", 8)
    async with open_world(Injector(), breaker_least=1, breaker_seconds=1.0) as world:
        executor = Recording(world.fleet.clock, act, target=lambda ref: host_of(ref) or None)
        pieces = Pieces(world)
        world.start({**dict.fromkeys(JobKind, executor), JobKind.DOWNLOAD: pieces})

        async def rested(first: int) -> tuple[Counter[str], Counter[str]]:
            for start in range(first, first + JOBS, AT_ONCE):
                await run_jobs(world, start, AT_ONCE)
            executor.starts.clear()
            world.fleet.clock.advance(LONG_AFTER)
            await world.fleet.passing(20.0)
            await throw_out(world.fleet.system.coordinator)
            roles = [service.role for service, _ in world.fleet._services]
            return sizes_of(world.fleet.system, world.embedded, pieces._long, *roles), live_objects()

        sizes, objects = await rested(0)
        more_sizes, more_objects = await rested(JOBS)
    assert growth(sizes, more_sizes) == {}
    assert {name: size for name, size in more_sizes.items() if size >= JOBS and "[]" not in name} == {}
    # A label of a metric may be new; what goes with a job is not so few.
    more_objects.subtract(objects)
    assert {name: more for name, more in more_objects.items() if more >= JOBS // 20} == {}


async def test_a_worker_forgets_runs_that_it_refused() -> None:
    """It was offered messages of runs that are paused."""
    async with open_fleet() as fleet:
        worker = fleet.worker()
        fleet.start(worker)

        async def rested() -> Counter[str]:
            for _ in range(5):
                job = await fleet.submit(1)
                await fleet.move(job, RunState.PAUSED)
                assert worker.on_offer(run_queue(job.run.run_id), messages(job.key, seeds(1), 1)[0].body)
                await fleet.passing(1)
            await fleet.passing(100)
            sizes = sizes_of(worker._seats)
            return Counter({name: size for name, size in sizes.items() if name.startswith("Seats.")})

        sizes = await rested()
        assert growth(sizes, await rested()) == {}


async def test_a_table_that_grows_is_named() -> None:
    async with open_world(Injector()) as world:
        world.start()
        (worker,) = [service.role for service, _ in world.fleet._services if isinstance(service.role, Worker)]
        before = sizes_of(world.fleet.system, worker)
        worker._breakers._waits.update({RunId(f"run_{number}"): Wait("breaker", "down") for number in range(7)})
        found = growth(before, sizes_of(world.fleet.system, worker))
        worker._breakers._waits.clear()
    assert found == {"Breakers._waits": "0 → 7"}


def test_caches_with_a_bound_are_as_large_as_other_tests_made_them() -> None:
    before = sizes_of()
    for number in range(JOBS):
        body_names._extension(f"application/x-{number}")
        made_for(f"SELECT {number}", "")
    assert growth(before, sizes_of()) == {}
