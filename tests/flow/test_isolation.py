"""One bad item of a housekeeping role: it is logged, counted, and looked at again; the others of its pass go on."""

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, ClassVar

from conveyor.accept.scheduler import Scheduler
from conveyor.accept.schedules import SCHEDULE
from conveyor.coordination.isolation import Isolation
from conveyor.egress.outbound import Outbound, PostReply
from conveyor.egress.target_guard import TargetGuard
from conveyor.engines.records import Document
from conveyor.errors import EngineFailed
from conveyor.jobs.deadlines import DEADLINE
from conveyor.jobs.event_names import WebhookNotify
from conveyor.model import EXPORT, FailureThreshold, Job, OutboxEvent, UploadRecord
from conveyor.notify.deliverer import Deliverer
from conveyor.notify.deliveries import DELIVERY
from conveyor.notify.dispatcher import OutboxDispatcher
from conveyor.notify.progress_notifier import ProgressNotifier
from conveyor.notify.webhooks import Webhooks, WebhookSpec
from conveyor.recover.monitor import monitor_of
from conveyor.recover.retention import SETTLE_SECONDS, Retention
from conveyor.recover.sampler import Sampler
from conveyor.recover.sweeper import Sweeper
from conveyor.states import RunState
from conveyor.system import System
from conveyor.telemetry import metrics
from tests.support.clocks import ManualClock
from tests.support.make_jobs import ACME, OTHER, end
from tests.support.small_fleet import Fleet, fail, open_fleet


class Poisoned:
    """A seam that raises for every call of one name that speaks of one of some ids."""

    def __init__(self, seam: Any, name: str, *poison: str) -> None:
        self._seam = seam
        self._name = name
        self.poison = poison

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._seam, name)
        if name != self._name:
            return call

        async def poisoned(*given: Any, **named: Any) -> Any:
            if any(each in repr(given) for each in self.poison):
                raise ZeroDivisionError("a bad item")
            return await call(*given, **named)

        return poisoned


class Counted:
    """A seam that counts its calls."""

    def __init__(self, seam: Any) -> None:
        self._seam = seam
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._seam, name)


def errors_of(role: str) -> float:
    return metrics.ITEM_ERRORS.series.get((role,), 0.0)


def sweeper_of(fleet: Fleet, system: System) -> Sweeper:
    return Sweeper(system.records, system.tasks, system.queue, fleet.lifecycle, fleet.clock)


async def _complete_unseen(fleet: Fleet, job: Job) -> None:
    """All tasks of a job end, and nobody sees that it is complete."""
    await fleet.system.tasks.finish(job.key, [end(index) for index in range(job.run.total)])


async def test_a_ratio_after_no_task_stops_nobody() -> None:
    """`after: 0` is judged before any task has ended."""
    async with open_fleet() as fleet:
        eager = await fleet.submit(3, failure_threshold=FailureThreshold(ratio=0.5, after=0))
        other = await fleet.submit(3, tenant=OTHER)
        swept = await fleet.sweeper.run_once()
        assert swept.checked == 2
        fleet.start(fleet.worker())
        fleet.start(fleet.sweeper)
        await fleet.ended(eager, other)
        await fleet.check(eager)
        await fleet.check(other)
        assert not [line for line in fleet.logs if line["log_level"] == "error"]


async def test_a_ratio_after_no_task_is_a_threshold_from_the_first_task_on() -> None:
    async with open_fleet() as fleet:
        fleet.executor.act = fail
        job = await fleet.submit(100, attempts=1, failure_threshold=FailureThreshold(ratio=0.5, after=0))
        fleet.start(fleet.worker())
        (ended,) = await fleet.ended(job)
        assert ended.state is RunState.FAILED
        assert ended.reason is not None
        assert "failure threshold" in ended.reason


