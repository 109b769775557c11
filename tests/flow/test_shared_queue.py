"""More runs than queues on SQS: runs that share one queue end like all others, whatever is lost on the way."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from conveyor.engines.queue import KeepsArrivals, QueueName, SharesQueues, run_queue
from conveyor.engines.sqs.envelope import from_text
from conveyor.model import Job, Outcome, RunId, TaskRef
from conveyor.recover.sampler import Sampler
from conveyor.recover.sweeper import Swept
from conveyor.settings import Settings
from conveyor.states import RunState
from conveyor.system import System, open_system
from conveyor.telemetry import metrics
from tests.faults.shim_sqs import Shim
from tests.servers.sqs import together, url_of
from tests.support.clocks import ManualClock
from tests.support.places import quick_place
from tests.support.small_fleet import Fleet, Threads, open_fleet, success

pytestmark = pytest.mark.server

LIMIT = 3
# Longer than a run may be without progress, with the defaults of a job.
STALLED = 700.0


class Everybody:
    """Whether a thread of the system works, or a call of SQS is under way."""

    def __init__(self, system: System, shim: Shim) -> None:
        self._threads = Threads(system)
        self._shim = shim

    @property
    def busy(self) -> int:
        return self._threads.busy + self._shim.busy


@asynccontextmanager
async def opened(shim: Shim, **settings: Any) -> AsyncIterator[Fleet]:
    clock = ManualClock()
    with quick_place() as place, together(clock), capture_logs() as logs:
        given = {"queue": url_of(place, shim.endpoint), "run_queue_limit": LIMIT, "lease_seconds": 30.0, **settings}
        chosen = Settings.load({}, data=place, flush_seconds=0.0, sync_task_limit=100_000, **given)
        async with open_system(chosen, clock) as system:
            made = Fleet(system, clock, logs, Everybody(system, shim))
            try:
                yield made
            finally:
                await made.close()


@pytest.fixture
async def shim() -> AsyncIterator[Shim]:
    made = Shim(1)
    async with made.running():
        yield made


@pytest.fixture
async def fleet(shim: Shim) -> AsyncIterator[Fleet]:
    async with opened(shim) as made:
        yield made


async def submitted(fleet: Fleet, runs: int = LIMIT + 3) -> list[Job]:
    return [await fleet.submit(4, chunk_size=1) for _ in range(runs)]


async def shared_depth(fleet: Fleet) -> int:
    assert isinstance(fleet.system.queue, SharesQueues)
    depth = await fleet.system.queue.shared_depth()
    return 0 if depth is None else depth.total


async def given_back(fleet: Fleet) -> float:
    """A receiver of another run gets the only message, and gives it back: for how long it is out of sight."""
    queue: Any = fleet.system.queue
    polls, delays = queue._polls, list[float]()
    note = polls._on_returned
    polls._on_returned = lambda message, delay: (delays.append(delay), note(message, delay))
    assert await queue.receive(run_queue(RunId("other")), 1, 30.0) == []
    polls._on_returned = note
    (delay,) = delays
    return delay


async def delete_one(fleet: Fleet, job: Job) -> None:
    """A message of this run is gone, behind everybody's back."""
    queue: Any = fleet.system.queue
    url = await queue.queues.shared()
    got = (await queue._calls.ask("receive_message", QueueUrl=url, MaxNumberOfMessages=10)).get("Messages", [])
    held = [each["ReceiptHandle"] for each in got]
    name = run_queue(job.run.run_id)
    lost = next(each["ReceiptHandle"] for each in got if from_text(each["Body"]).queue == name)  # type: ignore[union-attr]
    await queue._calls.ask("delete_message", QueueUrl=url, ReceiptHandle=lost)
    for handle in held:
        if handle != lost:
            await queue._calls.ask("change_message_visibility", QueueUrl=url, ReceiptHandle=handle, VisibilityTimeout=0)


