"""Bodies of results: in memory, or on this disk."""

from functools import partial
from hashlib import sha256
from pathlib import Path

from conveyor.client.client_session import ClientSession
from conveyor.client.downloads import Remote, download
from conveyor.client.resources import Result
from conveyor.client.transport import path_of
from conveyor.client.upload_file import Moved
from conveyor.errors import ConveyorError, NoBody


async def read_body(session: ClientSession, job_id: str, task: Result | str) -> bytes:
    """All of it. Raises NoBody, and ConveyorError if it is not what was stored."""
    task_id = task.task_id if isinstance(task, Result) else task
    answer = await session.transport.get(path_of("jobs", job_id, "tasks", task_id, "body"))
    wanted = answer.headers.get("etag", "").strip('"')
    if wanted and sha256(answer.body).hexdigest() != wanted:
        raise ConveyorError(f"The body of the task {task_id} is not what was stored: its sha256 is another.")
    return answer.body


async def save_body(session: ClientSession, job_id: str, task: Result | str, to: Path, progress: Moved | None) -> Path:
    """To a file, which is whole or not there under its name; what broke off is gone on with."""
    found = task if isinstance(task, Result) else await session.task(job_id, task)
    await download(session.transport, partial(_remote, session, job_id, found), to, progress)
    return to


async def _remote(session: ClientSession, job_id: str, task: Result) -> Remote:
    if task.size is None or task.sha256 is None:
        raise NoBody
    return Remote(path_of("jobs", job_id, "tasks", task.task_id, "body"), task.size, task.sha256)
