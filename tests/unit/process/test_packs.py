"""Packs of a fetcher: pages go to its log, other bodies with the pack; each outcome has its own. The worker makes pages
durable before a row points to them."""

import asyncio
from collections.abc import Collection, Sequence
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

from conveyor.engines.local_blobs import LocalBlobs
from conveyor.engines.sqlite import SqliteEngine
from conveyor.jobs.body_coding import INLINE_PAGE, LARGE, inflate
from conveyor.model import BodyRef, JobKind, Outcome, ResultDetail, ResultLayout, TaskError
from conveyor.process.body_store import BodyStore
from conveyor.process.executors.fetch.frames import OutcomePack, decode_pack, outcomes_of
from conveyor.process.executors.fetch.packs import Packer
from conveyor.process.recorded_outcomes import page_outcomes
from conveyor.states import TaskStatus
from tests.support.clocks import ManualClock
from tests.support.make_jobs import make_job

SMALL, PAGE, LAST = b"s" * INLINE_PAGE, b"p" * (INLINE_PAGE + 1), b"l" * 700
BODIES = [SMALL, PAGE, None, b"", LAST, b"x" * (LARGE + 1), PAGE]


class Frames:
    """The packs that were written."""

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


class FullDisk:
    """Logs that take nothing."""

    def append(self, objects: Sequence[tuple[str, bytes | bytearray | memoryview]]) -> list[str]:
        raise OSError(28, "No space left on device")


def succeeded(body: bytes | None) -> Outcome:
    return Outcome(TaskStatus.SUCCEEDED, http_status=200, body=body, content_type="text/plain")


def all_outcomes(pack: OutcomePack) -> list[Outcome]:
    """Those of stored pages too, in the order of their orders."""
    numbered = dict(outcomes_of(pack))
    for pages in pack.pages:
        numbered.update(zip(pages.numbers, page_outcomes(pages), strict=True))
    return [numbered[number] for number in sorted(numbered)]


def numbers(pack: OutcomePack) -> list[int]:
    stored = [number for pages in pack.pages for number in pages.numbers]
    return sorted([*(packed.number for packed in pack.outcomes), *stored])


async def bodies_of(pack: OutcomePack, blobs: LocalBlobs) -> list[bytes | None]:
    """The body of each outcome, wherever it is, inflated."""
    found: list[bytes | None] = []
    for outcome in all_outcomes(pack):
        place = msgspec.json.decode(outcome.detail or "", type=ResultDetail).body
        data: bytes | memoryview | None = outcome.body
        if place is None:
            assert outcome.segment is None
            place = BodyRef("", outcome.length, outcome.sha256 or "", stored=outcome.stored)
        else:
            assert outcome.segment == place.key and outcome.body is None
            data = await blobs.get(place.key, place.offset, place.stored_length)
        if data is not None:
            data = bytes(data) if place.stored is None else inflate(place, data)
            assert place.sha256 == sha256(data).hexdigest()
        found.append(data)
    return found


@pytest.fixture
def blobs(tmp_path: Path) -> LocalBlobs:
    return LocalBlobs(tmp_path)


@pytest.mark.parametrize("layout", [ResultLayout.PACKED, ResultLayout.OBJECT])
async def test_pages_go_to_the_log_and_other_bodies_with_the_pack(blobs: LocalBlobs, layout: ResultLayout) -> None:
    clock, frames = ManualClock(), Frames()
    jobs = [make_job(clock, kind=JobKind.FETCH, layout=layout) for _ in range(2)]
    packer = Packer(frames, clock, blobs, linger=60.0)
    for number, body in enumerate(BODIES):
        packer.put(jobs[number % 2], number, succeeded(body), is_last=False)
    packer.send()
    found = {
        number: body
        for pack in frames.packs
        for number, body in zip(numbers(pack), await bodies_of(pack, blobs), strict=True)
    }
    assert [found[number] for number in range(len(BODIES))] == BODIES
    segments = [pages.segment for pack in frames.packs for pages in pack.pages]
    if layout is ResultLayout.OBJECT:
        assert segments == []
    else:
        assert {key.rpartition("/")[0] for key in segments} == {
            f"results/{job.tenant}/{job.job_id}/{job.run.run_id}" for job in jobs
        }
        assert sum(len(pack.bodies) for pack in frames.packs) == len(SMALL) + LARGE + 1


