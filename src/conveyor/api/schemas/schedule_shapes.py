"""Responses about schedules and their fires."""

from collections.abc import Sequence
from typing import Any

from conveyor.accept.answer import CountsView
from conveyor.api.schemas.shape import Shape
from conveyor.model import JobId


class FireShape(Shape, frozen=True):
    """One fire of a schedule: its planned time, its actual time, and its job or error."""

    at: str
    made_at: str
    job_id: JobId | None
    error: str | None
    # Number of missed fires that this one also covers.
    coalesced: int


class FireOutcome(Shape, frozen=True):
    """What the job of a fire has come to."""

    name: str | None
    state: str
    total: int
    counts: CountsView
    invalid_lines: int


class FireDetail(FireShape, frozen=True):
    """One fire of a schedule, with its job's state and counts."""

    # Null without a job, and once the job was deleted or purged.
    outcome: FireOutcome | None


class ScheduleShape(Shape, frozen=True):
    """A schedule, with its next and its latest fires."""

    id: str
    name: str | None
    cron: str
    # The expression in words.
    cron_text: str
    timezone: str
    missed: str
    paused: bool
    # Whether each job compares its pages with those of the one before.
    changed_only: bool
    created_at: str
    next_fires: list[str]
    # Total number of fires.
    fired: int
    fires: Sequence[FireShape]
    # Invalid tasks of `job`, which each fire skips. Those of a list that it reads are only known of its jobs.
    invalid_lines: int
    job: dict[str, Any]


class ScheduleDetail(ScheduleShape, frozen=True):
    """A schedule, with its next fires, and its latest ones with the outcomes of their jobs."""

    fires: Sequence[FireDetail]


class StartedFire(Shape, frozen=True):
    """A fire that was asked for: its time, and the id that its job will have."""

    at: str
    job_id: JobId


class SchedulesPage(Shape, frozen=True):
    """Schedules, oldest first."""

    items: list[ScheduleShape]
    next_cursor: str | None
