"""A process dies on DynamoDB between the move of tasks and their counts: others count them within seconds, once, while
the run goes on. Counts never lead."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conveyor import faults
from conveyor.engines.dynamodb import DynamoEngine
from conveyor.engines.dynamodb.announcements import KEPT, packed, unpacked
from conveyor.engines.dynamodb.layout import announcement_prefix, home
from conveyor.engines.tasks import TaskFilter
from conveyor.lifecycle import Lifecycle
from conveyor.model import Counts, Job, Replaced, RunKey, TaskSeed
from conveyor.recover.sweeper import Sweeper
from conveyor.settings import Settings
from conveyor.states import RunState, TaskStatus
from conveyor.system import System, migrate, open_system
from tests.servers import dynamodb
from tests.support.clocks import ManualClock
from tests.support.make_jobs import ACME, end, make_job, make_notice, make_run, seeds

pytestmark = pytest.mark.server

FAILED = TaskStatus.FAILED
# Seconds between two looks that settle, and in which a user sees exact counts.
APART, SOON = 3.0, 10.0


class Died(BaseException):
    """The process died here."""


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.arm(None)


def die_at(point: str) -> None:
    def hook(passed: str) -> None:
        if passed == point:
            faults.arm(None)
            raise Died

    faults.arm(hook)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@asynccontextmanager
async def processes(place: Path, clock: ManualClock) -> AsyncIterator[tuple[DynamoEngine, DynamoEngine]]:
    async with dynamodb.open_engine(place, clock) as one, dynamodb.open_engine(place, clock) as two:
        yield one, two


@pytest.fixture
async def engines(tmp_path: Path, clock: ManualClock) -> AsyncIterator[tuple[DynamoEngine, DynamoEngine]]:
    """Two processes."""
    async with processes(tmp_path, clock) as opened:
        yield opened


async def finished_rows(engine: DynamoEngine, run: RunKey) -> Counts:
    """What the rows say."""
    counts = dict.fromkeys(("succeeded", "failed", "cancelled"), 0)
    for shard in range(max(1, run.shard_count)):
        for task in await engine.tasks.page(run, shard, None, 10_000, TaskFilter()):
            if task.status is not TaskStatus.PENDING:
                counts[task.status.name.lower()] += 1
    return Counts(**counts)


async def settle_all(engine: DynamoEngine, run: RunKey, clock: ManualClock) -> int:
    """Two looks, as far apart as the sweeper's."""
    settled = (await engine.tasks.settle_counts(run)).settled
    assert settled == 0, "one look alone settles nothing"
    clock.advance(APART)
    return (await engine.tasks.settle_counts(run)).settled


async def die_counting(engine: DynamoEngine, run: RunKey, indexes: range, point: str = "tasks.count.before") -> None:
    die_at(point)
    with pytest.raises(Died):
        await engine.tasks.finish(run, [end(i, FAILED, code="gone") if i % 5 == 0 else end(i) for i in indexes])


def test_indexes_are_packed() -> None:
    for indexes in ((), (0,), (5, 6, 7, 1_000_000), tuple(range(0, 100_000, 7))):
        assert unpacked(packed(indexes)) == indexes
    assert len(packed(range(400_000, 401_000))) < 1000


@pytest.mark.parametrize("shards", [1, 4])
async def test_tasks_of_a_dead_process_are_counted_while_others_work(
    engines: tuple[DynamoEngine, DynamoEngine], clock: ManualClock, shards: int
) -> None:
    one, two = engines
    run = make_run(clock, shards)
    await one.tasks.put(run, seeds(200))
    await one.tasks.finish(run, [end(index) for index in range(10)])
    await die_counting(one, run, range(10, 70))
    assert (await two.tasks.counts(run)).ended == 10, "the counts lag"
    began = clock.now()
    looked = await two.tasks.settle_counts(run)
    assert looked.pending
    for first in range(70, 100, 10):
        # Additions of a living process change nothing for the dead one.
        await two.tasks.finish(run, [end(index) for index in range(first, first + 10)])
        assert (await two.tasks.counts(run)).ended <= (await finished_rows(two, run)).ended
        clock.advance(1.0)
    looked = await two.tasks.settle_counts(run)
    assert clock.now() - began <= SOON
    assert (looked.settled, looked.counts) == (60, await finished_rows(two, run))
    assert await two.tasks.counts(run) == looked.counts == Counts(succeeded=88, failed=12)
    assert dict(await two.tasks.error_codes(run, 10)) == {"gone": 12}
    assert not (await two.tasks.settle_counts(run)).pending
    assert await two.tasks.recount(run) == looked.counts


