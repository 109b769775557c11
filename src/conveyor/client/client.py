"""Client and AsyncClient: a server, seen by one tenant. The two are one, but for the waiting."""

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any, Self, Unpack

from conveyor.client import submission
from conveyor.client.client_session import ClientSession
from conveyor.client.export import AsyncExport, ExportHandle
from conveyor.client.io import AwaitedIo, BlockingIo, drive, iterate
from conveyor.client.job import AsyncJob, JobHandle
from conveyor.client.job_options import Compression, JobOptions, Kind, ListFormat, ResultLayout
from conveyor.client.lists import Tasks
from conveyor.client.progress_display import moving
from conveyor.client.resources import Upload
from conveyor.client.server_address import find_server
from conveyor.client.transport import Json, Query
from conveyor.client.upload_file import Moved

# Seconds that a server which has answered before is given to come back.
PATIENCE = 120.0


class Client:
    """A server under `url`, seen by the tenant of `key`. Without them: CONVEYOR_URL and CONVEYOR_API_KEY, else the
    server that `conveyor up` runs here. `patience` is how many seconds a server that has answered before is given to
    come back. May be used by several threads at once."""

    def __init__(self, url: str | None = None, key: str | None = None, *, patience: float = PATIENCE) -> None:
        self._session = ClientSession(BlockingIo(), *find_server(url, key), patience)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connections."""
        drive(self._session.io.close())

    def submit(
        self,
        tasks: Tasks | Upload,
        *,
        kind: Kind | None = None,
        name: str | None = None,
        format: ListFormat | None = None,
        compression: Compression | None = None,
        result_layout: ResultLayout | None = None,
        notify: Sequence[Mapping[str, Any]] | None = None,
        idempotency_key: str | None = None,
        progress: bool | Moved = False,
        **options: Unpack[JobOptions],
    ) -> JobHandle:
        """Make a job of tasks: URLs, or what else its kind takes, from any iterable, an open file or the path of one,
        of any length in flat memory. With `handler` its kind is python, with `export` export_download, else fetch.

        However often it has to be tried there is one job; with an `idempotency_key` of your own also when you call this
        again. `format` and `compression` are those of a file, if its name or first bytes do not tell. `progress`: show
        what is sent, or call this with the bytes so far and their total."""
        spec = _spec(kind, options, name=name, result_layout=result_layout, notify=notify)
        form = _given(format=format, compression=compression)
        with moving(progress, name or "list", "sending") as moved:
            return JobHandle(
                self._session, drive(submission.submit(self._session, tasks, spec, form, idempotency_key, moved))
            )

    def open_job(
        self,
        *,
        kind: Kind | None = None,
        name: str | None = None,
        result_layout: ResultLayout | None = None,
        notify: Sequence[Mapping[str, Any]] | None = None,
        idempotency_key: str | None = None,
        **options: Unpack[JobOptions],
    ) -> JobHandle:
        """A job without tasks yet: `Job.add` adds them while others run, `Job.close` ends the list."""
        spec = _spec(kind, options, name=name, result_layout=result_layout, notify=notify, mode="open")
        return JobHandle(self._session, drive(submission.create(self._session, spec, idempotency_key)))

    def upload(self, tasks: Tasks, *, idempotency_key: str | None = None, progress: bool | Moved = False) -> Upload:
        """Send a list and make no job of it yet: `submit` takes what this returns, also several times."""
        with moving(progress, "list", "sending") as moved:
            return drive(submission.upload(self._session, tasks, idempotency_key, moved))

    def job(self, job_id: str, verify: bool = False) -> JobHandle:
        """A job by its id; with `verify`, its counts held to its rows. Raises NotFound."""
        return JobHandle(self._session, drive(self._session.job(job_id, verify)))

    def jobs(self) -> Iterator[JobHandle]:
        """All jobs, newest first."""
        return (JobHandle(self._session, data) for data in iterate(self._session.jobs()))

    def export(self, export_id: str) -> ExportHandle:
        """An export by its id. Raises NotFound."""
        return ExportHandle(self._session, drive(self._session.export(export_id)))

    def dead_letters(self) -> Iterator[Json]:
        """What was given up, oldest first."""
        return iterate(self._session.dead_letters())

    def redrive(self, ids: Sequence[str]) -> Json:
        """Send dead letters back to their queues: {redriven, skipped}."""
        return drive(self._session.redrive(ids))

    def health(self) -> Json:
        """What /healthz says; needs no key."""
        return drive(self._session.health())

    def create_key(self, tenant: str, name: str | None = None) -> Json:
        """A new key of a tenant: {key, key_id, tenant}. With an administrator's key, as the two that follow."""
        return drive(self._session.create_key(tenant, name))

    def keys(self, tenant: str | None = None) -> Iterator[Json]:
        """Keys of one tenant, or of all, without their secrets."""
        return iterate(self._session.keys(tenant))

    def revoke_key(self, key_id: str) -> None:
        """End a key."""
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
        """Any route of the API, for what has no method here: the JSON that it answers. `path_of` makes a path."""
        return drive(self._session.request(method, path, query, body, idempotency_key))

    def pages(self, path: str, query: Query | None = None) -> Iterator[Json]:
        """Any listing of the API: all its items, read as they are taken."""
        return iterate(self._session.pages(path, query))


