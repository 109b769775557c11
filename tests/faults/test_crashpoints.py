"""A2: die at every crash point, come back, and miss nothing.

A child runs a job of 200 tasks and is killed at the k-th passing of a point; where no process passes it so often, k
processes in a row are killed there. Then it is started until it is done, and every promise is checked:
each task moved once, the total right, nothing pending when the run was completed, each notice once, bodies intact, and
every request answered the same to the byte whoever answered it.
"""

import ast
import functools
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

from conveyor.engines.queue import CONTROL, Depth, run_queues
from conveyor.engines.sqlite.tasks import SqliteTasks
from conveyor.engines.tasks import TaskFilter
from conveyor.export.exports import ExportRecord, Exports, ExportState, part_range
from conveyor.model import EXPORT, EventRecord
from conveyor.settings import Settings
from conveyor.states import RunState
from conveyor.system import System, open_system
from tests.faults.child import EXPORTED, PARKED, SCENARIOS, TENANT, TOTAL, body_of, expected
from tests.faults.forks import Forks
from tests.faults.hits import ALL_HITS
from tests.support.dead_letters import dead_letters

CHILD = "tests.faults.child"
ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "conveyor"

# Which runs pass which points. A new point needs a line, here or below.
PASSED_IN: dict[str, tuple[str, ...]] = {
    "accept.before": ("inline",),
    "accept.after": ("inline",),
    "accept.tasks.before": ("steps",),
    "accept.tasks.after": ("steps",),
    "accept.job.before": ("steps",),
    "accept.job.after": ("steps",),
    "accept.send.before": ("steps",),
    "accept.send.after": ("steps",),
    "accept.stage.before": ("staged",),
    "accept.stage.after": ("staged", "staged_steps"),
    "accept.ingested.before": ("staged", "list", "upload", "open"),
    "accept.ingested.between": ("staged_steps",),
    "accept.ingested.after": ("staged", "staged_steps", "list", "open"),
    "add.stage.before": ("open",),
    "add.stage.after": ("open",),
    "accept.invalid.before": ("small_list", "skipping"),
    "accept.invalid.after": ("small_list", "skipping"),
    "add.append.after": ("open", "closed"),
    "add.seal.before": ("closed",),
    "add.seal.after": ("closed",),
    "blob.append.before": ("inline", "staged"),
    "blob.append.between": ("inline", "staged"),
    "blob.append.after": ("inline", "staged"),
    "blob.punch.before": ("removed",),
    "blob.punch.between": ("removed",),
    "blob.punch.after": ("removed",),
    "blob.remove_log.before": ("removed",),
    "blob.put.before": ("steps", "upload"),
    "blob.put.after": ("steps", "staged"),
    "bodies.keep.before": ("inline",),
    "bodies.keep.after": ("inline", "steps"),
    "dead_letters.name.before": ("parked", "poison"),
    "dead_letters.name.after": ("parked", "poison"),
    "export.publish.before": ("export",),
    "export.publish.after": ("export",),
    "exports.create.before": ("exported",),
    "exports.create.after": ("exported",),
    "exports.begin.before": ("exported_to",),
    "exports.begin.after": ("exported_to",),
    "exports.copy.before": ("exported_to",),
    "exports.copy.after": ("exported_to",),
    "exports.manifest.before": ("exported_to",),
    "exports.manifest.after": ("exported_to",),
    "exports.delete.before": ("exported",),
    "exports.delete.after": ("exported",),
    "exports.claim.before": ("exported", "exported_sorted"),
    "exports.claim.after": ("exported", "exported_sorted"),
    "exports.sort.before": ("exported_sorted",),
    "exports.sort.after": ("exported_sorted",),
    "exports.merge.before": ("exported_sorted",),
    "exports.merge.after": ("exported_sorted",),
    "exports.piece.before": ("exported", "exported_sorted"),
    "exports.piece.after": ("exported", "exported_sorted"),
    "exports.checkpoint.before": ("exported", "exported_sorted", "exported_to"),
    "exports.checkpoint.after": ("exported", "exported_sorted", "exported_to"),
    "exports.part.before": ("exported", "exported_sorted"),
    "exports.part.after": ("exported", "exported_sorted"),
    "exports.ready.before": ("exported", "exported_sorted", "exported_to"),
    "exports.ready.after": ("exported", "exported_sorted", "exported_to"),
    "exports.fail.before": ("export_failed",),
    "exports.fail.after": ("export_failed",),
    "ingest.split.before": ("staged", "list", "rerun"),
    "ingest.split.after": ("staged", "upload", "rerun"),
    "ingest.put.after": ("staged", "open", "rerun"),
    "ingest.enqueue.after": ("staged", "open", "rerun"),
    "ingest.checkpoint.after": ("staged", "open", "stale", "rerun"),
    "ingest.done.after": ("staged", "open", "stale", "rerun"),
    "ingester.ack.before": ("staged", "closed", "rerun"),
    "ingester.bury.after": ("resumed", "redriven"),
    "lease.grant.before": ("staged",),
    "lease.grant.after": ("staged", "stale"),
    "lifecycle.total.before": ("staged", "open"),
    "lifecycle.latch.before": ("staged", "open", "closed"),
    "lifecycle.latch.after": ("staged", "open"),
    "lifecycle.move.before": ("steps", "resumed", "rerun"),
    "lifecycle.move.after": ("steps", "resumed", "rerun"),
    "queue.send.before": ("steps", "staged", "open"),
    "queue.send.after": ("steps", "staged", "open"),
    "queue.receive.after": ("inline", "staged"),
    "queue.ack.before": ("steps", "staged", "doubled_steps"),
    "queue.ack.after": ("steps", "staged"),
    "queue.hasten.before": ("paused",),
    "queue.hasten.after": ("paused",),
    "queue.bury.before": ("resumed",),
    "queue.bury.after": ("resumed",),
    "recorder.ack.before": ("steps",),
    "recorder.dead_letter.after": ("parked_steps",),
    "recorder.flush.before": ("inline", "staged", "doubled", "rerun", "parked"),
    "recorder.flush.after": ("inline", "staged", "doubled", "rerun", "parked"),
    "redrive.rerun.after": ("parked",),
    "redrive.send.before": ("redriven",),
    "redrive.send.after": ("redriven",),
    "request.claim.before": ("steps", "open", "upload"),
    "request.claim.after": ("steps", "open", "upload"),
    "resume.deadline.before": ("resumed",),
    "resume.deadline.after": ("resumed",),
    "resume.moved.after": ("resumed",),
    "rerun.add.before": ("rerun",),
    "rerun.add.after": ("rerun",),
    "control.resume.between": ("paused",),
    "options.change.before": ("paused",),
    "options.change.after": ("paused",),
    "retention.export.before": ("exported", "exported_sorted"),
    "retention.forget.before": ("removed",),
    "retention.remove.before": ("removed",),
    "retention.upload.before": ("removed",),
    "retention.upload.between": ("removed",),
    "retention.upload.after": ("removed",),
    "sqlite.commit.before": ("inline", "staged", "open", "upload"),
    "sqlite.commit.after": ("inline", "staged", "open", "upload"),
    "tasks.put.before": ("steps", "staged"),
    "tasks.put.after": ("steps", "staged"),
    "tasks.finish.before": ("steps", "staged_steps"),
    "tasks.finish.after": ("steps", "staged_steps", "doubled_steps"),
    "upload.promise.before": ("upload",),
    "upload.promise.after": ("upload",),
    "upload.stored.before": ("upload",),
    "upload.stored.after": ("upload",),
    "worker.dead_letter.after": ("poison",),
    "worker.try_alone.between": ("poison",),
}
# The tasks of each later run: those that failed, then all.
RERUNS = [[index for index in range(TOTAL) if expected("rerun", index)[2] is not None], list(range(TOTAL))]

