"""Get the bodies of results: in memory, or as files."""

import json
import re
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from conveyor.client.client_session import ClientSession
from conveyor.client.downloads import DownloadSource, download
from conveyor.client.resources import Result
from conveyor.client.transport import path_of
from conveyor.client.upload_file import BytesProgress
from conveyor.errors import ConveyorError, NoBody

_SHA256 = re.compile(r"\b[0-9a-f]{64}\b")


async def read_body(session: ClientSession, job_id: str, task: Result | str) -> bytes:
    """Read the whole body. Raises NoBody, and ConveyorError if its sha256 is wrong."""
    task_id = task.task_id if isinstance(task, Result) else task
    answer = await session.transport.get(path_of("jobs", job_id, "tasks", task_id, "body"))
    # The body may have come as gzip, which has an ETag of its own; the sha256 is that of the body itself.
    expected = _SHA256.search(answer.headers.get("etag", ""))
    if expected is not None and sha256(answer.body).hexdigest() != expected[0]:
        raise ConveyorError(f"The body of task {task_id} is corrupt: its sha256 is wrong. Download it again.")
    return answer.body


async def read_extracted(session: ClientSession, job_id: str, task: Result | str) -> Any:
    """Read what was extracted for a task. Raises NoBody."""
    if isinstance(task, Result) and (task.extracted is not None or task.extracted_url is None):
        return task.extracted
    task_id = task.task_id if isinstance(task, Result) else task
    answer = await session.transport.get(path_of("jobs", job_id, "tasks", task_id, "extracted"))
    return json.loads(answer.body)


async def save_body(
    session: ClientSession, job_id: str, task: Result | str, to: Path, progress: BytesProgress | None
) -> Path:
    """Save the body to a file. The file gets its name once it is complete. After a failure, the next call resumes."""
    result = task if isinstance(task, Result) else await session.task(job_id, task)
    await download(session.transport, partial(_remote, session, job_id, result), to, progress)
    return to


async def _remote(session: ClientSession, job_id: str, task: Result) -> DownloadSource:
    if task.size is None or task.sha256 is None:
        raise NoBody
    return DownloadSource(path_of("jobs", job_id, "tasks", task.task_id, "body"), task.size, task.sha256)
