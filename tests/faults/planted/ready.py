"""Bugs around the ready index and the renewal of leases."""

import asyncio
from collections.abc import Iterable

import pytest

from conveyor.coordination import ready_runs
from conveyor.coordination.ready_marks import ReadyMarks
from conveyor.engines.queue import Outgoing
from conveyor.model import Job, JobId, RunId, TenantId
from conveyor.process.lease_renewal import LeaseRenewal
from conveyor.process.seats import SeatChanges, Seats
from conveyor.process.worker import Worker
from tests.faults.planted import Planted
from tests.flow import test_ready_runs as guards
from tests.flow import test_resting_sizes, test_simulated_fleet


def _nobody_looks_again(patch: pytest.MonkeyPatch) -> None:
    """A quiet run waits for a mark, and marks may be lost."""
    patch.setattr("conveyor.process.seats.next_pause", lambda pause: float("inf"))


def _seat_is_never_given_up(patch: pytest.MonkeyPatch) -> None:
    def leave(self: Seats, run_id: object, delay: float | None = None, *, was_busy: bool = True) -> None:
        pass

    patch.setattr(Seats, "leave", leave)


def _renewal_waits_for_the_tick(patch: pytest.MonkeyPatch) -> None:
    """Leases are extended only after the engines that a look needs have answered."""
    look = Worker._look

    async def look_and_renew(self: Worker) -> float:
        delay = await look(self)
        await self._renewal.renew()
        return delay

    patch.setattr(Worker, "_look", look_and_renew)
    patch.setattr(LeaseRenewal, "start", lambda self: None)


def _lost_index_is_not_rebuilt(patch: pytest.MonkeyPatch) -> None:
    async def rebuild(self: Seats, *, is_urgent: bool = False) -> bool:
        return False

    patch.setattr(Seats, "rebuild", rebuild)


def _look_that_fails_in_part_is_lost(patch: pytest.MonkeyPatch) -> None:
    """The worker counted runs as served of which it had never heard."""
    patch.setattr(SeatChanges, "__bool__", lambda changes: False)

    async def look(self: Worker) -> float:
        if not self._is_started:
            await self._start()
        self._changes.append(await self._seats.look(free_slots=16, slots=16))
        self.wake()
        return 0.25

    patch.setattr(Worker, "_look", look)


def _sweeper_restores_nothing(patch: pytest.MonkeyPatch) -> None:
    async def restore(self: object, active: object) -> None:
        pass

    patch.setattr(ready_runs.RunRestorer, "restore", restore)


def _retries_are_not_marked(patch: pytest.MonkeyPatch) -> None:
    """The run is looked at when its pause is over, and not when its retry is due."""
    note = ReadyMarks.note_messages

    def note_due_now(self: ReadyMarks, run_id: RunId, messages: Iterable[Outgoing]) -> None:
        note(self, run_id, [message for message in messages if message.delay <= 0])

    patch.setattr(ReadyMarks, "note_messages", note_due_now)


def _messages_wait_for_another_worker(patch: pytest.MonkeyPatch) -> None:
    """A worker gives back, after seconds, what its last poll of a run brought after it had left the run."""
    patch.setattr(Seats, "return_to", lambda self, run_id: None)


def _lost_seat_ends_attempts(patch: pytest.MonkeyPatch) -> None:
    """A run whose seat was lost while nothing was in flight is left, whatever began since the look."""

    def give_up(self: Seats, run_id: RunId) -> bool:
        self._forget(run_id)
        return False

    patch.setattr(Seats, "reclaim", give_up)


def _refused_runs_are_remembered(patch: pytest.MonkeyPatch) -> None:
    """The pause that a run came with is kept, whether the worker serves the run or not."""
    opened = Seats._open

    def remember(self: Seats, run_id: RunId, job: Job | None, changes: SeatChanges, pause: float = 0.0) -> None:
        self._pauses[run_id] = pause
        opened(self, run_id, job, changes, pause)

    patch.setattr(Seats, "_open", remember)


def _refusal_outlasts_the_pause(patch: pytest.MonkeyPatch) -> None:
    """A worker gave back messages of a run that it served again: it had refused the run a moment ago."""
    adopt = Seats.adopt

    def decline_first(self: Seats, run_id: RunId, tenant: TenantId, job_id: JobId) -> bool:
        if self._declined.get(run_id, 0.0) > self._clock.monotonic():
            return False
        return adopt(self, run_id, tenant, job_id)

    patch.setattr(Seats, "adopt", decline_first)


def _moves_without_an_answer_are_not_due(patch: pytest.MonkeyPatch) -> None:
    note = ReadyMarks.note_change
    patch.setattr(ReadyMarks, "note_change", lambda self, run_id, notice=None: note(self, run_id))


async def _leases_without_the_coordinator() -> None:
    await guards.test_leases_are_renewed_while_another_engine_is_away("coordinator", "hang")


async def _retry_in_a_flush() -> None:
    await guards.test_a_retry_of_a_run_that_nobody_serves_is_on_time(True)


async def _retry_of_one_run() -> None:
    await guards.test_a_retry_of_a_run_that_nobody_serves_is_on_time(False)


async def _index_was_lost() -> None:
    await guards.test_an_index_that_was_lost_is_rebuilt(True)


async def _late_messages() -> None:
    # It has a loop of its own.
    guard = test_simulated_fleet.test_messages_that_arrive_at_a_worker_that_has_left_the_run_are_worked_on_there
    await asyncio.to_thread(guard)


PLANTED = [
    Planted(
        "a worker refuses messages of a run that it serves again",
        _refusal_outlasts_the_pause,
        guards.test_a_worker_takes_a_message_of_a_run_that_was_resumed_a_moment_ago,
    ),
    Planted(
        "a resumed run waits for the sweeper if the answer was lost",
        _moves_without_an_answer_are_not_due,
        guards.test_a_run_is_taken_though_nobody_heard_that_it_was_resumed,
    ),
    Planted(
        "a late message is given back",
        _messages_wait_for_another_worker,
        _late_messages,
    ),
    Planted("a retry is not marked", _retries_are_not_marked, _retry_in_a_flush),
    Planted("a retry of a run that is written by itself is not marked", _retries_are_not_marked, _retry_of_one_run),
    Planted("nobody looks at a quiet run again", _nobody_looks_again, guards.test_a_run_whose_mark_was_lost_is_found),
    Planted(
        "a seat is never given up",
        _seat_is_never_given_up,
        guards.test_a_message_for_a_left_run_is_served_by_another,
    ),
    Planted("leases are renewed by a look", _renewal_waits_for_the_tick, _leases_without_the_coordinator),
    Planted(
        "a lost seat ends attempts that began later",
        _lost_seat_ends_attempts,
        guards.test_an_attempt_that_begins_after_the_seat_was_lost_is_not_cancelled,
    ),
    Planted(
        "a worker remembers every run that it refused",
        _refused_runs_are_remembered,
        test_resting_sizes.test_a_worker_forgets_runs_that_it_refused,
    ),
    Planted("a lost index is not rebuilt", _lost_index_is_not_rebuilt, _index_was_lost),
    Planted(
        "a look that fails in part is lost",
        _look_that_fails_in_part_is_lost,
        guards.test_a_run_is_served_although_the_rest_of_the_look_failed,
    ),
    Planted(
        "the sweeper restores no run",
        _sweeper_restores_nothing,
        guards.test_the_sweeper_restores_a_run_that_the_index_never_heard_of,
    ),
]
