"""A run ends, and the sweeper drops its queues, while somebody is about to send references of it again: nothing is left
in the queues, because nobody would look at them again."""

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from conveyor.engines.queue import Outgoing, QueueName, run_queue, run_queues
from conveyor.model import Job, JobKind, Outcome, TaskRef
from conveyor.process.task_progress import ProgressBook
from conveyor.recover.monitor import monitor_of
from conveyor.recover.sweeper import Sweeper
from conveyor.states import RunState
from conveyor.system import System
from tests.support.small_fleet import Fleet, Recording, open_fleet, success


class _EndsFirst:
    """A queue: before the first message of the run is sent, the run is cancelled and swept."""

    def __init__(self, fleet: Fleet, job: Job) -> None:
        self._fleet = fleet
        self._job = job
        self.sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet.system.queue, name)

    async def send(self, queue: QueueName, outgoing: Sequence[Outgoing]) -> list[int]:
        if queue in run_queues(self._job.run.run_id):
            self.sent += 1
            if self.sent == 1:
                await self._fleet.move(self._job, RunState.CANCELLED)
                while await self._fleet.system.records.jobs.unswept_jobs(1):
                    await self._fleet.sweeper.run_once()
        return await self._fleet.system.queue.send(queue, outgoing)


def _ending(fleet: Fleet, job: Job) -> tuple[System, _EndsFirst]:
    queue: Any = _EndsFirst(fleet, job)
    return dataclasses.replace(fleet.system, queue=queue), queue


async def past_its_deadline() -> None:
    async with open_fleet() as fleet:
        job = await fleet.submit(20, deadline=60)
        system, queue = _ending(fleet, job)
        fleet.clock.advance(61)
        await monitor_of(system).run_once()
        await _nothing_is_left(fleet, job, queue)


async def stuck() -> None:
    async with open_fleet(lease_seconds=30) as fleet:
        book = ProgressBook(fleet.system.records, fleet.clock, fleet.system.settings)

        async def hang(job: Job, ref: TaskRef) -> Outcome:
            await book.begin(job, ref)
            await fleet.clock.sleep(10_000)
            return success()

        executor = Recording(fleet.clock, hang)
        job = await fleet.submit(
            ["https://a.example/"], kind=JobKind.DOWNLOAD, handler=None, stuck_after=40, concurrency=1
        )
        await fleet.abandon(fleet.worker(executor), lambda: len(executor.starts) == 1)
        await fleet.system.queue.drop(run_queue(job.run.run_id))
        system, queue = _ending(fleet, job)
        fleet.clock.advance(2000)
        await monitor_of(system).run_once()
        await _nothing_is_left(fleet, job, queue)


async def lost() -> None:
    async with open_fleet() as fleet:
        job = await fleet.submit(20)
        await fleet.system.queue.drop(run_queue(job.run.run_id))
        system, queue = _ending(fleet, job)
        await Sweeper(system.records, system.tasks, system.queue, fleet.lifecycle, fleet.clock).run_once()
        await _nothing_is_left(fleet, job, queue)


async def _nothing_is_left(fleet: Fleet, job: Job, queue: _EndsFirst) -> None:
    assert queue.sent == 1
    assert (await fleet.depth(job)).total == 0
    assert not await fleet.system.records.jobs.unswept_jobs(10)


@pytest.mark.parametrize("requeued", [past_its_deadline, stuck, lost], ids=lambda requeued: requeued.__name__)
async def test_nothing_is_left_of_a_run_that_ended_before(requeued: Callable[[], Awaitable[None]]) -> None:
    await requeued()
