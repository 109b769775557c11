"""The order of task_id over slabs: what a listing reads, in which order, and how much of it."""

from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path
from typing import Any

import apsw
import pytest

from conveyor.engines.sqlite import SqliteEngine
from conveyor.engines.sqlite import database as database_module
from conveyor.engines.sqlite import slabs as slabs_module
from conveyor.engines.sqlite.database import MIGRATIONS, open_database
from conveyor.engines.tasks import MAX_SCANNED, TaskFilter, Tasks
from conveyor.model import InputJson, RunKey, TaskId, TaskSeed, task_id
from conveyor.states import TaskStatus
from tests.support.clocks import ManualClock
from tests.support.make_jobs import end, make_run

SLAB = 1 << 15
BEFORE_SLABS = 10
ALL = TaskFilter()


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[SqliteEngine]:
    async with SqliteEngine.open(tmp_path, ManualClock()) as engine:
        yield engine


def some(indexes: range) -> list[TaskSeed]:
    return [TaskSeed(index, InputJson(f'"https://example.com/{index}"')) for index in indexes]


def in_order(run: RunKey, indexes: range) -> list[TaskId]:
    return sorted(task_id(run.run_id, index) for index in indexes)


async def listed(tasks: Tasks, run: RunKey, limit: int, where: TaskFilter = ALL) -> list[TaskId]:
    """All pages of a listing."""
    found: list[TaskId] = []
    after: TaskId | None = None
    while True:
        scanned = await tasks.scan(run, 0, after, limit, where)
        assert len(scanned.tasks) <= limit
        found += [task.task_id for task in scanned.tasks]
        after = scanned.last
        if after is None:
            return found


# The tasks of one slab, of neighbouring slabs, and of slabs far apart, as the tasks of a rerun are.
INDEXES = [
    range(200),
    range(SLAB - 100, SLAB + 100),
    range(7, 40 * SLAB, 9973),
    range(300 * SLAB, 300 * SLAB + 3),
]


@pytest.mark.parametrize("indexes", INDEXES)
@pytest.mark.parametrize("limit", [1, 7, 1000])
async def test_pages_are_in_order_of_task_id(engine: SqliteEngine, indexes: range, limit: int) -> None:
    run = make_run(ManualClock())
    await engine.tasks.put(run, some(indexes))
    assert await listed(engine.tasks, run, limit) == in_order(run, indexes)


@pytest.mark.parametrize("indexes", INDEXES)
async def test_a_task_is_found_by_its_id(engine: SqliteEngine, indexes: range) -> None:
    run = make_run(ManualClock())
    await engine.tasks.put(run, some(indexes))
    for index in (indexes[0], indexes[-1]):
        task = await engine.tasks.task(run, task_id(run.run_id, index))
        assert task is not None
        assert task.index == index
    assert await engine.tasks.task(run, task_id(run.run_id, indexes[-1] + 1)) is None


async def test_a_filter_reads_all_slabs_in_order(engine: SqliteEngine) -> None:
    run, indexes = make_run(ManualClock()), range(7, 40 * SLAB, 9973)
    await engine.tasks.put(run, some(indexes))
    done, failed = indexes[::3], indexes[1::3]
    await engine.tasks.finish(run, [end(index) for index in done])
    await engine.tasks.finish(run, [end(index, TaskStatus.FAILED, code="odd") for index in failed])
    succeeded = TaskFilter(status=TaskStatus.SUCCEEDED)
    assert await listed(engine.tasks, run, 5, succeeded) == in_order(run, done)
    assert await listed(engine.tasks, run, 5, TaskFilter(status=TaskStatus.FAILED)) == in_order(run, failed)
    assert await listed(engine.tasks, run, 5, TaskFilter(error_code="odd")) == in_order(run, failed)


async def test_tasks_that_share_a_sort_key_are_listed_once(
    engine: SqliteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one digit instead of 15, they share it often."""
    monkeypatch.setattr(slabs_module, "_SORT_DIGITS", 1)
    monkeypatch.setattr(
        # By its name: the package has a function of the same one.
        import_module("conveyor.engines.sqlite.seed_rows"),
        "sort_keys",
        lambda run_id, indexes: [slabs_module.sort_key(task_id(run_id, index)) for index in indexes],
    )
    run, indexes = make_run(ManualClock()), range(0, 3 * SLAB, 1500)
    await engine.tasks.put(run, some(indexes))
    for limit in (1, 2, 5):
        found = await listed(engine.tasks, run, limit)
        assert sorted(found) == in_order(run, indexes)
        assert [name[0] for name in found] == sorted(name[0] for name in found)


async def test_the_cursor_of_a_deleted_task_goes_on_behind_it(engine: SqliteEngine) -> None:
    run, indexes = make_run(ManualClock()), range(0, 3 * SLAB, 1500)
    await engine.tasks.put(run, some(indexes))
    gone = task_id(run.run_id, indexes[-1] + 1)
    found = [task.task_id for task in (await engine.tasks.scan(run, 0, gone, 1000, ALL)).tasks]
    assert found == [name for name in in_order(run, indexes) if name > gone]


def test_sort_keys_are_the_first_digits_of_the_ids() -> None:
    run = make_run(ManualClock())
    names = [task_id(run.run_id, index) for index in range(1000)]
    assert slabs_module.sort_keys(run.run_id, range(1000)) == [int(name[:15], 16) for name in names]


async def test_a_page_of_many_slabs_reads_few_more_keys_than_it_returns(
    engine: SqliteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(ManualClock())
    for start in range(0, 4 * SLAB, 8192):
        await engine.tasks.put(run, some(range(start, start + 8192)))
    read: list[int] = []
    between = slabs_module._between

    def counted(db: apsw.Connection, *arguments: Any) -> Any:
        keys = between(db, *arguments)
        read.append(len(keys))
        return keys

    monkeypatch.setattr(slabs_module, "_between", counted)
    scanned = await engine.tasks.scan(run, 0, None, 100, ALL)
    await engine.tasks.scan(run, 0, scanned.last, 100, ALL)
    assert len(read) == 2, "one read for each page"
    read.clear()
    await engine.tasks.scan(run, 0, None, 100, TaskFilter(tag="none"))
    assert sum(read) == MAX_SCANNED + 1


async def test_tasks_of_the_schema_before_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, indexes = make_run(ManualClock()), range(0, 3 * SLAB, 1500)
    with monkeypatch.context() as patch:
        patch.setattr(database_module, "MIGRATIONS", MIGRATIONS[:BEFORE_SLABS])
        async with open_database(tmp_path) as database:
            values = {"run_id": run.run_id, "tenant": run.tenant}
            await database.change("INSERT INTO task_runs (run_no, run_id, tenant) VALUES (1, :run_id, :tenant)", values)
            for index in indexes:
                key = slabs_module.sort_key(task_id(run.run_id, index))
                await database.change(
                    "INSERT INTO tasks (run_no, idx, shard, sort_key, status, input) VALUES (1, :idx, 0, :key, 0, '1')",
                    {"idx": index, "key": key},
                )
    async with SqliteEngine.open(tmp_path, ManualClock()) as engine:
        assert await listed(engine.tasks, run, 10) == in_order(run, indexes)