@pytest.mark.parametrize(
    ("point", "settled"),
    [("tasks.announce.before", 0), ("tasks.announce.after", 0), ("tasks.count.after", 0), ("tasks.finish.after", 0)],
)
async def test_what_is_counted_is_not_counted_again(
    engines: tuple[DynamoEngine, DynamoEngine], clock: ManualClock, point: str, settled: int
) -> None:
    one, two = engines
    run = make_run(clock)
    await one.tasks.put(run, seeds(30))
    await die_counting(one, run, range(20), point)
    assert await settle_all(two, run, clock) == settled
    assert await two.tasks.counts(run) == await finished_rows(two, run)
    # The rest goes on, also by the process that came back.
    await one.tasks.finish(run, [end(index) for index in range(30)])
    assert await two.tasks.counts(run) == await finished_rows(two, run)
    assert (await two.tasks.counts(run)).ended == 30


@pytest.mark.parametrize("point", ["tasks.settle.before", "tasks.settle.after", "dynamodb.write.after"])
async def test_who_dies_settling_settles_once(
    engines: tuple[DynamoEngine, DynamoEngine], clock: ManualClock, point: str
) -> None:
    one, two = engines
    run = make_run(clock)
    await one.tasks.put(run, seeds(30))
    await die_counting(one, run, range(20))
    await two.tasks.settle_counts(run)
    clock.advance(APART)
    die_at(point)
    with pytest.raises(Died):
        await two.tasks.settle_counts(run)
    assert (await one.tasks.counts(run)).ended <= 20
    await settle_all(one, run, clock)
    assert await one.tasks.counts(run) == await finished_rows(one, run) == Counts(succeeded=16, failed=4)


async def test_two_at_once_settle_once(engines: tuple[DynamoEngine, DynamoEngine], clock: ManualClock) -> None:
    one, two = engines
    run = make_run(clock)
    await one.tasks.put(run, seeds(30))
    await die_counting(one, run, range(20))
    await asyncio.gather(one.tasks.settle_counts(run), two.tasks.settle_counts(run))
    clock.advance(APART)
    looked = await asyncio.gather(one.tasks.settle_counts(run), two.tasks.settle_counts(run))
    assert sum(each.settled for each in looked) == 20
    assert await one.tasks.counts(run) == Counts(succeeded=16, failed=4)


