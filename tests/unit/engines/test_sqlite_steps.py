"""What SQLite does for a page, counted in steps of its virtual machine: the same for few rows as for many."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import apsw
import pytest

from conveyor.engines.sqlite import SqliteEngine
from conveyor.engines.sqlite.database import SqliteDatabase
from conveyor.engines.tasks import TaskFilter
from conveyor.model import task_id
from tests.support.clocks import ManualClock
from tests.support.make_jobs import ACME, OTHER, make_job, make_notice, make_run, seeds

PAGE = 10
SLAB = 1 << 15


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[SqliteEngine]:
    async with SqliteEngine.open(tmp_path, ManualClock()) as engine:
        yield engine


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of each statement that was read with since it was cleared. SQLite adds up those of a statement."""
    steps: list[int] = []
    before: Counter[tuple[int, object]] = Counter()
    read = SqliteDatabase._read

    def counting(self: SqliteDatabase, work: Callable[[apsw.Connection], object]) -> object:
        def watched(db: apsw.Connection) -> object:
            def note(event: dict[str, Any]) -> None:
                total = event["stmt_status"]["SQLITE_STMTSTATUS_VM_STEP"]
                statement = (id(db), event["sql"])
                steps.append(total - before[statement])
                before[statement] = total

            db.trace_v2(apsw.SQLITE_TRACE_PROFILE, note, id="steps")
            return work(db)

        return read(self, watched)

    monkeypatch.setattr(SqliteDatabase, "_read", counting)
    return steps


async def add_jobs(engine: SqliteEngine, clock: ManualClock, count: int) -> None:
    made = [make_job(clock, tenant=ACME if number % 2 else OTHER) for number in range(count)]
    await asyncio.gather(*(engine.records.jobs.create_job(job, make_notice(clock, job), None) for job in made))


async def test_a_page_of_jobs_costs_the_same_among_ten_as_among_thousands(
    engine: SqliteEngine, steps: list[int]
) -> None:
    clock = ManualClock()
    jobs = engine.records.jobs
    await add_jobs(engine, clock, 4 * PAGE)
    steps.clear()
    await jobs.jobs(ACME, None, PAGE)
    (few,) = steps
    await add_jobs(engine, clock, 2000)
    middle = (await jobs.jobs(ACME, None, 500)).next_cursor
    for cursor in (None, middle):
        steps.clear()
        assert len((await jobs.jobs(ACME, cursor, PAGE)).items) == PAGE
        assert sum(steps) <= few * 1.05


async def test_a_page_of_tasks_costs_more_only_by_a_few_steps_for_each_slab(
    engine: SqliteEngine, steps: list[int]
) -> None:
    run = make_run(ManualClock())
    costs = []
    for slab in range(4):
        for start in range(slab * SLAB, (slab + 1) * SLAB, 4096):
            await engine.tasks.put(run, seeds(4096, start))
        steps.clear()
        scanned = await engine.tasks.scan(run, 0, task_id(run.run_id, 5), 100, TaskFilter())
        assert len(scanned.tasks) == 100
        costs.append(sum(steps))
    assert max(costs) <= min(costs) * 1.2, costs
