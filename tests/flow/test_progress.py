"""The public job: counts that add up, what workers hold, rate and time left, with a clock that is moved."""

from typing import Any

import msgspec
import pytest

from conveyor.cli.bar_view import view_job
from conveyor.cli.snapshot import Snapshot
from conveyor.engines.records import Document
from conveyor.model import (
    PROGRESS,
    InputJson,
    Job,
    JobId,
    JobKind,
    Mode,
    Options,
    ResultLayout,
    Run,
    RunId,
    TaskEnd,
    TaskProgress,
    TaskSeed,
    TenantId,
    progress_id,
)
from conveyor.read.status import job_json
from conveyor.states import RunState, TaskStatus
from conveyor.system import System

START = 1_790_000_000.0


class StillClock:
    """Time stands until it is moved, so that a rate is an exact number."""

    def __init__(self) -> None:
        self.at = START

    def now(self) -> float:
        return self.at

    def monotonic(self) -> float:
        return self.at

    def jitter(self) -> float:
        return 0.5

    def new_id(self, prefix: str) -> str:
        return f"{prefix}_1"

    async def sleep(self, seconds: float) -> None:
        self.at += seconds


@pytest.fixture
async def clock() -> StillClock:  # type: ignore[override]
    return StillClock()


def job_of(total: int, state: RunState = RunState.RUNNING, **run: Any) -> Job:
    return Job(
        tenant=TenantId("acme"),
        job_id=JobId("job_1"),
        name="prices",
        kind=JobKind.FETCH,
        mode=Mode.CLOSED,
        options=Options(concurrency=8, headers={"X-A": "1"}),
        task_shard_count=1,
        result_layout=ResultLayout.OBJECT,
        state=state,
        reason=None,
        created_at=START,
        expires_at=START + 86_400,
        run=Run(RunId("run_1"), 1, state, total, **{"last_batch": True, "created_at": START, **run}),
    )


async def seed(system: System, job: Job) -> None:
    await system.tasks.put(job.key, [TaskSeed(index, InputJson("0")) for index in range(job.run.total)])


async def finish(system: System, job: Job, indexes: range, code: str | None = None) -> None:
    status = TaskStatus.FAILED if code else TaskStatus.SUCCEEDED
    await system.tasks.finish(job.key, [TaskEnd(index, status, 1, None, code, "{}", START) for index in indexes])


async def shown(system: System, job: Job) -> dict[str, Any]:
    found = await job_json(system.records, system.tasks, system.coordinator, system.clock, job)
    return msgspec.json.decode(msgspec.json.encode(found))  # type: ignore[no-any-return]


async def test_the_public_shape_of_a_job(system: System, clock: StillClock) -> None:
    job = job_of(10)
    await seed(system, job)
    await finish(system, job, range(3))
    await finish(system, job, range(3, 5), "timeout")
    await finish(system, job, range(5, 6), "dns")
    await system.coordinator.acquire("run:run_1", "worker-a", 3, 100, 60)
    clock.at += 2
    assert await shown(system, job) == {
        "id": "job_1",
        "name": "prices",
        "state": "running",
        "reason": None,
        "reason_code": None,
        "waiting": None,
        "kind": "fetch",
        "mode": "closed",
        "task_shard_count": 1,
        "result_layout": "object",
        "options": {"concurrency": 8, "headers": {"X-A": "1"}},
        "created_at": "2026-09-21T14:13:20.000Z",
        "expires_at": "2026-09-22T14:13:20.000Z",
        "view": "latest-per-task",
        "total": 10,
        "counts": {"pending": 1, "running": 3, "succeeded": 3, "failed": 3, "cancelled": 0, "unchanged": 0},
        "run": {
            "id": "run_1",
            "number": 1,
            "state": "running",
            "reason_code": None,
            "total": 10,
            "counts": {"pending": 1, "running": 3, "succeeded": 3, "failed": 3, "cancelled": 0, "unchanged": 0},
            "created_at": "2026-09-21T14:13:20.000Z",
            "ended_at": None,
            "lineage": None,
        },
        "ingest": None,
        "invalid_lines": 0,
        "rate": 3.0,
        "eta": 1.3,
        "task_time": None,
        "transfers": None,
        "top_errors": [{"code": "timeout", "count": 2}, {"code": "dns", "count": 1}],
    }


