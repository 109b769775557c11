"""What must hold of a system that is started on a disk after the power failed: all that clients were told is true, and
all that was accepted comes to its end, once."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import apsw
import msgspec

from conveyor.accept.add_tasks import AddTasks
from conveyor.auth.keys import authenticate
from conveyor.client.server_address import local_key_file
from conveyor.clock import Clock
from conveyor.errors import ConveyorError, NotFound
from conveyor.export.exports import Exports
from conveyor.jobs.idempotency import Accepted, Idempotency
from conveyor.model import PROGRESS, Job, JobId, JobKind, Mode, Run, Task
from conveyor.states import ReasonCode, RunState, TaskStatus
from conveyor.system import System
from conveyor.verify.findings import FindingKind, Findings
from conveyor.verify.installation import Installation
from tests.powerloss.client import request_of
from tests.powerloss.ledger import Entry, Known, ShownTask, Told
from tests.powerloss.life import PIECE_BYTES, living, origin_of
from tests.powerloss.origin import PowerlossOrigin, file_at
from tests.support.make_jobs import ACME

# Seconds after which everything has come to its end: leases, pauses of the sweeper, the purge of what was deleted.
_PATIENCE = 300.0
_LOOK = 1.0
_FOLDERS = ("results", "invalid", "lists", "exports")
# What a system may fail with on a disk that it cannot read; anything else is a mistake of the test.
FAILURES = (ConveyorError, OSError, apsw.Error, msgspec.MsgspecError, ValueError)
_ENDS = ("run.completed", "run.failed", "run.cancelled")


class Broken(AssertionError):
    """Something that a client was told is not true any more."""


def expect(is_so: object, otherwise: str) -> None:
    if not is_so:
        raise Broken(otherwise)


async def check_disk(place: Path, clock: Clock, seed: int, known: Known) -> None:
    """Start a system on the disk, and hold it to what was told. Raises Broken."""
    origin = origin_of(clock, is_first=False)
    try:
        async with living(place, clock, seed, is_first=False, origin=origin) as system:
            check = Check(system, known, origin)
            await check.until_ended()
            await check.check_told()
            await check.check_jobs()
            await check.check_deleted()
            await check.verify()
    except FAILURES as error:
        raise Broken(f"{type(error).__name__}: {error}") from error


class Check:
    """One system against what was told."""

    def __init__(self, system: System, known: Known, origin: PowerlossOrigin) -> None:
        self._system = system
        self._known = known
        self._origin = origin
        # Jobs for which a delete was asked for may be there or not, and so may their lists.
        jobs = known.subjects(Told.DELETED)
        self._doomed = jobs | {entry.subject for entry in known.of(Told.SOURCE) if entry.detail in jobs}

    async def check_told(self) -> None:
        """Each answer is still true. That a body is what its row says, `verify` checks; so it is with exports."""
        shown: dict[tuple[str, str], list[ShownTask]] = {}
        for entry in self._known.answers:
            match entry.told:
                case Told.SIGNING_KEY:
                    expect(self._system.signing_key.hex() == entry.subject, "the signing key is another")
                case Told.LOCAL_KEY:
                    await self._check_key(entry)
                case Told.UPLOAD if entry.subject not in self._doomed:
                    await self._check_upload(entry)
                case Told.ANSWER:
                    await self._check_answer(entry)
                case Told.TASK if entry.detail.job_id not in self._doomed:
                    shown.setdefault((entry.detail.job_id, entry.detail.run_id), []).append(entry.detail)
                case Told.PROGRESS:
                    self._check_progress(entry)
                case Told.END if entry.detail[0] not in self._doomed:
                    run = await self._system.records.jobs.run(entry.detail[0], entry.subject)  # type: ignore[arg-type]
                    expect(run and run.state == entry.detail[1], f"{entry.subject} was {entry.detail[1]}")
                case Told.RERUN if entry.subject not in self._doomed:
                    job = await self._job(entry.subject)
                    expect(job.run.number >= entry.detail, f"a rerun of {entry.subject} is lost")
                case Told.EXPORT if entry.detail[0] not in self._doomed:
                    await self._check_export(entry)
                case Told.DELETED:
                    job_id = JobId(entry.subject)
                    found = await self._system.records.jobs.job(ACME, job_id)
                    expect(found is None, f"{job_id} was deleted and is back")
        for (of_job, run_id), tasks in shown.items():
            await self._check_tasks(of_job, run_id, tasks)

    async def _check_key(self, entry: Entry) -> None:
        key = await authenticate(self._system.records.access, self._system.clock, entry.subject)
        expect(key.admin, "the local key is not an administrator's")
        stored = local_key_file(self._system.settings.data)
        expect(stored.exists() and stored.read_text().strip() == entry.subject, "local.key has another key")

    async def _check_upload(self, entry: Entry) -> None:
        upload = await self._system.records.access.upload(entry.subject)
        expect(upload and upload.stored_at is not None, f"{entry.subject} was stored and is lost")
        assert upload is not None
        data = await self._system.blobs.get(upload.key)
        expect(data is not None, f"the list of {entry.subject} is lost")
        assert data is not None
        expect((len(data), sha256(data).hexdigest()) == entry.detail, f"the list of {entry.subject} is another")

    async def _check_answer(self, entry: Entry) -> None:
        async def carry_out(_: object) -> Accepted:
            raise Broken(f"the answer to {entry.subject!r} is forgotten")

        system = self._system
        idempotency = Idempotency(system.settings, system.clock, system.records)
        again = await idempotency.once(ACME, request_of(entry.subject), "another", carry_out)
        expect(again == entry.detail._replace(replayed=True), f"the answer to {entry.subject!r} is another")

    async def _check_tasks(self, job_id: str, run_id: str, tasks: Sequence[ShownTask]) -> None:
        job = await self._job(job_id)
        key = msgspec.structs.replace(job.key, run_id=run_id)
        rows = {row.index: row for row in await self._system.tasks.at(key, [task.index for task in tasks])}
        for shown in tasks:
            where, row = f"task {shown.index} of {run_id}", rows.get(shown.index)
            expect(row is not None, f"{where} was {shown.status} and is lost")
            assert row is not None
            expect(row.status.label == shown.status, f"{where} was {shown.status} and is {row.status.label}")
            digest = None if row.detail.body is None else row.detail.body.sha256
            expect(digest == shown.sha256, f"{where} has another body than was shown")

    async def _check_export(self, entry: Entry) -> None:
        exports = Exports(self._system)
        if entry.subject in self._known.subjects(Told.EXPORT_DELETED):
            if entry.subject in {deleted.subject for deleted in self._known.of(Told.EXPORT_DELETED)}:
                try:
                    await exports.find(ACME, entry.subject)
                except NotFound:
                    return
                raise Broken(f"{entry.subject} was deleted and is back")
            return
        stored = await exports.find(ACME, entry.subject)
        digests = [part.sha256 for part in stored.export.parts]
        expect(digests == entry.detail[1], f"{entry.subject} has other files")

    def _check_progress(self, entry: Entry) -> None:
        """Pieces that were stored are not requested again: at most the one that filled and the one being written."""
        if "/nameless/" not in entry.subject and (first := self._origin.first.get(entry.subject)) is not None:
            lost = entry.detail - first
            expect(lost <= 2 * PIECE_BYTES, f"{entry.subject} is requested from {first} on, of {entry.detail} bytes")

    async def until_ended(self) -> None:
        """Open jobs are closed; everything that was accepted ends, and what was deleted is purged."""
        for job in await self._system.records.jobs.active_jobs():
            if job.mode is Mode.OPEN and job.run.number == 1 and not job.run.sealed:
                await AddTasks(self._system).close(job)
        until = self._system.clock.now() + _PATIENCE
        while left := await self._left():
            expect(self._system.clock.now() < until, f"{left} are not at their end after {_PATIENCE:g} s")
            await asyncio.sleep(_LOOK)

    async def _left(self) -> list[Any]:
        active = [job.job_id for job in await self._system.records.jobs.active_jobs()]
        return (
            active
            or self._rows("SELECT job_id FROM jobs WHERE deleted")
            or self._rows("SELECT run_id FROM runs WHERE swept = 0")
            or self._rows(f"SELECT id FROM documents WHERE kind = '{PROGRESS}'")
        )

    def _rows(self, query: str) -> list[Any]:
        records: Any = self._system.records
        return list(records.jobs._database._writer.execute(query))

    async def check_jobs(self) -> None:
        """Every accepted job is there with its tasks, each of which has ended once."""
        for entry in self._known.of(Told.JOB):
            if entry.subject not in self._doomed:
                job = await self._job(entry.subject)
                await self._check_inputs(job, entry.detail)
        for job in (await self._system.records.jobs.jobs(ACME, None, 1000)).items:
            await self._check_ends(job)

    async def _check_inputs(self, job: Job, accepted: list[str] | None) -> None:
        first = next(run for run in await self._system.records.jobs.runs(job.job_id) if run.number == 1)
        rows = await self._system.tasks.at(job.key_of(first), range(first.total))
        inputs = [json.loads(bytes(row.input)) for row in rows]
        if accepted is not None:
            expect(inputs == list(accepted), f"{job.job_id} has {len(inputs)} of {len(accepted)} tasks, or others")
            return
        told = [task for entry in self._known.of(Told.BATCH) if entry.subject == job.job_id for task in entry.detail]
        asked = [entry for entry in self._known.under_way if entry.told is Told.BATCH and entry.subject == job.job_id]
        maybe = [task for entry in asked for task in entry.detail]
        counted = Counter(inputs)
        expect(not Counter(told) - counted, f"{job.job_id} has {len(inputs)} tasks of {len(told)} that were added")
        expect(not counted - Counter(told + maybe), f"{job.job_id} has tasks twice, or of nobody")

    async def _check_ends(self, job: Job) -> None:
        ended: Counter[str] = Counter()
        for event in (await self._system.records.outbox.events(ACME, job.job_id, None, 10_000)).items:
            ended[event.run_id] += event.event in _ENDS
        for run in await self._system.records.jobs.runs(job.job_id):
            await self._check_run(job, run, ended[run.run_id])

    async def _check_run(self, job: Job, run: Run, ends: int) -> None:
        key, tasks, name = job.key_of(run), self._system.tasks, f"run {run.number} of {job.job_id}"
        rows = await tasks.at(key, range(run.total))
        is_done = run.state is RunState.COMPLETED or (run.reason_code == ReasonCode.NO_TASKS and not rows)
        expect(is_done, f"{name} is {run.state}: {run.reason_code}")
        expect(ends == 1, f"{name} has {ends} terminal events")
        expect(len(rows) == run.total, f"{name} has {len(rows)} tasks, and a total of {run.total}")
        expect(all(row.status is not TaskStatus.PENDING for row in rows), f"{name} has tasks that did not end")
        if job.kind is JobKind.DOWNLOAD:
            _check_files(name, rows)
        counts = await tasks.counts(key)
        expect(counts == await tasks.recount(key), f"{name} counts {counts}")
        expect(counts.ended == run.total, f"{name} counts {counts} of {run.total}")

    async def check_deleted(self) -> None:
        """Of a job that was deleted nothing is left on the disk."""
        for entry in self._known.of(Told.DELETED):
            for folder in _FOLDERS:
                async for info in self._system.blobs.listing(f"{folder}/{ACME}/{entry.subject}"):
                    raise Broken(f"{entry.subject} was deleted, and {info.key} is still there")

    async def verify(self) -> None:
        """`conveyor verify` finds at most bodies of attempts whose outcome was not written, and removes them."""
        findings = Findings()
        installation = Installation(self._system, findings)
        await installation.verify()
        wrong = {kind: of.examples for kind, of in findings.by_kind.items() if kind is not FindingKind.ORPHAN}
        expect(not wrong and not findings.failures, f"verify: {wrong or findings.failures}")
        if findings.left:
            await installation.remove_orphans()
            again = Findings()
            await Installation(self._system, again).verify()
            expect(not again.left and not again.failures, f"verify after a repair: {again.by_kind}")

    async def _job(self, job_id: str) -> Job:
        job = await self._system.records.jobs.job(ACME, JobId(job_id))
        expect(job is not None, f"{job_id} was accepted and is lost")
        assert job is not None
        return job


def _check_files(name: str, rows: Sequence[Task]) -> None:
    """Each file is the one that the origin has."""
    for row in rows:
        url = json.loads(bytes(row.input))
        digest = None if row.detail.body is None else row.detail.body.sha256
        expect(digest == sha256(file_at(url)).hexdigest(), f"{url} of {name} is {row.status.label}: {row.detail}")
