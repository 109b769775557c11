"""The nine situations of docs/recovery.md, each from what goes wrong to what a user sees, the clock advanced."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from conveyor.accept.spec import decode_spec
from conveyor.accept.submit import Submit
from conveyor.clock import iso_text
from conveyor.coordination.waits import waiting
from conveyor.embedded import Embedded
from conveyor.engines.queue import Depth
from conveyor.errors import NoWorkers, Overloaded, QuotaExceeded
from conveyor.model import Backoff, Breaking, Job, JobId, JobKind, Outage, Outcome, TaskError, TaskRef, TenantId
from conveyor.read.results import stream_body, task_progress
from conveyor.recover.monitor import monitor_of
from conveyor.recover.monitored import Monitored
from conveyor.settings import Settings
from conveyor.states import ENDED, RunState, TaskStatus
from conveyor.system import System
from tests.support.api import Api
from tests.support.clocks import JumpingClock
from tests.support.file_site import MIB, Behaviour, FileSite, digest
from tests.support.make_jobs import ACME, OTHER
from tests.support.places import quick_place
from tests.support.small_fleet import Fleet, Recording, failure, open_fleet, success
from tests.support.working import until

SIZE = 3 * MIB + 77


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with open_fleet() as made:
        yield made


@pytest.fixture
def settings() -> Any:
    with quick_place() as place:
        yield Settings.load({}, data=place, allow_private_targets=True, fetchers=0)


def answered(status: int, retry_after: float | None = None) -> Outcome:
    error = TaskError(f"http_{status}", f"the target answered {status}")
    return Outcome(TaskStatus.FAILED, http_status=status, error=error, retry_after=retry_after, elapsed=0.01)


def host(ref: TaskRef) -> str:
    """The inputs here are "host number"."""
    return ref.input.strip('"').partition(" ")[0]


class TestStuckDownload:
    """1. A download that hangs is found by its row, and goes on from where it was."""

    async def test_it_is_found_and_resumed(self, system: System, clock: JumpingClock) -> None:
        async with FileSite(Behaviour(SIZE, stall_at=2 * MIB)) as site:
            embedded = Embedded(system)
            spec = {"kind": "download", "tasks": [site.url()], "timeout": 3600, "stuck_after": 300, "attempts": 1}
            accepted = await embedded.submit.submit(ACME, decode_spec(msgspec.json.encode(spec)))
            monitor = monitor_of(system)
            async with embedded.running({"work"}):
                await until(lambda: _bytes_kept(system), lambda size: size >= 2 * MIB - 256 * 1024)
                assert await monitor.run_once() == Monitored(), "nothing is late yet"
                job = await embedded.job(ACME, JobId(accepted.subject))
                (task,) = await system.tasks.at(job.key, [0])
                shown = await task_progress(system.records, job.key, task)
                assert shown is not None
                assert (shown["attempt"], shown["at"] <= iso_text(clock.now())) == (1, True)
                clock.advance(301)
                # The row was written when the download began and not since: it is late.
                seen = await monitor.run_once()
                assert (seen.checked, seen.requeued, seen.failed) == (1, 1, 0)
                job = await until(
                    lambda: embedded.job(ACME, JobId(accepted.subject)), lambda found: found.state in ENDED
                )
        (task,) = await system.tasks.at(job.key, [0])
        assert (job.state, task.status, task.attempts) == (RunState.COMPLETED, TaskStatus.SUCCEEDED, 1)
        assert await task_progress(system.records, job.key, task) is None
        body = task.detail.body
        assert body is not None
        assert (body.length, body.sha256) == (SIZE, digest(SIZE))
        assert sum([len(piece) async for piece in stream_body(system.blobs, body)]) == SIZE
        # One request for all of it, one for the rest: what was there was not fetched again.
        first, second = site.ranges()
        assert first is None
        assert second is not None
        assert int(second.removeprefix("bytes=").rstrip("-")) >= 2 * MIB - 256 * 1024
        assert site.sent < 1.2 * SIZE


async def _bytes_kept(system: System) -> int:
    return sum([info.size async for info in system.blobs.listing("results/")])


class TestJobDeadline:
    """2. A job that waits for ever is caught, queued again some times, and then given up for review."""

    async def test_what_was_delayed_for_long_is_queued_again_and_ends(self, fleet: Fleet) -> None:
        async def act(job: Job, ref: TaskRef) -> Outcome:
            # Away for the first minute; the retry would come in an hour.
            return failure() if ref.index == 3 and fleet.clock.now() < away_until else success()

        away_until = fleet.clock.now() + 60
        fleet.executor.act = act
        job = await fleet.submit(10, deadline=100, backoff=Backoff(base=3600, cap=3600, jitter=False))
        fleet.start(fleet.worker())
        await fleet.until(lambda: len(fleet.executor.starts) == 10)
        await fleet.quiet()
        fleet.clock.advance(101)
        seen = await monitor_of(fleet.system).run_once()
        assert (seen.overdue, seen.expired) == (1, 0)
        said = await waiting(fleet.system.coordinator, job.run.run_id)
        assert said is not None
        assert said.code == "deadline"
        assert "1 of 3 times" in said.detail
        await fleet.ended(job, within=30)
        tasks = await fleet.check(job)
        assert tasks[3].status is TaskStatus.SUCCEEDED
        assert "run.overdue" in await fleet.notices(job)
        # Its row goes when it is next due, and nothing happens then.
        fleet.clock.advance(200)
        assert (await monitor_of(fleet.system).run_once()).overdue == 0

    async def test_after_some_times_it_is_dead_lettered_and_never_loops(self, fleet: Fleet) -> None:
        async def hang(job: Job, ref: TaskRef) -> Outcome:
            if ref.index == 3:
                await asyncio.Event().wait()
            return success()

        fleet.executor.act = hang
        job = await fleet.submit(10, deadline=100)
        fleet.start(fleet.worker())
        fleet.start(fleet.sweeper)
        await fleet.until(lambda: len(fleet.executor.starts) == 10)
        monitor, counts = monitor_of(fleet.system), []
        for _ in range(6):
            fleet.clock.advance(101)
            counts.append(await monitor.run_once())
            await fleet.quiet()
        assert [(seen.overdue, seen.expired) for seen in counts] == [(1, 0)] * 3 + [(0, 1)] + [(0, 0)] * 2
        (ended,) = await fleet.ended(job)
        assert ended.state is RunState.FAILED
        assert ended.reason is not None
        assert ended.reason.startswith("deadline: not finished within 100 s")
        assert "1 tasks are unfinished" in ended.reason
        (letter,) = (await fleet.system.queue.dead_letters(None, 10)).items
        assert letter.reason == ended.reason
        assert [event for event in await fleet.notices(job) if event != "job.accepted"] == [
            *["run.overdue"] * 3,
            "run.failed",
        ]
        # The task that was left is cancelled behind it.
        await fleet.until(lambda: _swept(fleet))
        tasks = await fleet.check(job, RunState.FAILED)
        assert Counter(task.status for task in tasks.values()) == {TaskStatus.SUCCEEDED: 9, TaskStatus.CANCELLED: 1}


async def _swept(fleet: Fleet) -> bool:
    return not await fleet.system.records.jobs.unswept_jobs(1)


class TestWatchdog:
    """3. An attempt that hangs beyond its timeout is broken off and tried again."""

    async def test_it_is_broken_off(self, fleet: Fleet) -> None:
        async def act(job: Job, ref: TaskRef) -> Outcome:
            if ref.attempt == 1:
                await asyncio.Event().wait()
            return success()

        fleet.executor.act = act
        job = await fleet.submit(["http://a.example/"], kind=JobKind.FETCH, handler=None, timeout=5)
        fleet.start(fleet.worker())
        await fleet.until(lambda: fleet.executor.starts)
        await fleet.passing(20)
        assert len(fleet.executor.starts) == 1, "a little longer than its timeout is not yet a reason"
        (ended,) = await fleet.ended(job, within=60)
        assert ended.state is RunState.COMPLETED
        assert [start.attempt for start in fleet.executor.starts] == [1, 2]
        (event,) = [event for event in await fleet.events(job) if event.event == "task.retried"]
        assert event.data["error"]["code"] == "timeout"
        assert fleet.executor.running["all"] == 0


class TestTransient:
    """4. A target that answers 503 for a moment: later attempts, after its Retry-After, and it is done."""

    async def test_it_is_tried_again_after_what_the_target_asked_for(self, fleet: Fleet) -> None:
        async def act(job: Job, ref: TaskRef) -> Outcome:
            return answered(503, retry_after=30) if ref.attempt < 3 else success()

        fleet.executor.act = act
        job = await fleet.submit(["a 1", "a 2"], backoff=Backoff(base=1, jitter=False))
        fleet.start(fleet.worker())
        await fleet.ended(job, within=120)
        tasks = await fleet.check(job)
        assert {task.attempts for task in tasks.values()} == {3}
        first, second, third = fleet.executor.times(0)
        assert 31 <= second - first < 33
        assert 32 <= third - second < 34


class TestLongOutage:
    """5. A target that is away for long: few quick tries, then the tasks wait in the queue and hold no worker."""

    async def test_fail_fast_requeue_late(self, fleet: Fleet) -> None:
        down_until = fleet.clock.now() + 1000

        async def act(job: Job, ref: TaskRef) -> Outcome:
            return failure("connect_failed") if fleet.clock.now() < down_until else success()

        fleet.executor.act = act
        options = {"backoff": Backoff(base=2, jitter=False), "breaker": Breaking(enabled=False), "attempts": 10}
        job = await fleet.submit(30, outage=Outage(), **options)
        fleet.start(fleet.worker())
        await fleet.until(lambda: len(fleet.executor.starts) == 60, within=30)
        await fleet.quiet()
        assert await fleet.depth(job) == Depth(0, 0, 30), "all wait in the queue"
        assert await fleet.system.coordinator.permits_in_use(f"run:{job.run.run_id}") == 0, "and none has a slot"
        fleet.clock.advance(880)
        await fleet.passing(5)
        assert len(fleet.executor.starts) == 60, "nobody tries before the delay is over"
        fleet.clock.advance(130)
        await fleet.ended(job, within=60)
        tasks = await fleet.check(job)
        assert {task.attempts for task in tasks.values()} == {3}
        first, second, third = fleet.executor.times(0)
        assert second - first < 4
        assert 900 <= third - second <= 1100


class TestBreaker:
    """6. A target that is down: its tasks are parked and spend no attempt, others of the job go on; canaries find out
    that it is back, and the rest follows."""

    async def test_open_parked_canary_released(self, fleet: Fleet) -> None:
        up = asyncio.Event()

        async def act(job: Job, ref: TaskRef) -> Outcome:
            if up.is_set():
                # What begins beside it would have the same time.
                await fleet.clock.sleep(0.01)
            return success() if host(ref) == "good" or up.is_set() else failure("connect_failed")

        fleet.executor = Recording(fleet.clock, act, target=host)
        inputs = [f"{'bad' if number % 2 else 'good'} {number}" for number in range(400)]
        job = await fleet.submit(inputs, chunk_size=20, concurrency=8, backoff=Backoff(base=1000, jitter=False))
        worker = fleet.worker()
        fleet.start(worker)

        async def parked() -> bool:
            done = (await fleet.counts(job)).succeeded
            return done == 200 and (await fleet.depth(job)).ready + (await fleet.depth(job)).held == 0

        await fleet.until(parked, within=25)
        bad = [start for start in fleet.executor.starts if start.target == "bad"]
        assert 20 <= len(bad) <= 60, "it opened after a few, and all the good ones are done"
        await fleet.until(lambda: _says(fleet, job), within=5)
        said = await waiting(fleet.system.coordinator, job.run.run_id)
        assert said is not None
        assert said.detail.startswith("waiting: breaker open for bad until ")
        assert said.until is not None

        # Still down: one canary, and it is left alone for twice as long.
        tries = len(fleet.executor.starts)
        await fleet.until(lambda: len(fleet.executor.starts) > tries, within=60)
        await fleet.passing(30)
        assert len(fleet.executor.starts) == tries + 1

        up.set()
        more = len(fleet.executor.starts)
        await fleet.until(lambda: len(fleet.executor.starts) > more, within=90)
        began = fleet.clock.now()
        await fleet.ended(job, within=2000)
        tasks = await fleet.check(job)
        assert {task.status for task in tasks.values()} == {TaskStatus.SUCCEEDED}
        failed = Counter(start.index for start in bad) + Counter([fleet.executor.starts[tries].index])
        for index, task in tasks.items():
            # Who was parked comes to its first attempt, however often it was.
            assert task.attempts == 1 + failed[index]
        # Those that had failed come after their backoff; all others soon after the first canary.
        parked_ones = [start.at for start in fleet.executor.starts[more:] if not failed[start.index]]
        assert max(parked_ones) < began + 60
        # One by one at first.
        assert parked_ones[1] > parked_ones[0]

    async def test_a_target_that_never_comes_back_fails_its_tasks_in_the_end(self, fleet: Fleet) -> None:
        async def act(job: Job, ref: TaskRef) -> Outcome:
            return failure("connect_failed")

        fleet.executor = Recording(fleet.clock, act, target=host)
        patience = Breaking(patience=600)
        job = await fleet.submit([f"bad {number}" for number in range(100)], breaker=patience)
        fleet.start(fleet.worker())
        await fleet.ended(job, within=4000)
        tasks = await fleet.check(job)
        codes = Counter(task.error_code for task in tasks.values())
        assert set(codes) <= {"connect_failed", "target_down"}
        assert codes["target_down"] >= 50
        assert len(fleet.executor.starts) < 200

    async def test_a_named_upstream_is_one_target_for_all_jobs_of_its_tenant(self, fleet: Fleet) -> None:
        async def act(job: Job, ref: TaskRef) -> Outcome:
            await fleet.clock.sleep(0.1)
            return failure("handler_raised") if job.tenant == ACME else success()

        fleet.executor.act = act
        first = await fleet.submit(100, upstream="ledger", attempts=1, concurrency=8)
        fleet.start(fleet.worker())
        await fleet.until(lambda: _says(fleet, first))
        tries = len(fleet.executor.starts)
        second = await fleet.submit(100, upstream="ledger")
        apart = await fleet.submit(30, upstream="ledger", tenant=OTHER)
        await fleet.ended(apart, within=20)
        await fleet.passing(5)
        assert len(fleet.executor.starts) == tries + 30
        assert (await fleet.counts(second)).ended == 0
        assert await fleet.depth(second) == Depth(1, 0, 0), "its messages are left where they are"


async def _says(fleet: Fleet, job: Job) -> bool:
    said = await waiting(fleet.system.coordinator, job.run.run_id)
    return said is not None and said.code == "breaker"


class TestFlood:
    """7. Ten times more than there is room for: what is accepted ends, what is held stays bounded, and others wait
    little longer than on an idle system."""

    LIMIT = 400
    TASKS = 20

    async def test_ten_times_overload(self) -> None:
        settings = {"worker_concurrency": 8, "tenant_queued_tasks": self.LIMIT, "tenant_jobs": 15}
        async with open_fleet(**settings) as fleet:
            idle = await self._waits(fleet, flood=False)
        async with open_fleet(**settings) as fleet:
            busy = await self._waits(fleet, flood=True)
        assert max(busy) <= 3 * max(idle), (idle, busy)

    async def _waits(self, fleet: Fleet, *, flood: bool) -> list[float]:
        """How long small jobs of another tenant take, while one floods or not."""

        async def act(job: Job, ref: TaskRef) -> Outcome:
            await fleet.clock.sleep(0.5)
            return success()

        fleet.executor.act = act
        worker = fleet.worker()
        fleet.start(worker)
        fleet.start(fleet.sweeper)
        accepted: list[Job] = []
        refused = 0
        waits = []
        for _ in range(12):
            for _ in range(10 if flood else 0):
                # Capacity is 8 tasks in 0.5 s; this asks for 200 a second, for as long as the test goes on.
                try:
                    accepted.append(await fleet.submit(self.TASKS, tenant=TenantId("flood")))
                except QuotaExceeded as error:
                    refused += 1
                    assert error.details["retry_after"] >= 1
            polite = await fleet.submit(4)
            began = fleet.clock.now()
            await fleet.ended(polite, within=60)
            waits.append(fleet.clock.now() - began)
            held = sum(len(lane._waiting) for lane in worker._lanes.values())
            assert held <= 2 * (self.LIMIT + self.TASKS)
            queued = sum([job.run.total - (await fleet.counts(job)).ended for job in accepted])
            assert queued <= self.LIMIT + 15 * self.TASKS, "tasks that wait are bounded"
        if flood:
            assert refused > len(accepted)
            assert accepted
            for ended in await fleet.ended(*accepted, within=600):
                assert ended.state is RunState.COMPLETED
        return waits


class TestRefusal:
    """8. No room: 429 or 503, a code, a reason, and when to come again. The same request comes in later."""

    @pytest.fixture
    def settings(self) -> Any:
        with quick_place() as place:
            yield Settings.load({}, data=place, tenant_jobs=2, max_jobs=3, tenant_queued_tasks=50, sync_task_limit=10)

    async def test_a_tenant_over_its_quota(self, server: Api, clock: JumpingClock) -> None:
        body = {"kind": "python", "handler": "x", "tasks": [1, 2]}
        for _ in range(2):
            assert (await server.post("/v1/jobs", body)).status == 201
        clock.advance(10)
        refused = await server.post("/v1/jobs", body, headers={"Idempotency-Key": "one"})
        assert (refused.status, refused.json["code"]) == (429, "quota_exceeded")
        assert (refused.json["reason"], refused.json["limit"]) == ("jobs", 2)
        assert int(refused.headers["retry-after"]) == refused.json["retry_after"] >= 5
        # When there is room, the very same request is taken.
        (job, *_) = (await server.get("/v1/jobs")).json["items"]
        await server.post(f"/v1/jobs/{job['id']}/cancel", {})
        clock.advance(10)
        assert (await server.post("/v1/jobs", body, headers={"Idempotency-Key": "one"})).status == 201

    async def test_too_many_tasks_in_all(self, server: Api) -> None:
        body = {"kind": "python", "handler": "x", "tasks": list(range(51))}
        refused = await server.post("/v1/jobs", body)
        assert (refused.status, refused.json["reason"]) == (429, "tasks")

    async def test_a_system_that_is_full(self, system: System) -> None:
        submit = Submit(system)
        spec = decode_spec(b'{"kind": "python", "handler": "x", "tasks": [1]}')
        for tenant in ("a", "b", "c"):
            await submit.submit(TenantId(tenant), spec)
        with pytest.raises(Overloaded) as refused:
            await submit.submit(TenantId("d"), spec)
        assert refused.value.details["reason"] == "jobs"

    async def test_nobody_to_do_it(self, system: System) -> None:
        object.__setattr__(system, "settings", msgspec.structs.replace(system.settings, min_workers=1))
        submit = Submit(system)
        spec = decode_spec(b'{"mode": "open"}')
        with pytest.raises(NoWorkers):
            await submit.submit(ACME, spec)
        async with Embedded(system).running({"work"}):
            await until(lambda: system.coordinator.permits_in_use("workers"))
            await submit.submit(ACME, spec)


class TestRecoveryFirst:
    """9. What comes again goes before new work, four to one, so that neither starves."""

    async def test_four_to_one(self, fleet: Fleet) -> None:
        async def act(job: Job, ref: TaskRef) -> Outcome:
            await fleet.clock.sleep(0.1)
            return failure() if ref.attempt == 1 and ref.index < 60 else success()

        fleet.executor.act = act
        job = await fleet.submit(400, concurrency=1, chunk_size=10, backoff=Backoff(base=10, jitter=False))
        worker = fleet.worker()
        fleet.start(worker)
        await fleet.ended(job, within=600)
        order = [start.attempt for start in fleet.executor.starts]
        first, last = order.index(2), len(order) - 1 - order[::-1].index(2)
        stretch = order[first : last + 1]
        assert worker.take_counts == (60, 400)
        # There was new work all the while, and all that came again was done long before the end of it.
        assert last < 300
        assert 1 in order[last + 1 :]
        fives = [stretch[start : start + 5] for start in range(len(stretch) - 4)]
        assert all(1 in five for five in fives), "new work goes on"
        assert max(five.count(2) for five in fives) == 4, "four to one"
        await fleet.check(job)

    async def test_the_bound_is_a_setting(self) -> None:
        async with open_fleet(recovery_ratio=1) as fleet:

            async def act(job: Job, ref: TaskRef) -> Outcome:
                await fleet.clock.sleep(0.1)
                return failure() if ref.attempt == 1 and ref.index < 30 else success()

            fleet.executor.act = act
            job = await fleet.submit(200, concurrency=1, chunk_size=10, backoff=Backoff(base=3, jitter=False))
            fleet.start(fleet.worker())
            await fleet.ended(job, within=600)
            order = [start.attempt for start in fleet.executor.starts]
            assert all(1 in order[start : start + 2] for start in range(100))
