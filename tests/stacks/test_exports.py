"""Exports on every stack: of several pieces, in parts, of a sharded run, downloaded from who serves them, and gone."""

import io
import json
import zipfile
from hashlib import sha256
from typing import Any

import msgspec
import pytest

from conveyor.engines.tasks import by_index
from conveyor.export import sorting
from conveyor.export.exports import Exports, ExportState, export_json
from conveyor.read import walk
from conveyor.recover import retention
from conveyor.recover.retention import Removed, Retention
from conveyor.settings import Settings
from conveyor.system import System
from tests.support.api import client
from tests.support.export_jobs import (
    ACME,
    asked,
    body_of,
    exporter,
    found,
    has_body,
    made,
    outcome_of,
    parts_of,
    stored_job,
)

COUNT = 2000

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def settings(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Small steps make a small job a large one."""
    monkeypatch.setattr(walk, "ROWS", 300)
    monkeypatch.setattr(sorting, "_SPOOL_BYTES", 200_000)
    monkeypatch.setattr(sorting, "_READ_BYTES", 30_000)
    monkeypatch.setattr(sorting, "FAN_IN", 3)
    return msgspec.structs.replace(settings, export_piece_bytes=64 * 1024)


def check_zip(data: bytes, indexes: list[int]) -> None:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        lines = [json.loads(line) for line in archive.read("manifest.jsonl").splitlines()]
        assert [line["index"] for line in lines] == indexes
        for line in lines:
            assert line["status"] == outcome_of(line["index"]).label
            assert (line["file"] is not None) is has_body(line["index"])
            if line["file"] is not None:
                assert archive.read(line["file"]) == body_of(line["index"])


async def downloaded(system: System, export_id: str) -> list[bytes]:
    """The parts as a client gets them, where the store signs links."""
    row, export = await Exports(system).find(ACME, export_id)
    shown: dict[str, Any] = await export_json(system.blobs, row, export, system.clock.now())
    parts = []
    async with client() as http:
        for part in shown["parts"]:
            if part["url"].startswith("/"):
                return await parts_of(system, export_id)
            answer = await http.get(part["url"]).header("range", "bytes=5-").build().send()
            assert answer.status == 206
            rest = bytes(await answer.bytes())
            whole = bytes(await (await http.get(part["url"]).build().send()).bytes())
            assert whole[5:] == rest
            assert sha256(whole).hexdigest() == part["sha256"]
            parts.append(whole)
    return parts


async def test_zip_jsonl_and_parts(system: System, stack: str) -> None:
    job = await stored_job(system, COUNT, shards=4 if stack == "aws" else 1)
    assert (by_index(system.tasks, job.key) is not None) is (stack != "aws")
    export_id, _ = await made(system, job, compression="none")
    [data] = await downloaded(system, export_id)
    check_zip(data, list(range(COUNT)))

    _, [data] = await made(system, job, format="jsonl", select={"status": "failed"})
    failed = [index for index in range(COUNT) if index % 10 == 9]
    assert [json.loads(line)["index"] for line in data.splitlines()] == failed

    export_id, _ = await made(system, job, part_bytes=128 * 1024)
    parts = await downloaded(system, export_id)
    assert len(parts) > 1
    start = 0
    for part, file in zip(parts, (await found(system, export_id)).parts, strict=True):
        check_zip(part, list(range(start, start + file.tasks)))
        start += file.tasks
    assert start == COUNT


async def test_another_process_goes_on(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await stored_job(system, COUNT)
    export_id = await asked(system, job, compression="none")
    replace = system.records.documents.replace_document
    attempts = 0

    class Died(BaseException):
        pass

    while (await found(system, export_id)).state is not ExportState.READY:
        attempts += 1
        writes = 0

        async def dying(row: Any, notice: Any = None) -> Any:
            nonlocal writes
            writes += 1
            if writes == 6:
                raise Died
            return await replace(row, notice)

        with monkeypatch.context() as patch:
            patch.setattr(system.records.documents, "replace_document", dying)
            try:
                await exporter(system, "the same holder gets its lease again").tick()
            except Died:
                continue
    assert attempts > 1
    check_zip((await parts_of(system, export_id))[0], list(range(COUNT)))


async def test_nothing_is_left(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "SETTLE_SECONDS", -1.0)
    job = await stored_job(system, 500)
    first, _ = await made(system, job)
    second, _ = await made(system, job, format="csv")
    role = Retention(system.records, system.tasks, system.queue, system.coordinator, system.blobs, system.clock)
    await Exports(system).delete(ACME, first)
    while await role.run_once() != Removed():
        pass
    keys = [info.key async for info in system.blobs.listing("exports")]
    assert keys
    assert all(second in key for key in keys)
    await system.records.jobs.mark_deleted(ACME, job.job_id)
    while await role.run_once() != Removed():
        pass
    assert [info.key async for info in system.blobs.listing("exports")] == []
    assert await system.records.documents.due_documents("export", 1e12, 10) == []
