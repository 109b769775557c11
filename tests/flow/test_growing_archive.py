"""An archive that grows while its job runs has the same contents as one that is made afterwards."""

import asyncio
import json
import random
import zipfile
import zlib
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.engines.local_blobs import LocalBlobs
from conveyor.errors import EngineFailed
from conveyor.export import growing
from conveyor.export.direct import export_to_file
from conveyor.export.growing import GrowingArchive, growing_archive, joined_crc
from conveyor.model import BodyRef, InputJson, Job, TaskSeed
from conveyor.states import RunState
from conveyor.system import System
from tests.support.export_jobs import body_of, end_of, has_body, new_job, pack, url_of

BATCH = 20
MIB = 1024 * 1024


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "ROWS", BATCH)


async def put(system: System, job: Job, indexes: list[int]) -> None:
    await system.tasks.put(job.key, [TaskSeed(index, InputJson(f'"{url_of(index)}"')) for index in indexes])


async def finish(system: System, job: Job, indexes: list[int]) -> None:
    with_body = [index for index in indexes if has_body(index)]
    key = f"results/{job.tenant}/{job.job_id}/{job.run.run_id}/{system.clock.new_id('seg')}"
    refs = dict(zip(with_body, await pack(system.blobs, key, [body_of(index) for index in with_body]), strict=True))
    await system.tasks.finish(job.key, [end_of(index, refs.get(index), job.created_at + index) for index in indexes])


def contents(path: Path) -> tuple[dict[str, bytes], list[bytes]]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        assert len(names) == len(set(names))
        bodies = {name: archive.read(name) for name in names}
    return bodies, bodies.pop("manifest.jsonl").splitlines()


def archive_of(system: System, job: Job, path: Path) -> GrowingArchive:
    engine = system.tasks
    return GrowingArchive(engine, system.tasks, system.blobs, system.clock, job, path)  # type: ignore[arg-type]


async def packed_all(archive: GrowingArchive) -> int:
    """As `follow` does, until nothing more is to be packed."""
    while await archive._pack_one():
        pass
    return archive._progress.tasks


@pytest.mark.parametrize("seed", range(6))
async def test_it_is_the_archive_that_is_made_afterwards(system: System, tmp_path: Path, seed: int) -> None:
    """In whatever order tasks appear and finish; some never do, and some lines are none."""
    chance = random.Random(seed)
    indexes = [index for index in range(400) if chance.random() > (0.02 if seed % 2 else 0)]
    job = new_job(system, len(indexes), state=RunState.RUNNING)
    arrivals = [indexes[:200], indexes[200:]]
    if seed % 3 == 0:
        # A later range of the list is ingested first.
        arrivals.reverse()
    waiting: list[int] = []
    archive = archive_of(system, job, tmp_path / "grown.zip")
    early = 0
    for arrived in arrivals:
        await put(system, job, arrived)
        waiting = sorted(waiting + arrived)
        while len(waiting) > 70:
            near = waiting[:60]
            some = chance.sample(near, 25)
            await finish(system, job, some)
            waiting = [index for index in waiting if index not in some]
            system.clock.advance(3.0)  # type: ignore[attr-defined]
            early = await packed_all(archive)
    # Some are left as they are.
    await finish(system, job, waiting[10:])
    assert early > 0, "it has grown before the end"
    seen: list[int] = []
    assert await archive.is_sound()
    size = await archive.finish(job, lambda progress: seen.append(progress.tasks))
    assert seen[-1] == len(indexes)
    await export_to_file(system.tasks, system.blobs, job, tmp_path / "after.zip")
    grown, after = contents(tmp_path / "grown.zip"), contents(tmp_path / "after.zip")
    assert grown[1] == after[1], "the manifest, in the order of the list"
    assert grown[0] == after[0]
    archive.discard()
    assert sorted(each.name for each in tmp_path.iterdir() if each.is_file()) == ["after.zip", "grown.zip"]
    assert size == (tmp_path / "grown.zip").stat().st_size


