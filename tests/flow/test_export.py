"""Exports of runs that are in a real store: what is in the archive, and that a wrong archive is never made."""

import asyncio
import dataclasses
import io
import json
import os
import random
import tracemalloc
import zipfile
from collections.abc import AsyncIterator
from contextlib import suppress
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conveyor.engines.blobs import Blobs
from conveyor.engines.local_blobs import LocalBlobs
from conveyor.export import direct as export
from conveyor.export import spool
from conveyor.export.direct import ExportProgress, export_to_file, export_zip
from conveyor.model import (
    BodyRef,
    InputJson,
    Job,
    JobId,
    JobKind,
    Options,
    ResultDetail,
    ResultLayout,
    Run,
    RunId,
    TaskEnd,
    TaskError,
    TaskSeed,
    TenantId,
    task_id,
)
from conveyor.read import body_reader as reading
from conveyor.read import walk
from conveyor.states import RunState, TaskStatus
from conveyor.system import System
from tests.support.export_jobs import Unordered, pack

MIB = 1024 * 1024
AT = 1_790_000_000.0


def job_of(total: int, shards: int = 1) -> Job:
    return Job(
        tenant=TenantId("acme"),
        job_id=JobId("job_1"),
        name=None,
        kind=JobKind.FETCH,
        mode="closed",
        options=Options(),
        task_shard_count=shards,
        result_layout=ResultLayout.PACKED,
        state=RunState.RUNNING,
        reason=None,
        created_at=AT,
        expires_at=AT + 1e6,
        run=Run(RunId("run_1"), 1, RunState.RUNNING, total, True, AT),
    )


def end(index: int, ref: BodyRef | None, *, status: TaskStatus = TaskStatus.SUCCEEDED) -> TaskEnd:
    failed = status is TaskStatus.FAILED
    detail = ResultDetail(
        error=TaskError("http_status", "The target answered 500.") if failed else None,
        content_type="text/html" if ref else None,
        final_url=f"https://example.com/final/{index}" if ref else None,
        body=ref,
    )
    http_status = {TaskStatus.SUCCEEDED: 200, TaskStatus.FAILED: 500}.get(status)
    code = "http_status" if failed else None
    return TaskEnd(index, status, 2, http_status, code, msgspec.json.encode(detail).decode(), AT + index)


async def seed(system: System, job: Job) -> None:
    seeds = [TaskSeed(index, InputJson(f'"https://example.com/{index}"')) for index in range(job.run.total)]
    for start in range(0, len(seeds), 5000):
        await system.tasks.put(job.key, seeds[start : start + 5000])


async def alone(blobs: Blobs, key: str, body: bytes) -> BodyRef:
    await blobs.put(key, body)
    return BodyRef(key, len(body), sha256(body).hexdigest())


async def packed_job(system: System, total: int, size: int = 200, per_segment: int = 500) -> tuple[Job, list[bytes]]:
    """All tasks succeeded, their bodies in segments, in no order that the ids have."""
    job = job_of(total)
    await seed(system, job)
    bodies = [random.Random(index).randbytes(size + index % 50) for index in range(total)]
    for start in range(0, total, per_segment):
        refs = await pack(system.blobs, f"results/acme/seg{start:08d}", bodies[start : start + per_segment])
        await system.tasks.finish(job.key, [end(start + at, ref) for at, ref in enumerate(refs)])
    return job, bodies


@pytest.fixture(params=["by index", "by id"])
async def system(system: System, request: pytest.FixtureRequest) -> System:
    """The system, and the same with tasks that can not be walked in the order of the list."""
    if request.param == "by index":
        return system
    return dataclasses.replace(system, tasks=Unordered(system.tasks))  # type: ignore[arg-type]


async def exported(system: System, job: Job, level: int = 0) -> zipfile.ZipFile:
    data = b"".join([piece async for piece in export_zip(system.tasks, system.blobs, job, level=level)])
    found = zipfile.ZipFile(io.BytesIO(data))
    assert found.testzip() is None
    return found


def manifest_of(found: zipfile.ZipFile) -> list[dict[str, Any]]:
    return [json.loads(line) for line in found.read("manifest.jsonl").splitlines()]


