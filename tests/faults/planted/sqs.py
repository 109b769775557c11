"""Fixed bugs of the queue on SQS: calls that it need not make, and runs on the shared queue that waited for ever."""

from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest

from conveyor.engines.queue import QueueName
from conveyor.engines.sqs import queues, shared, shared_runs
from conveyor.engines.sqs.address import SqsAddress
from conveyor.engines.sqs.calls import SqsRefused
from conveyor.engines.sqs.polls import Message, Polls
from conveyor.engines.sqs.queue import SqsQueue
from conveyor.engines.sqs.queues import Queues
from conveyor.engines.sqs.shared import ServedRun, Shared
from conveyor.process.arrivals import Arrivals
from conveyor.recover.stalled_runs import StalledRuns
from tests.faults.planted import Planted
from tests.faults.test_shared_receiver import TestBothQueuesOfARun, TestStash, TestWhereARunIs
from tests.faults.test_sqs import opened
from tests.faults.test_sqs_polls import TestEmptyQueue, TestLimit, TestRememberedAbsence, TestSharedReceiver
from tests.flow import test_shared_queue
from tests.support.clocks import ManualClock


def _on_a_site(test: Callable[[Any], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    async def guarded() -> None:
        async with opened(clock=ManualClock()) as site:
            await test(site)

    return guarded


def count_every_queue(patch: pytest.MonkeyPatch) -> None:
    def queues_of(self: SqsAddress, names: Iterable[str]) -> set[str]:
        return {name for name in names if name.startswith(self.runs)}

    patch.setattr(SqsAddress, "runs_of", queues_of)


def remember_absence_for_a_second(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(queues, "_LONGEST_ABSENCE", 1.0)
    patch.setattr(Queues._find, "__defaults__", (float("inf"), 1.0))


def remember_absence_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(queues, "_LONGEST_ABSENCE", 1e9)
    patch.setattr(queues, "_FIRST_ABSENCE", 1e9)


def look_between_two_polls(patch: pytest.MonkeyPatch) -> None:
    begun = Polls._begun

    async def looked_first(self: Polls, url: str, limit: int, visibility: float) -> list[Message]:
        return await self.now(url, limit, visibility) or await begun(self, url, limit, visibility)

    patch.setattr(Polls, "_begun", looked_first)


def keep_what_polls_brought(patch: pytest.MonkeyPatch) -> None:
    async def nothing(self: Polls, messages: list[Message], pause: object) -> None: ...

    patch.setattr(Polls, "give_back", nothing)


def stop_where_listing_is_denied(patch: pytest.MonkeyPatch) -> None:
    async def counted(self: Queues) -> int:
        return len(await self.runs(self._limit))

    patch.setattr(Queues, "_count", counted)


def give_back_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Shared, "_pause", lambda self: lambda message: 0.0)


def serve_queues_and_not_runs(patch: pytest.MonkeyPatch) -> None:
    """A worker asks for the retries of a run first. What that receive brought of the run queue went back for a while,
    each time: the last message of a resumed run was found by the repair of stalled runs."""
    patch.setattr(shared, "home_queue", lambda queue: queue)


def return_without_a_word(patch: pytest.MonkeyPatch) -> None:
    """The index does not know when messages are visible again that nobody took."""
    patch.setattr(SqsQueue, "_on_returned", lambda self, message, delay: None)


def overlook_the_stash(patch: pytest.MonkeyPatch) -> None:
    def has_arrived(self: SqsQueue, queue: QueueName) -> bool:
        return any(name == queue and self._polls.has_arrived(url) for url, name in self._received.items())

    patch.setattr(SqsQueue, "has_arrived", has_arrived)


def tidy_with_the_next_receive(patch: pytest.MonkeyPatch) -> None:
    async def nothing(self: Shared) -> None: ...

    patch.setattr(Shared, "_keep_tidy", nothing)


def count_from_the_last_receive(patch: pytest.MonkeyPatch) -> None:
    """The stash of a run goes back soon after the first message, if the run was asked for long ago."""

    def stash(self: Shared, run: ServedRun, queue: QueueName, message: Message) -> None:
        run.stash.setdefault(queue, deque()).append(message)

    patch.setattr(Shared, "_stash", stash)


def have_the_last_receiver_sort(patch: pytest.MonkeyPatch) -> None:
    def on_arrival(self: Shared) -> None:
        if self._runs:
            self._wake(next(reversed(self._runs)))

    patch.setattr(Shared, "on_arrival", on_arrival)


def keep_messages_of_refused_runs(patch: pytest.MonkeyPatch) -> None:
    async def nothing(self: Arrivals, run_ids: object) -> None: ...

    patch.setattr(Arrivals, "give_back", nothing)


def look_for_the_shared_queue_rarely(patch: pytest.MonkeyPatch) -> None:
    async def shared_url(self: Queues, memory: float = 0.0) -> str | None:
        return await self._find(self._address.shared)

    patch.setattr(Queues, "shared", shared_url)


def trust_the_first_look(patch: pytest.MonkeyPatch) -> None:
    """A run that is on both queues is looked for on the shared one after five minutes."""
    patch.setattr(shared_runs, "_FIRST_LOOK_SECONDS", 300.0)


def repair_only_what_is_empty(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StalledRuns, "is_stalled", lambda self, job, depth, ended: False)


PLANTED = [
    Planted(
        "who asks for the retries of a run gives its new references back",
        serve_queues_and_not_runs,
        _on_a_site(TestBothQueuesOfARun().test_who_asks_for_retries_gets_new_references_next),
    ),
    Planted(
        "nobody knows when a message that went back is visible",
        return_without_a_word,
        test_shared_queue.test_a_resumed_run_ends_as_soon_as_its_message_is_visible,
    ),
    Planted(
        "a message that another receive brought has not arrived",
        overlook_the_stash,
        _on_a_site(TestStash().test_it_has_arrived_for_a_receiver_that_left),
    ),
    Planted(
        "a stash waits for the next receive",
        tidy_with_the_next_receive,
        _on_a_site(TestStash().test_it_goes_back_though_nobody_receives_any_more),
    ),
    Planted(
        "a stash goes back before its receiver can return",
        count_from_the_last_receive,
        _on_a_site(TestStash().test_a_receiver_that_left_long_ago_has_time_to_return),
    ),
    Planted(
        "what a poll of the shared queue brought waits for the receiver that asked last",
        have_the_last_receiver_sort,
        _on_a_site(TestStash().test_a_poll_whose_receiver_is_gone_is_sorted_at_once),
    ),
    Planted(
        "messages of a run that a worker refused stay with it",
        keep_messages_of_refused_runs,
        test_shared_queue.test_what_arrives_for_a_paused_run_goes_back_at_once,
    ),
    Planted(
        "the first run that shares waits for the next look at the shared queue",
        look_for_the_shared_queue_rarely,
        _on_a_site(TestWhereARunIs().test_the_first_run_that_shares_is_found_soon),
    ),
    Planted(
        "a run on two queues is found on one",
        trust_the_first_look,
        _on_a_site(TestWhereARunIs().test_a_run_that_two_processes_put_in_two_places_is_found_in_both),
    ),
    Planted(
        "recovery queues count against the limit of runs",
        count_every_queue,
        _on_a_site(TestLimit().test_runs_are_counted_and_not_queues),
    ),
    Planted(
        "a recovery queue that never was is looked for every second",
        remember_absence_for_a_second,
        _on_a_site(TestRememberedAbsence().test_a_recovery_queue_that_never_was_is_seldom_looked_for),
    ),
    Planted(
        "a recovery queue that another process made is never found",
        remember_absence_for_ever,
        _on_a_site(TestRememberedAbsence().test_a_retry_of_another_process_is_found_within_30_seconds),
    ),
    Planted(
        "an empty queue has short polls between its long ones",
        look_between_two_polls,
        _on_a_site(TestEmptyQueue().test_it_has_one_poll_and_no_other_calls),
    ),
    Planted(
        "what the polls of a process brought waits for its timeout",
        keep_what_polls_brought,
        _on_a_site(TestEmptyQueue().test_a_process_that_ends_gives_back_what_its_polls_brought),
    ),
    Planted(
        "nothing is sent where ListQueues is denied",
        stop_where_listing_is_denied,
        _on_a_site(TestLimit().test_a_process_that_may_not_list_queues_works_all_the_same),
        (SqsRefused,),
    ),
    Planted(
        "messages of a paused run circulate in the shared queue",
        give_back_at_once,
        _on_a_site(TestSharedReceiver().test_messages_of_a_run_that_is_not_served_do_not_circulate),
    ),
    Planted(
        "a lost reference in the shared queue is lost for ever",
        repair_only_what_is_empty,
        test_shared_queue.test_a_lost_reference_is_found_by_time,
    ),
]