# Points that no run here passes, each with the reason.
OUT_OF_REACH: dict[str, str] = {
    "breakdown.write.before": "a run of more tasks passes it; see conformance/test_breakdowns.py",
    "breakdown.write.after": "as above",
    "backup.snapshot.before": "a backup passes it; see flow/test_backup.py",
    "backup.snapshot.after": "as above",
    "backup.publish.before": "as above",
    "backup.publish.after": "as above",
    "sweeper.seal.before": "an open job that is left alone passes it; see flow/test_ingest_again.py",
    "sweeper.seal.after": "as above",
    "takeover.before": "a run that is resumed with its list mended passes it; see flow/test_run_kept.py",
    "takeover.after": "as above",
    "progress.begin.before": "a job of long tasks passes it; see test_crashpoints_long.py",
    "progress.begin.after": "as above",
    "progress.write.before": "as above",
    "progress.write.after": "as above",
    "progress.remove.before": "as above",
    "download.piece.before": "as above",
    "download.piece.after": "as above",
    "download.seal.before": "as above",
    "download.seal.after": "as above",
    "export.create.before": "as above",
    "export.create.after": "as above",
    "worker.condemn.between": "as above",
    "delivery.again.after": "webhooks and schedules have runs of their own; see test_crashpoints_notify.py",
    "delivery.again.before": "as above",
    "delivery.claim.after": "as above",
    "delivery.claim.before": "as above",
    "delivery.record.after": "as above",
    "delivery.record.before": "as above",
    "delivery.sent.after": "as above",
    "milestone.tell.after": "as above",
    "milestone.tell.before": "as above",
    "notify.deliveries.after": "as above",
    "notify.deliveries.before": "as above",
    "notify.told.after": "as above",
    "schedule.advance.after": "as above",
    "schedule.advance.before": "as above",
    "schedule.change.after": "as above",
    "schedule.change.before": "as above",
    "schedule.claim.after": "as above",
    "schedule.claim.before": "as above",
    "schedule.create.after": "as above",
    "schedule.create.before": "as above",
    "schedule.remove.after": "as above",
    "schedule.remove.before": "as above",
    "schedule.stage.after": "as above",
    "schedule.stage.before": "as above",
    "schedule.keep.after": "a schedule that compares passes it; see flow/test_schedules.py",
    "schedule.keep.before": "as above",
    "schedule.submit.after": "webhooks and schedules; see test_crashpoints_notify.py",
    "schedule.submit.before": "as above",
    "webhook.change.after": "as above",
    "webhook.change.before": "as above",
    "duplicate.copy.after": "a request passes it; see flow/test_duplicate.py",
    "duplicate.copy.before": "as above",
    "key.create.after": "a request passes it; see flow/test_api_idempotency.py",
    "key.create.before": "as above",
    "key.revoking.before": "an administrator's request passes it; see flow/test_api_keys.py",
    "key.revoking.after": "as above",
    "key.revoke.before": "as above",
    "key.revoke.after": "as above",
    "session.admin.after": "a request passes it; see dashboard/test_sessions.py",
    "session.admin.before": "as above",
    "session.link.after": "a request passes it; see flow/test_api_idempotency.py",
    "session.link.before": "as above",
    "orphans.forget.after": "a submit passes it; see stacks/test_retention.py",
    "orphans.forget.before": "as above",
    "orphans.note.after": "as above",
    "orphans.note.before": "as above",
    "retention.orphan.after": "as above",
    "retention.orphan.before": "as above",
    "retention.orphan.between": "as above",
    "retention.orphan.doomed": "as above",
    "webhook.create.after": "webhooks and schedules; see test_crashpoints_notify.py",
    "webhook.create.before": "as above",
    "webhook.remove.after": "as above",
    "webhook.remove.before": "as above",
    "sqs.replace.before": "the embedded system has no SQS; see test_sqs.py",
    "sqs.replace.between": "as above",
    "sqs.replace.after": "as above",
    "sqs.bury.between": "as above",
    "sqs.drop.before": "as above",
    "sqs.drop.after": "as above",
    "sqs.share.before": "as above",
    "sqs.share.after": "as above",
    "sqs.redrive.before": "as above",
    "sqs.redrive.between": "as above",
    "worker.announce.before": "a worker writes it again every minute; see flow/test_announced_workers.py",
    "worker.announce.after": "as above",
    "worker.beat.before": "a worker that runs long tasks passes it; see test_crashpoints_recovery.py",
    "worker.beat.after": "as above",
    "monitor.worker.before": "what is late passes it; see test_crashpoints_recovery.py",
    "monitor.take.before": "as above",
    "monitor.take.after": "as above",
    "monitor.send.before": "as above",
    "monitor.send.after": "as above",
    "monitor.overdue.before": "as above",
    "monitor.overdue.after": "as above",
    "monitor.requeue.after": "as above",
    "monitor.expire.before": "as above",
    "monitor.expire.after": "as above",
    "monitor.letter.after": "as above",
    "replace.take.before": "a job that replaces another passes it; see flow/test_replace.py",
    "replace.take.after": "as above",
    "replace.cancel.before": "as above",
    "replace.cancel.after": "as above",
    "handover.done.before": "as above",
    "handover.done.after": "as above",
    "callback.attach.before": "a state machine that waits passes it; see test_step_functions.py",
    "callback.attach.after": "as above",
    "callback.answer.after": "a state machine that waits passes it; see test_step_functions.py",
    "callback.answer.before": "as above",
    "callback.claim.after": "as above",
    "callback.claim.before": "as above",
    "callback.fail.after": "as above",
    "callback.fail.before": "as above",
    "callback.heartbeat.after": "as above",
    "callback.heartbeat.before": "as above",
    "callback.record.after": "as above",
    "callback.record.before": "as above",
    "callback.sent.after": "as above",
    "inbox.bury.before": "as above",
    "inbox.bury.between": "as above",
    "intake.bury.after": "as above",
    "intake.done.after": "as above",
    "intake.job.after": "as above",
    "intake.receive.after": "as above",
    "intake.refuse.after": "as above",
    "intake.refuse.before": "as above",
    "postgres.commit.before": "the embedded system has no Postgres; see test_postgres.py",
    "postgres.commit.after": "as above",
    "dynamodb.write.before": "the embedded system has no DynamoDB; see test_dynamodb.py",
    "dynamodb.write.after": "as above",
    "dynamodb.batch.before": "as above",
    "dynamodb.batch.after": "as above",
    "tasks.count.before": "only DynamoDB counts in a step of its own; see test_dynamodb.py",
    "tasks.count.after": "as above",
    "tasks.announce.before": "as above",
    "tasks.announce.after": "as above",
    "tasks.settle.before": "as above; see test_late_counts.py",
    "tasks.settle.after": "as above",
    "ingest.copy.before": "a list behind a URL that serves no ranges passes it; see flow/test_list_sources.py",
    "ingest.copy.after": "as above",
    "blob.begin_parts.before": "only S3 takes lists in parts; see flow/test_multipart_uploads.py",
    "blob.begin_parts.after": "as above",
    "blob.complete_parts.before": "as above",
    "blob.complete_parts.after": "as above",
    "upload.complete.before": "as above",
    "upload.complete.after": "as above",
    "blob.append.unsynced": "fetchers pass it; see test_fetcher_deaths.py",
    "blob.sync.before": "as above",
    "blob.sync.after": "as above",
    "fetcher.pack.before": "as above",
    "fetcher.pack.after": "as above",
    "move.clean.after": "a move of tasks passes it; see flow/test_move_tasks.py",
    "move.clean.before": "as above",
    "move.clean.between": "as above",
    "move.events.after": "as above",
    "move.events.before": "as above",
    "move.record.after": "as above",
    "move.record.before": "as above",
    "move.rows.after": "as above",
    "move.rows.before": "as above",
    "move.rows.between": "as above",
    "move.switch.after": "as above",
    "move.switch.before": "as above",
    "session.redeem.between": "who signs in passes it; see dashboard/test_sessions.py",
}

