"""Pace, end to end: hosts get as many requests at once as they can take, in lanes of both kinds."""

import statistics
from collections import Counter
from typing import Any

import pytest

from conveyor.accept.option_changes import change_options
from conveyor.coordination.paces import list_paces
from conveyor.model import Backoff, Job, JobKind, Outcome, Pace, TaskError, TaskRef
from conveyor.process.worker import Worker
from conveyor.states import TaskStatus
from tests.support.api import Api
from tests.support.local_fetchers import LocalFetchers
from tests.support.make_jobs import ACME
from tests.support.small_fleet import Act, Fleet, Recording, open_fleet, success

QUICK = Backoff(base=0.5, cap=1.0)

both_lanes = pytest.mark.parametrize("remote", [False, True], ids=["lane", "remote lane"])


def host_of(ref: TaskRef) -> str:
    return ref.input.split("/")[2]


def refusal(retry_after: float | None = None) -> Outcome:
    error = TaskError("http_429", "slow down")
    return Outcome(TaskStatus.FAILED, http_status=429, error=error, retry_after=retry_after)


def worker_of(fleet: Fleet, act: Act, *, remote: bool) -> Worker:
    fleet.executor = Recording(fleet.clock, act, target=host_of)
    executor: Any = LocalFetchers(fleet.executor) if remote else fleet.executor
    return fleet.worker(executor)


async def submit(fleet: Fleet, hosts: dict[str, int], **options: Any) -> Job:
    urls = [f"http://{host}/{number}" for host, count in hosts.items() for number in range(count)]
    return await fleet.submit(urls, **{"kind": JobKind.FETCH, "handler": None, "pace": Pace.AUTO, **options})


@both_lanes
async def test_a_host_gets_what_it_can_take(remote: bool) -> None:
    """It refuses above 20 at once. Another host is not held up by it, and every task succeeds."""
    async with open_fleet() as fleet:

        async def act(job: Job, ref: TaskRef) -> Outcome:
            if host_of(ref) == "small.example" and fleet.executor.running["small.example"] > 20:
                return refusal()
            await fleet.clock.sleep(0.05)
            outcome = success()
            outcome.elapsed = 0.05
            return outcome

        job = await submit(fleet, {"small.example": 600, "large.example": 600}, concurrency=200, backoff=QUICK)
        assert job.options.pace is Pace.AUTO
        fleet.start(worker_of(fleet, act, remote=remote))
        await fleet.ended(job, within=60)
        await fleet.check(job)
        counts = await fleet.counts(job)
        assert counts.failed == 0
        refused = sum(start.attempt > 1 for start in fleet.executor.starts)
        assert refused <= 60, "next to none, while the pace is found"
        assert fleet.executor.most["large.example"] >= 64
        await fleet.passing(2.0)
        shown = await list_paces(fleet.system.coordinator, ACME)
        assert shown["small.example"].limit <= 20 < shown["large.example"].limit


async def test_a_lane_of_one_host_sends_ahead_and_its_fetchers_run_what_the_host_can_take() -> None:
    """Few requests at once must not mean few references in a frame."""
    async with open_fleet() as fleet:
        ahead: list[int] = []

        async def act(job: Job, ref: TaskRef) -> Outcome:
            ahead.append(sum(len(orders) for orders in fetchers._orders.values()))
            if fleet.executor.running["one.example"] > 20:
                return refusal()
            await fleet.clock.sleep(0.05)
            outcome = success()
            outcome.elapsed = 0.05
            return outcome

        fleet.executor = Recording(fleet.clock, act, target=host_of)
        fetchers = LocalFetchers(fleet.executor)
        worker: Any = fleet.worker(fetchers)
        job = await submit(fleet, {"one.example": 1200}, concurrency=200, backoff=QUICK)
        fleet.start(worker)
        await fleet.ended(job, within=60)
        await fleet.check(job)
        refused = sum(start.attempt > 1 for start in fleet.executor.starts)
        assert refused <= 60
        assert statistics.median(ahead) >= 24
        assert fleet.executor.most["one.example"] <= 32, "the limit doubles until it is refused"


async def test_a_lane_that_has_sent_all_of_its_references_gets_slots_as_the_limit_grows() -> None:
    """They are at its fetchers, which run no more than its slots."""
    async with open_fleet() as fleet:

        async def act(job: Job, ref: TaskRef) -> Outcome:
            await fleet.clock.sleep(1.0)
            outcome = success()
            outcome.elapsed = 1.0
            return outcome

        job = await submit(fleet, {"one.example": 60})
        fleet.start(worker_of(fleet, act, remote=True))
        await fleet.ended(job, within=60)
        assert fleet.executor.most["one.example"] >= 16


