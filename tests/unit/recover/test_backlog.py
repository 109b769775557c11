"""The figure for autoscaling: work waiting, in seconds of fleet time."""

import msgspec
import pytest

from conveyor.engines.queue import Depth
from conveyor.recover.backlog import DEFAULT_SECONDS, HORIZON, QueueSample, RunSample, WorkWaiting, work_waiting

EMPTY = QueueSample(Depth(0, 0, 0), None)
RUN = RunSample(
    queue=QueueSample(Depth(10, 0, 0), None),
    recovery=EMPTY,
    unfinished=1000,
    running=0,
    concurrency=100,
    task_seconds=2.0,
    is_blocked=False,
    progress=(0, 1000, 0.0),
    moved_at=0.0,
)


def like(**changes: object) -> RunSample:
    return msgspec.structs.replace(RUN, **changes)


def test_an_idle_fleet_has_none() -> None:
    assert work_waiting([], 256) == WorkWaiting(0, 0)


def test_it_is_the_time_that_the_slots_take() -> None:
    assert work_waiting([RUN], 100) == WorkWaiting(1000, 20.0)
    assert work_waiting([RUN], 200).seconds == 10.0
    assert work_waiting([RUN, RUN], 200).seconds == 20.0


def test_tasks_that_run_do_not_wait() -> None:
    assert work_waiting([like(unfinished=64, running=64)], 64) == WorkWaiting(0, 0)
    # The number of running tasks lags behind the counts.
    assert work_waiting([like(unfinished=10, running=64)], 64) == WorkWaiting(0, 0)


def test_a_blocked_run_has_none() -> None:
    assert work_waiting([like(is_blocked=True)], 100) == WorkWaiting(0, 0)


def test_retries_that_are_not_due_do_not_count() -> None:
    delayed = QueueSample(Depth(0, 0, 10), None)
    assert work_waiting([like(queue=EMPTY, recovery=delayed)], 100) == WorkWaiting(0, 0)
    assert work_waiting([like(recovery=delayed)], 100).tasks == 500


def test_messages_of_unknown_state_may_be_ready() -> None:
    unknown = QueueSample(Depth(0, 0, 0, unknown=True), None)
    assert work_waiting([like(queue=unknown)], 100).tasks == 1000


def test_of_runs_that_share_a_queue_a_part_is_delayed() -> None:
    unknown = QueueSample(Depth(0, 0, 0, unknown=True), None)
    sharing = like(queue=unknown, recovery=unknown)
    for depth, tasks in (
        (Depth(0, 0, 30), 0),
        (Depth(10, 5, 15), 1000),
        (Depth(3, 0, 0), 2000),
        (Depth(0, 0, 0), 2000),
    ):
        assert work_waiting([sharing, sharing], 100, QueueSample(depth, None)).tasks == tasks
    delayed = QueueSample(Depth(0, 0, 30), None)
    assert work_waiting([RUN], 100, delayed).tasks == 1000, "it has a queue of its own"


def test_a_run_without_history_takes_the_mean_of_the_others() -> None:
    new = like(task_seconds=None)
    assert work_waiting([new], 100).seconds == 1000 * DEFAULT_SECONDS / 100
    known = [like(task_seconds=1.0, unfinished=0), like(task_seconds=5.0, unfinished=0)]
    assert work_waiting([new, *known], 100).seconds == pytest.approx(1000 * 3.0 / 100)


def test_what_more_workers_would_not_make_faster_does_not_count() -> None:
    narrow = like(concurrency=1, unfinished=1_000_000)
    assert work_waiting([narrow], 100) == WorkWaiting(1_000_000, HORIZON / 100)


def test_without_workers_work_still_waits() -> None:
    assert work_waiting([RUN], 0).seconds == 2000
