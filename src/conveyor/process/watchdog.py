"""Watchdog: the running attempts of one lane. It cancels an attempt whose executor exceeds the task's timeout, and one
whose task a newer attempt owns."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.errors import BadInput
from conveyor.lists.inputs import MAX_TIMEOUT, parse_fetch_input
from conveyor.model import Job, JobKind, Outcome, TaskError, TaskRef
from conveyor.process.gate import GatedRef
from conveyor.process.task_progress import Superseded
from conveyor.states import TaskStatus

log = structlog.get_logger()

# Seconds that an executor may take beyond the timeouts of its tasks, to start a process or wait for a slow store.
GRACE = 30.0
_TIMEOUT = '"timeout"'


class WatchedAttempt(msgspec.Struct):
    """A running attempt, or several that were started in one call."""

    task: "asyncio.Task[Any]"
    refs: Sequence[TaskRef]
    entries: Sequence[GatedRef]
    # How often the monitor had requeued the task when this attempt began.
    generation: int
    started_at: float
    # When to cancel it; None: never.
    deadline: float | None
    # When to check its generation next.
    check_at: float
    # Why it was cancelled: it took too long, or a newer attempt owns its task.
    expired: bool = False
    superseded: bool = False
    # Its asyncio task goes on to other attempts after this one.
    finished: bool = False

    @property
    def is_cancelled(self) -> bool:
        return self.expired or self.superseded

    def expire(self) -> None:
        """Cancel it because it took too long, if it still runs."""
        if self._cancel():
            self.expired = True

    def supersede(self) -> None:
        """Cancel it because a newer attempt owns its task, if it still runs."""
        if self._cancel():
            self.superseded = True

    def _cancel(self) -> bool:
        # The caller may have awaited something since it saw the attempt.
        return not self.finished and not self.is_cancelled and self.task.cancel()


class Watchdog:
    """`stuck_after`: seconds without progress after which the monitor may have requeued a long task."""

    def __init__(self, clock: Clock, stuck_after: float) -> None:
        self._clock = clock
        self._stuck_after = stuck_after
        self._attempts: dict[int, WatchedAttempt] = {}
        self._number = 0

    @property
    def attempts(self) -> list[WatchedAttempt]:
        return list(self._attempts.values())

    async def guard(
        self,
        job: Job,
        entries: Sequence[GatedRef],
        refs: Sequence[TaskRef],
        generation: int,
        attempting: Awaitable[list[Outcome]],
    ) -> list[Outcome]:
        """Await the attempts. An attempt that takes too long fails; Superseded is raised for one that is superseded."""
        task = asyncio.current_task()
        assert task is not None
        now, limit = self._clock.monotonic(), limit_of(job, refs)
        deadline = None if limit is None else now + limit
        attempt = WatchedAttempt(task, refs, entries, generation, now, deadline, now + self._stuck_after)
        self._number += 1
        number = self._number
        self._attempts[number] = attempt
        try:
            return await attempting
        except asyncio.CancelledError:
            if not attempt.is_cancelled or task.cancelling() > 1:
                raise
            if attempt.superseded:
                raise Superseded from None
            return [_expired(self._clock.monotonic() - attempt.started_at) for _ in refs]
        finally:
            attempt.finished = True
            del self._attempts[number]
            if attempt.is_cancelled:
                # However it finished, the cancellation was for this attempt, not for what the runner does next.
                task.uncancel()

    def check(self) -> list[WatchedAttempt]:
        """Cancel overdue attempts. Returns attempts that a newer one may have superseded."""
        now = self._clock.monotonic()
        suspects = []
        for attempt in self.attempts:
            if attempt.is_cancelled:
                continue
            if attempt.deadline is not None and now >= attempt.deadline:
                log.error(
                    "attempt cancelled: it took too long",
                    index=attempt.refs[0].index,
                    seconds=round(now - attempt.started_at, 1),
                )
                attempt.expire()
            elif now >= attempt.check_at and len(attempt.refs) == 1:
                attempt.check_at = now + self._stuck_after / 2
                suspects.append(attempt)
        return suspects


def limit_of(job: Job, refs: Sequence[TaskRef]) -> float | None:
    """Return the longest time for attempts that run together. None for long tasks, whose timeout is for silence, and
    for handlers, which first wait for a process; that process is killed after their timeout."""
    if job.kind is not JobKind.FETCH:
        return None
    return longest_timeout(job, refs) + GRACE


def longest_timeout(job: Job, refs: Sequence[TaskRef]) -> float:
    """Return the longest timeout of some fetches. Most have that of their job."""
    own = [timeout_of(job, ref) for ref in refs if _TIMEOUT in ref.input]
    if len(own) < len(refs):
        own.append(min(job.options.timeout, MAX_TIMEOUT))
    return max(own)


def timeout_of(job: Job, ref: TaskRef) -> float:
    """Return the timeout of a fetch: its own, or its job's."""
    timeout = job.options.timeout
    if _TIMEOUT in ref.input:
        try:
            timeout = parse_fetch_input(ref.input).timeout or timeout
        except BadInput:
            return timeout
    return min(timeout, MAX_TIMEOUT)


def _expired(seconds: float) -> Outcome:
    message = f"the attempt was cancelled after {seconds:.0f} seconds"
    return Outcome(TaskStatus.FAILED, error=TaskError("timeout", message), elapsed=seconds)