async def store_progress(system: System, job: Job, *progress: TaskProgress, due_at: float | None = START + 600) -> None:
    rows = [
        Document(
            PROGRESS,
            job.tenant,
            progress_id(each.run_id, each.index),
            msgspec.json.encode(each),
            due_at=due_at,
            job_id=job.job_id,
        )
        for each in progress
    ]
    for start in range(0, len(rows), 25):
        await system.records.documents.create_documents(rows[start : start + 25])


async def test_downloads_in_progress_are_added_up(system: System) -> None:
    """Those of the latest run that an attempt has."""
    job = msgspec.structs.replace(job_of(6), kind=JobKind.DOWNLOAD)
    await seed(system, job)
    assert (await shown(system, job))["transfers"] is None
    await store_progress(
        system,
        job,
        TaskProgress(RunId("run_1"), 0, 1, "a", START, 300, 1000, 10.0),
        TaskProgress(RunId("run_1"), 1, 1, "b", START, 500, 2000, 5.5),
        TaskProgress(RunId("run_0"), 2, 1, "c", START, 9, 9),
        TaskProgress(RunId("run_1"), 3, 1, "", START, 9, 9),
    )
    found = await shown(system, job)
    assert found["transfers"] == {"tasks": 2, "done": 800, "total": 3000, "rate": 15.5}
    view = view_job(Snapshot.of(found))
    assert (view.done, view.rate) == ("0 of 6 done, now 800 B of 2.9 KiB", "15 B/s")
    await store_progress(system, job, TaskProgress(RunId("run_1"), 4, 1, "d", START, 100, None))
    # It waits to resume.
    await store_progress(system, job, TaskProgress(RunId("run_1"), 5, 2, "e", START, 100, 200, 70.0), due_at=None)
    assert (await shown(system, job))["transfers"] == {"tasks": 3, "done": 900, "total": None, "rate": 15.5}


async def test_a_finished_download_is_no_longer_in_progress(system: System) -> None:
    """Its document stays until it is due; the last rate in it was that of a moment."""
    job = msgspec.structs.replace(job_of(500), kind=JobKind.DOWNLOAD)
    await seed(system, job)
    finished = [TaskProgress(RunId("run_1"), index, 1, "a", START, 9, 9, 1e9) for index in range(450)]
    await store_progress(system, job, *finished, TaskProgress(RunId("run_1"), 499, 1, "b", START, 300, 1000, 10.0))
    await finish(system, job, range(450))
    assert (await shown(system, job))["transfers"] == {"tasks": 1, "done": 300, "total": 1000, "rate": 10.0}
    await finish(system, job, range(499, 500))
    assert (await shown(system, job))["transfers"] is None


@pytest.mark.parametrize("state", list(RunState))
@pytest.mark.parametrize("held", [0, 2, 1000])
async def test_counts_add_up_to_the_total(system: System, state: RunState, held: int) -> None:
    job = job_of(10, state, ended_at=START + 5)
    await seed(system, job)
    await finish(system, job, range(4))
    await system.coordinator.acquire("run:run_1", "worker-a", held, 1000, 60)
    counts = (await shown(system, job))["run"]["counts"]
    assert sum(counts.values()) == 10
    assert counts["running"] == (min(held, 6) if state in {RunState.INGESTING, RunState.RUNNING} else 0)