async def test_the_sweeper_goes_on_after_a_run_that_makes_it_fail() -> None:
    async with open_fleet() as fleet:
        bad = await fleet.submit(3)
        good = await fleet.submit(3, tenant=OTHER)
        tasks = Poisoned(fleet.system.tasks, "counts", bad.run.run_id)
        sweeper = sweeper_of(fleet, replace(fleet.system, tasks=tasks))
        await _complete_unseen(fleet, good)
        before = errors_of("sweeper")
        await sweeper.run_once()
        assert (await fleet.job(good.job_id, OTHER)).state is RunState.COMPLETED
        assert errors_of("sweeper") == before + 1
        assert any(line.get("item") == bad.run.run_id for line in fleet.logs)
        # Once it is mended, it is looked at again.
        tasks.poison = ()
        await _complete_unseen(fleet, bad)
        fleet.clock.advance(60.0)
        await sweeper.run_once()
        assert (await fleet.job(bad.job_id)).state is RunState.COMPLETED


async def test_the_sweeper_clears_up_after_others_of_which_one_makes_it_fail() -> None:
    async with open_fleet() as fleet:
        jobs = [await fleet.submit(3) for _ in range(3)]
        for job in jobs:
            await fleet.lifecycle.move(job, RunState.CANCELLED, None, await fleet.counts(job))
        tasks = Poisoned(fleet.system.tasks, "cancel_pending", jobs[0].run.run_id)
        sweeper = sweeper_of(fleet, replace(fleet.system, tasks=tasks))
        for _ in range(3):
            await sweeper.run_once()
        left = {job.run.run_id for job in await fleet.system.records.jobs.unswept_jobs(10)}
        assert left == {jobs[0].run.run_id}


async def test_retention_goes_on_after_a_job_that_makes_it_fail() -> None:
    async with open_fleet() as fleet:
        jobs = [await fleet.submit(3) for _ in range(12)]
        for job in jobs:
            await fleet.system.records.jobs.mark_deleted(ACME, job.job_id)
        fleet.clock.advance(SETTLE_SECONDS + 1)
        # More bad ones than a pass looks at.
        tasks = Poisoned(fleet.system.tasks, "delete", *(job.run.run_id for job in jobs[:-1]))
        system = fleet.system
        retention = Retention(system.records, tasks, system.queue, system.coordinator, system.blobs, fleet.clock)
        for _ in range(6):
            await retention.run_once()
        hidden = {job.run.run_id for job in await system.records.jobs.purgeable_jobs(fleet.clock.now(), 100)}
        assert hidden == {job.run.run_id for job in jobs[:-1]}


async def test_the_notifier_goes_on_after_a_notice_that_makes_it_fail() -> None:
    async with open_fleet() as fleet:
        # The entries of a job are read only if its tenant has any: here the same tenant has a good job, too.
        notify = [WebhookNotify(url="https://receiver.example/")]
        bad, _ = [await fleet.submit(1, notify=notify) for _ in range(2)]
        await fleet.submit(1, tenant=OTHER)
        documents: Any = Poisoned(fleet.system.records.documents, "documents", bad.job_id)
        records = replace(fleet.system.records, documents=documents)
        notifier = OutboxDispatcher(fleet.system.settings, records, fleet.system.tasks, fleet.clock)
        passed = await notifier.run_once()
        assert passed.notices >= 1
        left: list[OutboxEvent] = await fleet.system.records.outbox.undispatched(100)
        assert {notice.job_id for notice in left} == {bad.job_id}
        documents.poison = ()
        fleet.clock.advance(60.0)
        await notifier.run_once()
        assert await fleet.system.records.outbox.undispatched(100) == []


async def test_one_tenant_that_makes_the_notifier_fail_stops_no_other() -> None:
    async with open_fleet() as fleet:
        bad = await fleet.submit(1)
        await fleet.submit(1, tenant=OTHER)
        documents: Any = Poisoned(fleet.system.records.documents, "documents", repr(ACME))
        records = replace(fleet.system.records, documents=documents)
        notifier = OutboxDispatcher(fleet.system.settings, records, fleet.system.tasks, fleet.clock)
        assert (await notifier.run_once()).notices == 1
        left: list[OutboxEvent] = await fleet.system.records.outbox.undispatched(100)
        assert {notice.job_id for notice in left} == {bad.job_id}


