"""What the sweep over single faults found."""

import asyncio
from collections.abc import Sequence

import pytest

from conveyor import service
from conveyor.coordination.breaker import Breakers
from conveyor.coordination.breaker_states import LEVELS
from conveyor.engines.records import Document
from conveyor.model import Job
from conveyor.process.heartbeat import Heartbeat
from conveyor.process.outcome_writer import OutcomeWriter, _event
from conveyor.process.recorded_outcomes import RecordedOutcome
from conveyor.service import Service
from tests.faults.planted import Planted
from tests.flow import test_lost_answers
from tests.unit import test_service


async def _stop_all_until_the_first_error(services: Sequence[Service], tasks: Sequence[asyncio.Task[None]]) -> None:
    for each in services:
        each.stop()
    await asyncio.gather(*tasks)


def _first_error_ends_the_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(service, "stop_all", _stop_all_until_the_first_error)


async def _note_each_time(self: OutcomeWriter, job: Job, attempts: list[RecordedOutcome]) -> None:
    now = self._clock.now()
    events = [_event(done, now) for done in attempts if done.outcome.error is not None]
    if events:
        await self._tasks.note(job.key, events)


def _noted_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OutcomeWriter, "_note", _note_each_time)


async def _created_or_left(self: Heartbeat, row: Document) -> Document:
    await self._records.documents.create_documents([row])
    return row


def _version_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Heartbeat, "_create", _created_or_left)


async def _remove_once(self: Heartbeat) -> None:
    if self._document is not None:
        document, self._document = self._document, None
        await self._records.documents.remove_document(document)


def _row_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Heartbeat, "_remove", _remove_once)


async def _let_go_of_all_at_once(self: Breakers) -> None:
    probed, self._probed = self._probed, {}
    for key, count in probed.items():
        left = self._probing.pop(key, 0) - count
        if left > 0:
            self._probing[key] = left
        await self._hold(key, max(0, left), 1 << LEVELS)


def _places_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Breakers, "_release_probes", _let_go_of_all_at_once)


PLANTED = [
    Planted(
        "the end of a task is noted with each try of its write",
        _noted_again,
        test_lost_answers.test_the_end_of_a_task_is_noted_once_though_its_write_is_made_again,
    ),
    Planted(
        "a worker whose heartbeat lost its answer is dead to the monitor",
        _version_lost,
        test_lost_answers.test_a_worker_goes_on_to_say_that_it_is_alive_after_an_answer_was_lost,
    ),
    Planted(
        "the row of a worker without long tasks stays when its removal failed",
        _row_forgotten,
        test_lost_answers.test_a_worker_without_long_tasks_removes_its_row_however_often_it_takes,
    ),
    Planted(
        "a canary's place that could not be given back is held for ever",
        _places_lost,
        test_lost_answers.test_the_places_of_canaries_come_free_though_giving_one_back_failed,
    ),
    Planted(
        "one role that fails to close leaves the others without their engines",
        _first_error_ends_the_wait,
        test_service.test_an_error_at_closing_is_told_when_all_the_others_have_given_back_what_they_hold,
    ),
]