@pytest.mark.parametrize("batches", [0, 1, 3])
async def test_a_process_that_was_only_slow_counts_the_rest(
    engines: tuple[DynamoEngine, DynamoEngine], clock: ManualClock, monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    """It is stopped after it has moved some of its tasks; others settle; then it goes on."""
    one, two = engines
    run = make_run(clock)
    await one.tasks.put(run, seeds(75))
    go_on, stopped = asyncio.Event(), asyncio.Event()
    once, passed = one._wire.once, 0

    async def held(action: str, payload: Any) -> dict[str, Any]:
        nonlocal passed
        if action == "BatchExecuteStatement":
            passed += 1
        if (action == "BatchExecuteStatement" and passed > batches) or action == "UpdateItem":
            stopped.set()
            await go_on.wait()
        return await once(action, payload)

    monkeypatch.setattr(one._wire, "once", held)
    finishing = asyncio.create_task(one.tasks.finish(run, [end(index) for index in range(75)]))
    await stopped.wait()
    while (await finished_rows(two, run)).ended < 25 * batches:
        continue
    assert await settle_all(two, run, clock) == 25 * batches
    assert (await two.tasks.counts(run)).ended == 25 * batches
    go_on.set()
    assert len((await finishing).moved) == 75
    assert await two.tasks.counts(run) == Counts(succeeded=75)
    assert await settle_all(two, run, clock) == 0
    assert await two.tasks.counts(run) == Counts(succeeded=75)


async def test_replaced_outcomes_are_counted_too(
    engines: tuple[DynamoEngine, DynamoEngine], clock: ManualClock
) -> None:
    one, two = engines
    run = make_run(clock)
    await one.tasks.put(run, [TaskSeed(index, '"input"', prior="2http_503") for index in range(20)])
    await die_counting(one, run, range(20))
    assert await settle_all(two, run, clock) == 20
    assert await two.tasks.replaced(run) == Replaced(Counts(failed=20), {"http_503": 20})


async def test_announcements_of_processes_that_are_gone_are_removed(
    engines: tuple[DynamoEngine, DynamoEngine], clock: ManualClock
) -> None:
    one, two = engines
    run = make_run(clock)
    await one.tasks.put(run, seeds(10))
    await die_counting(one, run, range(5))
    await settle_all(two, run, clock)

    async def left() -> int:
        items = await two.tasks._table.under(home(run))
        return sum(item["sk"].startswith(announcement_prefix(run)) for item in items)

    assert await left() == 1
    clock.advance(KEPT + 1)
    await two.tasks.settle_counts(run)
    assert await left() == 0
    await one.tasks.finish(run, [end(index) for index in range(10)])
    assert (await two.tasks.counts(run)).ended == 10


@pytest.fixture
async def system(tmp_path: Path, clock: ManualClock) -> AsyncIterator[System]:
    urls = {name: dynamodb.url_for(tmp_path / "aws") for name in ("records", "tasks")}
    settings = Settings.load({}, data=tmp_path / "data", **urls)
    await migrate(settings, clock)
    async with open_system(settings, clock) as opened:
        yield opened


async def submitted(system: System, clock: ManualClock, total: int) -> Job:
    job = make_job(clock, total=total, shards=4)
    job = msgspec.structs.replace(job, task_store=system.task_store)
    await system.tasks.put(job.key, seeds(total))
    await system.records.jobs.create_job(job, make_notice(clock, job), None)
    return job


def sweeper_of(system: System) -> Sweeper:
    lifecycle = Lifecycle(system.records, system.tasks, system.clock)
    return Sweeper(system.records, system.tasks, system.queue, lifecycle, system.clock)


async def test_the_sweeper_settles_a_run_that_goes_on(system: System, clock: ManualClock) -> None:
    """Its queue has work, so that nothing is lost and nothing is repaired: only the counts are settled."""
    job, sweeper = await submitted(system, clock, 300), sweeper_of(system)
    await sweeper.run_once()
    faults.arm(None)
    die_at("tasks.count.before")
    with suppress(Died):
        await system.tasks.finish(job.key, [end(index) for index in range(250)])
    died_at, settled = clock.now(), 0
    while not settled:
        clock.advance(2.0)
        settled = (await sweeper.run_once()).settled
        assert clock.now() - died_at <= SOON
    assert settled == 250
    assert await system.tasks.counts(job.key) == Counts(succeeded=250)


async def test_the_sweeper_completes_a_run_whose_last_count_is_missing(system: System, clock: ManualClock) -> None:
    job, sweeper = await submitted(system, clock, 40), sweeper_of(system)
    die_at("tasks.count.before")
    with suppress(Died):
        await system.tasks.finish(job.key, [end(index) for index in range(40)])
    died_at = clock.now()
    while True:
        await sweeper.run_once()
        stored = await system.records.jobs.job(ACME, job.job_id)
        assert stored is not None
        if stored.state is RunState.COMPLETED:
            break
        clock.advance(2.0)
        assert clock.now() - died_at <= SOON
    assert await system.tasks.counts(job.key) == Counts(succeeded=40)


async def test_the_counts_of_a_cancelled_run_are_settled_before_it_is_cleared(
    system: System, clock: ManualClock
) -> None:
    job, sweeper = await submitted(system, clock, 40), sweeper_of(system)
    die_at("tasks.count.before")
    with suppress(Died):
        await system.tasks.finish(job.key, [end(index) for index in range(10)])
    lifecycle = Lifecycle(system.records, system.tasks, clock)
    await lifecycle.move(job, RunState.CANCELLED, None, Counts())
    for _ in range(10):
        await sweeper.run_once()
        clock.advance(2.0)
    assert await system.records.jobs.unswept_jobs(10) == []
    assert await system.tasks.counts(job.key) == Counts(succeeded=10, cancelled=30)
