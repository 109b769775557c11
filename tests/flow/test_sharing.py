"""How runs share workers, slots and targets."""

import itertools
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from conveyor.model import (
    Job,
    Outcome,
    TaskRef,
    TenantId,
)
from tests.support.make_jobs import ACME, OTHER
from tests.support.small_fleet import Fleet, Recording, open_fleet, succeed, success

LEASE = 30.0


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with open_fleet(lease_seconds=LEASE) as opened:
        yield opened


class TestSharing:
    async def test_two_workers_share_a_run_within_its_concurrency(self, fleet: Fleet) -> None:
        async def slow(job: Job, ref: TaskRef) -> Outcome:
            await fleet.clock.sleep(0.4)
            return success()

        both = Recording(fleet.clock, slow)
        ran: Counter[str] = Counter()

        def counting(name: str) -> Recording:
            async def act(job: Job, ref: TaskRef) -> Outcome:
                ran[name] += 1
                return (await both.attempt(job, [ref]))[0]

            return Recording(fleet.clock, act)

        job = await fleet.submit(600, concurrency=12, chunk_size=10)
        fleet.start(fleet.worker(counting("one")))
        fleet.start(fleet.worker(counting("two")))
        await fleet.ended(job)
        await fleet.check(job)
        assert both.most[job.run.run_id] == 12
        assert sum(ran.values()) == 600

    async def test_concurrency_holds_while_other_runs_come_and_go(self, fleet: Fleet) -> None:
        """When a worker's slots are dealt anew, what it still runs counts against the run."""

        async def slow(job: Job, ref: TaskRef) -> Outcome:
            await fleet.clock.sleep(2.0)
            return success()

        fleet.executor.act = slow
        job = await fleet.submit(400, concurrency=20, chunk_size=5)
        for _ in range(2):
            fleet.start(fleet.worker(worker_concurrency=24))
        others = []
        for number in range(6):
            await fleet.passing(1.5)
            others.append(await fleet.submit(15, tenant=TenantId(f"t{number}"), chunk_size=5))
        await fleet.ended(job, *others)
        await fleet.check(job)
        assert fleet.executor.most[job.run.run_id] <= 20

    async def test_a_worker_keeps_within_its_slots(self, fleet: Fleet) -> None:
        async def slow(job: Job, ref: TaskRef) -> Outcome:
            await fleet.clock.sleep(0.4)
            return success()

        fleet.executor.act = slow
        jobs = [await fleet.submit(60, tenant=TenantId(f"t{number}"), chunk_size=7) for number in range(4)]
        fleet.start(fleet.worker(worker_concurrency=16))
        await fleet.ended(*jobs)
        assert fleet.executor.most["all"] <= 16 + 4, "those over the deal end with what they are doing"

    @pytest.mark.parametrize("tenant", [ACME, OTHER], ids=["same tenant", "another tenant"])
    async def test_a_small_job_is_done_long_before_a_huge_one(self, fleet: Fleet, tenant: TenantId) -> None:
        async def slow(job: Job, ref: TaskRef) -> Outcome:
            await fleet.clock.sleep(0.2)
            return success()

        fleet.executor.act = slow
        huge = await fleet.submit(50_000, concurrency=1000)
        fleet.start(fleet.worker())
        await fleet.until(lambda: len(fleet.executor.starts) > 500)
        before = fleet.clock.now()
        small = await fleet.submit(10, tenant=tenant)
        await fleet.ended(small, within=5)
        assert fleet.clock.now() - before < 2.0
        assert (await fleet.counts(huge)).ended < 5000

    async def test_more_runs_than_slots_all_get_there(self, fleet: Fleet) -> None:
        async def slow(job: Job, ref: TaskRef) -> Outcome:
            await fleet.clock.sleep(0.3)
            return success()

        fleet.executor.act = slow
        jobs = [await fleet.submit(6, tenant=TenantId(f"t{number % 2}"), chunk_size=2) for number in range(8)]
        fleet.start(fleet.worker(worker_concurrency=2))
        await fleet.ended(*jobs)
        for job in jobs:
            await fleet.check(job)

    async def test_a_higher_priority_goes_first(self, fleet: Fleet) -> None:
        async def slow(job: Job, ref: TaskRef) -> Outcome:
            await fleet.clock.sleep(0.2)
            return success()

        fleet.executor.act = slow
        low = await fleet.submit(400, priority=0, chunk_size=10)
        high = await fleet.submit(400, priority=5, chunk_size=10)
        fleet.start(fleet.worker(worker_concurrency=10))
        await fleet.ended(high)
        assert (await fleet.counts(low)).ended < 100


class TestTargets:
    async def test_requests_to_a_host_come_at_its_rate(self, fleet: Fleet) -> None:
        executor = Recording(fleet.clock, succeed, target=lambda ref: f"host{ref.index % 2}")
        job = await fleet.submit(60, rate_per_host=5.0)
        started = fleet.clock.now()
        fleet.start(fleet.worker(executor))
        fleet.start(fleet.worker(executor))
        await fleet.ended(job)
        await fleet.check(job)
        took = fleet.clock.now() - started
        assert 29 / 5.0 <= took <= 29 / 5.0 + 2.0
        for host in ("host0", "host1"):
            at = [start.at for start in executor.starts if start.target == host]
            assert len(at) == 30
            for first, last in itertools.combinations(range(30), 2):
                # A pass may be used a little after it was due, when the next is due already.
                assert last - first <= (at[last] - at[first] + 1.0) * 5.0

    async def test_a_rate_is_of_one_job(self, fleet: Fleet) -> None:
        executor = Recording(fleet.clock, succeed, target=lambda ref: "host")
        jobs = [await fleet.submit(10, rate_per_host=1.0, tenant=tenant) for tenant in (ACME, OTHER)]
        started = fleet.clock.now()
        fleet.start(fleet.worker(executor))
        await fleet.ended(*jobs)
        assert fleet.clock.now() - started < 12

    async def test_no_more_at_once_than_a_host_may_get(self, fleet: Fleet) -> None:
        async def slow(job: Job, ref: TaskRef) -> Outcome:
            await fleet.clock.sleep(0.5)
            return success()

        executor = Recording(fleet.clock, slow, target=lambda ref: f"host{ref.index % 2}")
        job = await fleet.submit(60, concurrency_per_host=3)
        for _ in range(2):
            fleet.start(fleet.worker(executor))
        await fleet.ended(job)
        await fleet.check(job)
        assert (executor.most["host0"], executor.most["host1"]) == (3, 3)

    async def test_a_slow_host_does_not_hold_up_another(self, fleet: Fleet) -> None:
        executor = Recording(fleet.clock, succeed, target=lambda ref: "slow" if ref.index < 50 else f"host{ref.index}")
        job = await fleet.submit(100, rate_per_host=0.5)
        fleet.start(fleet.worker(executor))
        await fleet.passing(3)
        assert sum(start.target != "slow" for start in executor.starts) == 50
        assert sum(start.target == "slow" for start in executor.starts) <= 2
        await fleet.ended(job)

    async def test_what_waits_for_a_slow_host_is_bounded(self, fleet: Fleet) -> None:
        executor = Recording(fleet.clock, succeed, target=lambda ref: "slow")
        job = await fleet.submit(12_000, rate_per_host=1.0)
        worker = fleet.worker(executor)
        fleet.start(worker)
        await fleet.passing(45)
        (lane,) = worker._lanes.values()
        assert len(lane._targets) + len(lane._waiting) <= 5500
        assert (await fleet.depth(job)).ready * 100 > 5000
