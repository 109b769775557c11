"""Job and AsyncJob: a job on a server. Both have the same methods; one blocks, one awaits."""

import tempfile
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, Unpack

from conveyor.client import bucket_exports as buckets
from conveyor.client import data_frames as frames
from conveyor.client import export_files as exports
from conveyor.client import export_folder as folders
from conveyor.client import following, submission
from conveyor.client import result_bodies as bodies
from conveyor.client.client_session import ClientSession
from conveyor.client.export import AsyncExport, ExportHandle, display_copy
from conveyor.client.io import drive, iterate
from conveyor.client.job_options import ExportOptions, Filter, JobOptions, rerun_choice
from conveyor.client.job_view import JobView
from conveyor.client.lists import Tasks
from conveyor.client.progress_display import display_bytes, display_job
from conveyor.client.resources import Event, InvalidLine, Progress, Result
from conveyor.client.transport import Json
from conveyor.client.upload_file import BytesProgress


class JobHandle(JobView):
    """A job on a server. Waiting, listing and downloading survive a restart of the server."""

    def __init__(self, session: ClientSession, data: Json) -> None:
        super().__init__(data)
        self._session = session

    def refresh(self, verify: bool = False, run: str | int | None = None) -> Self:
        """Fetch the current status. `verify` compares the counts with the task rows; `run` gets the counts and errors
        of one run alone."""
        return self._update(drive(self._session.job(self.id, verify, run)))

    def wait(self, timeout: float | None = None, progress: bool | Callable[[JobView], None] = False) -> Self:
        """Wait until the job has finished; then check `ok` or `state`. Raises TimeoutError. `progress`: True shows it;
        a function is called after each poll."""
        with display_job(progress, self) as on_status:
            return self._update(drive(following.wait(self._session, self.id, timeout, on_status)))

    def results(self, page_size: int = 1000, **where: Unpack[Filter]) -> Iterator[Result]:
        """Iterate over tasks and their results, in the order of the list where the server has it (SQLite,
        Postgres). Fetches pages on demand."""
        return iterate(self._session.results(self.id, where, page_size))

    def stream(self) -> Iterator[Event | Progress]:
        """Stream the events and the progress of the job, from its creation until its run finishes."""
        return iterate(following.stream(self._session, self.id))

    def events(self, task_id: str | None = None) -> Iterator[Event]:
        """List the events so far of the job, or of one of its tasks, oldest first."""
        return iterate(self._session.events(self.id, task_id))

    def invalid_lines(self) -> Iterator[InvalidLine]:
        """List the invalid lines of the list, in order."""
        return iterate(self._session.invalid(self.id))

    def error_groups(self, run: str | int | None = None) -> Json:
        """Get the errors of the latest run, or of one, by code and host, with samples: {failed, retried, items}."""
        return drive(self._session.breakdown(self.id, "errors", run))

    def hosts(self, run: str | int | None = None) -> Json:
        """Get the hosts of the latest run, or of one, with throughput, latency and errors: {items, other}."""
        return drive(self._session.breakdown(self.id, "hosts", run))

    def task(self, task_id: str) -> Result:
        """Get one task."""
        return drive(self._session.task(self.id, task_id))

    def body(self, task: Result | str) -> bytes:
        """Get the body of a result, checked against its sha256. Raises NoBody."""
        return drive(bodies.read_body(self._session, self.id, task))

    def extracted(self, task: Result | str) -> Any:
        """Get what `extract` returned for a task: an object, a list of objects, or None. Raises NoBody."""
        return drive(bodies.read_extracted(self._session, self.id, task))

    def save(self, task: Result | str, to: str | Path, progress: bool | BytesProgress = False) -> Path:
        """Save the body of a result to a file. After a failure, the next call resumes. Raises NoBody."""
        with display_bytes(progress, Path(to).name, "downloading") as report:
            return drive(bodies.save_body(self._session, self.id, task, Path(to), report))

    def export(
        self,
        to: str | Path,
        progress: bool = False,
        idempotency_key: str | None = None,
        **options: Unpack[ExportOptions],
    ) -> list[Path]:
        """Export results to a file: the server makes it, the client downloads it and checks its sha256. The suffix sets
        the format: .zip, .jsonl, .csv or .parquet; .jsonl and .csv may be followed by .gz or .zst. Returns the paths:
        several if `part_bytes` splits the export. For a directory with a file for each body, see `export_files`."""
        spec = exports.export_spec(options, Path(to))
        handle = ExportHandle(self._session, drive(self._session.create_export(self.id, spec, idempotency_key)))
        return handle.wait(progress).download(to, progress)

    def to_arrow(self, progress: bool = False, **options: Unpack[ExportOptions]) -> Any:
        """The results as a table of pyarrow, in memory: a row for each task, in list order, with your own columns.
        `bodies="binary"` includes bodies. Needs the extra `parquet`. Raises FormatUnavailable."""
        frames.optional("pyarrow", "parquet")
        with tempfile.TemporaryDirectory(prefix="conveyor-") as place:
            return frames.read_parquet(self.export(Path(place) / "results.parquet", progress, **options))

    def to_pandas(self, progress: bool = False, **options: Unpack[ExportOptions]) -> Any:
        """As `to_arrow`, as a DataFrame of pandas, which has to be installed."""
        frames.optional("pandas")
        return self.to_arrow(progress, **options).to_pandas()

    def to_polars(self, progress: bool = False, **options: Unpack[ExportOptions]) -> Any:
        """As `to_arrow`, as a DataFrame of polars, which has to be installed."""
        return frames.optional("polars").from_arrow(self.to_arrow(progress, **options))

    def export_files(
        self,
        to: str | Path,
        overwrite: bool = False,
        progress: bool | exports.CopyProgress = False,
        idempotency_key: str | None = None,
        export_id: str | None = None,
        **options: Unpack[ExportOptions],
    ) -> ExportHandle:
        """Export each body as a file of its own into a directory, with a manifest.jsonl, and return the export. After
        a failure, the same call resumes. Raises BadInput if the directory has anything else in it, unless
        `overwrite`, which replaces an earlier export."""
        with display_copy(progress, self.id) as copying:
            data = drive(
                folders.export_to_folder(
                    self._session,
                    self.id,
                    Path(to),
                    exports.export_spec(options),
                    overwrite=overwrite,
                    export_id=export_id,
                    idempotency_key=idempotency_key,
                    progress=copying,
                )
            )
        return ExportHandle(self._session, data)

    def export_to(
        self,
        to: str,
        overwrite: bool = False,
        progress: bool | exports.CopyProgress = False,
        idempotency_key: str | None = None,
        export_id: str | None = None,
        by_server: bool = False,
        **options: Unpack[ExportOptions],
    ) -> buckets.BucketExport:
        """Export results into a bucket of your own, s3://BUCKET/PREFIX/, gs:// or az://, or a directory, file:///DIR/,
        with your own credentials; the `urls` of the files are returned. By default they are .jsonl.gz, of at most 128
        MiB (`part_bytes`); `_manifest.json` is written last. After a failure, the same call resumes; `export_id` copies
        an export that exists. Needs the extra `aws`. Raises BadInput if something else is there, unless `overwrite`,
        and DestinationUnavailable. `by_server`: the server writes the files, with its own credentials, below a place
        that its operator lists; it raises DestinationRefused elsewhere."""
        write = buckets.export_by_server if by_server else buckets.export_to_prefix
        with display_copy(progress, self.id) as copying:
            return drive(
                write(
                    self._session,
                    self.id,
                    to,
                    exports.export_spec(options),
                    overwrite=overwrite,
                    export_id=export_id,
                    idempotency_key=idempotency_key,
                    progress=copying,
                )
            )

    def start_export(self, idempotency_key: str | None = None, **options: Unpack[ExportOptions]) -> ExportHandle:
        """Start an export and return at once."""
        spec = exports.export_spec(options)
        return ExportHandle(self._session, drive(self._session.create_export(self.id, spec, idempotency_key)))

    def exports(self) -> Iterator[ExportHandle]:
        """List the exports of the job, oldest first."""
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
        damaged: bool = False,
        extract_only: bool = False,
        host: str | None = None,
        indexes: Sequence[int] | None = None,
        changed_only: bool = False,
        idempotency_key: str | None = None,
        **options: Unpack[JobOptions],
    ) -> Self:
        """Start a new run over tasks, selected by their latest result: by default the failed ones. Several conditions
        must all match; `damaged` selects tasks whose stored body is damaged or missing, `host` those with this host in
        their URL, `indexes` single tasks. If the ingest of the job failed, resume it instead. Options override those of
        the job.

        `extract_only` makes no request: it calls the job's `extract`, or the one given here, with the stored bodies, by
        default with all of them. `changed_only` asks servers for pages that have changed, by default for all: a task
        whose page is the stored one is unchanged, and keeps its body."""
        selection = rerun_choice(
            failed, cancelled, all, error_code, http_status, tag, damaged, extract_only, host, indexes, changed_only
        )
        started = self._session.rerun(self.id, selection, options, idempotency_key, extract_only, changed_only)
        return self._update(drive(started))

    def duplicate(
        self, *, name: str | None = None, idempotency_key: str | None = None, **options: Unpack[JobOptions]
    ) -> Self:
        """Submit a new job with the same list and options, secrets included, and return it. Options override those of
        this job; the name stays the same without `name`."""
        return type(self)(self._session, drive(self._session.duplicate(self.id, name, options, idempotency_key)))

    def cancel(self) -> Self:
        """Cancel the job: start no more tasks. Results so far are kept; `rerun(cancelled=True)` runs the rest."""
        return self._update(drive(self._session.control(self.id, "cancel")))

    def pause(self) -> Self:
        """Pause the job: start no more tasks until `resume`."""
        return self._update(drive(self._session.control(self.id, "pause")))

    def resume(self) -> Self:
        """Resume a paused job."""
        return self._update(drive(self._session.control(self.id, "resume")))

    def change(self, **options: Unpack[JobOptions]) -> Self:
        """Change options of a running job. Workers apply them within a second."""
        return self._update(drive(self._session.change(self.id, options)))

    def add(self, tasks: Tasks, last: bool = False) -> int:
        """Add tasks to an open job, and close it if `last`. Returns the number of tasks added: invalid ones are skipped
        and counted in `invalid`."""
        return self._count_added(*drive(submission.add(self._session, self.id, tasks, last)))

    def close(self) -> Self:
        """Close an open job: no more tasks can be added."""
        return self._update(drive(self._session.control(self.id, "close")))

    def delete(self) -> None:
        """Delete the job and all its results."""
        drive(self._session.delete("jobs", self.id))

    def _update(self, data: Json) -> Self:
        self.data = data
        return self


