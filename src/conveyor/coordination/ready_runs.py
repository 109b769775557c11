"""Ready runs: the policies over the ready index. How it is rebuilt from Records, and how long a quiet run rests."""

from collections.abc import Iterable

import structlog

from conveyor.clock import Clock
from conveyor.engines.ready import ReadyIndex, ReadyMark
from conveyor.errors import ConveyorError
from conveyor.model import Job
from conveyor.states import WORKABLE

log = structlog.get_logger()

# A quiet run is looked at again after this long, each time so many times as long: marks of its messages may have been
# lost.
_FIRST_PAUSE = 1.0
_GROWTH = 4.0
_LONGEST_PAUSE = 60.0
_RESTORE_SECONDS = 10.0


def next_pause(pause: float) -> float:
    """How long to leave a run alone that was quiet after this pause."""
    return min(_LONGEST_PAUSE, max(_FIRST_PAUSE, _GROWTH * pause))


async def rebuild(index: ReadyIndex, active: Iterable[Job], *, is_urgent: bool = False) -> None:
    """Fill an index that was lost, given all unfinished jobs. If it is urgent, every run that can have work is due now,
    whatever it waits for."""
    marks = [_mark(job, is_restored=not is_urgent) for job in active]
    await index.mark_runs(marks, is_built=True)


class RunRestorer:
    """Puts single runs back that the index has lost, or never heard of."""

    def __init__(self, index: ReadyIndex, clock: Clock) -> None:
        self._index = index
        self._clock = clock
        self._due_at = 0.0

    async def restore(self, active: Iterable[Job]) -> None:
        """Restore these unfinished jobs, if it is time. An index that does not answer is not the caller's problem."""
        if self._clock.monotonic() < self._due_at:
            return
        self._due_at = self._clock.monotonic() + _RESTORE_SECONDS
        marks = [_mark(job, is_restored=True) for job in active]
        try:
            if marks:
                await self._index.mark_runs(marks)
        except ConveyorError as error:
            log.warning("ready runs not restored", error=str(error))


def _mark(job: Job, *, is_restored: bool) -> ReadyMark:
    """A paused run is known, and not due."""
    delay = 0.0 if job.state in WORKABLE else float("inf")
    return ReadyMark(job.run.run_id, job.tenant, job.job_id, delay, is_restored=is_restored)
