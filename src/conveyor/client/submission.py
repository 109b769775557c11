"""Submission: from a list to a job. A few tasks go in the request itself; more are staged first: gathered into a file,
announced, sent to where the server says, and named in the request. One idempotency key for all of it: however often a
step is tried, there is one upload and one job.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from conveyor.client.client_session import ClientSession, new_key
from conveyor.client.lists import Few, ListFile, Tasks, gathered, is_file, json_lines
from conveyor.client.resources import Upload
from conveyor.client.transport import Json, path_of
from conveyor.client.upload_file import FileBody, Moved
from conveyor.errors import BadInput, ConveyorError

# What the API answers to a second PUT, and what an object store does.
_STORED_BEFORE = frozenset({409, 412})
_LAPSED = 403
# Of an open job, in one request.
_MOST_ADDED = 1000
_MOST_ADDED_BYTES = 1024 * 1024


async def submit(
    session: ClientSession,
    tasks: Tasks | Upload,
    spec: Mapping[str, Any],
    form: Mapping[str, str],
    idempotency_key: str | None,
    progress: Moved | None,
) -> Json:
    """The job as it was accepted. `form` may have `format` and `compression` of a list."""
    key = idempotency_key or new_key()
    if isinstance(tasks, Upload):
        return await session.create_job({**spec, "source": {**tasks.source(), **form}}, key)
    async with gathered(session.io, tasks) as found:
        if isinstance(found, Few):
            return await session.create_job({**spec, "tasks": found.tasks}, key)
        upload = await _send(session, found, key, progress)
    return await session.create_job({**spec, "source": {**upload.source(), **form}}, key)


async def create(session: ClientSession, spec: Mapping[str, Any], idempotency_key: str | None) -> Json:
    """A job without tasks yet."""
    return await session.create_job(spec, idempotency_key or new_key())


async def upload(
    session: ClientSession, tasks: Tasks, idempotency_key: str | None = None, progress: Moved | None = None
) -> Upload:
    """Send a list, however long, and make no job of it yet."""
    async with gathered(session.io, tasks, whole=True) as found:
        assert isinstance(found, ListFile)
        return await _send(session, found, idempotency_key or new_key(), progress)


async def add(session: ClientSession, job_id: str, tasks: Tasks, last: bool) -> int:
    """Add tasks to an open job, in as many batches as they take; the last of them closes it if that is wanted. Returns
    how many there were."""
    if isinstance(tasks, str) or is_file(tasks):
        raise BadInput("Tasks are added from a list or another iterable; a file is for submit.")
    count, size = 0, 0
    batch: list[bytes] = []
    async for line in json_lines(session.io, tasks):
        if len(batch) == _MOST_ADDED or (batch and size + len(line) > _MOST_ADDED_BYTES):
            await _add(session, job_id, batch)
            batch, size = [], 0
        batch.append(line)
        count, size = count + 1, size + len(line)
    if batch or last:
        await _add(session, job_id, batch, last)
    return count


def kind_of(options: Mapping[str, Any]) -> str | None:
    """What the options ask for without saying it."""
    if options.get("handler") is not None:
        return "python"
    return "export_download" if options.get("export") is not None else None


async def _add(session: ClientSession, job_id: str, batch: list[bytes], last: bool = False) -> None:
    tasks = [msgspec.Raw(line) for line in batch]
    await session.add(job_id, {"tasks": tasks, "last_batch": last}, new_key())


async def _send(session: ClientSession, found: ListFile, key: str, progress: Moved | None) -> Upload:
    promised = {"size": found.size, "sha256": found.sha256}
    place = await session.transport.json("POST", "/v1/uploads", body=promised, idempotency_key=key)
    upload = Upload(place["upload_id"], found.format)
    body = FileBody(found.path, found.size, progress)
    try:
        await session.transport.put(place["method"], place["url"], place["headers"], body)
    except ConveyorError as error:
        if error.status not in {*_STORED_BEFORE, _LAPSED}:
            raise
        state = await session.transport.json("GET", path_of("uploads", upload.upload_id))
        # A try whose answer was lost has stored it. The link takes this list and no other.
        if state["stored"]:
            return upload
        if error.status != _LAPSED or "url" not in state:
            raise
        # A store's own link lapses before the promise does.
        await session.transport.put(state["method"], state["url"], state["headers"], body)
    return upload
