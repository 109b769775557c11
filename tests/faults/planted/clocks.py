"""Clocks that were set."""

import pytest

from conveyor.coordination.trusted_time import TrustedTime
from conveyor.engines.queue import QueueName
from conveyor.engines.sqlite.queue import SqliteQueue
from conveyor.process import feeder
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


def _peek_at_wall_clock(self: TrustedTime) -> float:
    return self._clock.now()


def _tasks_go_by_the_wall(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TrustedTime, "peek", _peek_at_wall_clock)


def _every_start_is_trusted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TrustedTime, "_start", _forget)


def _a_step_back_is_stored_later(patch: pytest.MonkeyPatch) -> None:
    compare = TrustedTime._compare

    def as_before(self: TrustedTime, wall: float, jump: float) -> None:
        written = self._written
        compare(self, wall, jump)
        self._written = written

    patch.setattr(TrustedTime, "_compare", as_before)


def _an_hour_of_the_wall_clock_is_enough(patch: pytest.MonkeyPatch) -> None:
    look = TrustedTime._look

    async def by_the_wall(self: TrustedTime) -> float:
        if self._wall is None:
            await look(self)
        if self._since:
            self._even = self._clock.now() - self._since
        return await look(self)

    patch.setattr(TrustedTime, "_look", by_the_wall)


PLANTED = [
    Planted("tasks reach their deadlines by a jump", _tasks_go_by_the_wall, test_clock_jump.no_task_fails_by_a_jump),
    Planted(
        "a second jump during a restart closes open jobs",
        _an_hour_of_the_wall_clock_is_enough,
        test_clock_jump.a_second_jump_during_a_restart_closes_nobody,
    ),
    Planted(
        "a jump after a step back closes open jobs",
        _a_step_back_is_stored_later,
        test_clock_jump.a_jump_after_a_step_back_closes_nobody,
    ),
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
