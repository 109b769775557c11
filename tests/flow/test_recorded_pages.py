"""Pages that a fetcher has stored: the worker writes their rows by column, and one by one where it cannot write them
together. Either way each has its row, its count and its body, and each message is acknowledged once."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import msgspec
import pytest

from conveyor.engines.queue import Depth, run_queue
from conveyor.engines.shared_logs import open_shared_logs
from conveyor.jobs.chunks import decode
from conveyor.model import Job, JobKind, Outcome, ResultDetail, TaskRef
from conveyor.process.body_store import BodyStore
from conveyor.process.breakdown_parts import BreakdownParts
from conveyor.process.executors.fetch.frames import OutcomePack, StoredPages, decode_pack
from conveyor.process.executors.fetch.packs import Packer
from conveyor.process.load_tally import LoadTally
from conveyor.process.outcome_writer import OutcomeWriter
from conveyor.process.recorded_outcomes import LeasedChunk, RecordedPages
from conveyor.states import TaskStatus
from conveyor.system import System
from tests.faults.one_fault import ANYBODY, Fault, Injector, Kind, When
from tests.support.small_fleet import Fleet, open_fleet

Lease = tuple[LeasedChunk, list[TaskRef]]


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with open_fleet() as opened:
        yield opened


def page(index: int) -> bytes:
    return f"<html>page {index}</html>\n".encode() * 40


class Frames:
    """Takes the packs of a fetcher."""

    def __init__(self) -> None:
        self.packs: list[OutcomePack] = []

    def write(self, data: bytes) -> None:
        self.packs.append(decode_pack(data[4:]))

    async def drain(self) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass


def stored_pages(fleet: Fleet, job: Job, indexes: list[int]) -> StoredPages:
    """The pages of these tasks, as a fetcher stores and sends them."""
    frames = Frames()
    packer = Packer(frames, fleet.clock, open_shared_logs(fleet.system.settings), linger=60.0)
    for index in indexes:
        answered = Outcome(TaskStatus.SUCCEEDED, 200, body=page(index), content_type="text/html", elapsed=0.5)
        packer.put(job, index, answered, is_last=index == indexes[-1])
    (pack,) = frames.packs
    (pages,) = pack.pages
    assert (pack.outcomes, pages.numbers) == ([], indexes)
    return pages


async def leased(fleet: Fleet, job: Job) -> list[Lease]:
    """All messages of the run, received."""
    queue = run_queue(job.run.run_id)
    deliveries = await fleet.system.queue.receive(queue, 100, 30.0)
    chunks = [(delivery.receipt, decode(delivery.body).refs) for delivery in deliveries]
    return [(LeasedChunk(queue, receipt, len(refs)), refs) for receipt, refs in chunks]


def recorded(fleet: Fleet, job: Job, leases: list[Lease]) -> RecordedPages:
    pairs = [(chunk, ref) for chunk, refs in leases for ref in refs]
    refs = [ref for _, ref in pairs]
    return RecordedPages(
        job, [chunk for chunk, _ in pairs], refs, stored_pages(fleet, job, [ref.index for ref in refs])
    )


def writer(fleet: Fleet, system: System) -> OutcomeWriter:
    bodies = BodyStore(fleet.blobs, system.tasks, fleet.clock)
    return OutcomeWriter(
        system.records.documents,
        system.tasks,
        system.queue,
        bodies,
        fleet.lifecycle,
        system.coordinator,
        fleet.clock,
        BreakdownParts(system.records.documents, fleet.clock, "worker", LoadTally(system.coordinator, "worker")),
        system.atomic_flush,
        lambda run_id, delay: None,
    )


async def submit(fleet: Fleet, tasks: int) -> Job:
    urls = [f"https://example.com/{number}" for number in range(tasks)]
    return await fleet.submit(urls, kind=JobKind.FETCH, handler=None, chunk_size=4, result_layout="packed")


async def check(fleet: Fleet, job: Job) -> None:
    tasks = await fleet.check(job)
    for index, task in tasks.items():
        assert (task.status, task.http_status, task.attempts) == (TaskStatus.SUCCEEDED, 200, 1)
        assert (task.detail.content_type, task.detail.elapsed) == ("text/html", 0.5)
        assert await fleet.body(task) == page(index)
    assert await fleet.depth(job) == Depth(0, 0, 0)


async def test_pages_of_several_runs_are_written_together(fleet: Fleet) -> None:
    jobs = [await submit(fleet, 10) for _ in range(2)]
    leases = [await leased(fleet, job) for job in jobs]
    pages = [recorded(fleet, job, each) for job, each in zip(jobs, leases, strict=True)]
    await writer(fleet, fleet.system).write([], pages)
    for job in jobs:
        await check(fleet, job)
    assert {chunk.left for each in leases for chunk, _ in each} == {0}


async def test_pages_are_written_one_by_one_where_engines_share_no_transaction(fleet: Fleet) -> None:
    job = await submit(fleet, 10)
    pages = recorded(fleet, job, await leased(fleet, job))
    await writer(fleet, dataclasses.replace(fleet.system, atomic_flush=None)).write([], [pages])
    await check(fleet, job)


@pytest.mark.parametrize("when", When)
@pytest.mark.parametrize("ordinal", [0, 1])
async def test_pages_are_written_once_though_the_flush_fails(fleet: Fleet, when: When, ordinal: int) -> None:
    """Before or after it took effect; the second flush acknowledges what two flushes had a part of."""
    fault = Injector(Fault(Kind(("atomic_flush", "record_flush", ANYBODY)), ordinal, when))
    job = await submit(fleet, 4)
    ((chunk, refs),) = await leased(fleet, job)
    flushing = writer(fleet, fault.over(fleet.system))
    halves = [recorded(fleet, job, [(chunk, part)]) for part in (refs[:2], refs[2:])]
    await asyncio.gather(*(flushing.write([], [half]) for half in halves))
    assert fault.made
    await check(fleet, job)
    assert chunk.left == 0


async def test_rows_of_slow_attempts_say_which_worker_made_them(fleet: Fleet) -> None:
    job = await submit(fleet, 2)
    pages = stored_pages(fleet, job, [0, 1])
    pages = msgspec.structs.replace(pages, elapsed=[0.999, 1.0])
    known = recorded(fleet, job, await leased(fleet, job))
    slow_pages = RecordedPages(job, known.chunks, known.refs, pages)
    quick, slow = (msgspec.json.decode(end.detail, type=ResultDetail) for end in slow_pages.ends(1.0, "worker_1"))
    assert (quick.worker, slow.worker) == ("", "worker_1")
    assert quick.body is not None
    assert slow.body is not None
