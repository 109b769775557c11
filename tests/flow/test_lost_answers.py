"""One call of a store fails, or its answer is lost: what is not said twice, and what is not held for ever."""

import dataclasses
from collections import Counter

import msgspec
import pytest

from conveyor.coordination.breaker import Breakers, Sign
from conveyor.coordination.breaker_states import breaker_key
from conveyor.engines.records import Document
from conveyor.errors import EngineFailed
from conveyor.model import BEAT, BEAT_TENANT, Beat, JobId, LongTask, RunId
from conveyor.process.heartbeat import Heartbeat
from conveyor.system import System
from tests.faults.one_fault import ANYBODY, Fault, Injector, Kind, When
from tests.support.clocks import ManualClock
from tests.support.make_jobs import ACME
from tests.support.small_fleet import fail, open_fleet

TASKS = [LongTask(ACME, JobId("job_1"), RunId("run_1"), 0)]


def injector(when: When, seam: str, method: str, ordinal: int = 0) -> Injector:
    return Injector(Fault(Kind((seam, method, ANYBODY)), ordinal, when))


async def test_the_end_of_a_task_is_noted_once_though_its_write_is_made_again() -> None:
    await check_one_note("queue", "ack", is_atomic=False)


async def test_the_end_of_a_task_is_noted_once_though_its_flush_is_made_again() -> None:
    await check_one_note("atomic_flush", "record_flush", is_atomic=True)


async def check_one_note(seam: str, call: str, *, is_atomic: bool) -> None:
    """The answer to this call is lost."""
    async with open_fleet() as fleet:
        lost = injector(When.AFTER, seam, call)
        fleet.executor.act = fail
        job = await fleet.submit(1, attempts=1)
        # With a flush in one transaction, nothing else acknowledges.
        system = fleet.system if is_atomic else dataclasses.replace(fleet.system, atomic_flush=None)
        fleet.start(fleet.worker(system=lost.over(system)))
        await fleet.ended(job)
        await fleet.passing(5)
        assert lost.made
        assert Counter(event.event for event in await fleet.events(job)) == {"task.failed": 1}


async def beat_of(system: System) -> Document | None:
    return await system.records.documents.document(BEAT, BEAT_TENANT, "worker_1")


def heartbeat(system: System, clock: ManualClock) -> Heartbeat:
    return Heartbeat(system.records, system.coordinator, clock, "worker_1", 30.0)


async def test_a_worker_goes_on_to_say_that_it_is_alive_after_an_answer_was_lost() -> None:
    async with open_fleet() as fleet:
        lost = injector(When.AFTER, "documents", "replace_document")
        heart = heartbeat(lost.over(fleet.system), fleet.clock)
        await heart.beat(TASKS)
        with pytest.raises(EngineFailed):
            await heart.beat(TASKS)
        for _ in range(3):
            fleet.clock.advance(10)
            await heart.beat(TASKS)
            row = await beat_of(fleet.system)
            assert row is not None
            assert msgspec.json.decode(row.body, type=Beat).at == fleet.clock.now(), "the monitor takes it for dead"
            assert row.due_at == fleet.clock.now() + 60
        await heart.close()
        assert await beat_of(fleet.system) is None


async def test_a_worker_without_long_tasks_removes_its_row_however_often_it_takes() -> None:
    for when in When:
        async with open_fleet() as fleet:
            lost = injector(when, "documents", "remove_document")
            heart = heartbeat(lost.over(fleet.system), fleet.clock)
            await heart.beat(TASKS)
            with pytest.raises(EngineFailed):
                await heart.beat([])
            await heart.beat([])
            assert await beat_of(fleet.system) is None, "the monitor takes it for dead"


async def test_the_places_of_canaries_come_free_though_giving_one_back_failed() -> None:
    for when in When:
        async with open_fleet() as fleet:
            # Two places are taken, then they are given back.
            lost = injector(when, "coordinator", "acquire", ordinal=2)
            breakers = Breakers(lost.over(fleet.system).coordinator, fleet.clock, fleet.system.settings, "worker_1")
            keys = [breaker_key(ACME, host) for host in ("a.example", "b.example")]
            for key in keys:
                for _ in range(20):
                    breakers.count(key, Sign.DOWN)
            await breakers.report()
            fleet.clock.advance(31)
            assert [await breakers.acquire_probe(key) for key in keys] == [True, True]
            for key in keys:
                breakers.record_probe(key, None)
            await breakers.report()
            assert lost.made
            for _ in range(4):
                # A place that nobody renews expires.
                fleet.clock.advance(20)
                await breakers.report()
                await breakers.refresh()
                await breakers.renew_probes()
            assert [await fleet.system.coordinator.permits_in_use(f"canary:{key}") for key in keys] == [0, 0]
            assert [await breakers.acquire_probe(key) for key in keys] == [True, True], (
                "nobody ever tries the target again"
            )