# Told by roles that come when they come, of what is no move of the run.
BESIDE = frozenset({"job.ingested", "run.progress", "tasks.failed"})

# Dead letters that are left. What is buried before the run is moved may be buried again after a death in between.
LETTERS: dict[str, int | None] = {"poison": 1, "parked": 4, "parked_steps": 4, "resumed": None, "redriven": None}


def hits(point: str, scenario: str, first: bool) -> tuple[int, ...]:
    """At the first and second hit in one scenario, and at the first in the others, unless all are asked for."""
    # More deaths than the poison's own would make others look guilty too.
    if scenario == "poison" or not (first or ALL_HITS):
        return (1,)
    # Commits carry everything, so they are cut in more places.
    if point.startswith("sqlite.commit."):
        return (1, 2, 3, 5, 8, 13, 21) if ALL_HITS else (1, 3, 8, 21)
    return (1, 2, 3) if ALL_HITS else (1, 2)


CASES = [
    (scenario, point, nth)
    for point, scenarios in PASSED_IN.items()
    for number, scenario in enumerate(scenarios)
    for nth in hits(point, scenario, number == 0)
]


@functools.cache
def points_in_source() -> frozenset[str]:
    names = set()
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "crashpoint" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "crashpoint":
                (name,) = node.args
                assert isinstance(name, ast.Constant), f"{path}:{node.lineno}: the name must be a literal"
                names.add(name.value)
    return frozenset(names)


