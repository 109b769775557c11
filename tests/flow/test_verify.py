"""`conveyor verify`: it finds nothing in an installation in use, and each kind of damage where it is."""

import asyncio
import dataclasses
import json
import os
import threading
from collections.abc import AsyncIterator, Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conveyor.cli.guard import run_guarded
from conveyor.clock import sortable_id
from conveyor.embedded import Embedded
from conveyor.engines.blobs import Blobs
from conveyor.engines.queue import run_queue, run_queues
from conveyor.jobs.chunks import encode
from conveyor.model import BodyRef, Chunk, InputJson, Job, ResultDetail, TaskEnd, TaskRef, TaskSeed
from conveyor.settings import Settings
from conveyor.states import TaskStatus
from conveyor.system import System, open_system
from conveyor.verify.findings import Finding, FindingKind, Findings, Pacing
from conveyor.verify.installation import Installation
from tests.support.api import Api
from tests.support.clocks import JumpingClock, ManualClock
from tests.support.export_jobs import body_of, has_body, made, new_job, stored_job
from tests.support.installations import Used, stored, use, verified
from tests.support.make_jobs import make_notice, make_run
from tests.support.places import quick_place
from tests.support.target_site import Site

DAY = 86_400.0
COUNT = 40


@pytest.fixture
def settings() -> Any:
    with quick_place() as place:
        yield Settings.load({}, data=place, allow_private_targets=True, fetchers=1, app="tests.stacks.app")


@pytest.fixture
async def used(server: Api) -> AsyncIterator[Used]:
    async with Site() as site, Embedded(server.system).running():
        made = await use(server, site)
    yield made


async def found(system: System, kind: FindingKind, job_id: str | None = None) -> list[Finding]:
    """The findings, which are of one kind; the first of many."""
    findings = await verified(system, job_id)
    assert set(findings.by_kind) <= {kind}, findings.by_kind
    return findings.by_kind[kind].examples if findings.by_kind else []


async def change(system: System, statement: str, *values: Any) -> None:
    """Change the database by hand."""
    database: Any = system.records.jobs._database  # type: ignore[attr-defined]
    await database.write(lambda db: db.execute(statement, values))


