"""Client and AsyncClient: a connection to a server as one tenant. Both have the same methods; one blocks, one
awaits."""

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Self, Unpack

from conveyor.client import data_frames as frames
from conveyor.client import submission
from conveyor.client.client_session import ClientSession
from conveyor.client.export import AsyncExport, ExportHandle
from conveyor.client.io import AsyncIo, BlockingIo, drive, iterate
from conveyor.client.job import AsyncJob, JobHandle
from conveyor.client.job_options import Compression, JobOptions, Kind, ListFormat, ResultLayout
from conveyor.client.lists import Tasks
from conveyor.client.progress_display import display_bytes
from conveyor.client.resources import RemoteList, Upload
from conveyor.client.server_address import find_server
from conveyor.client.transport import Json, Query
from conveyor.client.upload_file import BytesProgress

# How long to retry requests to a server that has answered before, in seconds.
PATIENCE = 120.0


class Client:
    """A connection to the server at `url`, as the tenant of `key`. Without arguments it uses CONVEYOR_URL and
    CONVEYOR_API_KEY, else the local `conveyor up`. `patience` is how long to retry requests to a server that has
    answered before, in seconds. Several threads may share a client."""

    def __init__(self, url: str | None = None, key: str | None = None, *, patience: float = PATIENCE) -> None:
        self._session = ClientSession(BlockingIo(), *find_server(url, key), patience)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        drive(self._session.io.close())

    def submit(
        self,
        tasks: Tasks | Upload | RemoteList,
        *,
        kind: Kind | None = None,
        name: str | None = None,
        format: ListFormat | None = None,
        compression: Compression | None = None,
        url_column: str | None = None,
        url: str | None = None,
        result_layout: ResultLayout | None = None,
        notify: Sequence[Mapping[str, Any]] | None = None,
        replaces: str | None = None,
        idempotency_key: str | None = None,
        progress: bool | BytesProgress = False,
        **options: Unpack[JobOptions],
    ) -> JobHandle:
        """Create a job from tasks: an iterable, an open file, the path of a file, or `s3://BUCKET/KEY`, which the
        client reads and uploads if the server may not read it. A list of any length needs constant memory. The kind is
        python with `handler`, export_download with `export`, else fetch.

        Retries never create a second job; with your own `idempotency_key`, neither do repeated calls. `format` and
        `compression` describe a file whose name and first bytes do not; `url_column` is the column of a csv that has
        the URLs, and `url` that of a DataFrame (pandas, polars, pyarrow), whose other columns travel with its tasks.
        `progress`: True shows the upload; a function is called with the bytes sent and the total.

        `replaces` is the id of a job, or the `idempotency_key` of its submission: that job is cancelled, and no
        task of this one starts before nothing of it is running."""
        spec = _spec(kind, options, name=name, result_layout=result_layout, notify=notify, replaces=replaces)
        tasks, url_column = _listed(tasks, spec.get("kind"), url_column or url)
        form = _drop_none(format=format, compression=compression, url_column=url_column)
        with display_bytes(progress, name or "list", "uploading") as report:
            return JobHandle(
                self._session, drive(submission.submit(self._session, tasks, spec, form, idempotency_key, report))
            )

    def open_job(
        self,
        *,
        kind: Kind | None = None,
        name: str | None = None,
        result_layout: ResultLayout | None = None,
        notify: Sequence[Mapping[str, Any]] | None = None,
        replaces: str | None = None,
        idempotency_key: str | None = None,
        **options: Unpack[JobOptions],
    ) -> JobHandle:
        """Create a job without tasks. `Job.add` adds tasks while others run; `Job.close` completes the list."""
        spec = _spec(
            kind, options, name=name, result_layout=result_layout, notify=notify, replaces=replaces, mode="open"
        )
        return JobHandle(self._session, drive(submission.create(self._session, spec, idempotency_key)))

    def upload(
        self, tasks: Tasks, *, idempotency_key: str | None = None, progress: bool | BytesProgress = False
    ) -> Upload:
        """Upload a list without creating a job. Pass the result to `submit`, any number of times."""
        with display_bytes(progress, "list", "uploading") as report:
            return drive(submission.upload(self._session, tasks, idempotency_key, report))

    def job(self, job_id: str, verify: bool = False, run: str | int | None = None) -> JobHandle:
        """Get a job by its id. `verify` compares its counts with its task rows. `run`, the id or number of a run, gets
        the counts and errors of that run alone. Raises NotFound."""
        return JobHandle(self._session, drive(self._session.job(job_id, verify, run)))

    def jobs(
        self,
        *,
        text: str | None = None,
        state: str | None = None,
        kind: str | None = None,
        schedule_id: str | None = None,
        created_after: datetime | None = None,
        created_before: datetime | None = None,
    ) -> Iterator[JobHandle]:
        """List jobs, newest first: all, or those that match every filter. `text` is in the name or the id; the state
        `active` is any unfinished one; `schedule_id` is the schedule that made the job."""
        where = _job_filters(text, state, kind, schedule_id, created_after, created_before)
        return (JobHandle(self._session, data) for data in iterate(self._session.jobs(where)))

    def export(self, export_id: str) -> ExportHandle:
        """Get an export by its id. Raises NotFound."""
        return ExportHandle(self._session, drive(self._session.export(export_id)))

    def dead_letters(self, *, error_code: str | None = None, job_id: str | None = None) -> Iterator[Json]:
        """List dead letters: messages, oldest first, then dead-lettered tasks by run."""
        return iterate(self._session.dead_letters(error_code, job_id))

    def redrive(
        self,
        ids: Sequence[str] | None = None,
        *,
        all: bool = False,
        error_code: str | None = None,
        job_id: str | None = None,
        dry_run: bool = False,
    ) -> Json:
        """Redrive dead letters: those with these ids, all, or all with an error code or of a job. Messages go back to
        their queues, tasks are rerun. Returns {redriven, skipped, runs, requeued, blocked}; with `dry_run` only what a
        redrive would do."""
        return drive(self._session.redrive(ids, all, error_code, job_id, dry_run))

    def breakers(self, all_tenants: bool = False) -> Iterator[Json]:
        """List breakers that are open or half-open. Those of all tenants need an administrator's key."""
        return iterate(self._session.breakers(all_tenants))

    def reset_breakers(self, targets: Sequence[str] | None = None, all_tenants: bool = False) -> Json:
        """Close the breakers of targets that are back, or all breakers. Returns {reset}."""
        return drive(self._session.reset_breakers(targets, all_tenants))

    def health(self) -> Json:
        """Get /healthz. Needs no key."""
        return drive(self._session.health())

    def create_key(self, tenant: str, name: str | None = None) -> Json:
        """Create a key for a tenant. Returns {key, key_id, tenant}. All key methods need an administrator's key."""
        return drive(self._session.create_key(tenant, name))

    def keys(self, tenant: str | None = None) -> Iterator[Json]:
        """List the keys of one tenant, or of all, without their secrets."""
        return iterate(self._session.keys(tenant))

    def revoke_key(self, key_id: str) -> None:
        """Revoke a key."""
        drive(self._session.delete("keys", key_id))

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        body: object = None,
        idempotency_key: str | None = None,
    ) -> Any:
        """Call any route of the API and return its JSON. `path_of` makes a path."""
        return drive(self._session.request(method, path, query, body, idempotency_key))

    def pages(self, path: str, query: Query | None = None) -> Iterator[Json]:
        """Iterate over all items of any listing of the API. Fetches pages on demand."""
        return iterate(self._session.pages(path, query))


