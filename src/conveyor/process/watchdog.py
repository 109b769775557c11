"""Watchdog: the attempts under way in one lane, and those of them that must be broken off. Executors keep to a task's
timeout themselves; this is for one that does not, and for a long task that another attempt has taken over."""

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

# What an executor may take beyond the timeouts of its tasks: a process to start, a store that is slow.
GRACE = 30.0
_TIMEOUT = '"timeout"'


class WatchedAttempt(msgspec.Struct):
    """An attempt under way, or several that are made as one."""

    task: "asyncio.Task[Any]"
    refs: Sequence[TaskRef]
    held: Sequence[GatedRef]
    # How often the monitor had sent the task again when this began.
    turn: int
    begun: float
    # When it is broken off for its length; None: never.
    due: float | None
    # When its row is next looked at.
    look_at: float
    # Set when it is broken off: it took too long; else another attempt has it.
    expired: bool = False
    overtaken: bool = False
    # Set when it has come to its end: its task goes on to other attempts then.
    over: bool = False

    @property
    def broken(self) -> bool:
        return self.expired or self.overtaken

    def expire(self) -> None:
        """Break it off because it took too long, if it still goes on."""
        if self._break_off():
            self.expired = True

    def overtake(self) -> None:
        """Break it off because another attempt has its task, if it still goes on."""
        if self._break_off():
            self.overtaken = True

    def _break_off(self) -> bool:
        # Whoever asks may have awaited something since it saw the attempt.
        return not self.over and not self.broken and self.task.cancel()


class Watchdog:
    """`stuck_after` is when a long task that did not move may have been given to another attempt."""

    def __init__(self, clock: Clock, stuck_after: float) -> None:
        self._clock = clock
        self._stuck_after = stuck_after
        self._attempts: dict[int, WatchedAttempt] = {}
        self._number = 0

    @property
    def attempts(self) -> list[WatchedAttempt]:
        return list(self._attempts.values())

    async def guard(
        self, job: Job, held: Sequence[GatedRef], refs: Sequence[TaskRef], turn: int, making: Awaitable[list[Outcome]]
    ) -> list[Outcome]:
        """Make the attempts, unless they are broken off. Raises Superseded if that is because another has the task."""
        task = asyncio.current_task()
        assert task is not None
        now, limit = self._clock.monotonic(), limit_of(job, refs)
        due = None if limit is None else now + limit
        attempt = WatchedAttempt(task, refs, held, turn, now, due, now + self._stuck_after)
        self._number += 1
        number = self._number
        self._attempts[number] = attempt
        try:
            return await making
        except asyncio.CancelledError:
            if not attempt.broken or task.cancelling() > 1:
                raise
            if attempt.overtaken:
                raise Superseded from None
            return [_expired(self._clock.monotonic() - attempt.begun) for _ in refs]
        finally:
            attempt.over = True
            del self._attempts[number]
            if attempt.broken:
                # However it ended, it was this one that was cancelled, and not what the task does next.
                task.uncancel()

    def look(self) -> list[WatchedAttempt]:
        """Break off what took too long. Returns what ran so long that another attempt may have it by now."""
        now = self._clock.monotonic()
        suspects = []
        for attempt in self.attempts:
            if attempt.broken:
                continue
            if attempt.due is not None and now >= attempt.due:
                log.error("attempt broken off", index=attempt.refs[0].index, seconds=round(now - attempt.begun, 1))
                attempt.expire()
            elif now >= attempt.look_at and len(attempt.refs) == 1:
                attempt.look_at = now + self._stuck_after / 2
                suspects.append(attempt)
        return suspects


def limit_of(job: Job, refs: Sequence[TaskRef]) -> float | None:
    """Seconds that attempts which are made at once may take at most. None for kinds whose timeout is for silence, and
    for handlers: those wait for a process first, which is killed when their time is over."""
    if job.kind is not JobKind.FETCH:
        return None
    return max(timeout_of(job, ref) for ref in refs) + GRACE


def timeout_of(job: Job, ref: TaskRef) -> float:
    """The timeout of a fetch: its own, or its job's."""
    timeout = job.options.timeout
    if _TIMEOUT in ref.input:
        try:
            timeout = parse_fetch_input(ref.input).timeout or timeout
        except BadInput:
            return timeout
    return min(timeout, MAX_TIMEOUT)


def _expired(seconds: float) -> Outcome:
    message = f"the attempt was broken off after {seconds:.0f} seconds"
    return Outcome(TaskStatus.FAILED, error=TaskError("timeout", message), elapsed=seconds)
