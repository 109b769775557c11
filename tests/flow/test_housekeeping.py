"""Housekeeping in numbers: what quiet runs cost, what several processes share, and what the sampler publishes."""

import ast
import asyncio
import inspect
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import conveyor
from conveyor.coordination import parallel
from conveyor.coordination.buckets import Buckets, LeasedBuckets
from conveyor.coordination.durations import count_durations
from conveyor.coordination.waits import Wait, publish_wait
from conveyor.engines.queue import Depth, Outgoing, run_queue
from conveyor.jobs.active_jobs import ActiveJobs
from conveyor.model import WORKERS, Job
from conveyor.notify import dispatcher
from conveyor.notify.dispatcher import OutboxDispatcher
from conveyor.notify.progress_notifier import ProgressNotifier
from conveyor.recover.retention import SETTLE_SECONDS, Retention
from conveyor.recover.sampler import Sampler
from conveyor.recover.sweeper import Sweeper, Swept
from conveyor.states import RunState
from conveyor.system import System
from conveyor.telemetry import metrics
from tests.support.make_jobs import ACME, end
from tests.support.small_fleet import Fleet, open_fleet


class Counting:
    """A seam that counts its calls, and how many were under way at once."""

    def __init__(self, seam: Any, calls: Counter[str]) -> None:
        self._seam = seam
        self._calls = calls
        self._now = 0
        self.most = 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._seam, name)
        if not inspect.iscoroutinefunction(call):
            return call

        async def counted(*given: Any, **named: Any) -> Any:
            self._calls[name] += 1
            self._now += 1
            self.most = max(self.most, self._now)
            await asyncio.sleep(0)
            try:
                return await call(*given, **named)
            finally:
                self._now -= 1

        return counted


def counted(system: System) -> tuple[System, Counter[str]]:
    calls: Counter[str] = Counter()
    records = replace(system.records, jobs=Counting(system.records.jobs, calls))  # type: ignore[arg-type]
    tasks, queue = Counting(system.tasks, calls), Counting(system.queue, calls)
    return replace(system, records=records, tasks=tasks, queue=queue), calls  # type: ignore[arg-type]


def sweeper_of(fleet: Fleet, system: System, **given: Any) -> Sweeper:
    return Sweeper(system.records, system.tasks, system.queue, fleet.lifecycle, fleet.clock, **given)


async def lose_references(fleet: Fleet, job: Job) -> None:
    await fleet.system.queue.drop(run_queue(job.run.run_id))


class TestQuietRuns:
    async def test_their_checks_get_rare(self) -> None:
        async with open_fleet() as fleet:
            runs = 5
            for _ in range(runs):
                await fleet.submit(3)
            system, calls = counted(fleet.system)
            sweeper = sweeper_of(fleet, system)
            for _ in range(1800):
                await sweeper.tick()
                fleet.clock.advance(2.0)
            # An hour: a check a minute for each, and a few more at first.
            assert calls["depth"] <= runs * 70
            assert calls["counts"] <= runs * 70

    async def test_a_run_that_moves_costs_no_look_at_its_queues(self) -> None:
        async with open_fleet() as fleet:
            job = await fleet.submit(500)
            system, calls = counted(fleet.system)
            sweeper = sweeper_of(fleet, system)
            await sweeper.run_once()
            before = calls["depth"]
            for index in range(100):
                await fleet.system.tasks.finish(job.key, [end(index)])
                fleet.clock.advance(2.0)
                assert (await sweeper.run_once()).checked == 1
            assert calls["depth"] == before

    async def test_references_that_are_lost_late_are_found_within_the_pause(self) -> None:
        async with open_fleet() as fleet:
            job = await fleet.submit(300)
            sweeper = fleet.sweeper
            for _ in range(300):
                await sweeper.run_once()
                fleet.clock.advance(2.0)
            await lose_references(fleet, job)
            lost_at = fleet.clock.now()
            while not (await sweeper.run_once()).requeued:
                fleet.clock.advance(2.0)
            assert fleet.clock.now() - lost_at <= 60.0

    async def test_references_that_are_lost_while_it_moves_are_found_soon(self) -> None:
        async with open_fleet() as fleet:
            job = await fleet.submit(300)
            for index in range(20):
                await fleet.sweeper.run_once()
                await fleet.system.tasks.finish(job.key, [end(index)])
                fleet.clock.advance(2.0)
            await lose_references(fleet, job)
            swept = [await fleet.sweeper.run_once()]
            fleet.clock.advance(2.0)
            swept.append(await fleet.sweeper.run_once())
            assert sum(each.requeued for each in swept) == 280

    async def test_a_change_of_its_row_ends_the_pause(self) -> None:
        async with open_fleet() as fleet:
            job = await fleet.submit(3)
            for _ in range(300):
                await fleet.sweeper.run_once()
                fleet.clock.advance(2.0)
            await fleet.sweeper.run_once()
            assert await fleet.sweeper.run_once() == Swept()
            await fleet.move(job, RunState.PAUSED)
            await fleet.sweeper.run_once()
            await fleet.move(await fleet.job(job.job_id), RunState.RUNNING)
            assert (await fleet.sweeper.run_once()).checked == 1

    async def test_the_maximum_lifetime_waits_for_no_pause(self) -> None:
        async with open_fleet() as fleet:
            job = await fleet.submit(3, max_lifetime=1000.0)
            while (await fleet.job(job.job_id)).state is RunState.RUNNING:
                await fleet.sweeper.run_once()
                fleet.clock.advance(2.0)
            assert fleet.clock.now() - job.run.created_at <= 1004.0

    async def test_new_runs_come_before_quiet_ones(self) -> None:
        async with open_fleet() as fleet:
            for _ in range(3):
                await fleet.submit(3)
            await fleet.sweeper.run_once()
            order: list[str] = []

            class Watching:
                def __getattr__(self, name: str) -> Any:
                    return getattr(fleet.system.tasks, name)

                async def counts(self, run: Any) -> Any:
                    order.append(run.run_id)
                    return await fleet.system.tasks.counts(run)

            fleet.sweeper._tasks = Watching()  # type: ignore[assignment]
            new = await fleet.submit(3)
            fleet.clock.advance(2.0)
            await fleet.sweeper.run_once()
            assert order[0] == new.run.run_id