@pytest.mark.parametrize("level", [0, 1])
async def test_every_task_has_its_line_and_every_body_its_file(system: System, level: int) -> None:
    job = job_of(9)
    await seed(system, job)
    bodies = {0: b"first", 1: b"", 2: b"<html>" * 1000, 5: b"error page", 7: os.urandom(9 * MIB), 8: b"alone"}
    refs = dict(zip((0, 1, 2, 5), await pack(system.blobs, "r/seg", [bodies[at] for at in (0, 1, 2, 5)]), strict=True))
    refs[7] = await alone(system.blobs, "r/big", bodies[7])
    refs[8] = await alone(system.blobs, "r/alone", bodies[8])
    ends = [end(index, refs[index]) for index in (0, 1, 2, 7, 8)]
    ends.append(end(3, None, status=TaskStatus.FAILED))
    ends.append(end(4, None, status=TaskStatus.CANCELLED))
    ends.append(end(5, refs[5], status=TaskStatus.FAILED))
    await system.tasks.finish(job.key, ends)

    found = await exported(system, job, level)
    lines = manifest_of(found)

    assert found.namelist()[-1] == "manifest.jsonl"
    assert sorted(found.namelist()[:-1]) == [f"bodies/{index:07d}_example.com-{index}.html" for index in sorted(bodies)]
    assert [line["index"] for line in lines] == list(range(9)), "in the order of the list"
    statuses = ["succeeded"] * 3 + ["failed", "cancelled", "failed", "pending"] + ["succeeded"] * 2
    assert [line["status"] for line in lines] == statuses
    for index, body in bodies.items():
        assert found.read(str(lines[index]["file"])) == body
    assert lines[2] == {
        "index": 2,
        "task_id": task_id(job.run.run_id, 2),
        "input": "https://example.com/2",
        "status": "succeeded",
        "http_status": 200,
        "attempts": 2,
        "file": "bodies/0000002_example.com-2.html",
        "size": 6000,
        "sha256": sha256(bodies[2]).hexdigest(),
        "content_type": "text/html",
        "error": None,
        "final_url": "https://example.com/final/2",
        "id": None,
        "tag": None,
        "data": None,
        "extracted": None,
        "unchanged": False,
    }
    nothing = {"file": None, "size": None, "sha256": None, "content_type": None, "final_url": None}
    assert lines[3]["error"] == {"code": "http_status", "message": "The target answered 500."}
    assert nothing.items() <= lines[3].items()
    assert {"http_status": None, "error": None, **nothing}.items() <= lines[4].items()
    assert {"attempts": 0, "http_status": None, "error": None, **nothing}.items() <= lines[6].items()


async def test_a_run_without_tasks(system: System) -> None:
    found = await exported(system, job_of(0))
    assert found.namelist() == ["manifest.jsonl"]
    assert found.read("manifest.jsonl") == b""


async def test_a_sharded_run_is_walked_whole(system: System) -> None:
    job = job_of(40, shards=4)
    await seed(system, job)
    assert [line["index"] for line in manifest_of(await exported(system, job))] == list(range(40))


async def test_many_pages_segments_and_spills(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "SPILL_BYTES", 50_000)
    monkeypatch.setattr(export, "_BUFFER_BYTES", 50_000)
    monkeypatch.setattr(walk, "ROWS", 300)
    monkeypatch.setattr(reading, "_WINDOW_BYTES", 30_000)
    monkeypatch.setattr(reading, "_RANGE_BYTES", 20_000)
    job, bodies = await packed_job(system, 3500)
    found = await exported(system, job)
    lines = manifest_of(found)
    assert [line["index"] for line in lines] == list(range(3500))
    assert [found.read(str(line["file"])) for line in lines] == bodies


async def test_two_exports_are_the_same_bytes(system: System, tmp_path: Path) -> None:
    job, _ = await packed_job(system, 300)
    for name in ("one.zip", "two.zip"):
        await export_to_file(system.tasks, system.blobs, job, tmp_path / name)
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()