def passings(place: Path) -> Counter[str]:
    """How often the last child passed each point."""
    return Counter((place / "passed").read_text().split())


def run_to_the_end(children: Forks, place: Path, scenario: str, crash_at: str | None, crashes: int) -> int:
    """Start it until it is done; it dies at the point so often. Returns how often it did."""
    name, _, nth = (crash_at or ":").partition(":")
    died = 0
    for _ in range(20):
        armed = crash_at if died < crashes else None
        status = children.run(place, scenario=scenario, crash_at=armed)
        if status == 0:
            return died
        assert status == -signal.SIGKILL, (place / "log").read_text()
        died += armed is not None and passings(place)[name] == int(nth)
    raise AssertionError("it is never done:\n" + (place / "log").read_text()[-3000:])


async def check(place: Path, scenario: str, letters: int | None = 0) -> None:
    """`letters` is None where a death may leave one more."""
    check_answers(place)
    async with open_system(Settings.load({}, data=place / "data")) as system:
        assert list((place / "data" / "blobs" / ".tmp").iterdir()) == []
        database = system.records.jobs._database  # type: ignore[attr-defined]
        assert await database.row("PRAGMA integrity_check", {}) == ("ok",)
        if scenario == "removed":
            await check_removed(place, system)
            return
        (job,) = (await system.records.jobs.jobs(TENANT, None, 10)).items
        assert job.state is job.run.state is RunState.COMPLETED
        assert (job.run.total, job.run.last_batch) == (TOTAL, True)
        pages = [
            await system.tasks.page(job.key, shard, None, 2 * TOTAL, TaskFilter())
            for shard in range(max(1, job.task_shard_count))
        ]
        tasks = [task for page in pages for task in page]
        assert sorted(task.index for task in tasks) == list(range(TOTAL))
        for task in tasks:
            status, attempts, code = expected(scenario, task.index)
            assert (task.status, task.attempts, task.error_code) == (status, attempts, code), task.index
            assert bytes(task.input) == b"%d" % task.index
        await check_moves(system, RERUNS if scenario == "rerun" or scenario in PARKED else [])
        counts = await system.tasks.counts(job.key)
        by_status = Counter(task.status.label for task in tasks)
        assert (counts.succeeded, counts.failed, counts.cancelled) == (by_status["succeeded"], by_status["failed"], 0)
        assert counts.ended == TOTAL
        assert await system.tasks.recount(job.key) == counts
        ingested = await system.records.ingests.ingested(job.run.run_id)
        assert ingested.tasks == (TOTAL if ingested.ranges else 0)
        assert ingested.done
        notices = (await system.records.outbox.events(TENANT, job.job_id, None, 100)).items
        between = ["run.failed", "run.resumed"] if scenario in ("resumed", "redriven") else []
        if scenario in EXPORTED:
            await check_export(system, place, scenario, notices)
            notices = [event for event in notices if "export_id" not in event.data]
        notices = [event for event in notices if event.event not in BESIDE]
        if scenario == "rerun" or scenario in PARKED:
            between = ["run.completed", "run.added"] * len(RERUNS)
        if scenario == "paused":
            # As often as it died before it was known to have gone on.
            notices = [event for event in notices if event.event not in ("run.paused", "run.resumed", "job.changed")]
            assert job.options.concurrency == 7
        assert [event.event for event in notices] == ["job.accepted", *between, "run.completed"]
        assert notices[-1].data["counts"] == msgspec.structs.asdict(counts)
        for queue in (*run_queues(job.run.run_id), CONTROL):
            assert await system.queue.depth(queue) == Depth(0, 0, 0)
        if letters is not None:
            assert len(await dead_letters(system, job.tenant)) == letters
        await check_bodies(system, tasks)
    if scenario == "export":
        check_archive(place / "out.zip")


