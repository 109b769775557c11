"""Responses about tasks, their results and events."""

from typing import Any, Literal

import msgspec

from conveyor.api.schemas.shape import Shape
from conveyor.model import RunId, TaskError, TaskId


class ProgressShape(Shape, frozen=True):
    """The last reported progress of an attempt: bytes of a download, or units of a function."""

    at: str
    attempt: int
    done: int
    total: int | None
    # Units a second, over the last interval.
    rate: float
    note: str | None


class TaskShape(Shape, frozen=True):
    """A task and its result."""

    task_id: TaskId
    index: int
    input: Any
    status: str
    # It succeeded with the body of an earlier outcome, which its run compared it with.
    unchanged: bool
    attempts: int
    http_status: int | None
    error: TaskError | None
    # It failed and waits for a redrive; after a redrive, the result of an earlier run keeps it.
    dead_lettered: bool
    content_type: str | None
    size: int | None
    sha256: str | None
    final_url: str | None
    headers: list[tuple[str, str]] | None
    elapsed: float | None
    finished_at: str | None
    body_url: str | None
    # What the job's `extract` returned for the body: an object or a list of objects. Null if that was nothing, or is
    # longer than 64 KiB, or the page has 8 MiB already; `extracted_url` has it then.
    extracted: Any
    extracted_url: str | None
    # Only for a single task whose last attempt took a second or more: seconds until the head of the response had
    # arrived.
    first_byte: float | msgspec.UnsetType = msgspec.UNSET
    # Only for a single task: the worker that attempts it now, or, of a last attempt that took a second or more, the one
    # that made it.
    worker: str | msgspec.UnsetType = msgspec.UNSET
    # Only for a task that has been attempted for a second or more now. It may be some seconds old.
    running: bool | msgspec.UnsetType = msgspec.UNSET
    # Only for a task that is running and has reported progress; of a single one also while it waits to resume.
    progress: ProgressShape | msgspec.UnsetType = msgspec.UNSET


class EventShape(Shape, frozen=True):
    """An event of a job or of one of its tasks. An event of a job has the same id in webhooks."""

    id: str | None
    seq: int
    at: str
    event: str
    run_id: RunId
    index: int | None
    data: dict[str, Any]


class ResultsPage(Shape, frozen=True):
    """Tasks. `order` says how they are sorted: by `index`, the order of the list, or by `task_id`, where the engine has
    no such order or the cursor is of a listing by `task_id`."""

    items: list[TaskShape]
    next_cursor: str | None
    order: Literal["index", "task_id"]


class TaskSearchPage(Shape, frozen=True):
    """Tasks that match, how they are sorted, and the number of rows read."""

    items: list[TaskShape]
    next_cursor: str | None
    read: int
    order: Literal["index", "task_id"]


class EventsPage(Shape, frozen=True):
    """Events, oldest first."""

    items: list[EventShape]
    next_cursor: str | None