class Counting(LocalBlobs):
    """The real directory, and how often it was asked."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gets: list[str] = []

    async def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes | None:
        self.gets.append(key)
        return await super().get(key, offset, length)


async def test_a_segment_is_read_once(system: System) -> None:
    """An engine may give tasks in the order of hashes; without a plan each body would be a read of its own."""
    job, _ = await packed_job(system, 4000, per_segment=1000)
    blobs = Counting(system.settings.data / "blobs")
    assert len([piece async for piece in export_zip(system.tasks, blobs, job)]) > 0
    assert sorted(blobs.gets) == [f"results/acme/seg{start:08d}" for start in range(0, 4000, 1000)]


@pytest.mark.parametrize(
    ("kind", "damage"),
    # Not a segment that is too long: what follows its last body belongs to nobody.
    [(kind, damage) for kind in ("alone", "big") for damage in ("flipped", "short", "long", "gone")]
    + [(kind, damage) for kind in ("segment", "deflated") for damage in ("flipped", "short", "gone")],
)
async def test_an_export_goes_on_past_a_damaged_body(system: System, tmp_path: Path, kind: str, damage: str) -> None:
    job = job_of(3)
    await seed(system, job)
    body = os.urandom(9 * MIB if kind == "big" else 1000)
    refs = [await alone(system.blobs, "r/body", body)]
    if kind == "segment":
        refs = await pack(system.blobs, "r/body", [b"sound", body, b"sound"])
    elif kind == "deflated":
        refs = await pack(system.blobs, "r/body", [b"sound", b"a page of words " + body.hex().encode(), b"sound"])
        assert refs[1].stored is not None
    await system.tasks.finish(job.key, [end(index, ref) for index, ref in enumerate(refs)])
    path = system.settings.data / "blobs/r/body"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    match damage:
        case "flipped":
            path.write_bytes(raw)
        case "short":
            os.truncate(path, len(raw) - 50)
        case "long":
            os.truncate(path, len(raw) + 1)
        case "gone":
            path.unlink()
    out = tmp_path / "out.zip"
    out.write_bytes(b"the export of yesterday")
    await export_to_file(system.tasks, system.blobs, job, out)
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None
        lines = manifest_of(archive)
        hit = {line["index"]: line["error"] for line in lines if line["error"]}
        damaged = [1] if len(refs) > 1 else [0]
        if len(refs) > 1 and damage == "gone":
            damaged = [0, 1, 2]
        elif len(refs) > 1 and damage == "short":
            damaged = [1, 2]
        assert sorted(hit) == damaged
        assert {error["code"] for error in hit.values()} == {"body_damaged"}
        assert [line["index"] for line in lines] == [0, 1, 2]
        sound = [line for line in lines if line["file"] and line["index"] not in hit]
        assert [archive.read(str(line["file"])) for line in sound] == [b"sound"] * (len(refs) - len(damaged))
        if kind != "big":
            assert len(archive.namelist()) == len(sound) + 1, "no damaged body is in it"


async def test_a_cancelled_export_leaves_no_file(system: System, tmp_path: Path) -> None:
    job, _ = await packed_job(system, 2000)
    out = tmp_path / "out.zip"
    reached = asyncio.Event()

    def report(progress: ExportProgress) -> None:
        reached.set()

    making = asyncio.create_task(export_to_file(system.tasks, system.blobs, job, out, report=report))
    await reached.wait()
    making.cancel()
    with suppress(asyncio.CancelledError):
        await making
    assert making.cancelled()
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == []


async def test_progress_is_told(system: System, tmp_path: Path) -> None:
    job, _ = await packed_job(system, 2500)
    seen: list[ExportProgress] = []
    out = tmp_path / "out.zip"
    size = await export_to_file(system.tasks, system.blobs, job, out, report=seen.append)
    assert size == out.stat().st_size
    assert seen[-1] == ExportProgress(2500, 2500, size)
    for before, after in pairwise(seen):
        values = zip(msgspec.structs.astuple(before), msgspec.structs.astuple(after), strict=True)
        assert all(first <= second for first, second in values)
    assert {each.tasks for each in seen} == {0, 2000, 2500}


async def test_memory_does_not_grow_with_the_run(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller bounds make a small run a large one: 8,000 bodies are 80 windows and 60 spilled files."""
    monkeypatch.setattr(spool, "SPILL_BYTES", 64 * 1024)
    monkeypatch.setattr(export, "_BUFFER_BYTES", 64 * 1024)
    monkeypatch.setattr(export, "ROWS", 200)
    monkeypatch.setattr(walk, "ROWS", 200)
    monkeypatch.setattr(reading, "_WINDOW_BYTES", 256 * 1024)
    monkeypatch.setattr(reading, "_RANGE_BYTES", 128 * 1024)
    job, bodies = await packed_job(system, 8000, size=3000)
    tracemalloc.start()
    try:
        size = 0
        async for piece in export_zip(system.tasks, system.blobs, job):
            size += len(piece)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size > sum(map(len, bodies))
    assert peak < 8 * MIB, "a page of tasks, a window, the buffers of the spilled files"


async def test_an_export_while_the_run_goes_on(system: System) -> None:
    """Tasks that end meanwhile are in it or not, each whole."""
    job, _ = await packed_job(system, 1500)
    more = job_of(3000)
    await seed(system, more)

    async def go_on() -> AsyncIterator[int]:
        for start in range(1500, 3000, 100):
            refs = await pack(
                system.blobs, f"results/acme/more{start}", [b"%d" % at for at in range(start, start + 100)]
            )
            await system.tasks.finish(more.key, [end(start + at, ref) for at, ref in enumerate(refs)])
            yield start

    working = asyncio.create_task(anext_all(go_on()))
    found = await exported(system, more)
    await working
    lines = manifest_of(found)
    assert [line["index"] for line in lines] == list(range(3000))
    for line in lines:
        assert (line["status"] == "succeeded") is (line["file"] is not None)
        if line["file"] is not None:
            assert sha256(found.read(str(line["file"]))).hexdigest() == line["sha256"]
    assert job.key == more.key


async def anext_all(steps: AsyncIterator[int]) -> None:
    async for _ in steps:
        pass