async def check_export(system: System, place: Path, scenario: str, events: list[EventRecord]) -> None:
    """It came to its end once, its files are whole and hold every task; nothing is left of the deleted one."""
    export_id = (place / "export").read_text()
    told = [event.event for event in events if event.data.get("export_id") == export_id]
    row, export = await Exports(system).find(TENANT, export_id)
    assert [info.key async for info in system.blobs.listing("exports") if export_id not in info.key] == []
    assert [each.id for each in await system.records.documents.due_documents(EXPORT, 1e12, 10)] == [export_id]
    if scenario == "export_failed":
        assert (export.state, told) == (ExportState.FAILED, ["export.failed"])
        return
    assert (export.state, told) == (ExportState.READY, ["export.ready"])
    assert row.due_at == row.expires_at
    if scenario == "exported_to":
        check_copy(place / "copied" / "kept", export_id, export)
    indexes = []
    for part in export.parts:
        data = b"".join([piece async for piece in part_range(system.blobs, part, 0, part.size)])
        assert (len(data), sha256(data).hexdigest()) == (part.size, part.sha256)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.testzip() is None
            lines = [json.loads(line) for line in archive.read("manifest.jsonl").splitlines()]
            assert len(lines) == part.tasks
            assert len(archive.namelist()) == 1 + sum(line["file"] is not None for line in lines)
            assert all(archive.read(line["file"]) == body_of(line["index"]) for line in lines if line["file"])
            indexes += [line["index"] for line in lines]
    assert len(export.parts) > 1
    assert indexes == list(range(TOTAL))
    assert sum(export.counts.values()) == TOTAL


