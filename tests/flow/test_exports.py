"""Exports that are made offline: what is in the files of each format, parts, filters, and what becomes of them."""

import asyncio
import base64
import csv
import dataclasses
import gzip
import io
import json
import random
import sys
import zipfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conveyor.engines.blobs import Presigned
from conveyor.engines.local_blobs import LocalBlobs
from conveyor.errors import EngineFailed, InvalidField, LimitReached, NotFound
from conveyor.export import exporter, exports, sorting, staged_file, writer
from conveyor.export.exports import Exports, ExportState, export_json
from conveyor.export.request import ExportSpec
from conveyor.lists.decoders import zstd
from conveyor.model import BodyRef, InputJson, Job, Lineage, OutboxEvent, Run, RunId, RunKey, TaskSeed, task_id
from conveyor.read import body_reader as reading
from conveyor.read import walk
from conveyor.recover.retention import SETTLE_SECONDS, Retention
from conveyor.settings import Settings
from conveyor.states import RunState, TaskStatus
from conveyor.system import System
from tests.support.clocks import JumpingClock
from tests.support.export_jobs import (
    ACME,
    Unordered,
    asked,
    body_of,
    end_of,
    found,
    has_body,
    made,
    new_job,
    outcome_of,
    parts_of,
    stored_job,
    url_of,
)
from tests.support.export_jobs import exporter as new_exporter

MIB = 1024 * 1024


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.load({}, data=tmp_path / "data", export_piece_bytes=64 * 1024)


