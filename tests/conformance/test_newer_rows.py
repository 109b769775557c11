"""A job that a newer Conveyor wrote: listings skip it and it alone, and reading it says why it cannot be read."""

from pathlib import Path
from typing import Any

import pytest

from conveyor.engines.postgres.queries import parse
from conveyor.errors import EngineFailed
from conveyor.model import Job
from conveyor.states import RunState
from tests.conformance.conftest import ENGINES
from tests.support.clocks import ManualClock
from tests.support.make_jobs import ACME, make_job, make_notice

ON = [pytest.param("sqlite"), pytest.param("postgres", marks=pytest.mark.server)]
# Fields that do not exist yet, and a kind that does not.
CHANGES = (
    "jobs SET options = '{\"later\": true}'",
    "jobs SET kind = 'later'",
    'jobs SET source = \'{"key": "k", "size": 1, "sha256": "", "later": true}\'',
    'runs SET lineage = \'{"parent": "run_1", "later": true}\'',
)


async def rewrite(engine: Any, name: str, job: Job, change: str) -> None:
    """As a newer version would have written it."""
    statement = f"UPDATE {change} WHERE job_id = '{job.job_id}'"
    query: Any = statement if name == "sqlite" else parse(statement)
    assert await engine._database.change(query, {}) == 1


@pytest.mark.parametrize("change", CHANGES, ids=["option", "kind", "source", "lineage"])
@pytest.mark.parametrize("name", ON)
async def test_one_newer_job_hides_no_other(name: str, change: str, place: Path, clock: ManualClock) -> None:
    async with ENGINES[name].open(place, clock) as engine:
        jobs = engine.records.jobs
        made = []
        for state in (RunState.RUNNING, RunState.RUNNING, RunState.RUNNING):
            job = make_job(clock, total=1, state=state)
            await jobs.create_job(job, make_notice(clock, job), None)
            made.append(job)
        first, newer, last = made
        await rewrite(engine, name, newer, change)
        readable = {first.job_id, last.job_id}
        assert {job.job_id for job in await jobs.active_jobs()} == readable
        keys = [(ACME, job.job_id) for job in made]
        assert {job.job_id for job in await jobs.jobs_of(keys)} == readable
        assert {job.job_id for job in await jobs.jobs_of(keys * 20)} == readable
        listed, cursor = [], None
        for _ in range(3):
            # One at a time: the cursor passes the one that cannot be read.
            page = await jobs.jobs(ACME, cursor, 1)
            listed += [job.job_id for job in page.items]
            cursor = page.next_cursor
        assert (set(listed), cursor) == (readable, None)
        with pytest.raises(EngineFailed, match="written by a newer Conveyor"):
            await jobs.job(ACME, newer.job_id)
