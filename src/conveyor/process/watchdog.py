"""Watchdog: attempts under way in one lane, and those of them that must be broken off. Executors keep to a task's
timeout themselves; this is for one that does not, and for long tasks that another attempt has taken over."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from conveyor.errors import BadInput
from conveyor.inputs import MAX_TIMEOUT, parse_fetch_input
from conveyor.model import Job, JobKind, TaskRef
from conveyor.process.gate import Passing

# What an executor may take beyond the timeouts of its tasks: a process to start, a store that is slow.
GRACE = 30.0
_TIMEOUT = '"timeout"'


class Attempt(msgspec.Struct):
    """An attempt under way, or several that are made as one."""

    task: "asyncio.Task[Any]"
    refs: Sequence[TaskRef]
    held: Sequence[Passing]
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

    @property
    def broken(self) -> bool:
        return self.expired or self.overtaken


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