def check_copy(place: Path, export_id: str, export: ExportRecord) -> None:
    """The place has the same files, each whole, the manifest that names them, and nothing else."""
    manifest = json.loads((place / "_manifest.json").read_text())
    names = [part["name"] for part in manifest["parts"]]
    assert names == [f"part-{number:04d}-{export_id}.zip" for number in range(1, len(export.parts) + 1)]
    assert {path.name for path in place.iterdir()} == {*names, "_export.json", "_manifest.json"}
    for name, part in zip(names, export.parts, strict=True):
        data = (place / name).read_bytes()
        assert (len(data), sha256(data).hexdigest()) == (part.size, part.sha256)


async def check_moves(system: System, reruns: list[list[int]]) -> None:
    """Each task was moved once in each run, from pending; each run was completed once, and nothing was pending then."""
    database = system.records.jobs._database  # type: ignore[attr-defined]
    for number, indexes in enumerate([list(range(TOTAL)), *reruns], start=1):
        moves = await database.rows("SELECT idx, old FROM harness_moves WHERE run_no = :number", {"number": number})
        assert sorted(moves) == [(index, 0) for index in indexes]
    totals = [TOTAL, *map(len, reruns)]
    ends = await database.rows("SELECT total, ended, pending FROM harness_ends", {})
    assert ends == [(total, total, 0) for total in totals]
    assert await database.rows("SELECT count(*) FROM task_runs", {}) == [(len(totals),)], "tasks that no job points to"


def check_answers(place: Path) -> None:
    """Whatever process answered: one request has one answer, to the byte."""
    answers: dict[str, set[str]] = {}
    path = place / "answers"
    for line in path.read_text().splitlines() if path.exists() else []:
        answers.setdefault(json.loads(line)["key"], set()).add(line)
    assert all(len(same) == 1 for same in answers.values()), answers


async def check_removed(place: Path, system: System) -> None:
    database = system.records.jobs._database  # type: ignore[attr-defined]
    for table in (
        "jobs",
        "runs",
        "ranges",
        "tasks",
        "task_runs",
        "task_events",
        "task_errors",
        "messages",
        "leases",
        "uploads",
    ):
        assert await database.rows(f"SELECT count(*) FROM {table}", {}) == [(0,)], table
    assert [path for path in (place / "data" / "blobs").rglob("*") if path.is_file()] == []


