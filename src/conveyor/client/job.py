"""Job and AsyncJob: a job of a server, and what can be done with it. The two are one, but for the waiting."""

from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Self, Unpack

from conveyor.client import export_files as exports
from conveyor.client import following, submission
from conveyor.client import result_bodies as bodies
from conveyor.client.client_session import ClientSession
from conveyor.client.export import AsyncExport, ExportHandle
from conveyor.client.io import drive, iterate
from conveyor.client.job_options import ExportOptions, Filter, JobOptions, rerun_choice
from conveyor.client.job_view import JobView
from conveyor.client.lists import Tasks
from conveyor.client.progress_display import moving, watching
from conveyor.client.resources import Event, InvalidLine, Progress, Result
from conveyor.client.transport import Json
from conveyor.client.upload_file import Moved


class JobHandle(JobView):
    """A job as it was last seen, and what can be done with it. Waiting, listing and downloading outlast a restart of
    the server."""

    def __init__(self, session: ClientSession, data: Json) -> None:
        super().__init__(data)
        self._session = session

    def refresh(self, verify: bool = False) -> Self:
        """See it as it is now; with `verify`, its counts held to its rows."""
        return self._seen(drive(self._session.job(self.id, verify)))

    def wait(self, timeout: float | None = None, progress: bool | Callable[[JobView], None] = False) -> Self:
        """Wait until it has ended, however; `ok` and `state` tell. Raises TimeoutError. `progress`: show it, or call
        this now and then."""
        with watching(progress, self) as seen:
            return self._seen(drive(following.wait(self._session, self.id, timeout, seen)))

    def results(self, page_size: int = 1000, **where: Unpack[Filter]) -> Iterator[Result]:
        """Its tasks with what they came to, in no certain order, read as they are taken."""
        return iterate(self._session.results(self.id, where, page_size))

    def stream(self) -> Iterator[Event | Progress]:
        """What happens to it as it happens, from its beginning to the end of its run."""
        return iterate(following.stream(self._session, self.id))

    def events(self, task_id: str | None = None) -> Iterator[Event]:
        """What has happened to it, or to one of its tasks, oldest first."""
        return iterate(self._session.events(self.id, task_id))

    def invalid_lines(self) -> Iterator[InvalidLine]:
        """Lines of its list that were no task, in their order."""
        return iterate(self._session.invalid(self.id))

    def task(self, task_id: str) -> Result:
        """One task."""
        return drive(self._session.task(self.id, task_id))

    def body(self, task: Result | str) -> bytes:
        """The body of a result, in memory, checked against its sha256. Raises NoBody."""
        return drive(bodies.read_body(self._session, self.id, task))

    def save(self, task: Result | str, to: str | Path, progress: bool | Moved = False) -> Path:
        """Write the body of a result to a file. If it breaks off, the next call goes on. Raises NoBody."""
        with moving(progress, Path(to).name, "downloading") as moved:
            return drive(bodies.save_body(self._session, self.id, task, Path(to), moved))

    def export(
        self,
        to: str | Path,
        progress: bool = False,
        idempotency_key: str | None = None,
        **options: Unpack[ExportOptions],
    ) -> list[Path]:
        """Have all results made into a file by the server, wait for it, and download it, checked against its sha256.
        The name says the form: .zip, .jsonl, .csv, .parquet; .jsonl and .csv also .gz and .zst. Returns the file; more
        than one if `part_bytes` asks for parts."""
        spec = exports.export_spec(options, Path(to))
        made = ExportHandle(self._session, drive(self._session.create_export(self.id, spec, idempotency_key)))
        return made.wait(progress).download(to, progress)

    def start_export(self, idempotency_key: str | None = None, **options: Unpack[ExportOptions]) -> ExportHandle:
        """Have results made into files, and wait for nothing."""
        spec = exports.export_spec(options)
        return ExportHandle(self._session, drive(self._session.create_export(self.id, spec, idempotency_key)))

    def exports(self) -> Iterator[ExportHandle]:
        """Its exports, oldest first."""
        return (ExportHandle(self._session, data) for data in iterate(self._session.exports(self.id)))

    def rerun(
        self,
        *,
        failed: bool = False,
        cancelled: bool = False,
        all: bool = False,
        error_code: str | None = None,
        http_status: int | None = None,
        tag: str | None = None,
        idempotency_key: str | None = None,
        **options: Unpack[JobOptions],
    ) -> Self:
        """Run tasks again, each chosen by how it came out last: those that failed unless something else is chosen;
        several choices must all match. A job whose list could not be ingested goes on instead. Options override the
        job's."""
        which = rerun_choice(failed, cancelled, all, error_code, http_status, tag)
        return self._seen(drive(self._session.rerun(self.id, which, options, idempotency_key)))

    def cancel(self) -> Self:
        """Start nothing more of it, for good. Results so far stay; `rerun(cancelled=True)` runs the rest."""
        return self._seen(drive(self._session.move(self.id, "cancel")))

    def pause(self) -> Self:
        """Start nothing more of it until it is resumed."""
        return self._seen(drive(self._session.move(self.id, "pause")))

    def resume(self) -> Self:
        """Go on with it."""
        return self._seen(drive(self._session.move(self.id, "resume")))

    def change(self, **options: Unpack[JobOptions]) -> Self:
        """Replace options while it runs; workers follow within a second."""
        return self._seen(drive(self._session.change(self.id, options)))

    def add(self, tasks: Tasks, last: bool = False) -> int:
        """Add tasks to an open job; with `last` no more will come. Returns how many there were."""
        return drive(submission.add(self._session, self.id, tasks, last))

    def close(self) -> Self:
        """No more tasks will come to an open job."""
        return self._seen(drive(self._session.move(self.id, "close")))

    def delete(self) -> None:
        """Remove it with all its results."""
        drive(self._session.delete("jobs", self.id))

    def _seen(self, data: Json) -> Self:
        self.data = data
        return self