async def test_large_bodies_and_none(system: System, tmp_path: Path) -> None:
    job = new_job(system, 70, state=RunState.RUNNING)
    await put(system, job, list(range(70)))
    large = random.Random(1).randbytes(9 * MIB)
    await system.blobs.put("r/large", large)
    ref = BodyRef("r/large", len(large), sha256(large).hexdigest())
    await system.tasks.finish(job.key, [end_of(index, ref if index == 3 else None, 1.0) for index in range(70)])
    archive = archive_of(system, job, tmp_path / "grown.zip")
    assert await packed_all(archive) > BATCH
    await archive.finish(job, lambda _: None)
    archive.discard()
    bodies, lines = contents(tmp_path / "grown.zip")
    assert (list(bodies.values()), len(lines)) == ([large], 70)


async def test_of_nothing(system: System, tmp_path: Path) -> None:
    job = new_job(system, 0)
    async with growing_archive(system.tasks, system.blobs, system.clock, job, tmp_path / "grown.zip") as archive:
        assert archive is not None and await archive.is_sound()
        await archive.finish(job, lambda _: None)
    assert contents(tmp_path / "grown.zip") == ({}, [])


async def test_what_is_not_finished_leaves_nothing(system: System, tmp_path: Path) -> None:
    job = new_job(system, 100, state=RunState.RUNNING)
    await put(system, job, list(range(100)))
    await finish(system, job, list(range(100)))
    out = tmp_path / "out.zip"
    out.write_bytes(b"of yesterday")
    with pytest.raises(KeyError):
        async with growing_archive(system.tasks, system.blobs, system.clock, job, out) as archive:
            assert archive is not None
            while archive._progress.tasks == 0:  # noqa: ASYNC110  (seen from outside)
                await asyncio.sleep(0)
            assert (tmp_path / "out.zip.part").exists()
            raise KeyError
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == ["out.zip"]
    assert out.read_bytes() == b"of yesterday"


async def test_a_failure_on_the_way_is_one_of_the_export_at_the_end(system: System, tmp_path: Path) -> None:
    """No batch is left out: the caller begins anew, and meets the same failure there."""
    job = new_job(system, 100, state=RunState.RUNNING)
    await put(system, job, list(range(100)))
    await finish(system, job, list(range(100)))
    away, out = Away(system.settings.data / "blobs"), tmp_path / "out.zip"
    async with growing_archive(system.tasks, away, system.clock, job, out) as archive:
        assert archive is not None
        while archive._is_sound:  # noqa: ASYNC110  (seen from outside)
            await asyncio.sleep(0)
        assert not await archive.is_sound()
        assert [each.name for each in tmp_path.iterdir() if each.is_file()] == []
        with pytest.raises(EngineFailed):
            await export_to_file(system.tasks, away, job, out)
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == []


class Away(LocalBlobs):
    """The real directory, out of reach."""

    async def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes | None:
        raise EngineFailed


async def test_a_damaged_body_is_left_out_and_listed(system: System, tmp_path: Path) -> None:
    job = new_job(system, 100, state=RunState.RUNNING)
    await put(system, job, list(range(100)))
    await finish(system, job, list(range(100)))
    [task] = await system.tasks.at(job.key, [7])
    ref = task.detail.body
    assert ref is not None
    data = bytearray(await system.blobs.get(ref.key) or b"")
    data[ref.offset] ^= 1
    await system.blobs.put(ref.key, bytes(data))
    out = tmp_path / "out.zip"
    async with growing_archive(system.tasks, system.blobs, system.clock, job, out) as archive:
        assert archive is not None and await archive.is_sound()
        await archive.finish(job, lambda _: None)
    with zipfile.ZipFile(out) as made:
        lines = [json.loads(line) for line in made.read("manifest.jsonl").splitlines()]
    [hit] = [line for line in lines if line["error"] and line["error"]["code"] == "body_damaged"]
    assert (hit["index"], hit["file"], hit["status"]) == (7, None, "succeeded")


@given(first=st.binary(max_size=200), second=st.binary(max_size=200), times=st.sampled_from([1, 7, 60_000]))
def test_checksums_join(first: bytes, second: bytes, times: int) -> None:
    second = second * times
    joined = joined_crc(zlib.crc32(first), zlib.crc32(second), len(second))
    assert joined == zlib.crc32(first + second)
