"""The client of the recorded lives: asks for things, and has the ledger keep what it is told."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from hashlib import sha256
from typing import Any

import msgspec

from conveyor.accept.add_tasks import AddTasks
from conveyor.accept.rerun import Rerun, RerunSpec
from conveyor.accept.spec import TasksSpec, decode_spec
from conveyor.accept.submit import Submit
from conveyor.cli.local_key import ensure_local_key
from conveyor.errors import NotFound
from conveyor.export.exports import Exports, ExportState, StoredExport, part_range
from conveyor.export.request import ExportSpec
from conveyor.jobs.idempotency import Accepted, IdempotentRequest
from conveyor.lists.uploads import Uploads, UploadSpec
from conveyor.model import PROGRESS, Job, JobId, JobKind, Run, Task, TaskProgress, progress_id
from conveyor.read.results import read_body
from conveyor.states import ENDED, TaskStatus
from conveyor.system import System
from tests.powerloss.ledger import Ledger, ShownTask, Told
from tests.support.make_jobs import ACME

# Seconds between two looks.
_LOOK = 0.05
_PIECE = 1000


class Client:
    """All requests of one life. `look` shows the client everything that has finished since the last look."""

    def __init__(self, system: System, ledger: Ledger) -> None:
        self._system = system
        self._ledger = ledger
        self._jobs: dict[JobId, None] = {}
        self._shown: set[str] = {entry.subject for entry in ledger.entries}
        self._progress: dict[str, int] = {}

    async def arrive(self) -> None:
        """What every start of a server tells."""
        self._ledger.tell(Told.SIGNING_KEY, self._system.signing_key.hex())
        self._ledger.tell(Told.LOCAL_KEY, await ensure_local_key(self._system))

    async def job(self, job_id: JobId) -> Job:
        job = await self._system.records.jobs.job(ACME, job_id)
        assert job is not None
        return job

    async def submit(self, name: str, tasks: Sequence[str], **spec: Any) -> JobId:
        """A job whose tasks are in the request."""
        asked = decode_spec(json.dumps({**spec, "name": name, "tasks": list(tasks)}).encode())
        at = self._ledger.asking()
        accepted = await self._ask(name, lambda request: Submit(self._system).submit(ACME, asked, request))
        return self._accepted(JobId(accepted.subject), tasks, at)

    async def upload(self, name: str, tasks: Sequence[str], **spec: Any) -> JobId:
        """A job of a list that is uploaded first."""
        data = "".join(f"{json.dumps(task)}\n" for task in tasks).encode()
        digest = sha256(data).hexdigest()
        uploads, wanted = Uploads(self._system), UploadSpec(len(data), digest)
        answer = await self._ask(f"{name} list", lambda request: uploads.promise(ACME, wanted, "{}/{}".format, request))
        upload_id, _, signature = json.loads(answer.body)["url"].partition("/")
        at = self._ledger.asking()
        await uploads.fill(upload_id, signature, None, None, _pieces(data))
        self._ledger.tell(Told.UPLOAD, upload_id, (len(data), digest), at)
        source = {"upload_id": upload_id, "format": "jsonl"}
        asked = decode_spec(json.dumps({**spec, "name": name, "source": source}).encode())
        at = self._ledger.asking()
        accepted = await self._ask(name, lambda request: Submit(self._system).submit(ACME, asked, request))
        self._ledger.tell(Told.SOURCE, upload_id, accepted.subject)
        return self._accepted(JobId(accepted.subject), tasks, at)

    async def open_job(self, name: str, **spec: Any) -> JobId:
        asked = decode_spec(json.dumps({**spec, "name": name, "mode": "open"}).encode())
        at = self._ledger.asking()
        accepted = await self._ask(name, lambda request: Submit(self._system).submit(ACME, asked, request))
        return self._accepted(JobId(accepted.subject), None, at)

    def _accepted(self, job_id: JobId, tasks: Sequence[str] | None, asked_at: int) -> JobId:
        self._ledger.tell(Told.JOB, job_id, tasks, asked_at)
        self._jobs[job_id] = None
        return job_id

    async def add(self, name: str, job_id: JobId, tasks: Sequence[str], *, is_last: bool) -> None:
        job, spec = (
            await self.job(job_id),
            TasksSpec([msgspec.Raw(json.dumps(task).encode()) for task in tasks], is_last),
        )
        at = self._ledger.asking()
        await self._ask(name, lambda request: AddTasks(self._system).add(job, spec, request))
        self._ledger.tell(Told.BATCH, job_id, tasks, at)

    async def rerun(self, name: str, job_id: JobId) -> None:
        job, at = await self.job(job_id), self._ledger.asking()
        await self._ask(name, lambda request: Rerun(self._system).rerun(job, RerunSpec("all"), request))
        self._ledger.tell(Told.RERUN, job_id, job.run.number + 1, at)

    async def export(self, name: str, job_id: JobId, **spec: Any) -> str:
        """An export, once it is ready."""
        job, exports = await self.job(job_id), Exports(self._system)
        wanted = msgspec.convert(spec, ExportSpec)
        export_id = (await self._ask(name, lambda request: exports.create(job, wanted, request))).subject
        while (stored := await exports.find(ACME, export_id)).export.state is not ExportState.READY:
            assert stored.export.state is not ExportState.FAILED, stored.export.error
            await asyncio.sleep(_LOOK)
        digests = await digests_of(self._system, stored)
        self._ledger.tell(Told.EXPORT, export_id, (job_id, digests))
        return export_id

    async def delete_export(self, export_id: str) -> None:
        at = self._ledger.asking()
        await Exports(self._system).delete(ACME, export_id)
        self._ledger.tell(Told.EXPORT_DELETED, export_id, None, at)

    async def delete(self, job_id: JobId) -> None:
        at = self._ledger.asking()
        self._jobs.pop(job_id, None)
        assert await self._system.records.jobs.mark_deleted(ACME, job_id)
        self._ledger.tell(Told.DELETED, job_id, None, at)

    async def until_ended(self, job_id: JobId) -> None:
        while (await self.job(job_id)).state not in ENDED:  # noqa: ASYNC110  (seen from outside)
            await asyncio.sleep(_LOOK)
        await self.look()

    async def until_purged(self, job_id: JobId) -> None:
        while await self._system.records.jobs.runs(job_id):  # noqa: ASYNC110  (seen from outside)
            await asyncio.sleep(_LOOK)
        self._ledger.tell(Told.PURGED, job_id)

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK)
            await self.look()

    async def look(self) -> None:
        for job_id in list(self._jobs):
            for run in await self._system.records.jobs.runs(job_id):
                try:
                    await self._look_at(await self.job(job_id), run)
                except (AssertionError, NotFound):
                    # Deleted meanwhile.
                    if job_id in self._jobs:
                        raise

    async def _look_at(self, job: Job, run: Run) -> None:
        if run.run_id in self._shown:
            return
        for task in await self._system.tasks.at(job.key_of(run), range(run.total)):
            if task.status is TaskStatus.PENDING and job.kind is JobKind.DOWNLOAD:
                await self._look_at_progress(run, task)
            if task.status is TaskStatus.PENDING or task.task_id in self._shown:
                continue
            body = None if task.detail.body is None else await read_body(self._system.blobs, task)
            if job.job_id not in self._jobs or task.task_id in self._shown:
                continue
            self._shown.add(task.task_id)
            digest = None if body is None else sha256(body).hexdigest()
            shown = ShownTask(job.job_id, run.run_id, task.index, task.status.label, digest)
            self._ledger.tell(Told.TASK, task.task_id, shown)
        if run.state in ENDED:
            self._shown.add(run.run_id)
            self._ledger.tell(Told.END, run.run_id, (job.job_id, run.state))

    async def _look_at_progress(self, run: Run, task: Task) -> None:
        stored = await self._system.records.documents.document(PROGRESS, ACME, progress_id(run.run_id, task.index))
        done = 0 if stored is None else msgspec.json.decode(stored.body, type=TaskProgress).done
        url = json.loads(bytes(task.input))
        if done > self._progress.get(url, 0):
            self._progress[url] = done
            self._ledger.tell(Told.PROGRESS, url, done)

    async def _ask(self, key: str, send: Callable[[IdempotentRequest], Awaitable[Accepted]]) -> Accepted:
        at = self._ledger.asking()
        accepted = await send(request_of(key))
        self._ledger.tell(Told.ANSWER, key, accepted, at)
        return accepted


def request_of(key: str) -> IdempotentRequest:
    return IdempotentRequest("POST /v1", key, f"fingerprint of {key}")


async def digests_of(system: System, stored: StoredExport) -> list[str]:
    """The sha256 of each file of an export, read as a client reads it."""
    digests = []
    for part in stored.export.parts:
        digest = sha256()
        async for data in part_range(system.blobs, part, 0, part.size):
            digest.update(data)
        digests.append(digest.hexdigest())
    return digests


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), _PIECE):
        yield data[start : start + _PIECE]
