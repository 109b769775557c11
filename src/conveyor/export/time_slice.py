"""How long one process works at an export, and why it stops before the export is ready."""

from collections.abc import Callable

from conveyor.clock import Clock


class ExportSuperseded(Exception):
    """Another process has claimed the row, or the row is gone. This process has to stop."""


class ExportPaused(Exception):
    """The time slice is over or interrupted. The checkpoint is durable."""


class TimeSlice:
    """How long a process works at an export before it takes the next one. Getting back to the checkpoint does not
    count, so that every time slice makes progress, however long that takes."""

    def __init__(self, clock: Clock, seconds: float, interrupted: Callable[[], bool]) -> None:
        self._clock = clock
        self._seconds = seconds
        self._interrupted = interrupted
        self.begin()

    def begin(self) -> None:
        """Start the clock, or start it again."""
        self._until = self._clock.monotonic() + self._seconds

    @property
    def is_over(self) -> bool:
        return self._interrupted() or self._clock.monotonic() >= self._until

    def check_interrupted(self) -> None:
        """For steps that change nothing. Raises ExportPaused."""
        if self._interrupted():
            raise ExportPaused