class AsyncClient:
    """Client for asyncio. It belongs to the event loop that uses it first."""

    def __init__(self, url: str | None = None, key: str | None = None, *, patience: float = PATIENCE) -> None:
        self._session = ClientSession(AsyncIo(), *find_server(url, key), patience)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """As Client.close."""
        await self._session.io.close()

    async def submit(
        self,
        tasks: Tasks | Upload | RemoteList,
        *,
        kind: Kind | None = None,
        name: str | None = None,
        format: ListFormat | None = None,
        compression: Compression | None = None,
        url_column: str | None = None,
        url: str | None = None,
        result_layout: ResultLayout | None = None,
        notify: Sequence[Mapping[str, Any]] | None = None,
        replaces: str | None = None,
        idempotency_key: str | None = None,
        progress: bool | BytesProgress = False,
        **options: Unpack[JobOptions],
    ) -> AsyncJob:
        """As Client.submit, also for async iterables. Other iterables are read on the event loop."""
        spec = _spec(kind, options, name=name, result_layout=result_layout, notify=notify, replaces=replaces)
        tasks, url_column = _listed(tasks, spec.get("kind"), url_column or url)
        form = _drop_none(format=format, compression=compression, url_column=url_column)
        with display_bytes(progress, name or "list", "uploading") as report:
            return AsyncJob(
                self._session, await submission.submit(self._session, tasks, spec, form, idempotency_key, report)
            )

    async def open_job(
        self,
        *,
        kind: Kind | None = None,
        name: str | None = None,
        result_layout: ResultLayout | None = None,
        notify: Sequence[Mapping[str, Any]] | None = None,
        replaces: str | None = None,
        idempotency_key: str | None = None,
        **options: Unpack[JobOptions],
    ) -> AsyncJob:
        """As Client.open_job."""
        spec = _spec(
            kind, options, name=name, result_layout=result_layout, notify=notify, replaces=replaces, mode="open"
        )
        return AsyncJob(self._session, await submission.create(self._session, spec, idempotency_key))

    async def upload(
        self, tasks: Tasks, *, idempotency_key: str | None = None, progress: bool | BytesProgress = False
    ) -> Upload:
        """As Client.upload."""
        with display_bytes(progress, "list", "uploading") as report:
            return await submission.upload(self._session, tasks, idempotency_key, report)

    async def job(self, job_id: str, verify: bool = False, run: str | int | None = None) -> AsyncJob:
        """As Client.job."""
        return AsyncJob(self._session, await self._session.job(job_id, verify, run))

    async def jobs(
        self,
        *,
        text: str | None = None,
        state: str | None = None,
        kind: str | None = None,
        schedule_id: str | None = None,
        created_after: datetime | None = None,
        created_before: datetime | None = None,
    ) -> AsyncGenerator[AsyncJob, None]:
        """As Client.jobs."""
        where = _job_filters(text, state, kind, schedule_id, created_after, created_before)
        async for data in self._session.jobs(where):
            yield AsyncJob(self._session, data)

    async def export(self, export_id: str) -> AsyncExport:
        """As Client.export."""
        return AsyncExport(self._session, await self._session.export(export_id))

    def dead_letters(self, *, error_code: str | None = None, job_id: str | None = None) -> AsyncGenerator[Json, None]:
        """As Client.dead_letters."""
        return self._session.dead_letters(error_code, job_id)

    async def redrive(
        self,
        ids: Sequence[str] | None = None,
        *,
        all: bool = False,
        error_code: str | None = None,
        job_id: str | None = None,
        dry_run: bool = False,
    ) -> Json:
        """As Client.redrive."""
        return await self._session.redrive(ids, all, error_code, job_id, dry_run)

    def breakers(self, all_tenants: bool = False) -> AsyncGenerator[Json, None]:
        """As Client.breakers."""
        return self._session.breakers(all_tenants)

    async def reset_breakers(self, targets: Sequence[str] | None = None, all_tenants: bool = False) -> Json:
        """As Client.reset_breakers."""
        return await self._session.reset_breakers(targets, all_tenants)

    async def health(self) -> Json:
        """As Client.health."""
        return await self._session.health()

    async def create_key(self, tenant: str, name: str | None = None) -> Json:
        """As Client.create_key."""
        return await self._session.create_key(tenant, name)

    def keys(self, tenant: str | None = None) -> AsyncGenerator[Json, None]:
        """As Client.keys."""
        return self._session.keys(tenant)

    async def revoke_key(self, key_id: str) -> None:
        """As Client.revoke_key."""
        await self._session.delete("keys", key_id)

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        body: object = None,
        idempotency_key: str | None = None,
    ) -> Any:
        """As Client.request."""
        return await self._session.request(method, path, query, body, idempotency_key)

    def pages(self, path: str, query: Query | None = None) -> AsyncGenerator[Json, None]:
        """As Client.pages."""
        return self._session.pages(path, query)


def _job_filters(
    text: str | None,
    state: str | None,
    kind: str | None,
    schedule_id: str | None,
    created_after: datetime | None,
    created_before: datetime | None,
) -> dict[str, str]:
    times = {"created_after": created_after, "created_before": created_before}
    texts = {"text": text, "state": state, "kind": kind, "schedule_id": schedule_id}
    # A naive time is local.
    shown = {name: at.astimezone(UTC).isoformat() for name, at in times.items() if at is not None}
    return {**{name: value for name, value in texts.items() if value is not None}, **shown}


def _spec(kind: Kind | None, options: JobOptions, **more: Any) -> Json:
    """The body of POST /v1/jobs, without its tasks. The server has the defaults."""
    return {**_drop_none(kind=kind or submission.kind_of(options), **more), **options}


def _listed(tasks: Any, kind: str | None, url: str | None) -> tuple[Any, str | None]:
    """The tasks, and the column of a csv with their URLs. The rows of a DataFrame are tasks, which have no columns."""
    return (frames.frame_tasks(tasks, kind, url), None) if frames.is_frame(tasks) else (tasks, url)


def _drop_none(**fields: Any) -> Json:
    return {name: value for name, value in fields.items() if value is not None}