class AsyncJob(JobView):
    """As Job, on an event loop."""

    def __init__(self, session: ClientSession, data: Json) -> None:
        super().__init__(data)
        self._session = session

    async def refresh(self, verify: bool = False) -> Self:
        """As Job.refresh."""
        return self._seen(await self._session.job(self.id, verify))

    async def wait(self, timeout: float | None = None, progress: bool | Callable[[JobView], None] = False) -> Self:
        """As Job.wait."""
        with watching(progress, self) as seen:
            return self._seen(await following.wait(self._session, self.id, timeout, seen))

    def results(self, page_size: int = 1000, **where: Unpack[Filter]) -> AsyncGenerator[Result, None]:
        """As Job.results."""
        return self._session.results(self.id, where, page_size)

    def stream(self) -> AsyncGenerator[Event | Progress, None]:
        """As Job.stream."""
        return following.stream(self._session, self.id)

    def events(self, task_id: str | None = None) -> AsyncGenerator[Event, None]:
        """As Job.events."""
        return self._session.events(self.id, task_id)

    def invalid_lines(self) -> AsyncGenerator[InvalidLine, None]:
        """As Job.invalid_lines."""
        return self._session.invalid(self.id)

    async def task(self, task_id: str) -> Result:
        """As Job.task."""
        return await self._session.task(self.id, task_id)

    async def body(self, task: Result | str) -> bytes:
        """As Job.body."""
        return await bodies.read_body(self._session, self.id, task)

    async def save(self, task: Result | str, to: str | Path, progress: bool | Moved = False) -> Path:
        """As Job.save."""
        with moving(progress, Path(to).name, "downloading") as moved:
            return await bodies.save_body(self._session, self.id, task, Path(to), moved)

    async def export(
        self,
        to: str | Path,
        progress: bool = False,
        idempotency_key: str | None = None,
        **options: Unpack[ExportOptions],
    ) -> list[Path]:
        """As Job.export."""
        spec = exports.export_spec(options, Path(to))
        made = AsyncExport(self._session, await self._session.create_export(self.id, spec, idempotency_key))
        return await (await made.wait(progress)).download(to, progress)

    async def start_export(self, idempotency_key: str | None = None, **options: Unpack[ExportOptions]) -> AsyncExport:
        """As Job.start_export."""
        spec = exports.export_spec(options)
        return AsyncExport(self._session, await self._session.create_export(self.id, spec, idempotency_key))

    async def exports(self) -> AsyncGenerator[AsyncExport, None]:
        """As Job.exports."""
        async for data in self._session.exports(self.id):
            yield AsyncExport(self._session, data)

    async def rerun(
        self,
        *,
        failed: bool = False,
        cancelled: bool = False,
        all: bool = False,
        error_code: str | None = None,
        http_status: int | None = None,
        tag: str | None = None,
        idempotency_key: str | None = None,
        **options: Unpack[JobOptions],
    ) -> Self:
        """As Job.rerun."""
        which = rerun_choice(failed, cancelled, all, error_code, http_status, tag)
        return self._seen(await self._session.rerun(self.id, which, options, idempotency_key))

    async def cancel(self) -> Self:
        """As Job.cancel."""
        return self._seen(await self._session.move(self.id, "cancel"))

    async def pause(self) -> Self:
        """As Job.pause."""
        return self._seen(await self._session.move(self.id, "pause"))

    async def resume(self) -> Self:
        """As Job.resume."""
        return self._seen(await self._session.move(self.id, "resume"))

    async def change(self, **options: Unpack[JobOptions]) -> Self:
        """As Job.change."""
        return self._seen(await self._session.change(self.id, options))

    async def add(self, tasks: Tasks, last: bool = False) -> int:
        """As Job.add."""
        return await submission.add(self._session, self.id, tasks, last)

    async def close(self) -> Self:
        """As Job.close."""
        return self._seen(await self._session.move(self.id, "close"))

    async def delete(self) -> None:
        """As Job.delete."""
        await self._session.delete("jobs", self.id)

    def _seen(self, data: Json) -> Self:
        self.data = data
        return self