@pytest.fixture(params=["by index", "by id"])
async def system(system: System, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> System:
    """The system, and the same with tasks that can not be walked in the order of the list. Small steps make a small
    job a large one."""
    monkeypatch.setattr(walk, "ROWS", 200)
    monkeypatch.setattr(sorting, "PAGE", 100)
    monkeypatch.setattr(sorting, "_SPOOL_BYTES", 200_000)
    monkeypatch.setattr(sorting, "_READ_BYTES", 20_000)
    monkeypatch.setattr(sorting, "FAN_IN", 2)
    if request.param == "by index":
        return system
    return dataclasses.replace(system, tasks=Unordered(system.tasks))  # type: ignore[arg-type]


def unzipped(data: bytes) -> zipfile.ZipFile:
    archive = zipfile.ZipFile(io.BytesIO(data))
    assert archive.testzip() is None
    return archive


def manifest_of(archive: zipfile.ZipFile) -> list[dict[str, Any]]:
    return [json.loads(line) for line in archive.read("manifest.jsonl").splitlines()]


def check_zip(archive: zipfile.ZipFile, indexes: Sequence[int]) -> None:
    lines = manifest_of(archive)
    assert [line["index"] for line in lines] == list(indexes)
    assert archive.namelist()[-1] == "manifest.jsonl"
    assert [line["file"] for line in lines if line["file"]] == archive.namelist()[:-1]
    for line in lines:
        index = line["index"]
        assert line["status"] == outcome_of(index).label
        assert (line["file"] is not None) is has_body(index)
        if line["file"] is not None:
            assert archive.read(line["file"]) == body_of(index)


@pytest.mark.parametrize("compression", ["none", "deflate"])
async def test_zip(system: System, compression: str) -> None:
    job = await stored_job(system, 2500)
    export_id, [data] = await made(system, job, format="zip", compression=compression)
    archive = unzipped(data)
    check_zip(archive, range(2500))
    methods = Counter(info.compress_type for info in archive.infolist())
    assert methods[zipfile.ZIP_DEFLATED] == 1 if compression == "none" else methods[zipfile.ZIP_DEFLATED] > 1500
    export = await found(system, export_id)
    bodies = [body_of(index) for index in range(2500) if has_body(index)]
    assert (export.read, export.body_count, export.body_bytes) == (2500, len(bodies), sum(map(len, bodies)))
    assert export.counts == {"succeeded": 2250, "failed": 250}
    assert len(export.parts) == 1
    assert export.bytes == len(data)


async def test_a_zip_without_bodies_is_a_manifest(system: System) -> None:
    job = await stored_job(system, 300)
    _, [data] = await made(system, job, bodies="none")
    archive = unzipped(data)
    assert archive.namelist() == ["manifest.jsonl"]
    lines = manifest_of(archive)
    assert [line["file"] for line in lines] == [None] * 300
    assert [line["sha256"] for line in lines] == [
        sha256(body_of(index)).hexdigest() if has_body(index) else None for index in range(300)
    ]


UNPACK: dict[str, Callable[[bytes], bytes]] = {
    "none": bytes,
    "gzip": gzip.decompress,
    "zstd": lambda data: zstd.decompress(data) if data else b"",
}


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
@pytest.mark.parametrize("bodies", ["none", "text", "base64"])
async def test_jsonl(system: System, compression: str, bodies: str) -> None:
    job = await stored_job(system, 1500)
    _, [data] = await made(system, job, format="jsonl", compression=compression, bodies=bodies)
    lines = [json.loads(line) for line in UNPACK[compression](data).splitlines()]
    assert [line["index"] for line in lines] == list(range(1500))
    for line in lines:
        index = line["index"]
        body = body_of(index) if has_body(index) else None
        assert line["input"] == {"url": url_of(index), "tag": f"t{index % 5}"}
        assert line["sha256"] == (sha256(body).hexdigest() if body is not None else None)
        assert line["headers"] == [["server", "fleet"]]
        assert (line["elapsed"], line["error"] is None) == (0.25, index % 10 != 9)
        if bodies == "none":
            assert not {"body", "body_base64", "body_omitted"} & set(line)
        elif body is None:
            assert (line["body"], line["body_base64"], line["body_omitted"]) == (None, None, False)
        elif bodies == "text" and index % 7 != 3:
            assert (line["body"].encode(), line["body_base64"]) == (body, None)
        else:
            assert (line["body"], base64.b64decode(line["body_base64"])) == (None, body)


async def test_gzip_is_one_stream(system: System) -> None:
    """Some readers stop at the end of the first of several."""
    job = await stored_job(system, 3000)
    export_id, [data] = await made(system, job, format="jsonl", compression="gzip", bodies="base64")
    assert (await found(system, export_id)).attempt == 1
    unpacker = __import__("zlib").decompressobj(31)
    unpacker.decompress(data)
    assert unpacker.eof
    assert unpacker.unused_data == b""


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
async def test_csv(system: System, compression: str) -> None:
    job = await stored_job(system, 600)
    _, [data] = await made(system, job, format="csv", compression=compression)
    rows = list(csv.DictReader(io.StringIO(UNPACK[compression](data).decode(), newline="")))
    assert [int(row["index"]) for row in rows] == list(range(600))
    assert list(rows[0]) == [
        "index", "task_id", "input", "status", "http_status", "attempts", "size", "sha256", "content_type",
        "error_code", "error_message", "final_url", "elapsed", "finished_at", "url", "id", "tag",
    ]  # fmt: skip
    assert rows[9]["error_code"] == "http_503"
    assert json.loads(rows[9]["input"])["url"] == url_of(9)
    assert rows[5]["size"] == ""


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
@pytest.mark.parametrize("bodies", ["none", "binary"])
async def test_parquet(system: System, compression: str, bodies: str) -> None:
    import pyarrow.parquet as pq

    job = await stored_job(system, 1200)
    _, [data] = await made(system, job, format="parquet", compression=compression, bodies=bodies)
    table = pq.read_table(io.BytesIO(data)).to_pylist()
    assert [row["index"] for row in table] == list(range(1200))
    for row in table:
        index = row["index"]
        assert row["task_id"] == task_id(job.run.run_id, index)
        assert row["status"] == outcome_of(index).label
        assert row["http_status"] == (503 if index % 10 == 9 else 200)
        assert row["finished_at"].timestamp() == pytest.approx(job.created_at + index, abs=0.002)
        if bodies == "binary":
            assert row["body"] == (body_of(index) if has_body(index) else None)
            assert row["body_omitted"] is False


async def listed_job(system: System, total: int) -> Job:
    """A job of a list with columns of its own, of which one appears late."""
    job = new_job(system, total)
    event = OutboxEvent(
        system.clock.new_id("evt"), ACME, job.job_id, job.run.run_id, "job.accepted", job.created_at, {}
    )
    await system.records.jobs.create_job(job, event, None)
    rows = [
        {"url": url_of(index), "id": f"sku-{index % 400}", "data": {"price": index / 2, "Status": "old"}}
        for index in range(total)
    ]
    rows[-1]["data"] = {"late": "yes"}
    seeds = [TaskSeed(index, InputJson(json.dumps(row))) for index, row in enumerate(rows)]
    await system.tasks.put(job.key, seeds)
    body = b"<p>page</p>"
    refs = [BodyRef("", len(body), sha256(body).hexdigest(), inline=body) for _ in rows]
    await system.tasks.finish(job.key, [end_of(index, ref, job.created_at) for index, ref in enumerate(refs)])
    return job


@pytest.mark.parametrize("piece_bytes", [4096, 1 << 20])
async def test_the_lists_own_columns_are_columns(
    system: System, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.parquet as pq

    monkeypatch.setattr(writer, "_CHECKPOINT_SECONDS", 0.0 if piece_bytes == 4096 else 60.0)
    system = dataclasses.replace(
        system, settings=msgspec.structs.replace(system.settings, export_piece_bytes=piece_bytes)
    )
    job = await listed_job(system, 450)
    _, [data] = await made(system, job, format="csv")
    rows = list(csv.DictReader(io.StringIO(data.decode(), newline="")))
    assert list(rows[0])[-6:] == ["url", "id", "tag", "price", "data.Status", "late"]
    assert [rows[3][name] for name in ("url", "id", "tag", "price", "data.Status", "late")] == [
        url_of(3), "sku-3", "", "1.5", "old", "",
    ]  # fmt: skip
    assert (rows[449]["price"], rows[449]["late"]) == ("", "yes")
    _, [data] = await made(system, job, format="parquet")
    table = pq.read_table(io.BytesIO(data))
    assert {name: str(table.schema.field(name).type) for name in ("price", "late", "id")} == {
        "price": "double", "late": "string", "id": "string",
    }  # fmt: skip
    row = table.to_pylist()[3]
    assert (row["price"], row["id"], row["headers"]) == (1.5, "sku-3", [{"name": "server", "value": "fleet"}])
    _, [data] = await made(system, job, format="jsonl")
    line = json.loads(data.splitlines()[3])
    assert (line["id"], line["tag"], line["data"]) == ("sku-3", None, {"price": 1.5, "Status": "old"})


async def test_bodies_are_named_by_id_or_by_a_template(system: System) -> None:
    job = await listed_job(system, 450)
    _, [data] = await made(system, job, format="zip")
    archive = unzipped(data)
    files = [line["file"] for line in manifest_of(archive)]
    assert files[3] == "bodies/sku-3.html"
    # The ids repeat.
    assert files[403] == "bodies/sku-3~403.html"
    assert len(set(files)) == 450
    assert manifest_of(archive)[3]["data"] == {"price": 1.5, "Status": "old"}
    export_id, [data] = await made(system, job, format="zip", names="{data.Status}/{index}{ext}")
    assert manifest_of(unzipped(data))[3]["file"] == "bodies/old/0000003.html"
    assert (await found(system, export_id)).names == "{data.Status}/{index}{ext}"
    for wrong in ({"format": "zip", "names": "../{id}"}, {"format": "csv", "names": "{id}"}):
        with pytest.raises(InvalidField):
            await asked(system, job, **wrong)


@pytest.mark.parametrize("kind", ["csv", "parquet", "zip"])
async def test_an_export_of_the_version_before_is_resumed_as_it_began(system: System, kind: str) -> None:
    import pyarrow.parquet as pq

    job = await listed_job(system, 50)
    export_id = await asked(system, job, format=kind)
    row, export = await Exports(system).find(ACME, export_id)
    before = msgspec.structs.replace(export, has_labels=False)
    await system.records.documents.replace_document(msgspec.structs.replace(row, body=msgspec.json.encode(before)))
    role = new_exporter(system)
    while await role.tick() == 0.0:
        pass
    [data] = await parts_of(system, export_id)
    if kind == "csv":
        assert data.splitlines()[0].endswith(b"finished_at")
    elif kind == "parquet":
        assert pq.read_table(io.BytesIO(data)).schema.names[-1] == "finished_at"
    else:
        assert manifest_of(unzipped(data))[3]["file"] == "bodies/0000003_example.com-3.html"


@pytest.mark.parametrize(
    "spec",
    [
        {"format": "zip", "compression": "none"},
        {"format": "zip"},
        {"format": "zip", "bodies": "none"},
        {"format": "jsonl"},
        {"format": "jsonl", "compression": "gzip", "bodies": "base64"},
        {"format": "jsonl", "compression": "zstd", "bodies": "text"},
        {"format": "csv"},
        {"format": "csv", "compression": "gzip"},
        {"format": "parquet", "bodies": "binary"},
    ],
    ids=lambda spec: "-".join(spec.values()),
)
async def test_parts_are_whole_files_of_bounded_size(system: System, spec: dict[str, str]) -> None:
    limit = 100_000
    job = await stored_job(system, 4000)
    export_id, parts = await made(system, job, **spec, part_bytes=limit)
    assert len(parts) > 1
    assert all(len(part) <= limit for part in parts), [len(part) for part in parts]
    if spec["format"] != "parquet":
        # Parquet is known by its groups, and a text there by what it could be at most.
        assert all(len(part) > limit * 0.6 for part in parts[:-1]), [len(part) for part in parts]
    seen = []
    for part in parts:
        if spec["format"] == "zip":
            lines = manifest_of(unzipped(part))
            seen += [line["index"] for line in lines]
            if spec.get("bodies") != "none":
                check_zip(unzipped(part), [line["index"] for line in lines])
        elif spec["format"] == "parquet":
            import pyarrow.parquet as pq

            seen += pq.read_table(io.BytesIO(part)).column("index").to_pylist()
        else:
            text = UNPACK[spec.get("compression", "none")](part)
            if spec["format"] == "jsonl":
                seen += [json.loads(line)["index"] for line in text.splitlines()]
            else:
                seen += [int(row["index"]) for row in csv.DictReader(io.StringIO(text.decode(), newline=""))]
    assert seen == list(range(4000))
    assert sum(part.tasks for part in (await found(system, export_id)).parts) == 4000


@pytest.mark.parametrize(
    ("select", "right"),
    [
        ({"status": "failed"}, lambda index: index % 10 == 9),
        ({"status": "succeeded", "tag": "t3"}, lambda index: index % 10 != 9 and index % 5 == 3),
        ({"error_code": "http_503"}, lambda index: index % 10 == 9),
        ({"http_status": 200}, lambda index: index % 10 != 9),
        ({"tag": "t4"}, lambda index: index % 5 == 4),
        ({"status": "cancelled"}, lambda index: False),
    ],
)
async def test_only_what_is_selected(system: System, select: dict[str, Any], right: Callable[[int], bool]) -> None:
    job = await stored_job(system, 700)
    export_id, [data] = await made(system, job, format="jsonl", select=select)
    assert [json.loads(line)["index"] for line in data.splitlines()] == [n for n in range(700) if right(n)]
    export = await found(system, export_id)
    assert sum(export.counts.values()) == len(data.splitlines())


@pytest.mark.parametrize("spec", [{"format": "zip"}, {"format": "csv"}, {"format": "parquet"}, {"format": "jsonl"}])
async def test_a_run_without_tasks(system: System, spec: dict[str, str]) -> None:
    job = await stored_job(system, 0)
    export_id, [data] = await made(system, job, **spec)
    assert (await found(system, export_id)).parts[0].tasks == 0
    if spec["format"] == "zip":
        assert unzipped(data).read("manifest.jsonl") == b""
    if spec["format"] == "jsonl":
        assert data == b""


async def test_a_sharded_run_is_walked_whole(system: System) -> None:
    job = await stored_job(system, 1000, shards=4)
    _, [data] = await made(system, job)
    check_zip(unzipped(data), range(1000))


async def second_run(system: System, job: Any, indexes: Sequence[int]) -> RunKey:
    """The tasks that failed, run again: they succeed now, with a body of their own."""
    run = Run(
        RunId(system.clock.new_id("run")),
        2,
        RunState.RUNNING,
        len(indexes),
        True,
        system.clock.now(),
        lineage=Lineage(job.run.run_id),
    )
    again = msgspec.structs.replace(job, run=run, state=RunState.RUNNING)
    notice = OutboxEvent(system.clock.new_id("evt"), ACME, job.job_id, run.run_id, "run.added", 1.0, {})
    assert await system.records.jobs.add_run(again, notice, None) is True
    await system.tasks.put(again.key, [TaskSeed(index, f'{{"url":"{url_of(index)}"}}') for index in indexes])
    ends = []
    for index in indexes:
        body = b"again %d" % index
        key = f"results/acme/{job.job_id}/{run.run_id}/{index}"
        await system.blobs.put(key, body)
        end = end_of(index, BodyRef(key, len(body), sha256(body).hexdigest()), 2.0)
        ends.append(msgspec.structs.replace(end, status=TaskStatus.SUCCEEDED, http_status=200, error_code=None))
    await system.tasks.finish(again.key, ends)
    await system.records.jobs.move_run(job.job_id, run.run_id, [RunState.RUNNING], RunState.COMPLETED, None, None)
    return again.key


async def test_each_task_as_it_came_out_last(system: System) -> None:
    job = await stored_job(system, 1000)
    failed = [index for index in range(1000) if outcome_of(index) is TaskStatus.FAILED]
    again = failed[: len(failed) // 2]
    key = await second_run(system, job, again)
    now = await system.records.jobs.job(ACME, job.job_id)
    assert now is not None

    _, [data] = await made(system, now, format="jsonl", bodies="text", select={"run": "latest-per-task"})
    lines = [json.loads(line) for line in data.splitlines()]
    assert [line["index"] for line in lines] == list(range(1000))
    for line in lines:
        index = line["index"]
        mended = index in again
        assert line["task_id"] == task_id(key.run_id if mended else job.run.run_id, index)
        if mended:
            assert (line["status"], line["body"]) == ("succeeded", f"again {index}")
        else:
            assert line["status"] == outcome_of(index).label

    # A task counts as it came out last: those that were mended are not among the failed.
    select = {"run": "latest-per-task", "status": "failed"}
    _, [data] = await made(system, now, format="jsonl", select=select)
    assert [json.loads(line)["index"] for line in data.splitlines()] == failed[len(failed) // 2 :]
    _, [data] = await made(system, now, format="jsonl", select={"run": job.run.run_id, "status": "failed"})
    assert [json.loads(line)["index"] for line in data.splitlines()] == failed
    _, [data] = await made(system, now, format="jsonl")
    assert [json.loads(line)["index"] for line in data.splitlines()] == list(range(1000)), "the default is every task"
    _, [data] = await made(system, now, format="jsonl", select={"run": "latest"})
    assert [json.loads(line)["index"] for line in data.splitlines()] == again
    _, [data] = await made(system, now, format="jsonl", select={"run": "2"})
    assert [json.loads(line)["index"] for line in data.splitlines()] == again
    with pytest.raises(InvalidField, match="run"):
        await asked(system, now, select={"run": "nonsense"})
    with pytest.raises(NotFound):
        await asked(system, now, select={"run": "3"})


async def test_large_bodies(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go into a zip in pieces, and are left out of lines."""
    monkeypatch.setattr(reading, "LARGE", 50_000)
    monkeypatch.setattr(writer, "LARGE", 50_000)
    job = new_job(system, 4)
    notice = OutboxEvent("evt_1", ACME, job.job_id, job.run.run_id, "job.accepted", 1.0, {})
    await system.records.jobs.create_job(job, notice, None)
    bodies = [b"small", random.Random(1).randbytes(500_000), b"text " * 30_000, b"small too"]
    await system.tasks.put(job.key, [TaskSeed(index, f'"{url_of(index)}"') for index in range(4)])
    ends = []
    for index, body in enumerate(bodies):
        key = f"results/acme/{job.job_id}/{index}"
        await system.blobs.put(key, body)
        ends.append(end_of(index, BodyRef(key, len(body), sha256(body).hexdigest()), 2.0))
    await system.tasks.finish(job.key, ends)
    for compression in ("none", "deflate"):
        for part_bytes in (None, 65536):
            export_id, parts = await made(system, job, compression=compression, part_bytes=part_bytes)
            assert len(parts) == (1 if part_bytes is None else {"none": 4, "deflate": 3}[compression])
            lines = [(line, archive) for archive in map(unzipped, parts) for line in manifest_of(archive)]
            assert [archive.read(line["file"]) for line, archive in lines] == bodies
            assert (await found(system, export_id)).body_bytes == sum(map(len, bodies))
    _, [data] = await made(system, job, format="jsonl", bodies="text")
    lines = [json.loads(line) for line in data.splitlines()]
    assert [line["body_omitted"] for line in lines] == [False, True, True, False]
    assert [line["body"] for line in lines] == ["small", None, None, "small too"]
    await system.blobs.put(f"results/acme/{job.job_id}/1", bodies[1][:-1])
    export_id, [data] = await made(system, job)
    archive = unzipped(data)
    lines = manifest_of(archive)
    assert [line["error"] and line["error"]["code"] for line in lines] == [None, "body_damaged", None, None]
    assert [archive.read(lines[index]["file"]) for index in (0, 2, 3)] == [bodies[index] for index in (0, 2, 3)]
    assert (await found(system, export_id)).damaged == 1


@pytest.mark.parametrize("kind", ["zip", "jsonl"])
async def test_a_damaged_body_is_a_warning(system: System, kind: str) -> None:
    job = await stored_job(system, 400)
    [segment] = [info async for info in system.blobs.listing(f"results/acme/{job.job_id}")]
    data = bytearray(await system.blobs.get(segment.key) or b"")
    data[len(data) // 2] ^= 1
    await system.blobs.put(segment.key, data)
    more = {"format": kind, "bodies": "text"} if kind == "jsonl" else {}
    export_id, [file] = await made(system, job, **more)
    stored = await Exports(system).find(ACME, export_id)
    assert (stored.export.state, stored.export.damaged, stored.export.body_count) == (
        ExportState.READY,
        1,
        sum(map(has_body, range(400))) - 1,
    )
    shown = await export_json(system.blobs, stored.row, stored.export, system.clock.now())
    assert shown["warning"].startswith("1 stored body is damaged or missing")
    assert (shown["counts"]["damaged"], shown["error"]) == (1, None)
    lines = list(map(json.loads, file.splitlines())) if kind == "jsonl" else manifest_of(unzipped(file))
    [hit] = [line for line in lines if line["error"] and line["error"]["code"] == "body_damaged"]
    assert hit["status"] == "succeeded"
    assert (hit["file"] if kind == "zip" else hit["body"]) is None


async def test_a_store_that_comes_back_is_asked_again(system: System, clock: JumpingClock) -> None:
    job = await stored_job(system, 400)
    export_id = await asked(system, job)
    away = Away(system.settings.data / "blobs")
    role = new_exporter(dataclasses.replace(system, blobs=away))
    assert await role.tick() == 0.0
    assert await role.tick() > 0, "not at once"
    away.is_away = False
    clock.advance(3)
    assert await role.tick() == 0.0
    check_zip(unzipped((await parts_of(system, export_id))[0]), range(400))


class Away(LocalBlobs):
    """The real directory, out of reach for a while."""

    is_away = True

    async def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes | None:
        if self.is_away:
            raise EngineFailed
        return await super().get(key, offset, length)


async def test_ready_is_told_once_with_it(system: System) -> None:
    job = await stored_job(system, 100)
    export_id, [data] = await made(system, job)
    events = (await system.records.outbox.events(ACME, job.job_id, None, 10)).items
    assert [event.event for event in events] == ["job.accepted", "export.ready"]
    assert events[-1].data == {
        "export_id": export_id,
        "format": "zip",
        "tasks": 100,
        "bytes": len(data),
        "parts": 1,
        "name": f"{job.job_id}.zip",
    }


class Signing(LocalBlobs):
    """The real directory, that signs links as an object store does."""

    async def presigned_get(self, key: str, seconds: float, content_type: str, filename: str) -> Presigned | None:
        return Presigned(f"https://store.example/{key}?{filename}&{content_type}&{seconds:.0f}", "GET", {})


async def test_where_links_are_signed_a_part_is_one_object(system: System) -> None:
    system = dataclasses.replace(system, blobs=Signing(system.settings.data / "blobs"))
    job = await stored_job(system, 3000)
    export_id, [data] = await made(system, job, compression="none")
    check_zip(unzipped(data), range(3000))
    row, export = await Exports(system).find(ACME, export_id)
    [part] = export.parts
    assert part.key is not None
    assert await system.blobs.get(part.key) == data
    shown = await exports.export_json(system.blobs, row, export, system.clock.now())
    assert shown["parts"][0]["url"].startswith(f"https://store.example/{part.key}?{job.job_id}.zip&application/zip&86")
    left = [info.key async for info in system.blobs.listing("exports")]
    assert left == [part.key], "what it was made of is gone"


async def test_nothing_but_the_parts_is_left(system: System) -> None:
    job = await stored_job(system, 3000)
    _, parts = await made(system, job, compression="none", part_bytes=300_000)
    assert len(parts) > 2
    keys = [info.key async for info in system.blobs.listing("exports")]
    lists = [key for key in keys if key.endswith(".json")]
    assert len(lists) == len(parts)
    sizes = [info.size async for info in system.blobs.listing("exports") if not info.key.endswith(".json")]
    assert sum(sizes) == sum(map(len, parts))


def retention(system: System) -> Retention:
    return Retention(system.records, system.tasks, system.queue, system.coordinator, system.blobs, system.clock)


async def leftovers(system: System) -> tuple[list[str], int, int]:
    """Objects of exports, rows of them, leases."""
    database: Any = system.records.jobs._database  # type: ignore[attr-defined]
    [(rows,)] = await database.rows("SELECT count(*) FROM documents WHERE kind = 'export'", {})
    [(leases,)] = await database.rows("SELECT count(*) FROM leases", {})
    return [info.key async for info in system.blobs.listing("exports")], rows, leases


async def test_an_export_expires_before_its_job(system: System, clock: JumpingClock) -> None:
    job = await stored_job(system, 500)
    export_id, _ = await made(system, job)
    clock.advance(3 * 86_400 - 60)
    assert (await found(system, export_id)).state is ExportState.READY
    clock.advance(61)
    with pytest.raises(NotFound):
        await found(system, export_id)
    assert (await Exports(system).page(job, None, 10)).items == []
    assert (await leftovers(system))[1] == 1
    clock.advance(SETTLE_SECONDS)
    removed = [await retention(system).run_once() for _ in range(2)]
    assert [each.exports for each in removed] == [0, 1]
    assert await leftovers(system) == ([], 0, 0)
    assert await system.records.jobs.job(ACME, job.job_id) is not None


async def test_a_deleted_export_is_gone_at_once(system: System, clock: JumpingClock) -> None:
    job = await stored_job(system, 500)
    export_id, _ = await made(system, job)
    other, _ = await made(system, job, format="csv")
    await Exports(system).delete(ACME, export_id)
    with pytest.raises(NotFound):
        await found(system, export_id)
    with pytest.raises(NotFound):
        await Exports(system).delete(ACME, export_id)
    clock.advance(SETTLE_SECONDS + 1)
    while await retention(system).run_once() != exports_none():
        pass
    assert len((await parts_of(system, other))[0]) > 0
    assert all(other in key for key in (await leftovers(system))[0])


def exports_none() -> Any:
    from conveyor.recover.retention import Removed

    return Removed()


async def stop_in_the_middle(
    system: System, monkeypatch: pytest.MonkeyPatch, export_id: str, then: Callable[[], Any]
) -> None:
    """Work at it, and after its third piece let something happen."""
    put, count = system.blobs.put, 0

    async def counting(key: str, data: bytes) -> None:
        nonlocal count
        await put(key, data)
        if export_id in key:
            count += 1
            if count == 3:
                await then()

    with monkeypatch.context() as patch:
        patch.setattr(system.blobs, "put", counting)
        await new_exporter(system).tick()
    assert count >= 3


async def test_deleted_while_it_is_made(system: System, clock: JumpingClock, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await stored_job(system, 3000)
    export_id = await asked(system, job, compression="none")
    await stop_in_the_middle(system, monkeypatch, export_id, lambda: Exports(system).delete(ACME, export_id))
    assert await new_exporter(system).tick() > 0
    clock.advance(SETTLE_SECONDS + 1)
    while await retention(system).run_once() != exports_none():
        pass
    assert await leftovers(system) == ([], 0, 0)


async def test_the_job_deleted_while_it_is_made(
    system: System, clock: JumpingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await stored_job(system, 3000)
    export_id = await asked(system, job, compression="none")
    await stop_in_the_middle(system, monkeypatch, export_id, lambda: system.records.jobs.mark_deleted(ACME, job.job_id))
    with pytest.raises(NotFound):
        await found(system, export_id)
    assert await new_exporter(system).tick() > 0, "no busy loop over a row that nobody reads"
    clock.advance(SETTLE_SECONDS + 1)
    while await retention(system).run_once() != exports_none():
        pass
    assert await leftovers(system) == ([], 0, 0)
    assert [info.key async for info in system.blobs.listing("results")] == []


async def test_turns_are_taken(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large export does not hold up a small one, and nothing of it is made twice."""
    large, small = await stored_job(system, 4000), await stored_job(system, 10)
    first = await asked(system, large, compression="none")
    second = await asked(system, small)
    monkeypatch.setattr(exporter, "_SLICE_SECONDS", 0.0)
    role = new_exporter(system)
    seen = []
    while await role.tick() == 0.0:
        seen.append((await found(system, first)).state)
        if (await found(system, second)).state is ExportState.READY and len(seen) < 10:
            assert seen[-1] is ExportState.RUNNING
    assert len(seen) > 10
    check_zip(unzipped((await parts_of(system, first))[0]), range(4000))
    check_zip(unzipped((await parts_of(system, second))[0]), range(10))


async def test_a_turn_over_does_not_hash_again(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await stored_job(system, 4000)
    await asked(system, job, compression="none")
    monkeypatch.setattr(exporter, "_SLICE_SECONDS", 0.0)
    again: list[int] = []
    opened = staged_file.StagedFile.open

    async def counted(self: staged_file.StagedFile) -> None:
        again.append(self.pieces if self._digest is None else 0)
        await opened(self)

    monkeypatch.setattr(staged_file.StagedFile, "open", counted)
    role = new_exporter(system)
    while await role.tick() == 0.0:
        pass
    assert sum(again) == 0


@pytest.mark.parametrize(
    "spec",
    [
        {"compression": "none"},
        {"format": "jsonl", "compression": "gzip", "bodies": "base64"},
        {"format": "jsonl", "compression": "zstd", "bodies": "text"},
        {"format": "csv"},
        {"format": "parquet", "bodies": "binary", "part_bytes": 100_000},
        {"compression": "none", "part_bytes": 100_000},
    ],
    ids=lambda spec: "-".join(map(str, spec.values())),
)
async def test_whoever_goes_on_makes_the_same_bytes(
    system: System, monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any]
) -> None:
    """One exporter dies after each durable write in turn, another goes on; rows are not read again from the start."""
    job = await stored_job(system, 1500)
    monkeypatch.setattr(writer, "_CHECKPOINT_SECONDS", 0.0)
    expected = contents(spec, (await made(system, job, **spec))[1])
    export_id = await asked(system, job, **spec)
    replace = system.records.documents.replace_document
    attempts = 0

    class Died(BaseException):
        pass

    while (await found(system, export_id)).state in {ExportState.QUEUED, ExportState.RUNNING}:
        attempts += 1
        writes = 0

        async def dying(row: Any, notice: Any = None) -> Any:
            nonlocal writes
            written = await replace(row, notice)
            writes += 1
            if writes == 6:
                raise Died
            return written

        with monkeypatch.context() as patch:
            patch.setattr(system.records.documents, "replace_document", dying)
            try:
                await new_exporter(system, f"exporter {attempts}").tick()
            except Died:
                # As a restart does.
                await system.coordinator.release_all()  # type: ignore[attr-defined]
    assert contents(spec, await parts_of(system, export_id)) == expected
    assert attempts >= 2
    export = await found(system, export_id)
    # Each attempt counts a batch that it had begun.
    assert export.read <= 1500 + attempts * 2 * walk.ROWS


def contents(spec: dict[str, Any], parts: list[bytes]) -> Any:
    """Blocks of a compressed file are cut where a process stopped; what is in them is the same."""
    if spec.get("format") == "jsonl":
        return [UNPACK[spec["compression"]](part) for part in parts]
    if spec.get("format") == "parquet":
        import pyarrow.parquet as pq

        return [row for part in parts for row in pq.read_table(io.BytesIO(part)).to_pylist()]
    if "format" not in spec:
        # Where a part ends depends on how well its manifest was compressed so far.
        archives = [unzipped(part) for part in parts]
        files = [(info.filename, info.CRC) for archive in archives for info in archive.infolist()[:-1]]
        return files, [line for archive in archives for line in manifest_of(archive)]
    return parts


async def test_a_zombie_writes_nothing_that_counts(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """One hangs in the middle of a piece, its lease lapses, another makes the whole; then the first goes on."""
    job = await stored_job(system, 3000)
    export_id = await asked(system, job, compression="none")
    put = system.blobs.put
    there, go = asyncio.Event(), asyncio.Event()

    async def hanging(key: str, data: bytes) -> None:
        if key.endswith("0001/000001-1"):
            there.set()
            await go.wait()
        await put(key, data)

    monkeypatch.setattr(system.blobs, "put", hanging)
    slow = asyncio.create_task(new_exporter(system, "slow").tick())
    await there.wait()
    await system.coordinator.release_all()  # type: ignore[attr-defined]
    assert await new_exporter(system, "quick").tick() == 0.0
    ready = await found(system, export_id)
    assert (ready.state, ready.attempt) == (ExportState.READY, 2)
    [before] = await parts_of(system, export_id)
    go.set()
    await slow
    assert await found(system, export_id) == ready
    assert await parts_of(system, export_id) == [before]
    check_zip(unzipped(before), range(3000))
    events = (await system.records.outbox.events(ACME, job.job_id, None, 10)).items
    assert [event.event for event in events] == ["job.accepted", "export.ready"]


async def test_two_exporters_share_the_work(system: System) -> None:
    job = await stored_job(system, 1000)
    ids = [await asked(system, job) for _ in range(4)]
    roles = [new_exporter(system, name) for name in ("one", "two")]

    async def work(role: exporter.Exporter) -> None:
        while await role.tick() == 0.0:
            pass

    await asyncio.gather(*map(work, roles))
    for export_id in ids:
        export = await found(system, export_id)
        assert (export.state, export.attempt) == (ExportState.READY, 1)


async def test_an_export_that_kills_its_process_is_given_up(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await stored_job(system, 100)
    export_id = await asked(system, job)

    class Died(BaseException):
        pass

    async def die(self: writer.ExportWriter) -> None:
        raise Died

    monkeypatch.setattr(writer.ExportWriter, "run", die)
    for _ in range(11):
        with pytest.raises(Died):
            await new_exporter(system).tick()
        await system.coordinator.release_all()  # type: ignore[attr-defined]
    await new_exporter(system).tick()
    export = await found(system, export_id)
    assert export.state is ExportState.FAILED
    assert export.error is not None
    assert "died" in export.error.message


async def test_bounds(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await stored_job(system, 10)
    for spec in (
        {"format": "csv", "bodies": "text"},
        {"format": "zip", "compression": "gzip"},
        {"format": "jsonl", "compression": "deflate"},
        {"part_bytes": 100},
        {"format": "parquet", "part_bytes": 1 << 31},
        {"select": {"status": "nonsense"}},
        {"select": {"http_status": 99}},
        {"select": {"tag": "x" * 201}},
    ):
        with pytest.raises(InvalidField):
            await asked(system, job, **spec)
    for _ in range(50):
        await asked(system, job)
    with pytest.raises(LimitReached):
        await asked(system, job)
    monkeypatch.setattr(writer, "MAX_PARTS", 2)
    many = await stored_job(system, 3000)
    export_id = await asked(system, many, compression="none", part_bytes=100_000)
    role = new_exporter(system)
    while (await found(system, export_id)).state in {ExportState.QUEUED, ExportState.RUNNING}:
        await role.tick()
    export = await found(system, export_id)
    assert export.state is ExportState.FAILED
    assert "part_bytes" in (export.error.message if export.error else "")


async def test_parquet_that_is_not_installed(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    from conveyor.errors import FormatUnavailable

    job = await stored_job(system, 10)
    monkeypatch.setitem(sys.modules, "conveyor.export.parquet", None)
    with pytest.raises(FormatUnavailable, match=r"conveyor-jobs\[parquet\]"):
        await asked(system, job, format="parquet")


async def test_while_the_job_goes_on_only_if_it_is_asked_for(system: System) -> None:
    job = new_job(system, 5, state=RunState.RUNNING)
    notice = OutboxEvent("evt_1", ACME, job.job_id, job.run.run_id, "job.accepted", 1.0, {})
    await system.records.jobs.create_job(job, notice, None)
    await system.tasks.put(job.key, [TaskSeed(index, f'"{url_of(index)}"') for index in range(5)])
    from conveyor.errors import Conflict

    with pytest.raises(Conflict, match="partial"):
        await Exports(system).create(job, ExportSpec())
    _, [data] = await made(system, job, partial=True)
    assert [line["status"] for line in manifest_of(unzipped(data))] == ["pending"] * 5


async def test_memory_does_not_grow_with_the_job(system: System) -> None:
    import tracemalloc

    job = await stored_job(system, 8000)
    export_id = await asked(system, job, compression="none")
    tracemalloc.start()
    try:
        while await new_exporter(system).tick() == 0.0:
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (await found(system, export_id)).bytes > 3 * MIB
    assert peak < 6 * MIB


async def collect(pieces: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in pieces])


async def test_any_range_of_a_part(system: System) -> None:
    job = await stored_job(system, 3000)
    export_id, [data] = await made(system, job, compression="none")
    part = (await found(system, export_id)).parts[0]
    assert part.pieces is not None
    chance = random.Random(5)
    for _ in range(30):
        start = chance.randrange(len(data))
        end = chance.randrange(start, len(data)) + 1
        assert await collect(exports.part_range(system.blobs, part, start, end)) == data[start:end]