@both_lanes
async def test_retry_after_holds_for_the_whole_host(remote: bool) -> None:
    async with open_fleet() as fleet:
        began = fleet.clock.now()

        async def act(job: Job, ref: TaskRef) -> Outcome:
            if host_of(ref) == "busy.example" and fleet.clock.now() < began + 10:
                return refusal(30.0)
            await fleet.clock.sleep(0.05)
            return success()

        job = await submit(fleet, {"busy.example": 100, "other.example": 20}, backoff=QUICK)
        fleet.start(worker_of(fleet, act, remote=remote))
        await fleet.ended(job, within=90)
        await fleet.check(job)
        assert (await fleet.counts(job)).failed == 0
        times = Counter(round(start.at - began) for start in fleet.executor.starts if start.target == "busy.example")
        assert sum(count for at, count in times.items() if at < 29) <= 8, "those that were sent at first"
        others = [start.at - began for start in fleet.executor.starts if start.target == "other.example"]
        assert max(others) < 5
        first = min(start.at for start in fleet.executor.starts if start.at - began > 20)
        at_once = sum(start.at - first < 0.04 for start in fleet.executor.starts if start.at >= first)
        assert at_once <= 4, "it begins with a few after the pause"


@both_lanes
async def test_a_paused_host_with_many_tasks_holds_up_no_other(remote: bool) -> None:
    """More of its tasks come first than a lane lets wait."""
    async with open_fleet() as fleet:
        began = fleet.clock.now()

        async def act(job: Job, ref: TaskRef) -> Outcome:
            if host_of(ref) == "busy.example" and fleet.clock.now() < began + 10:
                return refusal(40.0)
            await fleet.clock.sleep(0.05)
            return success()

        job = await submit(fleet, {"busy.example": 1500, "other.example": 20}, backoff=QUICK)
        fleet.start(worker_of(fleet, act, remote=remote))
        await fleet.until(lambda: fleet.executor.most["other.example"] > 0, within=4)
        await fleet.ended(job, within=200)
        await fleet.check(job)
        counts = await fleet.counts(job)
        assert (counts.succeeded, counts.failed) == (1520, 0)
        starts = [start for start in fleet.executor.starts if start.target == "busy.example"]
        assert len(starts) <= 1500 + 8, "only those that were refused had a second attempt"
        assert sum(start.attempt > 1 for start in starts) == len(starts) - 1500
        assert sum(start.at - began < 39 for start in starts) <= 8


@both_lanes
async def test_a_slow_host_with_many_tasks_holds_up_no_other(remote: bool) -> None:
    async with open_fleet() as fleet:

        async def act(job: Job, ref: TaskRef) -> Outcome:
            await fleet.clock.sleep(25.0 if host_of(ref) == "slow.example" else 0.05)
            return success()

        await submit(fleet, {"slow.example": 1500, "other.example": 20})
        fleet.start(worker_of(fleet, act, remote=remote))
        await fleet.until(lambda: sum(s.target == "other.example" for s in fleet.executor.starts) == 20, within=40)
        assert max(start.attempt for start in fleet.executor.starts) == 1


async def test_downloads_of_a_slow_host_hold_up_none_of_others() -> None:
    """It takes one at a time, for hours."""
    async with open_fleet() as fleet:

        async def act(job: Job, ref: TaskRef) -> Outcome:
            if host_of(ref) == "slow.example" and fleet.executor.running["slow.example"] > 1:
                return refusal()
            await fleet.clock.sleep(3600.0 if host_of(ref) == "slow.example" else 1.0)
            return success()

        await submit(fleet, {"slow.example": 30, "other.example": 5}, kind=JobKind.DOWNLOAD, backoff=QUICK, attempts=9)
        fleet.start(worker_of(fleet, act, remote=False))
        await fleet.until(lambda: sum(s.target == "other.example" for s in fleet.executor.starts) == 5, within=300)


@both_lanes
async def test_jobs_share_the_pace_of_a_host_and_can_leave_it(remote: bool) -> None:
    async with open_fleet() as fleet:

        async def act(job: Job, ref: TaskRef) -> Outcome:
            await fleet.clock.sleep(0.5)
            outcome = success()
            outcome.elapsed = 1.0 if fleet.executor.running["one.example"] <= 8 else 4.0
            await fleet.clock.sleep(0.5)
            return outcome

        jobs = [await submit(fleet, {"one.example": 40}) for _ in range(3)]
        fleet.start(worker_of(fleet, act, remote=remote))
        await fleet.until(lambda: len(fleet.executor.starts) > 60, within=60)
        assert fleet.executor.most["one.example"] <= 16
        busy = {job.job_id: fleet.executor.most[job.run.run_id] for job in jobs}
        assert min(busy.values()) > 0, "each has its share"
        await change_options(fleet.system, await fleet.job(jobs[0].job_id), {"pace": "fixed"})
        await fleet.ended(*jobs, within=120)
        for job in jobs:
            await fleet.check(job)


async def test_hosts_are_shown(server: Api) -> None:
    assert (await server.get("/v1/hosts")).json == {"items": [], "next_cursor": None}
