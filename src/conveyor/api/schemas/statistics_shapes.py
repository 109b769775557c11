"""Responses with the statistics of a job."""

from conveyor.api.schemas.job_shapes import ErrorCount
from conveyor.api.schemas.shape import Shape
from conveyor.model import RunId


class SampleShape(Shape, frozen=True):
    """The counts of a run at one time."""

    at: str
    succeeded: int
    failed: int
    cancelled: int


class DurationShape(Shape, frozen=True):
    """Number of tasks by duration of their last attempt; each bucket is a tenth longer than the one before."""

    seconds: float
    count: int


class AttemptsShape(Shape, frozen=True):
    """Attempts that ended in the interval that begins at `at`."""

    at: str
    succeeded: int
    failed: int
    # Failed attempts that were retried.
    retried: int


class SeriesShape(Shape, frozen=True):
    """Attempts over time, oldest first, in intervals of `seconds`; those without any are left out."""

    seconds: int
    items: list[AttemptsShape]


class StatisticsShape(Shape, frozen=True):
    """Statistics of a run: counts over time, oldest first; latency, shortest first. And the errors of `view`, most
    frequent first."""

    run_id: RunId
    # As in a job.
    view: str
    samples: list[SampleShape]
    series: SeriesShape
    durations: list[DurationShape]
    errors: list[ErrorCount]