async def test_a_run_that_lost_a_reference_ends_while_others_share_its_queue(fleet: Fleet) -> None:
    """A paused run keeps messages in the shared queue all the time, so that it is never empty."""
    jobs = await submitted(fleet)
    unlucky, paused = jobs[LIMIT], jobs[-1]
    await fleet.move(paused, RunState.PAUSED)
    await delete_one(fleet, unlucky)
    worker = fleet.worker()
    fleet.start(worker)
    fleet.start(fleet.sweeper)
    assert fleet.system.wakes is not None
    async with fleet.system.wakes(worker.on_message):
        await fleet.ended(*jobs[:LIMIT], *jobs[LIMIT + 1 : -1])
        assert (await fleet.counts(unlucky)).ended == 3
        assert await shared_depth(fleet) > 0
        await fleet.ended(unlucky, within=STALLED + 60)
        await fleet.check(unlucky)
        await fleet.move(await fleet.job(paused.job_id), RunState.RUNNING)
        await fleet.ended(paused, within=120)
        await fleet.check(paused)


async def test_a_resumed_run_ends_as_soon_as_its_message_is_visible() -> None:
    """Receivers of other runs got it many times, and nobody but its own worker receives any more."""
    shim = Shim(1)
    async with shim.running(), opened(shim, run_queue_limit=0) as fleet:
        job = await fleet.submit(1)
        await fleet.move(job, RunState.PAUSED)
        hidden = 0.0
        while hidden < 23.0:
            await fleet.passing(hidden)
            hidden = await given_back(fleet)
        await fleet.move(await fleet.job(job.job_id), RunState.RUNNING)
        fleet.start(fleet.worker())
        await fleet.ended(job, within=hidden + 3.0)
        await fleet.check(job)


async def test_what_arrives_for_a_paused_run_goes_back_at_once() -> None:
    """Another process may serve it as soon as it is resumed."""
    shim = Shim(1)
    async with shim.running(), opened(shim, run_queue_limit=0) as fleet:
        job = await fleet.submit(1)
        await fleet.move(job, RunState.PAUSED)
        queue = fleet.system.queue
        assert isinstance(queue, KeepsArrivals)
        worker = fleet.worker()
        fleet.start(worker)
        await fleet.passing(8)
        answers: list[bool] = []

        def offer(name: QueueName, body: bytes) -> bool:
            answers.append(worker.on_offer(name, body))
            return answers[-1]

        assert fleet.system.offers is not None
        with fleet.system.offers(offer):
            assert await queue.receive(run_queue(RunId("other")), 1, 30.0) == []
            await fleet.passing(1)
        assert answers == [True], "it has to read the job first"
        assert not queue.has_arrived(run_queue(job.run.run_id))
        assert await shared_depth(fleet) == 1


async def test_a_lost_reference_is_found_by_time() -> None:
    """The sweeper alone: the queue of the run that lost it is never empty, and nothing moves."""
    shim = Shim(1)
    async with shim.running(), opened(shim) as fleet:
        shared = (await submitted(fleet))[-1]
        swept = [await fleet.sweeper.run_once()]
        while fleet.clock.monotonic() < 1000 + 6 * STALLED:
            fleet.clock.advance(60)
            swept.append(await fleet.sweeper.run_once())
        requeued = [number for number, each in enumerate(swept) if each.requeued]
        assert len(requeued) == 2, "after eleven minutes, and after twice as long"
        assert swept[requeued[0]].requeued == 4 * 3, "those of the three runs that share"
        assert (await fleet.counts(shared)).ended == 0


async def test_a_run_that_goes_on_is_left_alone(fleet: Fleet) -> None:
    async def slow(job: Job, ref: TaskRef) -> Outcome:
        await fleet.clock.sleep(400)
        return success()

    fleet.executor.act = slow
    jobs = await submitted(fleet)
    shared = jobs[-1]
    fleet.start(fleet.worker())
    swept: list[Swept] = []
    while (await fleet.job(shared.job_id)).state is RunState.RUNNING:
        swept.append(await fleet.sweeper.run_once())
        await fleet.passing(20)
    assert sum(each.requeued for each in swept) == 0
    assert fleet.executor.count() == dict.fromkeys(range(4), LIMIT + 3)


