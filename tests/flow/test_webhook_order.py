"""The events of one job arrive at a receiver in their order while all is well, and wait for no other job's."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, cast

from conveyor.engines.records import Document, DocumentRecords
from conveyor.model import Job, OutboxEvent
from conveyor.notify.deliveries import DELIVERY
from conveyor.notify.dispatcher import OutboxDispatcher
from conveyor.notify.webhooks import Webhooks, WebhookSpec
from conveyor.settings import Settings
from conveyor.system import System, open_system
from tests.flow.test_webhooks import telling
from tests.support.clocks import JumpingClock
from tests.support.make_jobs import ACME, make_job, make_notice
from tests.support.places import quick_place
from tests.support.receiver import Receiver, Told, answering
from tests.support.working import until

JOBS = 4
EVENTS = 12


class Place(NamedTuple):
    """A system whose roles do not run yet, and a receiver with one endpoint."""

    system: System
    clock: JumpingClock
    receiver: Receiver


@asynccontextmanager
async def opened(endpoints: int = 1) -> AsyncIterator[Place]:
    clock = JumpingClock()
    with quick_place() as data:
        settings = Settings.load({}, data=data, allow_private_targets=True)
        async with open_system(settings, clock) as system, Receiver() as receiver:
            for number in range(endpoints):
                await Webhooks(system).create(ACME, WebhookSpec(receiver.url(f"/{number}")))
            yield Place(system, clock, receiver)


class SlowDocuments:
    """The first call that creates documents takes longer than those that are made meanwhile."""

    def __init__(self, documents: DocumentRecords) -> None:
        self._documents = documents
        self._is_first = True
        self.written: list[Document] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._documents, name)

    async def create_documents(self, rows: Sequence[Document]) -> None:
        is_first, self._is_first = self._is_first, False
        if is_first:
            for _ in range(1000):
                await asyncio.sleep(0)
        await self._documents.create_documents(rows)
        self.written += rows


async def store(system: System, jobs: Sequence[Job], events: int) -> list[OutboxEvent]:
    """Store the events of the jobs in turn."""
    stored = []
    for number in range(events):
        for job in jobs:
            event = make_notice(system.clock, job, "run.progress", number=number)
            await system.records.documents.create_documents([], event)
            stored.append(event)
    return stored


def numbers(told: Sequence[Told], job: Job, path: str = "/0") -> list[int]:
    """The numbers of the job's events, as they have arrived at a path."""
    own = [each for each in told if each.seen.target == path and each.json["data"]["job_id"] == job.job_id]
    return [each.json["data"]["number"] for each in own]


async def arrived(receiver: Receiver, count: int) -> None:
    async def look() -> int:
        return len(receiver.told)

    await until(look, lambda found: found >= count)


async def test_the_events_of_a_job_arrive_in_their_order() -> None:
    async with opened(endpoints=2) as (system, clock, receiver):
        jobs = [make_job(clock) for _ in range(JOBS)]
        held: list[asyncio.Event] = []

        async def reverse(told: Told, writer: asyncio.StreamWriter) -> None:
            """Of what is here together, the last is answered first."""
            gate = asyncio.Event()
            held.append(gate)
            if len(held) == 2 * JOBS:
                for each in reversed(held):
                    each.set()
                held.clear()
            await gate.wait()
            await answering(200)(told, writer)

        receiver.always = reverse
        await store(system, jobs, EVENTS)
        async with telling(system):
            await arrived(receiver, 2 * JOBS * EVENTS)
        for job in jobs:
            for path in ("/0", "/1"):
                assert numbers(receiver.told, job, path) == list(range(EVENTS))
        assert receiver.most_at_once == 2 * JOBS, "one of each job at each endpoint"


async def test_a_slow_event_holds_up_its_own_job_alone() -> None:
    async with opened() as (system, clock, receiver):
        slow, *others = jobs = [make_job(clock) for _ in range(JOBS)]
        gate = asyncio.Event()

        async def wait_for_first(told: Told, writer: asyncio.StreamWriter) -> None:
            if told.json["data"]["job_id"] == slow.job_id:
                await gate.wait()
            await answering(200)(told, writer)

        receiver.always = wait_for_first
        await store(system, jobs, EVENTS)
        async with telling(system):
            await arrived(receiver, len(others) * EVENTS + 1)
            assert numbers(receiver.told, slow) == [0]
            gate.set()
            await arrived(receiver, JOBS * EVENTS)
        assert numbers(receiver.told, slow) == list(range(EVENTS))


async def test_a_retry_holds_nothing_back() -> None:
    async with opened() as (system, clock, receiver):
        job = make_job(clock)
        receiver.acts = [answering(503)]
        await store(system, [job], 3)
        async with telling(system):
            await arrived(receiver, 3)
            assert numbers(receiver.told, job) == [0, 1, 2]
            clock.advance(10)
            await arrived(receiver, 4)
        assert numbers(receiver.told, job) == [0, 1, 2, 0]


async def test_deliveries_are_written_and_due_in_the_order_of_the_events() -> None:
    """More than one write takes, the first of which is slow."""
    async with opened() as (system, clock, _):
        jobs = [make_job(clock) for _ in range(2)]
        stored = await store(system, jobs, 60)
        slow = SlowDocuments(system.records.documents)
        records = dataclasses.replace(system.records, documents=cast(Any, slow))
        await OutboxDispatcher(system.settings, records, system.tasks, clock).run_once()
        due = await system.records.documents.due_documents(DELIVERY, clock.now(), 1000)
        for job in jobs:
            own = [event.notice_id for event in stored if event.job_id == job.job_id]
            for rows in (slow.written, due):
                assert [row.id.partition(":")[2] for row in rows if row.job_id == job.job_id] == own
