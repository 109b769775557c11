"""Responses about callbacks of Step Functions."""

from conveyor.api.schemas.shape import Shape
from conveyor.model import JobId, RunId


class CallbackShape(Shape, frozen=True):
    """A state machine that waits for the job, without its token."""

    id: str
    # step_functions
    type: str
    job_id: JobId
    run_id: RunId
    # pending, in_progress, completed, failed, timed_out or callback_sent.
    status: str
    created_at: str
    # The worker that runs a long task of the job, if known.
    worker: str | None
    last_progress_at: str
    last_heartbeat_at: str | None
    next_at: str | None
    # The event that it was answered with, and the error, once it is answered.
    event_id: str | None
    error: str | None
    answered_at: str | None


class CallbacksPage(Shape, frozen=True):
    """All callbacks of a job."""

    items: list[CallbackShape]
    next_cursor: None
