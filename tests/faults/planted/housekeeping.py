"""Housekeeping: one item after the other, on every run in every pass, and reads that need the coordinator."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import pytest

from conveyor.coordination.fail_open import FailOpen
from conveyor.coordination.isolation import Isolation
from conveyor.coordination.parallel import at_once
from conveyor.coordination.revisits import Revisits
from conveyor.engines.queue import Depth
from conveyor.engines.sqs.queue import SqsQueue
from conveyor.notify import deliverer, progress_notifier
from conveyor.notify.dispatcher import OutboxDispatcher
from conveyor.notify.progress_notifier import ProgressNotifier
from conveyor.recover import backlog, retention
from conveyor.recover.backlog import Backlog
from conveyor.states import RunState
from tests.faults import test_sqs
from tests.faults.planted import Planted
from tests.flow import test_coordinator_away, test_events, test_housekeeping, test_webhook_order
from tests.support.small_fleet import open_fleet


def _always_due(self: Revisits, items: Sequence[Any], *_: object) -> list[Any]:
    return list(items)


def _checked_in_every_pass(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Revisits, "due", _always_due)


def _paused_for_long(patch: pytest.MonkeyPatch) -> None:
    checked = Revisits.checked

    def without_end(self: Revisits, name: str, mark: object, found: object, by: float = 0.0) -> None:
        checked(self, name, mark, found)

    patch.setattr(Revisits, "checked", without_end)


async def _one_after_the_other(
    self: Isolation, items: Iterable[Any], name: Callable[[Any], str], work: Callable[[Any], Awaitable[None]], *_: Any
) -> None:
    for item in items:
        with self.item(name(item)):
            await work(item)


def _no_parallelism(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Isolation, "each", _one_after_the_other)


def _foreign_items_hide(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Isolation, "skipped", property(lambda self: self.failing))


async def _waits_for_it(self: FailOpen, call: Callable[[], Awaitable[Any]], default: object) -> Any:
    return await call()


def _reads_fail_closed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FailOpen, "_open", _waits_for_it)


def _unknown_is_delayed(patch: pytest.MonkeyPatch) -> None:
    depth = SqsQueue.depth

    async def told_as_delayed(self: SqsQueue, queue: Any) -> Depth:
        found = await depth(self, queue)
        return Depth(found.ready, found.held, found.delayed + int(found.unknown))

    patch.setattr(SqsQueue, "depth", told_as_delayed)


async def _counted_for_each_run(self: Backlog, name: Any) -> backlog.QueueSample:
    queue: Any = self._system.queue
    shared = await queue.shared_depth() if name.startswith("run:") else await queue.depth(name)
    return backlog.QueueSample(shared, None)


def _shared_queue_many_times(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Backlog, "queue", _counted_for_each_run)


def _lost_additions(patch: pytest.MonkeyPatch) -> None:
    check = ProgressNotifier._check

    async def read_before_the_wait(self: ProgressNotifier, notified: Any, job: Any) -> None:
        quarters = notified.quarters
        own = type(notified)()
        await check(self, own, job)
        notified.quarters = quarters + own.quarters

    patch.setattr(ProgressNotifier, "_check", read_before_the_wait)


def _small_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(retention, "_JOBS", 10)


def _no_turns(patch: pytest.MonkeyPatch) -> None:
    """All deliveries of a job that are due are sent at once."""
    patch.setattr(deliverer, "_turn", lambda row, delivery: None)


def _written_at_once(patch: pytest.MonkeyPatch) -> None:
    """All documents of a pass are written at once, whichever of them is first."""

    async def create(self: OutboxDispatcher, rows: Sequence[Any]) -> None:
        documents = self._records.documents
        await at_once(range(0, len(rows), 25), lambda start: documents.create_documents(rows[start : start + 25]))

    patch.setattr(OutboxDispatcher, "_create", create)


def _quarters_of_finished_runs(patch: pytest.MonkeyPatch) -> None:
    """What was read of the active jobs some time ago still holds."""
    patch.setattr(progress_notifier, "WORKABLE", frozenset(RunState))


async def _finished_run_has_no_more_quarters() -> None:
    async with open_fleet() as fleet:
        await test_events.TestMilestones().test_there_are_none_of_a_run_that_has_finished(fleet.system)


PLANTED = [
    Planted(
        "a quarter of a run is reported after its end", _quarters_of_finished_runs, _finished_run_has_no_more_quarters
    ),
    Planted(
        "the events of a job overtake each other",
        _no_turns,
        test_webhook_order.test_a_slow_event_holds_up_its_own_job_alone,
    ),
    Planted(
        "the deliveries of a job are written in any order",
        _written_at_once,
        test_webhook_order.test_deliveries_are_written_and_due_in_the_order_of_the_events,
    ),
    Planted(
        "the sweeper asks for the queues of every run in every pass",
        _checked_in_every_pass,
        test_housekeeping.TestQuietRuns().test_their_checks_get_rare,
    ),
    Planted(
        "a run reaches its maximum lifetime during a pause and stays",
        _paused_for_long,
        test_housekeeping.TestQuietRuns().test_the_maximum_lifetime_waits_for_no_pause,
    ),
    Planted(
        "a role works on one item at a time", _no_parallelism, test_housekeeping.test_work_on_many_items_is_bounded
    ),
    Planted("a pass purges ten jobs", _small_pages, test_housekeeping.test_a_small_job_is_purged_in_one_pass),
    Planted(
        "items count while others wait", _lost_additions, test_coordinator_away.test_progress_is_reported_without_it
    ),
    Planted(
        "a reader needs the coordinator",
        _reads_fail_closed,
        test_coordinator_away.test_a_status_is_read_without_it,
    ),
    Planted(
        "items of another process hide the own ones",
        _foreign_items_hide,
        test_housekeeping.test_items_of_others_hide_none,
    ),
    Planted(
        "what a process cannot know is told as delayed",
        _unknown_is_delayed,
        test_sqs.test_what_a_fresh_process_cannot_know_is_neither_delayed_nor_absent,
    ),
    Planted(
        "a queue that runs share counts once for each of them",
        _shared_queue_many_times,
        test_housekeeping.test_a_shared_queue_counts_once,
    ),
]