async def test_a_worker_that_dies_with_messages_of_the_shared_queue(fleet: Fleet) -> None:
    async def for_ever(job: Job, ref: TaskRef) -> Outcome:
        await fleet.clock.sleep(100_000)
        return success()

    jobs = await submitted(fleet)
    act, fleet.executor.act = fleet.executor.act, for_ever
    dead = fleet.worker()
    await fleet.abandon(dead, lambda: {job.run.run_id for job in jobs[LIMIT:]} <= set(dead._lanes))
    fleet.executor.act = act
    fleet.start(fleet.worker())
    fleet.start(fleet.sweeper)
    await fleet.ended(*jobs, within=300)
    for job in jobs:
        await fleet.check(job)


async def test_a_cancelled_run_leaves_nothing_in_the_shared_queue(fleet: Fleet) -> None:
    jobs = await submitted(fleet)
    await fleet.move(jobs[-1], RunState.CANCELLED)
    fleet.start(fleet.worker())
    fleet.start(fleet.sweeper)
    await fleet.ended(*jobs[:-1])
    for job in jobs[:-1]:
        await fleet.check(job)
    await fleet.check(jobs[-1], RunState.CANCELLED)
    # Some of its messages were received before it was cleared, and are out of sight; later runs that share find them.
    await fleet.passing(30)
    await fleet.ended(*await submitted(fleet))
    assert (await shared_depth(fleet)) == 0


async def test_what_waits_is_counted_where_all_runs_share() -> None:
    shim = Shim(1)
    async with shim.running(), opened(shim, run_queue_limit=0) as fleet:
        jobs = await submitted(fleet, 5)
        sampler = Sampler(fleet.system)
        await sampler.tick()
        shown = metrics.QUEUE_MESSAGES.series
        assert [shown["runs", state] for state in ("ready", "in_flight", "delayed")] == [20, 0, 0]
        assert [shown["recovery", state] for state in ("ready", "in_flight", "delayed")] == [0, 0, 0]
        assert metrics.TASKS_WAITING.series[()] == 20
        slots = fleet.system.settings.worker_concurrency
        assert metrics.WORK_WAITING_SECONDS.series[()] == pytest.approx(20 / slots)
        delayed = 0
        while delayed < 20:
            for queue in (run_queue(job.run.run_id) for job in jobs):
                received = [each.receipt for each in await fleet.system.queue.receive(queue, 4, 30.0)]
                await fleet.system.queue.release(queue, received, 800.0)
                delayed += len(received)
            await fleet.passing(1)
        await fleet.passing(5 * fleet.system.settings.sample_seconds)
        await sampler.tick()
        assert [shown["runs", state] for state in ("ready", "in_flight", "delayed")] == [0, 0, 20]
        assert metrics.TASKS_WAITING.series[()] == metrics.WORK_WAITING_SECONDS.series[()] == 0


async def test_a_run_that_shares_is_one_entry_of_the_index() -> None:
    """With both its queues; and none once it has finished, although messages of it still go back."""
    shim = Shim(1)
    async with shim.running(), opened(shim, run_queue_limit=0) as fleet:
        jobs = await submitted(fleet)
        runs = {job.run.run_id for job in jobs}
        coordinator: Any = fleet.system.coordinator
        await fleet.quiet()
        assert await fleet.system.coordinator.known_runs(runs) == runs
        assert coordinator._engine._ready._entries.keys() == runs
        await fleet.move(jobs[-1], RunState.CANCELLED)
        fleet.start(fleet.worker())
        await fleet.ended(*jobs)
        await fleet.passing(120)
        assert coordinator._engine._ready._entries == {}


async def test_jobs_run_though_queues_may_not_be_listed(fleet: Fleet, shim: Shim) -> None:
    shim.denied = {"ListQueues"}
    jobs = await submitted(fleet)
    fleet.start(fleet.worker())
    await fleet.ended(*jobs)
    for job in jobs:
        await fleet.check(job)
    assert any("ListQueues is denied" in str(each) for each in fleet.logs)


async def test_only_the_count_of_the_queue_matters_where_it_is_known() -> None:
    async with open_fleet() as fleet:
        assert not isinstance(fleet.system.queue, SharesQueues)