class AsyncJob(JobView):
    """Job for asyncio."""

    def __init__(self, session: ClientSession, data: Json) -> None:
        super().__init__(data)
        self._session = session

    async def refresh(self, verify: bool = False, run: str | int | None = None) -> Self:
        """As Job.refresh."""
        return self._update(await self._session.job(self.id, verify, run))

    async def wait(self, timeout: float | None = None, progress: bool | Callable[[JobView], None] = False) -> Self:
        """As Job.wait."""
        with display_job(progress, self) as on_status:
            return self._update(await following.wait(self._session, self.id, timeout, on_status))

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

    async def error_groups(self, run: str | int | None = None) -> Json:
        """As Job.error_groups."""
        return await self._session.breakdown(self.id, "errors", run)

    async def hosts(self, run: str | int | None = None) -> Json:
        """As Job.hosts."""
        return await self._session.breakdown(self.id, "hosts", run)

    async def task(self, task_id: str) -> Result:
        """As Job.task."""
        return await self._session.task(self.id, task_id)

    async def body(self, task: Result | str) -> bytes:
        """As Job.body."""
        return await bodies.read_body(self._session, self.id, task)

    async def extracted(self, task: Result | str) -> Any:
        """Get what `extract` returned for a task: an object, a list of objects, or None. Raises NoBody."""
        return await bodies.read_extracted(self._session, self.id, task)

    async def save(self, task: Result | str, to: str | Path, progress: bool | BytesProgress = False) -> Path:
        """As Job.save."""
        with display_bytes(progress, Path(to).name, "downloading") as report:
            return await bodies.save_body(self._session, self.id, task, Path(to), report)

    async def export(
        self,
        to: str | Path,
        progress: bool = False,
        idempotency_key: str | None = None,
        **options: Unpack[ExportOptions],
    ) -> list[Path]:
        """As Job.export."""
        spec = exports.export_spec(options, Path(to))
        handle = AsyncExport(self._session, await self._session.create_export(self.id, spec, idempotency_key))
        return await (await handle.wait(progress)).download(to, progress)

    async def to_arrow(self, progress: bool = False, **options: Unpack[ExportOptions]) -> Any:
        """As Job.to_arrow."""
        frames.optional("pyarrow", "parquet")
        with tempfile.TemporaryDirectory(prefix="conveyor-") as place:
            files = await self.export(Path(place) / "results.parquet", progress, **options)
            return await self._session.io.run_blocking(frames.read_parquet, files)

    async def to_pandas(self, progress: bool = False, **options: Unpack[ExportOptions]) -> Any:
        """As Job.to_pandas."""
        frames.optional("pandas")
        return (await self.to_arrow(progress, **options)).to_pandas()

    async def to_polars(self, progress: bool = False, **options: Unpack[ExportOptions]) -> Any:
        """As Job.to_polars."""
        return frames.optional("polars").from_arrow(await self.to_arrow(progress, **options))

    async def export_files(
        self,
        to: str | Path,
        overwrite: bool = False,
        progress: bool | exports.CopyProgress = False,
        idempotency_key: str | None = None,
        export_id: str | None = None,
        **options: Unpack[ExportOptions],
    ) -> AsyncExport:
        """As Job.export_files."""
        with display_copy(progress, self.id) as copying:
            data = await folders.export_to_folder(
                self._session,
                self.id,
                Path(to),
                exports.export_spec(options),
                overwrite=overwrite,
                export_id=export_id,
                idempotency_key=idempotency_key,
                progress=copying,
            )
        return AsyncExport(self._session, data)

    async def export_to(
        self,
        to: str,
        overwrite: bool = False,
        progress: bool | exports.CopyProgress = False,
        idempotency_key: str | None = None,
        export_id: str | None = None,
        by_server: bool = False,
        **options: Unpack[ExportOptions],
    ) -> buckets.BucketExport:
        """As Job.export_to."""
        write = buckets.export_by_server if by_server else buckets.export_to_prefix
        with display_copy(progress, self.id) as copying:
            return await write(
                self._session,
                self.id,
                to,
                exports.export_spec(options),
                overwrite=overwrite,
                export_id=export_id,
                idempotency_key=idempotency_key,
                progress=copying,
            )

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
        damaged: bool = False,
        extract_only: bool = False,
        host: str | None = None,
        indexes: Sequence[int] | None = None,
        changed_only: bool = False,
        idempotency_key: str | None = None,
        **options: Unpack[JobOptions],
    ) -> Self:
        """As Job.rerun."""
        selection = rerun_choice(
            failed, cancelled, all, error_code, http_status, tag, damaged, extract_only, host, indexes, changed_only
        )
        started = self._session.rerun(self.id, selection, options, idempotency_key, extract_only, changed_only)
        return self._update(await started)

    async def duplicate(
        self, *, name: str | None = None, idempotency_key: str | None = None, **options: Unpack[JobOptions]
    ) -> Self:
        """As Job.duplicate."""
        return type(self)(self._session, await self._session.duplicate(self.id, name, options, idempotency_key))

    async def cancel(self) -> Self:
        """As Job.cancel."""
        return self._update(await self._session.control(self.id, "cancel"))

    async def pause(self) -> Self:
        """As Job.pause."""
        return self._update(await self._session.control(self.id, "pause"))

    async def resume(self) -> Self:
        """As Job.resume."""
        return self._update(await self._session.control(self.id, "resume"))

    async def change(self, **options: Unpack[JobOptions]) -> Self:
        """As Job.change."""
        return self._update(await self._session.change(self.id, options))

    async def add(self, tasks: Tasks, last: bool = False) -> int:
        """As Job.add."""
        return self._count_added(*await submission.add(self._session, self.id, tasks, last))

    async def close(self) -> Self:
        """As Job.close."""
        return self._update(await self._session.control(self.id, "close"))

    async def delete(self) -> None:
        """As Job.delete."""
        await self._session.delete("jobs", self.id)

    def _update(self, data: Json) -> Self:
        self.data = data
        return self