async def check_bodies(system: System, tasks: list) -> None:
    stored: dict[str, bytes] = {}
    for task in tasks:
        ref = task.detail.body
        if task.error_code is not None:
            assert ref is None
            continue
        if ref.inline is not None:
            assert len(ref.inline) == ref.length <= SqliteTasks.inline_bytes
            stored[ref.key] = ref.inline
        elif ref.key not in stored:
            found = await system.blobs.get(ref.key)
            assert found is not None, "a body is missing"
            stored[ref.key] = found
        start = max(ref.offset, 0)
        data = stored[ref.key][start : start + ref.stored_length]
        if ref.stored is not None:
            # By another library than the one that deflated it.
            data = zlib.decompress(data, -zlib.MAX_WBITS)
        assert data == body_of(task.index)
        assert sha256(data).hexdigest() == ref.sha256


def check_archive(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        lines = [json.loads(line) for line in archive.read("manifest.jsonl").splitlines()]
        assert [line["index"] for line in lines] == list(range(TOTAL))
        for line in lines:
            if line["file"] is not None:
                assert archive.read(line["file"]) == body_of(line["index"])


def test_every_point_in_the_source_has_a_run() -> None:
    points = points_in_source()
    assert points, "the walk finds nothing"
    assert points - set(PASSED_IN) - set(OUT_OF_REACH) == set(), "points that nobody dies at"
    assert (set(PASSED_IN) | set(OUT_OF_REACH)) - points == set(), "points that are gone"
    assert not set(PASSED_IN) & set(OUT_OF_REACH)


def test_points_that_no_run_here_passes_have_tests_elsewhere() -> None:
    """In the file that their reason names."""
    reason = ""
    for point, why in OUT_OF_REACH.items():
        reason = reason if why == "as above" else why
        name = re.search(r"see ([\w/]+\.py)", reason)
        assert name, (point, reason)
        files = [path for path in (ROOT / "tests" / name[1], Path(__file__).parent / name[1]) if path.exists()]
        assert files, (point, reason)
        assert point.rpartition(".")[0] in files[0].read_text(), (point, reason)


@pytest.mark.parametrize("scenario", [scenario for scenario in SCENARIOS if scenario != "poison"])
async def test_without_a_crash(children: Forks, place: Path, scenario: str) -> None:
    assert children.run(place, scenario=scenario) == 0, (place / "log").read_text()
    assert {point for point, scenarios in PASSED_IN.items() if scenario in scenarios} <= set(passings(place))
    await check(place, scenario, LETTERS.get(scenario, 0))


async def test_a_task_that_kills_its_process_is_given_up_alone(children: Forks, place: Path) -> None:
    deaths = 0
    while (status := children.run(place, scenario="poison")) != 0:
        assert status == -signal.SIGKILL, (place / "log").read_text()
        deaths += 1
    # The first delivery is not marked; then three starts of its chunk, and three of its own.
    assert deaths == 7
    await check(place, "poison", letters=1)


@pytest.mark.parametrize(("scenario", "point", "nth"), CASES)
async def test_dying_there_loses_nothing(
    children: Forks, place: Path, scenario: str, point: str, nth: int, record_property: Callable[[str, object], None]
) -> None:
    # At k = 2 it dies in the run that recovers as well, if that comes so far.
    died = run_to_the_end(children, place, scenario, f"{point}:{nth}", 2 if nth == 2 else 1)
    if died == 0:
        # No process passes the point so often: the passings are those of several, each of which dies at its first.
        shutil.rmtree(place)
        place.mkdir()
        died = run_to_the_end(children, place, scenario, f"{point}:1", nth)
    record_property("died", died)
    assert died > 0, "the point was not passed"
    await check(place, scenario, LETTERS.get(scenario, 0))


def test_the_environment_says_where_to_die(place: Path) -> None:
    """As CONVEYOR_CRASH_AT does it for any process that arms it."""
    environ = {**os.environ, "CONVEYOR_CRASH_AT": "accept.after:1"}
    command = [sys.executable, "-m", CHILD, str(place), "inline"]
    ended = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert (place / "passed").read_text().split()[-1] == "accept.after"
