"""Tasks that stand by index: a run is walked in the order of its list. An engine without that says so by not having it;
then there is nothing to hold it to."""

from collections.abc import AsyncIterator

import pytest

from conveyor.engines.postgres import tasks as postgres_tasks
from conveyor.engines.sqlite import tasks as sqlite_tasks
from conveyor.engines.tasks import ReadsByIndex, TaskFilter, Tasks, Walked
from conveyor.model import InputJson, RunId, RunKey, Task, TaskEnd, TaskSeed, TenantId
from conveyor.read.walk import matches
from conveyor.states import TaskStatus
from tests.support.clocks import ManualClock

EVERYTHING = TaskFilter()


def make_run(clock: ManualClock, shards: int = 1) -> RunKey:
    job_id = clock.new_id("job")
    return RunKey(TenantId("acme"), job_id, RunId(job_id.replace("job_", "run_")), shards)  # type: ignore[arg-type]


async def stretches(tasks: ReadsByIndex, run: RunKey, limit: int, where: TaskFilter) -> AsyncIterator[Walked]:
    last: int | None = -1
    while last is not None:
        walked = await tasks.walk(run, last, limit, where)
        yield walked
        last = walked.last


async def walked(tasks: ReadsByIndex, run: RunKey, limit: int, where: TaskFilter = EVERYTHING) -> list[Task]:
    return [task async for walked in stretches(tasks, run, limit, where) for task in walked.tasks]


async def filled(tasks: Tasks, run: RunKey) -> list[int]:
    """Every third index has no task, as with lines that were none."""
    indexes = [index for index in range(150) if index % 3]
    await tasks.put(run, [TaskSeed(index, InputJson(f'{{"tag":"t{index % 4}"}}')) for index in reversed(indexes)])
    ends = [
        TaskEnd(index, TaskStatus.FAILED, 1, 503, "http_503", "{}", 5.0)
        if index % 5 == 0
        else TaskEnd(index, TaskStatus.SUCCEEDED, 2, 200, None, '{"elapsed":0.5}', 6.25)
        for index in indexes
        if index % 7
    ]
    await tasks.finish(run, ends)
    return indexes


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("limit", [1, 7, 100, 1000])
async def test_a_run_in_the_order_of_its_list(tasks: Tasks, clock: ManualClock, shards: int, limit: int) -> None:
    if not isinstance(tasks, ReadsByIndex):
        return
    run = make_run(clock, shards)
    indexes = await filled(tasks, run)
    other = make_run(clock)
    await tasks.put(other, [TaskSeed(1, InputJson('"of another run"'))])
    found = await walked(tasks, run, limit)
    assert [task.index for task in found] == indexes
    paged = [task for shard in range(shards) for task in await tasks.page(run, shard, None, 1000, EVERYTHING)]
    assert found == sorted(paged, key=lambda task: task.index), "the same tasks as by pages"
    read = [each.read async for each in stretches(tasks, run, limit, EVERYTHING)]
    assert sum(read) == len(indexes)
    assert max(read) <= limit


@pytest.mark.parametrize(
    "where",
    [
        TaskFilter(status=TaskStatus.PENDING),
        TaskFilter(status=TaskStatus.FAILED),
        TaskFilter(error_code="http_503"),
        TaskFilter(http_status=200),
        TaskFilter(tag="t3"),
        TaskFilter(status=TaskStatus.SUCCEEDED, tag="t2"),
        TaskFilter(status=TaskStatus.CANCELLED),
    ],
    ids=str,
)
async def test_filters(tasks: Tasks, clock: ManualClock, where: TaskFilter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stretch has a bound of rows that are looked at, however few of them match."""
    if not isinstance(tasks, ReadsByIndex):
        return
    for engine in (sqlite_tasks, postgres_tasks):
        monkeypatch.setattr(engine, "FEW_FAILED", 0)
    run = make_run(clock)
    indexes = await filled(tasks, run)
    everything = await walked(tasks, run, 1000)
    assert await walked(tasks, run, 10, where) == [task for task in everything if matches(task, where)]
    read = [each.read async for each in stretches(tasks, run, 10, where)]
    assert sum(read) == len(indexes)
    assert max(read) <= 10


@pytest.mark.parametrize(
    "where",
    [
        TaskFilter(status=TaskStatus.FAILED),
        TaskFilter(TaskStatus.FAILED, "http_503", 503, "t2"),
        TaskFilter(TaskStatus.FAILED, "timeout"),
    ],
    ids=str,
)
async def test_a_few_failed_tasks_are_walked_alone(tasks: Tasks, clock: ManualClock, where: TaskFilter) -> None:
    if not isinstance(tasks, ReadsByIndex):
        return
    run = make_run(clock, 4)
    await filled(tasks, run)
    everything = await walked(tasks, run, 1000)
    assert await walked(tasks, run, 3, where) == [task for task in everything if matches(task, where)]
    read = [each.read async for each in stretches(tasks, run, 3, where)]
    assert sum(read) == sum(task.status is TaskStatus.FAILED for task in everything)
    assert max(read) <= 3


async def test_nothing_to_walk(tasks: Tasks, clock: ManualClock) -> None:
    if not isinstance(tasks, ReadsByIndex):
        return
    run = make_run(clock)
    assert await tasks.walk(run, -1, 10, EVERYTHING) == Walked([], 0, None)
    await filled(tasks, run)
    assert await tasks.walk(run, 1_000_000, 10, EVERYTHING) == Walked([], 0, None)
    foreign = RunKey(TenantId("other"), run.job_id, run.run_id)
    assert await tasks.walk(foreign, -1, 10, EVERYTHING) == Walked([], 0, None)