async def test_events_that_nobody_waits_for_cost_no_read_each() -> None:
    async with open_fleet() as fleet:
        for _ in range(50):
            await fleet.submit(1)
        documents = Counted(fleet.system.records.documents)
        records: Any = replace(fleet.system.records, documents=documents)  # type: ignore[arg-type]  # it stands for one
        notifier = OutboxDispatcher(fleet.system.settings, records, fleet.system.tasks, fleet.clock)
        assert (await notifier.run_once()).notices == 50
        assert documents.calls == Counter(documents=2), "the endpoints and the notify entries of the tenant"


async def test_the_progress_notifier_goes_on_after_a_run_that_makes_it_fail() -> None:
    async with open_fleet() as fleet:
        bad = await fleet.submit(4)
        good = await fleet.submit(4, tenant=OTHER)
        tasks = Poisoned(fleet.system.tasks, "counts", bad.run.run_id)
        system = fleet.system
        notifier = ProgressNotifier(system.records, tasks, system.coordinator, fleet.clock, 60.0)
        await system.tasks.finish(good.key, [end(0), end(1)])
        told = await notifier.run_once()
        assert told.quarters == 1
        assert "run.progress" in await fleet.notices(good)


async def test_the_deliverer_goes_on_after_a_delivery_that_makes_it_fail() -> None:
    """The bad one is tried with a pause that grows, and not in every tick."""

    class Receiving:
        bodies: ClassVar[list[bytes]] = []

        async def post(self, url: str, headers: object, body: bytes, timeout: float) -> PostReply:
            self.bodies.append(body)
            return PostReply(200, None)

        async def close(self) -> None: ...

    async with open_fleet() as fleet:
        system, clock = fleet.system, fleet.clock
        await Webhooks(system).create(ACME, WebhookSpec("https://receiver.example/", ["job.accepted"]))
        jobs = [await fleet.submit(1) for _ in range(40)]
        await OutboxDispatcher(system.settings, system.records, system.tasks, clock).run_once()
        rows = await system.records.documents.due_documents(DELIVERY, clock.now(), 100)
        assert len(rows) == len(jobs)
        documents: Any = Poisoned(system.records.documents, "replace_document", rows[0].id)
        outbound: Any = Receiving()
        records = replace(system.records, documents=documents)
        deliverer = Deliverer(system.settings, records, clock, system.signing_key, outbound)
        before = errors_of("deliverer")
        service = fleet.start(deliverer)
        await fleet.until(lambda: len(outbound.bodies) == len(jobs) - 1)
        await fleet.passing(20.0)
        assert 2 <= errors_of("deliverer") - before <= 5
        documents.poison = ()
        await fleet.until(lambda: len(outbound.bodies) == len(jobs))
        await fleet.stop(service)


async def test_the_sampler_goes_on_after_a_run_that_makes_it_fail() -> None:
    async with open_fleet() as fleet:
        bad, *_ = [await fleet.submit(100) for _ in range(5)]
        tasks: Any = Poisoned(fleet.system.tasks, "counts", bad.run.run_id)
        before = errors_of("sampler")
        await Sampler(replace(fleet.system, tasks=tasks)).tick()
        assert errors_of("sampler") == before + 1
        assert metrics.TASKS_WAITING.series[()] == 400
        assert metrics.QUEUE_MESSAGES.series["runs", "ready"] == 4