async def test_the_roles_of_a_process_read_the_active_jobs_together() -> None:
    async with open_fleet() as fleet:
        for _ in range(3):
            await fleet.submit(3)
        system, calls = counted(fleet.system)
        active = ActiveJobs(system.records.jobs, fleet.clock, fresh_seconds=2.0)
        sweeper = sweeper_of(fleet, system, active=active)
        notifier = ProgressNotifier(system.records, system.tasks, system.coordinator, fleet.clock, 60.0, active)
        sampler = Sampler(system, active)
        for _ in range(30):
            for role in (sweeper, notifier, sampler):
                await role.tick()
            fleet.clock.advance(2.0)
        assert calls["active_jobs"] == 30


async def test_many_active_jobs_are_read_rarely() -> None:
    class Full:
        reads = 0

        async def active_jobs(self) -> list[None]:
            self.reads += 1
            return [None] * 1000

    class Three(Buckets):
        processes = 3

    async with open_fleet() as fleet:
        for buckets, expected in ((Buckets(), 10), (Three(), 7)):
            jobs: Any = Full()
            active = ActiveJobs(jobs, fleet.clock, buckets, fresh_seconds=2.0)
            for _ in range(50):
                await active.read()
                fleet.clock.advance(2.0)
            # Every 10 seconds, and every 15 where others read them, too.
            assert jobs.reads == expected


class TestProcesses:
    async def test_two_processes_share_every_role(self) -> None:
        """Each job is swept, dispatched and purged by one of them."""
        async with open_fleet() as fleet:
            jobs = [await fleet.submit(1) for _ in range(60)]
            processes = [LeasedBuckets(fleet.system.coordinator, fleet.clock) for _ in range(2)]
            for process in (*processes, *processes):
                await process.tick()
            swept = [sweeper_of(fleet, fleet.system, buckets=process) for process in processes]
            checked = [(await sweeper.run_once()).checked for sweeper in swept]
            assert sum(checked) == len(jobs)
            assert min(checked) > 0
            system = fleet.system
            told = []
            for process in processes:
                role = OutboxDispatcher(system.settings, system.records, system.tasks, fleet.clock, None, process)
                told.append((await role.run_once()).notices)
            assert sum(told) == len(jobs)
            assert min(told) > 0
            for job in jobs:
                await system.records.jobs.mark_deleted(ACME, job.job_id)
            fleet.clock.advance(SETTLE_SECONDS + 1)
            removed = []
            for process in processes:
                role = Retention(*engines(system), fleet.clock, process)
                removed.append((await role.run_once()).jobs)
            assert sum(removed) == len(jobs)
            assert min(removed) > 0

    async def test_one_that_does_not_lead_shows_no_samples(self) -> None:
        class Follower(Buckets):
            leads = False  # type: ignore[assignment]

        async with open_fleet() as fleet:
            await fleet.submit(3)
            await Sampler(fleet.system).tick()
            assert metrics.QUEUE_MESSAGES.series["runs", "ready"] == 1
            await Sampler(fleet.system, buckets=Follower()).tick()
            assert not any(gauge.series for gauge in metrics.SAMPLED)


async def test_items_of_others_hide_none() -> None:
    """A page full of what belongs to a process that does not get on is read past."""

    class Half(Buckets):
        processes = 2

        def owns(self, key: str) -> bool:
            return key == last.job_id

    async with open_fleet() as fleet:
        jobs = [await fleet.submit(1) for _ in range(30)]
        last = jobs[-1]
        system = fleet.system
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dispatcher, "_EVENTS", 5)
            role = OutboxDispatcher(system.settings, system.records, system.tasks, fleet.clock, None, Half())
            told = [(await role.run_once()).notices for _ in range(8)]
        assert sum(told) == 1