async def test_a_total_that_is_not_set_yet_makes_nothing_negative(system: System) -> None:
    job = job_of(5)
    await seed(system, job)
    await finish(system, job, range(5))
    early = job_of(0, RunState.INGESTING, last_batch=False)
    await system.coordinator.acquire("run:run_1", "worker-a", 3, 1000, 60)
    found = await shown(system, early)
    assert found["run"]["counts"] == {
        "pending": 0,
        "running": 0,
        "succeeded": 5,
        "failed": 0,
        "cancelled": 0,
        "unchanged": 0,
    }
    assert found["eta"] is None


async def test_the_rate_is_that_of_the_last_seconds(system: System, clock: StillClock) -> None:
    job = job_of(10_000)
    await seed(system, job)
    await shown(system, job)
    done = 0
    for step in range(40):
        clock.at += 1
        pace = 10 if step < 20 else 50
        await finish(system, job, range(done, done + pace))
        done += pace
        found = await shown(system, job)
    assert done == 1200
    assert found["rate"] == pytest.approx(50)
    assert found["eta"] == pytest.approx(8800 / 50)


async def test_a_standstill_shows_as_one(system: System, clock: StillClock) -> None:
    job = job_of(100)
    await seed(system, job)
    await finish(system, job, range(50))
    for _ in range(30):
        clock.at += 1
        found = await shown(system, job)
    assert (found["rate"], found["eta"]) == (0, None)


async def test_many_readers_sample_at_most_twice_a_second(system: System, clock: StillClock) -> None:
    job = job_of(100)
    await seed(system, job)
    for _ in range(1000):
        clock.at += 0.02
        await shown(system, job)
    kept = await system.coordinator.cached("rate:run_1")
    assert kept is not None
    samples = msgspec.json.decode(kept)
    assert len(samples) <= 22
    assert samples[0][0] == pytest.approx(clock.at - 10, abs=1.1)


async def test_a_reader_that_was_away_sees_the_pace_since(system: System, clock: StillClock) -> None:
    job = job_of(1000)
    await seed(system, job)
    clock.at += 100
    await finish(system, job, range(100))
    assert (await shown(system, job))["rate"] == pytest.approx(1), "nobody looked before: since the run began"
    clock.at += 30
    await finish(system, job, range(100, 400))
    assert (await shown(system, job))["rate"] == pytest.approx(10)
    clock.at += 61
    assert (await shown(system, job))["rate"] == pytest.approx(400 / 191, abs=0.001), "the samples have lapsed"


async def test_a_clock_that_went_back_does_no_harm(system: System, clock: StillClock) -> None:
    job = job_of(100)
    await seed(system, job)
    clock.at += 50
    await finish(system, job, range(50))
    await shown(system, job)
    clock.at -= 45
    assert (await shown(system, job))["rate"] == pytest.approx(10)


async def test_samples_of_another_version_are_dropped(system: System, clock: StillClock) -> None:
    job = job_of(100)
    await seed(system, job)
    await system.coordinator.cache("rate:run_1", b'{"not": "ours"}', 60)
    clock.at += 10
    assert (await shown(system, job))["rate"] == 0


@pytest.mark.parametrize("state", [RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED])
async def test_an_ended_run_has_its_average_and_no_time_left(
    system: System, clock: StillClock, state: RunState
) -> None:
    job = job_of(100, state, ended_at=START + 20)
    await seed(system, job)
    await finish(system, job, range(100))
    clock.at += 1000
    found = await shown(system, job)
    assert (found["rate"], found["eta"]) == (5.0, None)
    assert found["run"]["ended_at"] == "2026-09-21T14:13:40.000Z"


async def test_a_run_that_ended_as_it_began(system: System) -> None:
    found = await shown(system, job_of(0, RunState.COMPLETED, ended_at=START))
    assert (found["rate"], found["eta"], found["top_errors"]) == (0, None, [])


async def test_a_paused_run_has_no_time_left(system: System, clock: StillClock) -> None:
    job = job_of(100, RunState.PAUSED)
    await seed(system, job)
    await finish(system, job, range(10))
    clock.at += 10
    assert (await shown(system, job))["eta"] is None
