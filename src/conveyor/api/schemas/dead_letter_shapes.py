"""Responses about dead letters."""

from typing import Literal

from conveyor.api.schemas.shape import Shape
from conveyor.model import JobId, RunId, TaskId


class DeadLetterShape(Shape, frozen=True):
    """A dead letter: a dead-lettered task, or a message. Its queue is `control` for an ingest, `run` for tasks."""

    id: str
    queue: str
    job_id: JobId
    run_id: RunId
    # Of a dead-lettered task; null for a message.
    task_id: TaskId | None
    index: int | None
    attempts: int | None
    error_code: str | None
    reason: str
    at: str
    # What redriving it does now, and a sentence that says so.
    redrive: Literal["requeue", "rerun_task", "none"]
    redrive_effect: str


class DeadLettersPage(Shape, frozen=True):
    """Dead letters: messages, oldest first, then dead-lettered tasks by run."""

    items: list[DeadLetterShape]
    next_cursor: str | None
