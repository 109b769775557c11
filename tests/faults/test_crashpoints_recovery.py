"""A2 for the monitor: die at every crash point of what takes over stuck tasks, buries workers and catches runs that are
late; come back, and nothing is lost, done twice, or looked at for ever."""

import signal
import time
from pathlib import Path

import pytest

from conveyor.clock import SystemClock
from conveyor.engines.queue import Depth, run_queues
from conveyor.engines.tasks import TaskFilter
from conveyor.jobs.deadlines import DEADLINE
from conveyor.model import BEAT, BEAT_TENANT, PROGRESS, Job, JobId
from conveyor.settings import Settings
from conveyor.states import RunState, TaskStatus
from conveyor.system import System, open_system
from tests.faults.forks import Forks
from tests.faults.recovery_child import HANGS, TENANT, TOTAL
from tests.support.dead_letters import dead_letters

CHILD = "tests.faults.recovery_child"
# Seconds until there is another process: what the dead one held has lapsed, and its tasks have not moved for long.
RESTART = 1.0
# A second process may have to die at a point that only a dead worker leads to.
STUCK = [
    ("monitor.take.before:1",),
    ("monitor.take.after:1",),
    ("monitor.send.before:1",),
    ("monitor.send.after:1",),
    ("monitor.take.after:1", "monitor.take.after:1"),
    ("monitor.send.after:1", "progress.begin.after:1"),
    ("worker.beat.before:1",),
    ("worker.beat.after:1",),
    ("worker.beat.after:2", "monitor.worker.before:1"),
]
OVERDUE = ["monitor.overdue.before", "monitor.overdue.after", "monitor.requeue.after", "queue.send.before"]
EXPIRED = [
    "monitor.expire.before",
    "monitor.expire.after",
    "queue.bury.before",
    "queue.bury.after",
    "monitor.letter.after",
    "lifecycle.move.before",
    "lifecycle.move.after",
]


def killed_then_done(children: Forks, place: Path, scenario: str, *points: str) -> None:
    for point in points:
        ended = children.run(place, scenario=scenario, crash_at=point)
        assert ended == -signal.SIGKILL, f"{point}:\n{(place / 'log').read_text()}"
        time.sleep(RESTART)
    assert children.run(place, scenario=scenario, crash_at=None) == 0, (place / "log").read_text()


async def found(system: System, place: Path) -> Job:
    job = await system.records.jobs.job(TENANT, JobId((place / "job").read_text()))
    assert job is not None
    for queue in run_queues(job.run.run_id):
        assert await system.queue.depth(queue) == Depth(0, 0, 0)
    assert (await system.records.documents.documents(BEAT, BEAT_TENANT, None, 10)).items == []
    assert (await system.records.documents.documents(PROGRESS, TENANT, None, 10)).items == []
    counts = await system.tasks.counts(job.key)
    assert counts == await system.tasks.recount(job.key)
    assert counts.ended == job.run.total
    return job


async def events(system: System, job: Job) -> list[str]:
    """What was told of the run's moves."""
    told = [event.event for event in (await system.records.outbox.events(TENANT, job.job_id, None, 100)).items]
    return [event for event in told if event not in ("run.progress", "tasks.failed")]


@pytest.mark.parametrize("points", STUCK, ids=" ".join)
async def test_stuck_tasks_and_lost_workers(children: Forks, place: Path, points: tuple[str, ...]) -> None:
    killed_then_done(children, place, "stuck", *points)
    async with open_system(Settings(data=place / "data"), SystemClock()) as system:
        job = await found(system, place)
        assert job.state is RunState.COMPLETED
        tasks = await system.tasks.page(job.key, 0, None, 10, TaskFilter())
        assert {(task.status, task.attempts) for task in tasks} == {(TaskStatus.SUCCEEDED, 1)}
        assert await dead_letters(system, job.tenant) == []


@pytest.mark.parametrize("point", OVERDUE)
async def test_a_run_past_its_deadline(children: Forks, place: Path, point: str) -> None:
    killed_then_done(children, place, "overdue", f"{point}:1")
    async with open_system(Settings(data=place / "data"), SystemClock()) as system:
        job = await found(system, place)
        assert (job.state, job.run.total) == (RunState.COMPLETED, TOTAL)
        told = await events(system, job)
        assert [event for event in told if event != "run.overdue"] == ["job.accepted", "run.completed"]
        assert (await system.tasks.counts(job.key)).succeeded == TOTAL
        assert await dead_letters(system, job.tenant) == []


@pytest.mark.parametrize("point", EXPIRED)
async def test_a_run_that_is_given_up(children: Forks, place: Path, point: str) -> None:
    killed_then_done(children, place, "expired", f"{point}:1")
    async with open_system(Settings(data=place / "data"), SystemClock()) as system:
        job = await found(system, place)
        assert job.state is RunState.FAILED
        assert job.reason is not None
        assert job.reason.startswith("deadline: ")
        assert await events(system, job) == ["job.accepted", "run.failed"]
        (task,) = await system.tasks.at(job.key, [HANGS])
        assert task.status is TaskStatus.CANCELLED
        # Written before the run is moved: again, should that be done again.
        letters = (await system.queue.dead_letters(None, 10)).items
        assert 1 <= len(letters) <= 2
        assert {letter.reason for letter in letters} == {job.reason}
        assert (await system.records.documents.due_documents(DEADLINE, SystemClock().now() + 1e9, 10)) == []