async def test_the_body_of_a_failure_goes_to_the_worker_which_may_retry_it(blobs: LocalBlobs) -> None:
    clock, frames = ManualClock(), Frames()
    job = make_job(clock, kind=JobKind.FETCH, layout=ResultLayout.PACKED)
    failed = Outcome(TaskStatus.FAILED, http_status=503, body=PAGE, error=TaskError("http_503", "503"))
    Packer(frames, clock, blobs).put(job, 1, failed, is_last=True)
    (pack,) = frames.packs
    assert pack.pages == []
    assert await bodies_of(pack, blobs) == [PAGE]


async def test_a_page_that_cannot_be_encoded_fails_alone(blobs: LocalBlobs) -> None:
    clock, frames = ManualClock(), Frames()
    job = make_job(clock, kind=JobKind.FETCH, layout=ResultLayout.PACKED)
    packer = Packer(frames, clock, blobs, linger=60.0)
    for number, final_url in enumerate(["https://example.com/", "\ud800", "https://example.com/2"]):
        outcome = succeeded(PAGE)
        outcome.final_url = final_url
        packer.put(job, number, outcome, is_last=number == 2)
    (pack,) = frames.packs
    assert [(packed.number, packed.status, packed.error) for packed in pack.outcomes] == [
        (1, TaskStatus.FAILED, TaskError("internal", "the fetch failed inside Conveyor"))
    ]
    assert [pages.numbers for pages in pack.pages] == [[0, 2]]
    assert await bodies_of(pack, blobs) == [PAGE, None, PAGE]


async def test_pages_that_cannot_be_stored_go_to_the_worker(blobs: LocalBlobs) -> None:
    clock, frames = ManualClock(), Frames()
    job = make_job(clock, kind=JobKind.FETCH, layout=ResultLayout.PACKED)
    packer = Packer(frames, clock, FullDisk(), linger=60.0)
    for number, body in enumerate(BODIES):
        packer.put(job, number, succeeded(body), is_last=False)
    packer.send()
    assert all(pack.pages == [] for pack in frames.packs)
    found = {
        number: body
        for pack in frames.packs
        for number, body in zip(numbers(pack), await bodies_of(pack, blobs), strict=True)
    }
    assert [found[number] for number in range(len(BODIES))] == BODIES


async def test_an_outcome_waits_for_others_only_if_others_are_on_their_way() -> None:
    clock, frames = ManualClock(), Frames()
    job = make_job(clock, kind=JobKind.FETCH)
    packer = Packer(frames, clock, linger=0.001)
    packer.put(job, 1, succeeded(SMALL), is_last=False)
    assert frames.packs == []
    packer.put(job, 2, succeeded(SMALL), is_last=True)
    assert [len(pack.outcomes) for pack in frames.packs] == [2]
    packer.put(job, 3, succeeded(SMALL), is_last=False)
    await asyncio.sleep(0.05)
    assert [len(pack.outcomes) for pack in frames.packs] == [2, 1]


class SyncedBlobs(LocalBlobs):
    """Blobs that note what was made durable, and fail at it if told so."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.synced: set[str] = set()
        self.fails = False

    async def make_durable(self, keys: Collection[str]) -> None:
        await super().make_durable(keys)
        if self.fails:
            raise OSError(5, "Input/output error")
        self.synced.update(keys)


async def test_pages_are_durable_before_a_row_can_point_to_them(tmp_path: Path) -> None:
    clock, frames, blobs = ManualClock(), Frames(), SyncedBlobs(tmp_path / "blobs")
    job = make_job(clock, kind=JobKind.FETCH, layout=ResultLayout.PACKED)
    packer = Packer(frames, clock, blobs, linger=60.0)
    for number, body in enumerate(BODIES[:5]):
        packer.put(job, number, succeeded(body), is_last=False)
    packer.send()
    (pack,) = frames.packs
    outcomes = all_outcomes(pack)
    segments = {pages.segment for pages in pack.pages}
    async with SqliteEngine.open(tmp_path, clock) as engine:
        store = BodyStore(blobs, engine.tasks, clock)
        blobs.fails = True
        with pytest.raises(OSError, match="Input/output"):
            await store.keep([(job, outcomes)])
        blobs.fails = False
        await store.keep([(job, outcomes)])
        assert blobs.synced == segments
        # And as the recorder names them when it gets pages by column.
        blobs.synced = set()
        await store.keep([], segments)
    assert blobs.synced == segments


async def test_a_sync_of_a_log_that_was_removed_is_none(tmp_path: Path) -> None:
    blobs, job = LocalBlobs(tmp_path), make_job(ManualClock(), kind=JobKind.FETCH)
    (key,) = blobs.append([(f"results/{job.tenant}/{job.job_id}/seg_1", PAGE)])
    (log,) = (tmp_path / ".logs").rglob("*.log")
    await blobs.make_durable([key])
    log.unlink()
    await blobs.make_durable([key])