async def test_retention_goes_on_after_an_upload_an_export_or_a_last_step_that_makes_it_fail() -> None:
    async with open_fleet() as fleet:
        system, clock = fleet.system, fleet.clock
        jobs = [await fleet.submit(1) for _ in range(5)]
        for number in range(5):
            upload = UploadRecord(ACME, f"upload_{number}", f"uploads/{number}", 1, "x", clock.now(), clock.now() + 1)
            await system.records.access.create_upload(upload, None)
        rows = [
            Document(
                EXPORT,
                ACME,
                f"export_{number}",
                b"{}",
                due_at=clock.now(),
                expires_at=clock.now() + 1,
                job_id=job.job_id,
            )
            for number, job in enumerate(jobs)
        ]
        await system.records.documents.create_documents(rows)
        for job in jobs[:3]:
            await system.records.jobs.mark_deleted(ACME, job.job_id)
        clock.advance(SETTLE_SECONDS + 2)
        records = replace(
            system.records,
            access=Poisoned(system.records.access, "purge_upload", "upload_0"),  # type: ignore[arg-type]
            jobs=Poisoned(system.records.jobs, "purge_job", jobs[0].job_id),  # type: ignore[arg-type]
        )
        blobs: Any = Poisoned(system.blobs, "delete_prefix", "export_4")
        retention = Retention(records, system.tasks, system.queue, system.coordinator, blobs, clock)
        removed = await retention.run_once()
        assert (removed.jobs, removed.uploads) == (2, 4)
        # Those of the jobs went with them.
        left = await system.records.documents.due_documents(EXPORT, clock.now(), 10)
        assert [row.id for row in left if row.job_id not in (jobs[0].job_id,)] == ["export_4"]


async def test_the_monitor_goes_on_after_a_run_that_makes_it_fail() -> None:
    """A deadline that can not be looked at, and a part that fails, stop neither the other runs nor the other parts."""
    async with open_fleet(deadline_tries=0) as fleet:
        bad = await fleet.submit(1, deadline=10.0)
        good = await fleet.submit(1, tenant=OTHER, deadline=11.0)
        fleet.clock.advance(60.0)
        tasks = Poisoned(fleet.system.tasks, "counts", bad.run.run_id)

        async def failing() -> dict[str, int]:
            raise ZeroDivisionError("a bad part")

        async def working() -> dict[str, int]:
            return {"worked": 1}

        monitor = monitor_of(replace(fleet.system, tasks=tasks), parts=[working])
        seen = await monitor.run_once()
        assert seen.expired == 1
        assert seen.others["worked"] == 1
        assert (await fleet.job(good.job_id, OTHER)).state is RunState.FAILED
        assert (await fleet.job(bad.job_id)).state is RunState.RUNNING
        assert await fleet.system.records.documents.document(DEADLINE, ACME, bad.run.run_id) is not None
        tasks.poison = ()
        fleet.clock.advance(60.0)
        await monitor.run_once()
        assert (await fleet.job(bad.job_id)).state is RunState.FAILED
        late = await fleet.submit(1, deadline=10.0)
        fleet.clock.advance(60.0)
        await _raised(monitor_of(fleet.system, parts=[failing]).run_once, ZeroDivisionError)
        assert (await fleet.job(late.job_id)).state is RunState.FAILED


async def test_a_schedule_that_can_not_be_read_is_put_off() -> None:
    async with open_fleet() as fleet:
        row = Document(SCHEDULE, ACME, "sched_bad", b'{"not": "a schedule"}', due_at=fleet.clock.now())
        await fleet.system.records.documents.create_documents([row])
        outbound = Outbound(TargetGuard(allow_private=True, clock=fleet.clock))
        before = errors_of("scheduler")
        fleet.start(Scheduler(fleet.system, outbound))
        await fleet.passing(10.0)
        # Each failure doubles the pause.
        assert 1 <= errors_of("scheduler") - before <= 4


async def test_an_engine_that_fails_for_all_ends_the_pass() -> None:
    isolation = Isolation("sweeper", ManualClock())

    async def down(number: int) -> None:
        with isolation.item(f"item {number}"):
            raise EngineFailed

    for number in range(9):
        await down(number)
    await _raised(lambda: down(9), EngineFailed)
    assert isolation.failing == 10


async def test_the_pause_of_a_failing_item_grows_and_ends() -> None:
    clock = ManualClock()
    isolation = Isolation("sweeper", clock)
    pauses = []
    for _ in range(8):
        with isolation.item("bad"):
            raise ValueError("bad")
        pauses.append(isolation.pause("bad"))
        assert isolation.is_resting("bad")
        clock.advance(pauses[-1])
        assert not isolation.is_resting("bad")
    assert pauses == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    with isolation.item("bad"):
        pass
    assert isolation.failing == 0


async def _raised(call: Callable[[], Awaitable[object]], kind: type[Exception]) -> None:
    try:
        await call()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__} was raised")