def flip(path: Path, place: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def files(system: System, prefix: str) -> list[Path]:
    return sorted(path for path in (system.settings.data / "blobs" / prefix).rglob("*") if path.is_file())


def of_job(kind: str, job: Job) -> str:
    return f"{kind}/{job.tenant}/{job.job_id}"


async def finish_one(system: System, ref: BodyRef, job: Job | None = None) -> Job:
    """A finished job of one task, with this body."""
    job = job or new_job(system, 1)
    await system.records.jobs.create_job(job, make_notice(system.clock, job), None)
    await system.tasks.put(job.key, [TaskSeed(0, InputJson('"x"'))])
    detail = msgspec.json.encode(ResultDetail(body=ref)).decode()
    await system.tasks.finish(job.key, [TaskEnd(0, TaskStatus.SUCCEEDED, 1, 200, None, detail, 1.0)])
    return job


async def test_nothing_is_wrong_in_an_installation_in_use(used: Used, system: System, clock: JumpingClock) -> None:
    for days in (0, 2):
        clock.advance(days * DAY)
        findings = await verified(system)
        assert findings.by_kind == {}, days
        checked = findings.checked
        assert (checked.jobs, checked.runs, checked.exports, checked.lists) == (6, 7, 1, 4)
        assert checked.tasks == checked.tasks_total == 524
        assert checked.bodies > 500
    await change(system, "UPDATE task_runs SET replaced_succeeded = 1 WHERE rerun = 1")
    (drift,) = await found(system, FindingKind.COUNTS)
    assert (drift.job_id, drift.run) == (used.fetched, None)
    assert drift.detail.startswith("The job counts 6 succeeded, 1 failed, 0 cancelled; the latest outcomes")
    assert (await verified(system, repair=True)).left == 0
    assert await found(system, FindingKind.COUNTS) == []
    # The lists of a job, of a batch of an open job, and of a schedule.
    listed = await stored(system, used.listed)
    assert listed.source is not None
    await system.blobs.delete([listed.source.key])
    assert [each.key for each in await found(system, FindingKind.LIST)] == [listed.source.key]
    batch = files(system, f"lists/acme/{used.opened}")[0]
    os.truncate(batch, 3)
    (damage,) = await found(system, FindingKind.LIST, used.opened)
    assert "has 3 bytes" in damage.detail
    for upload in files(system, "uploads"):
        upload.unlink()
    assert f"of schedule {used.schedule} is missing" in (await found(system, FindingKind.LIST))[-1].detail


@pytest.mark.parametrize("damage", ["flipped", "short", "gone"])
async def test_a_damaged_segment_is_found(system: System, damage: str) -> None:
    await stored_job(system, COUNT)
    job = await stored_job(system, COUNT)
    (segment,) = files(system, of_job("results", job))
    if damage == "flipped":
        flip(segment)
        indexes = [COUNT - 1]
    elif damage == "short":
        os.truncate(segment, segment.stat().st_size - 1)
        indexes = [COUNT - 1]
    else:
        segment.unlink()
        indexes = [index for index in range(COUNT) if has_body(index)]
    kind = FindingKind.BODY_MISSING if damage == "gone" else FindingKind.BODY_DAMAGED
    for only in (None, job.job_id):
        findings = await verified(system, only)
        assert set(findings.by_kind) == {kind}
        assert findings.by_kind[kind].count == len(indexes)
        assert findings.by_kind[kind].bytes == sum(len(body_of(index)) for index in indexes)
        first = findings.by_kind[kind].examples[0]
        assert (first.job_id, first.run, first.index) == (job.job_id, 1, indexes[0])


@pytest.mark.parametrize("kind", ["inline", "long", "pieces"])
async def test_other_damaged_bodies_are_found(system: System, kind: str) -> None:
    body = os.urandom(9 * 1024 * 1024 if kind == "long" else 1000)
    ref = BodyRef(of_job("results", new_job(system, 1)) + "/body", len(body), sha256(body).hexdigest())
    if kind == "inline":
        ref = BodyRef("", len(body), sha256(body).hexdigest(), inline=body)
        await finish_one(system, ref)
        assert await found(system, FindingKind.BODY_DAMAGED) == []
        await finish_one(system, msgspec.structs.replace(ref, inline=b"?" + body[1:]))
    elif kind == "long":
        await system.blobs.put(ref.key, body)
        await finish_one(system, ref)
        assert await found(system, FindingKind.BODY_DAMAGED) == []
        flip(files(system, "results")[0])
    else:
        ref = msgspec.structs.replace(ref, piece=600)
        await system.blobs.put(f"{ref.key}/000000", body[:600])
        await finish_one(system, ref)
        assert [each.index for each in await found(system, FindingKind.BODY_MISSING)] == [0]
        await system.blobs.put(f"{ref.key}/000001", body[600:-1] + b"\0\0")
    assert [each.index for each in await found(system, FindingKind.BODY_DAMAGED)] == [0]


async def test_wrong_counts_are_found_and_repaired(system: System) -> None:
    job = await stored_job(system, COUNT)
    await change(system, "UPDATE task_runs SET succeeded = succeeded - 2, failed = failed + 3")
    for repair in (False, True):
        findings = await verified(system, repair=repair)
        (drift,) = findings.by_kind[FindingKind.COUNTS].examples
        assert drift.detail == (
            "The run counts 34 succeeded, 7 failed, 0 cancelled; its rows are 36 succeeded, 4 failed, 0 cancelled."
        )
        assert (drift.job_id, drift.run, drift.repaired) == (job.job_id, 1, repair)
        assert findings.left == (0 if repair else 1)
    assert await found(system, FindingKind.COUNTS) == []


async def test_a_total_that_is_not_that_of_rows_and_lines_is_found(system: System) -> None:
    await stored_job(system, COUNT)
    await change(system, "UPDATE runs SET total = total - 1")
    (rows,) = await found(system, FindingKind.TOTAL)
    assert rows.detail == "The run has 39 tasks, but 40 rows."
    await change(system, "UPDATE runs SET total = total + 1, ranges = 1, ranges_done = 1, range_tasks = 41")
    (lines,) = await found(system, FindingKind.TOTAL)
    assert lines.detail.endswith("41 tasks and 0 invalid lines were ingested.")


@pytest.mark.parametrize("damage", [flip, Path.unlink])
async def test_a_damaged_export_is_found(system: System, damage: Callable[[Path], None]) -> None:
    job = await stored_job(system, COUNT)
    export_id, _ = await made(system, job, format="jsonl")
    assert await found(system, FindingKind.EXPORT) == []
    damage(files(system, of_job("exports", job))[0])
    (finding,) = await found(system, FindingKind.EXPORT)
    assert finding.job_id == job.job_id
    assert f"Part 1 of export {export_id}" in finding.detail


async def test_orphans_are_found_after_a_day_and_removed(system: System, server: Api, clock: JumpingClock) -> None:
    job = await stored_job(system, COUNT)
    await made(system, job, format="zip")
    before = set(files(system, ""))
    run, lost = f"{of_job('results', job)}/{job.run.run_id}", make_run(clock)
    keys = [
        f"{run}/{clock.new_id('body')}",
        f"{run}/{clock.new_id('file')}/000000",
        f"exports/acme/{job.job_id}/{clock.new_id('export')}/0001-1",
        f"results/acme/{lost.job_id}/{lost.run_id}/{clock.new_id('seg')}",
        f"lists/acme/{lost.job_id}/{clock.new_id('list')}",
        f"invalid/acme/{lost.job_id}/{lost.run_id}/000000-000000000000.jsonl",
        f"uploads/acme/{clock.new_id('upload')}",
    ]
    for key in keys:
        await system.blobs.put(key, b"123")
    (in_log,) = await system.blobs.put_all([(f"{run}/{clock.new_id('seg')}", b"4567")])
    expired = await server.upload(b"a list that no job was made of\n")
    assert await found(system, FindingKind.ORPHAN) == [], "they may be written right now"
    clock.advance(1.5 * DAY)
    await system.blobs.put(f"{run}/{clock.new_id('body')}", b"young")
    findings = await verified(system)
    assert findings.by_kind[FindingKind.ORPHAN].count == len(keys) + 1
    assert findings.by_kind[FindingKind.ORPHAN].bytes == 3 * len(keys) + 4
    assert {each.key for each in findings.by_kind[FindingKind.ORPHAN].examples} == {*keys, in_log}
    assert len(await found(system, FindingKind.ORPHAN, job.job_id)) == 4
    assert (await verified(system, repair=True)).left == 0
    assert await found(system, FindingKind.ORPHAN) == []
    kept = {path for path in files(system, "") if ".logs" not in path.parts}
    assert before <= kept
    assert len(kept - before) == 2, f"the young one, and {expired}, which retention purges"


async def test_messages_without_a_run_are_found(system: System, clock: JumpingClock) -> None:
    deleted, job, lost = await stored_job(system, COUNT), await stored_job(system, COUNT), make_run(clock)
    await system.records.jobs.mark_deleted(deleted.tenant, deleted.job_id)
    for run in (deleted.key, job.key, lost):
        for queue in run_queues(run.run_id):
            await system.queue.send(queue, [encode(Chunk(run, [TaskRef(0, InputJson('"x"'))]))])
    (finding,) = await found(system, FindingKind.MESSAGE)
    assert finding.detail == f"2 messages belong to {lost.run_id}, which does not exist."


async def test_a_dead_letter_without_a_job_is_found(system: System, clock: JumpingClock) -> None:
    job = await stored_job(system, COUNT)
    for run in (job.key, make_run(clock)):
        queue = run_queue(run.run_id)
        await system.queue.send(queue, [encode(Chunk(run, [TaskRef(0, InputJson('"x"'))]))])
        (message,) = await system.queue.receive(queue, 1, 30.0)
        await system.queue.dead_letter(queue, [message.receipt], "by hand")
    (finding,) = await found(system, FindingKind.DEAD_LETTER)
    assert finding.job_id == run.job_id


async def test_a_row_that_cannot_be_decoded_hides_nothing_else(system: System, clock: JumpingClock) -> None:
    broken, damaged = await stored_job(system, COUNT), await stored_job(system, COUNT)
    await change(system, "UPDATE tasks SET detail = '{' WHERE run_no = 1 AND idx = 3")
    flip(files(system, of_job("results", damaged))[0])
    run = f"{of_job('results', broken)}/{broken.run.run_id}"
    await system.blobs.put(f"{run}/{clock.new_id('body')}", b"which of its rows refers to it is not known")
    clock.advance(2 * DAY)
    findings = Findings()
    await Installation(system, findings).verify()
    assert set(findings.by_kind) == {FindingKind.BODY_DAMAGED}
    rows, objects = findings.failures
    assert rows.startswith(f"Job {broken.job_id}: It cannot be decoded")
    assert objects.startswith(f"Objects under {run}: It cannot be decoded")


class StillClock(ManualClock):
    """Time that only work and sleep take."""

    async def sleep(self, seconds: float) -> None:
        self._passed += seconds


async def test_it_pauses_in_proportion_to_its_work() -> None:
    clock = StillClock()
    pacing = Pacing(clock, 0.25)
    start = clock.monotonic()
    for seconds in (8.0, 0.0, 2.0):
        await clock.sleep(seconds)
        await pacing.rest()
    assert clock.monotonic() - start == 40.0


class DeletesJobs:
    """Blobs during whose reads a job is deleted."""

    def __init__(self, system: System, job: Job) -> None:
        self._system = system
        self._job = job

    def __getattr__(self, name: str) -> Any:
        return getattr(self._system.blobs, name)

    async def size(self, key: str) -> int | None:
        await self._system.records.jobs.mark_deleted(self._job.tenant, self._job.job_id)
        return await self._system.blobs.size(key)


async def test_a_job_that_is_deleted_meanwhile_has_no_findings(system: System) -> None:
    job = await stored_job(system, COUNT)
    files(system, of_job("results", job))[0].unlink()
    blobs: Blobs = DeletesJobs(system, job)  # type: ignore[assignment]  # the rest are the real ones
    assert (await verified(dataclasses.replace(system, blobs=blobs))).by_kind == {}


def verify(data: Path, *arguments: str) -> int:
    return run_guarded(["verify", "--data", str(data), *arguments])


def test_the_command_says_what_is_wrong_and_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONVEYOR_LOG_LEVEL", "error")
    settings = Settings.load({}, data=tmp_path / "data")
    assert verify(settings.data) == 2
    assert "holds no data" in capsys.readouterr().err
    assert not settings.data.exists()

    async def fill() -> Job:
        clock = JumpingClock()
        clock.advance(-2 * DAY)
        async with open_system(settings, clock) as system:
            job = await stored_job(system, COUNT)
            assert verify_elsewhere(settings) == 2, "one process owns the directory"
            return job

    job = asyncio.run(fill())
    assert "Stop the server" in capsys.readouterr().err
    assert verify(settings.data) == 0
    shown = capsys.readouterr().out
    assert "Checked 1 jobs, 1 runs, 40 tasks, 37 bodies" in shown
    assert "Nothing is wrong." in shown
    place = settings.data / "blobs" / of_job("results", job) / job.run.run_id
    (segment,) = place.iterdir()
    flip(segment)
    (place / sortable_id("body", job.created_at, 1)).write_bytes(b"orphan")
    assert verify(settings.data) == 1
    shown = capsys.readouterr().out
    assert f"Next: conveyor rerun {job.job_id} --damaged" in shown
    assert f"{job.job_id} run 1 task 39 " in shown
    assert "orphan: 1, 6 B" in shown
    assert verify(settings.data, "--repair") == 2
    assert "Pass --yes" in capsys.readouterr().err
    assert verify(settings.data, "--repair", "--yes", "--json", "--job", job.job_id) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["clean"] is False
    assert {kind: (each["count"], each["repaired"]) for kind, each in report["findings"].items()} == {
        "body_damaged": (1, 0),
        "orphan": (1, 1),
    }
    assert [path.name for path in place.iterdir()] == [segment.name]
    assert verify(settings.data, "--job", "job_unknown") == 2
    (settings.data / "conveyor.db").unlink()
    capsys.readouterr()
    assert verify(settings.data) == 2
    said = capsys.readouterr().err
    assert "conveyor.db is missing, but" in said
    assert "Restore the data directory from a backup" in said
    assert not (settings.data / "conveyor.db").exists()


def verify_elsewhere(settings: Settings) -> int:
    """In a thread of its own: this one has a loop."""
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(verify(settings.data)))
    thread.start()
    thread.join()
    return codes[0]
