"""Clocks that were set."""

import pytest

from conveyor.engines.queue import QueueName
from conveyor.engines.sqlite.queue import SqliteQueue
from conveyor.process import feeder
from conveyor.recover.trusted_time import TrustedTime
from tests.faults.planted import Planted
from tests.flow import test_clock_jump, test_clock_set_back


async def _reveal_nothing(self: SqliteQueue, queue: QueueName, beyond: float) -> int:
    return 0


def _hidden(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SqliteQueue, "reveal", _reveal_nothing)


def _any_due_time_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(feeder, "longest_delay", lambda _: float("inf"))


async def _wall_clock(self: TrustedTime) -> float:
    return self._clock.now()


def _one_look_is_enough(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TrustedTime, "now", _wall_clock)


async def _forget(self: TrustedTime, wall: float) -> None:
    pass


def _every_start_is_trusted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TrustedTime, "_start", _forget)


PLANTED = [
    Planted(
        "what a clock that jumped hides is purged", _one_look_is_enough, test_clock_jump.what_a_jump_hides_comes_back
    ),
    Planted(
        "a process that starts after a jump purges what it hides",
        _every_start_is_trusted,
        test_clock_jump.a_process_that_starts_after_the_jump_purges_nothing,
    ),
    Planted(
        "chunks stay hidden by a clock that was set back", _hidden, test_clock_set_back.queued_chunks_are_processed
    ),
    Planted(
        "a retry waits until the time of a clock that was set back",
        _any_due_time_counts,
        test_clock_set_back.retries_are_processed,
    ),
]