def engines(system: System) -> tuple[Any, ...]:
    return system.records, system.tasks, system.queue, system.coordinator, system.blobs


def test_no_count_is_read_before_a_wait_and_written_after_it() -> None:
    """`counts.x += await …` loses what other items of the pass add meanwhile."""
    for folder in ("recover", "notify"):
        for path in (Path(conveyor.__file__).parent / folder).glob("*.py"):
            text = path.read_text()
            for node in ast.walk(ast.parse(text)) if "coordination.isolation" in text else ():
                if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute):
                    awaited = [each for each in ast.walk(node.value) if isinstance(each, ast.Await)]
                    assert not awaited, f"{path.name}:{node.lineno}"


async def test_work_on_many_items_is_bounded() -> None:
    async with open_fleet() as fleet:
        for _ in range(3 * parallel.AT_ONCE):
            await fleet.submit(1)
        calls: Counter[str] = Counter()
        tasks: Any = Counting(fleet.system.tasks, calls)
        await sweeper_of(fleet, replace(fleet.system, tasks=tasks)).run_once()
        assert 1 < tasks.most <= parallel.AT_ONCE


async def test_a_small_job_is_purged_in_one_pass() -> None:
    async with open_fleet() as fleet:
        jobs = [await fleet.submit(5) for _ in range(50)]
        for job in jobs:
            await fleet.system.records.jobs.mark_deleted(ACME, job.job_id)
        fleet.clock.advance(SETTLE_SECONDS + 1)
        removed = await Retention(*engines(fleet.system), fleet.clock).run_once()
        assert (removed.jobs, removed.tasks) == (50, 250)
        assert await fleet.system.records.jobs.purgeable_jobs(fleet.clock.now(), 100) == []


class TestWorkWaiting:
    async def test_from_what_waits_and_who_is_there(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        async with open_fleet(worker_concurrency=10, cloudwatch_namespace="Conveyor/test") as fleet:
            job, paused, blocked = [await fleet.submit(1000, concurrency=1000) for _ in range(3)]
            coordinator = fleet.system.coordinator
            await fleet.move(paused, RunState.PAUSED)
            await publish_wait(coordinator, blocked.run.run_id, Wait("replacing", "it waits"), 600.0)
            await count_durations(coordinator, {job.run.run_id: [2.0] * 10})
            for name in ("one", "two"):
                await coordinator.acquire(WORKERS, name, 1, 100, 600.0)
            await Sampler(fleet.system).tick()
            assert metrics.TASKS_WAITING.series[()] == 1000
            assert metrics.WORK_WAITING_SECONDS.series[()] == pytest.approx(1000 * 2.0 / 20, rel=0.1)
        (line,) = [json.loads(line) for line in capsys.readouterr().out.splitlines() if "_aws" in line]
        (directive,) = line["_aws"]["CloudWatchMetrics"]
        assert directive["Namespace"] == "Conveyor/test"
        assert directive["Dimensions"] == [[]]
        assert {"Name": "WorkWaitingSeconds", "Unit": "Seconds"} in directive["Metrics"]
        assert line["WorkWaitingSeconds"] == metrics.WORK_WAITING_SECONDS.series[()]
        assert (line["TasksWaiting"], line["Workers"]) == (1000, 2)
        assert line["_aws"]["Timestamp"] == int(fleet.clock.now() * 1000)

    async def test_nothing_is_printed_unless_asked_for(self, capsys: pytest.CaptureFixture[str]) -> None:
        async with open_fleet() as fleet:
            await Sampler(fleet.system).tick()
        assert "_aws" not in capsys.readouterr().out


class Sharing:
    """A queue that all runs share, as SQS does above its limit of queues."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    async def depth(self, name: Any) -> Depth:
        return Depth(0, 0, 0, unknown=True) if name.startswith("run:") else await self._queue.depth(name)

    async def shared_depth(self) -> Depth:
        return Depth(7, 4, 1)


async def test_a_shared_queue_counts_once() -> None:
    async with open_fleet() as fleet:
        for _ in range(5):
            await fleet.submit(3)
        await fleet.system.queue.send(run_queue((await fleet.submit(1)).run.run_id), [Outgoing(b"x")])
        queue: Any = Sharing(fleet.system.queue)
        await Sampler(replace(fleet.system, queue=queue)).tick()
        shown = metrics.QUEUE_MESSAGES.series
        assert [shown["runs", state] for state in ("ready", "in_flight", "delayed")] == [7, 4, 1]
        assert [shown["recovery", state] for state in ("ready", "in_flight", "delayed")] == [0, 0, 0]