class AsyncClient:
    """As Client, on an event loop: the one that uses it first."""

    def __init__(self, url: str | None = None, key: str | None = None, *, patience: float = PATIENCE) -> None:
        self._session = ClientSession(AwaitedIo(), *find_server(url, key), patience)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """As Client.close."""
        await self._session.io.close()

    async def submit(
        self,
        tasks: Tasks | Upload,
        *,
        kind: Kind | None = None,
        name: str | None = None,
        format: ListFormat | None = None,
        compression: Compression | None = None,
        result_layout: ResultLayout | None = None,
        notify: Sequence[Mapping[str, Any]] | None = None,
        idempotency_key: str | None = None,
        progress: bool | Moved = False,
        **options: Unpack[JobOptions],
    ) -> AsyncJob:
        """As Client.submit; takes async iterables too. An iterable that is not async is read on the event loop."""
        spec = _spec(kind, options, name=name, result_layout=result_layout, notify=notify)
        form = _given(format=format, compression=compression)
        with moving(progress, name or "list", "sending") as moved:
            return AsyncJob(
                self._session, await submission.submit(self._session, tasks, spec, form, idempotency_key, moved)
            )

    async def open_job(
        self,
        *,
        kind: Kind | None = None,
        name: str | None = None,
        result_layout: ResultLayout | None = None,
        notify: Sequence[Mapping[str, Any]] | None = None,
        idempotency_key: str | None = None,
        **options: Unpack[JobOptions],
    ) -> AsyncJob:
        """As Client.open_job."""
        spec = _spec(kind, options, name=name, result_layout=result_layout, notify=notify, mode="open")
        return AsyncJob(self._session, await submission.create(self._session, spec, idempotency_key))

    async def upload(
        self, tasks: Tasks, *, idempotency_key: str | None = None, progress: bool | Moved = False
    ) -> Upload:
        """As Client.upload."""
        with moving(progress, "list", "sending") as moved:
            return await submission.upload(self._session, tasks, idempotency_key, moved)

    async def job(self, job_id: str, verify: bool = False) -> AsyncJob:
        """As Client.job."""
        return AsyncJob(self._session, await self._session.job(job_id, verify))

    async def jobs(self) -> AsyncGenerator[AsyncJob, None]:
        """As Client.jobs."""
        async for data in self._session.jobs():
            yield AsyncJob(self._session, data)

    async def export(self, export_id: str) -> AsyncExport:
        """As Client.export."""
        return AsyncExport(self._session, await self._session.export(export_id))

    def dead_letters(self) -> AsyncGenerator[Json, None]:
        """As Client.dead_letters."""
        return self._session.dead_letters()

    async def redrive(self, ids: Sequence[str]) -> Json:
        """As Client.redrive."""
        return await self._session.redrive(ids)

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


def _spec(kind: Kind | None, options: JobOptions, **more: Any) -> Json:
    """The body of POST /v1/jobs without its tasks. What was not given stays the server's choice."""
    return {**_given(kind=kind or submission.kind_of(options), **more), **options}


def _given(**fields: Any) -> Json:
    return {name: value for name, value in fields.items() if value is not None}
