"""Submit a list as a job. A few tasks go in the request itself. A longer list is collected into a file, announced
to the server, uploaded to the URL that it returns, and named in the request. A list in a bucket or behind a URL is
named in the request, and the server reads it; if the server may not, the client reads it from its bucket and uploads
it. All steps share one idempotency key, so that retries make one upload and one job.
"""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec

from conveyor.client.client_session import ClientSession, new_key
from conveyor.client.list_objects import is_object, is_servers, open_object
from conveyor.client.list_parts import send_parts
from conveyor.client.lists import InlineTasks, ListFile, Tasks, collect_tasks, is_file, json_lines
from conveyor.client.resources import RemoteList, Upload
from conveyor.client.transport import Json, path_of
from conveyor.client.upload_file import BytesProgress, FileBody
from conveyor.errors import BadInput, ConveyorError, ListChanged, SourceRefused, UnknownField
from conveyor.model import format_from_name

# Answers to a second PUT: of the API, and of an object store.
_ALREADY_STORED = frozenset({409, 412})
_LINK_EXPIRED = 403
# Maximum batch for an open job.
_MAX_BATCH_TASKS = 1000
_MAX_BATCH_BYTES = 1024 * 1024


class AddedTasks(NamedTuple):
    """Tasks that were added to an open job, and invalid ones that were skipped."""

    tasks: int
    invalid: int

    def plus(self, batch: Json) -> "AddedTasks":
        return AddedTasks(self.tasks + batch["count"], self.invalid + batch.get("invalid_lines", 0))


async def submit(
    session: ClientSession,
    tasks: Tasks | Upload | RemoteList,
    spec: Mapping[str, Any],
    form: Mapping[str, str],
    idempotency_key: str | None,
    progress: BytesProgress | None,
) -> Json:
    """Create the job and return it. `form` may have the `format` and `compression` of a list."""
    key = idempotency_key or new_key()
    if isinstance(tasks, Upload):
        return await session.create_job({**spec, "source": {**tasks.source(), **form}}, key)
    if isinstance(tasks, str) and is_object(tasks):
        tasks = RemoteList(tasks, format=format_from_name(tasks))
    if isinstance(tasks, RemoteList):
        try:
            if is_servers(tasks.url) or not is_object(tasks.url):
                return await session.create_job({**spec, "source": {**tasks.source(), **form}}, key)
        except (SourceRefused, UnknownField):
            # The server does not read from this bucket, or is too old to read from any.
            if not is_object(tasks.url):
                raise
        form = {**_form(tasks), **form}
        # Another key: a repeated call sends the request that was refused first, which differs from this one.
        key = sha256(f"{key}:staged".encode()).hexdigest()
        upload = await _stage(session, tasks, key, progress)
        return await session.create_job({**spec, "source": {**upload.source(), **form}}, key)
    async with collect_tasks(session.io, tasks) as collected:
        if isinstance(collected, InlineTasks):
            return await session.create_job({**spec, "tasks": collected.tasks}, key)
        upload = await _send(session, collected, key, progress)
    return await session.create_job({**spec, "source": {**upload.source(), **form}}, key)


async def create(session: ClientSession, spec: Mapping[str, Any], idempotency_key: str | None) -> Json:
    """Create a job without tasks."""
    return await session.create_job(spec, idempotency_key or new_key())


async def upload(
    session: ClientSession, tasks: Tasks, idempotency_key: str | None = None, progress: BytesProgress | None = None
) -> Upload:
    """Upload a list without creating a job."""
    async with collect_tasks(session.io, tasks, as_file=True) as collected:
        assert isinstance(collected, ListFile)
        return await _send(session, collected, idempotency_key or new_key(), progress)


async def add(session: ClientSession, job_id: str, tasks: Tasks, last: bool) -> AddedTasks:
    """Add tasks to an open job, in batches. If `last`, the last batch closes the job."""
    if isinstance(tasks, str) or is_file(tasks):
        raise BadInput("Cannot add tasks from a file. Pass an iterable, or use `submit`.")
    added, size = AddedTasks(0, 0), 0
    batch: list[bytes] = []
    async for line in json_lines(session.io, tasks):
        if len(batch) == _MAX_BATCH_TASKS or (batch and size + len(line) > _MAX_BATCH_BYTES):
            added = added.plus(await _add(session, job_id, batch))
            batch, size = [], 0
        batch.append(line)
        size += len(line)
    if batch or last:
        added = added.plus(await _add(session, job_id, batch, last))
    return added


def kind_of(options: Mapping[str, Any]) -> str | None:
    """The kind that the options imply; None for the default."""
    if options.get("handler") is not None:
        return "python"
    return "export_download" if options.get("export") is not None else None


async def _add(session: ClientSession, job_id: str, batch: list[bytes], last: bool = False) -> Json:
    tasks = [msgspec.Raw(line) for line in batch]
    return await session.add(job_id, {"tasks": tasks, "last_batch": last}, new_key())


async def _stage(session: ClientSession, remote: RemoteList, key: str, progress: BytesProgress | None) -> Upload:
    """Read an object with the caller's own credentials, and upload it."""
    found = await session.io.run_blocking(open_object, remote.url, remote.version_id, remote.etag)
    async with collect_tasks(session.io, found, as_file=True) as collected:
        assert isinstance(collected, ListFile)
        if remote.sha256 is not None and collected.sha256 != remote.sha256.lower():
            raise ListChanged(f"{remote.url} has another sha256 than the one that was named.")
        return await _send(session, collected, key, progress)


def _form(remote: RemoteList) -> dict[str, str]:
    form = {"format": remote.format, "compression": remote.compression}
    return {name: value for name, value in form.items() if value is not None}


async def _send(session: ClientSession, list_file: ListFile, key: str, progress: BytesProgress | None) -> Upload:
    announcement = {"size": list_file.size, "sha256": list_file.sha256}
    target = await session.transport.json("POST", "/v1/uploads", body=announcement, idempotency_key=key)
    upload = Upload(target["upload_id"], list_file.format)
    if target.get("part_bytes") is not None:
        await send_parts(session.transport, upload.upload_id, list_file, progress)
        return upload
    body = FileBody(list_file.path, list_file.size, progress)
    try:
        await session.transport.put(target["method"], target["url"], target["headers"], body)
    except ConveyorError as error:
        if error.status not in {*_ALREADY_STORED, _LINK_EXPIRED}:
            raise
        state = await session.transport.json("GET", path_of("uploads", upload.upload_id))
        # An earlier attempt, whose answer was lost, has stored it. The link accepts only this list.
        if state["stored"]:
            return upload
        if error.status != _LINK_EXPIRED or "url" not in state:
            raise
        # The link of an object store expires before the upload does.
        await session.transport.put(state["method"], state["url"], state["headers"], body)
    return upload
