"""Fetchers, the watchdog, and the processes that run handlers."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import pytest

from conveyor import handlers
from conveyor.process import watchdog
from conveyor.process.executors.fetch import child, fetchers, packs
from conveyor.process.executors.fetch.frames import Order, Orders, framed
from conveyor.process.executors.python import children as executors_children
from conveyor.process.executors.python import handler_calls as calls
from conveyor.process.executors.python import python_executor as python
from conveyor.process.executors.python.children import Child, NotStarted
from conveyor.process.watchdog import GRACE, timeout_of
from tests.faults.planted import Planted
from tests.flow import test_capacity, test_fetching_lanes, test_watchdog
from tests.unit.process import test_fetch_child as test_fetcher
from tests.unit.process import test_fetchers, test_python_executor


def all_runners_leave(patch: pytest.MonkeyPatch) -> None:
    """A runner that ends stays in the set until a later step: all that end in one step find the lane too wide."""

    def fill(self: child.ChildFetcher, lane: child.ChildLane) -> None:
        for _ in range(min(lane.width - len(lane.running), len(lane.waiting))):
            runner = asyncio.create_task(run(self, lane))
            lane.running.add(runner)
            runner.add_done_callback(lane.running.discard)

    async def run(self: child.ChildFetcher, lane: child.ChildLane) -> None:
        while lane.waiting and len(lane.running) <= lane.width:
            await self._attempt(lane, lane.waiting.popleft())

    patch.setattr(child.ChildFetcher, "_fill", fill)


def orders_kept_without_a_width(patch: pytest.MonkeyPatch) -> None:
    """A fetcher whose share of a lane becomes 0 keeps its orders."""
    real = child.ChildFetcher._accept

    def accept(self: child.ChildFetcher, orders: Orders) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self, "_hand_back", lambda lane: None)
            real(self, orders)

    patch.setattr(child.ChildFetcher, "_accept", accept)


def frames_for_a_process_that_is_gone(patch: pytest.MonkeyPatch) -> None:
    """They are written as if it were there, and raise where nobody expects it."""
    for module in (child, fetchers, packs):
        patch.setattr(module, "write_frame", lambda writer, value: writer.write(framed(value)))


def an_attempt_that_raises_takes_its_order_along(patch: pytest.MonkeyPatch) -> None:
    async def attempt(self: child.ChildFetcher, lane: child.ChildLane, order: Order) -> None:
        with suppress(RuntimeError, UnicodeEncodeError):
            self._answer(lane, order, await self._executor.attempt_one(lane.job, order.ref))

    patch.setattr(child.ChildFetcher, "_attempt", attempt)


def a_width_without_references_is_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fetchers.Fetchers, "update_width", lambda self, port: None)
    real = fetchers.Fetchers.start

    def start(self: fetchers.Fetchers, port: fetchers.Port, held: Sequence[fetchers.LeasedReference]) -> None:
        if held:
            real(self, port, held)

    patch.setattr(fetchers.Fetchers, "start", start)


def orders_stay_where_no_slot_is_free(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fetchers.Fetchers, "balance", lambda self, port: None)


def references_without_a_process_are_lost(patch: pytest.MonkeyPatch) -> None:
    real = fetchers.Fetchers.start

    def start(self: fetchers.Fetchers, port: fetchers.Port, held: Sequence[fetchers.LeasedReference]) -> None:
        if any(member.ready.is_set() for member in self.members):
            real(self, port, held)

    patch.setattr(fetchers.Fetchers, "start", start)


def silence_of_one_lane_is_not_seen(patch: pytest.MonkeyPatch) -> None:
    """Any word of the process counted for all its lanes."""

    def watch(self: fetchers.FetcherProcess) -> None:
        owing = [share for share in self._shares.values() if share.owed]
        heard_at = max((share.heard_at for share in self._shares.values()), default=0.0)
        patience = max(
            (timeout_of(share.port.job, entry.ref) for share in owing for _, entry in self._sent.values()), default=0
        )
        if owing and self._process is not None and self._reading_time() - heard_at > patience + GRACE:
            self._process.kill()

    patch.setattr(fetchers.FetcherProcess, "watch", watch)


def waiting_for_the_store_counts_as_silence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fetchers.FetcherProcess, "_reading_time", lambda self: self._clock.monotonic())


def a_failed_launch_ends_the_fetcher(patch: pytest.MonkeyPatch) -> None:
    async def run(self: fetchers.FetcherProcess) -> None:
        pause = fetchers._FIRST_PAUSE
        while True:
            await self._run_one()
            await self._clock.sleep(pause)
            pause = min(fetchers._LONGEST_PAUSE, pause * 2)

    patch.setattr(fetchers.FetcherProcess, "run", run)


def any_attempt_of_the_runner_is_broken_off(patch: pytest.MonkeyPatch) -> None:
    def supersede(self: watchdog.WatchedAttempt) -> None:
        self.superseded = True
        self.task.cancel()

    patch.setattr(watchdog.WatchedAttempt, "supersede", supersede)


def a_child_without_a_descriptor_is_no_failed_start(patch: pytest.MonkeyPatch) -> None:
    async def start_one(self: python.Children) -> None:
        with suppress(NotStarted, OSError):
            self._ready.append(await self.make())

    patch.setattr(Child, "start", Child._start)
    patch.setattr(python.Children, "_start_one", start_one)


def a_child_without_a_descriptor_costs_the_task(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(executors_children, "_NO_CAPACITY", frozenset())


def text_of_handlers_is_passed_on_as_it_is(patch: pytest.MonkeyPatch) -> None:
    for module in (handlers, calls):
        patch.setattr(module, "storable_text", lambda text, longest: text[:longest])


def attempts_of_a_wider_lane_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    """The slots of a lane that was narrowed count as free at once."""
    patch.setattr(fetchers.LaneShare, "attempts", property(lambda share: min(share.width, share.owed)))


PLANTED = [
    Planted(
        "attempts beyond the width of a lane at a fetcher are not counted",
        attempts_of_a_wider_lane_are_not_counted,
        test_fetchers.test_attempts_beyond_a_narrower_lane_count_until_they_end,
    ),
    Planted(
        "all runners of a lane leave in one step",
        all_runners_leave,
        test_fetcher.test_runners_that_end_in_one_step_leave_no_order_behind_in_a_narrower_lane,
    ),
    Planted(
        "a job whose concurrency is lowered stands still",
        all_runners_leave,
        test_fetching_lanes.test_a_job_whose_concurrency_is_lowered_does_not_stand_still,
    ),
    Planted(
        "a fetcher keeps orders of a lane without a width",
        orders_kept_without_a_width,
        test_fetcher.test_a_lane_without_a_width_hands_back_what_has_not_begun,
    ),
    Planted(
        "a fetcher keeps orders when it has no share of the lane",
        orders_kept_without_a_width,
        test_fetchers.test_references_of_a_fetcher_without_a_share_go_to_the_others,
    ),
    Planted(
        "references are lost on the way to a process that is gone",
        frames_for_a_process_that_is_gone,
        test_fetchers.test_a_process_that_died_while_nothing_was_read_gets_no_more,
        (RuntimeError,),
    ),
    Planted(
        "outcomes for a worker that is gone raise",
        frames_for_a_process_that_is_gone,
        test_fetcher.test_outcomes_for_a_worker_that_is_gone_are_no_errors,
    ),
    Planted(
        "an attempt that raises takes its order along",
        an_attempt_that_raises_takes_its_order_along,
        test_fetcher.test_an_executor_that_raises_costs_its_order_and_no_runner,
    ),
    Planted(
        "a new width without references is not told",
        a_width_without_references_is_not_told,
        test_fetchers.test_a_lane_that_was_dealt_nothing_goes_on_when_it_is_dealt_something,
    ),
    Planted(
        "orders wait at one fetcher while another has slots free",
        orders_stay_where_no_slot_is_free,
        test_fetchers.test_a_fetcher_with_free_slots_gets_what_waits_at_another,
    ),
    Planted(
        "references are lost if no fetcher is there",
        references_without_a_process_are_lost,
        test_fetchers.test_references_come_back_if_there_is_no_process_to_take_them,
    ),
    Planted(
        "a lane's silence hides behind other lanes",
        silence_of_one_lane_is_not_seen,
        test_fetchers.test_an_order_that_nothing_runs_is_noticed_though_others_are_answered,
    ),
    Planted(
        "a fetcher is killed because the worker did not read",
        waiting_for_the_store_counts_as_silence,
        test_fetchers.test_silence_while_nothing_is_read_is_not_the_fetchers,
    ),
    Planted(
        "a launch that fails ends the fetcher for good",
        a_failed_launch_ends_the_fetcher,
        test_fetchers.test_a_fetcher_that_can_not_be_launched_is_tried_again_later,
    ),
    Planted(
        "the watchdog breaks off the runner's next attempt",
        any_attempt_of_the_runner_is_broken_off,
        test_watchdog.test_a_runner_that_went_on_while_the_worker_looked_keeps_its_next_attempt,
    ),
    Planted(
        "a child that finds no descriptor is waited for for ever",
        a_child_without_a_descriptor_is_no_failed_start,
        test_capacity.test_a_handler_waits_for_a_process_that_the_machine_has_no_capacity_for,
    ),
    Planted(
        "a machine without descriptors spends the attempts of tasks",
        a_child_without_a_descriptor_costs_the_task,
        test_capacity.test_a_handler_waits_for_a_process_that_the_machine_has_no_capacity_for,
    ),
    Planted(
        "a lone surrogate in what a handler raises hangs its batch",
        text_of_handlers_is_passed_on_as_it_is,
        test_python_executor.test_a_result_that_says_anything_can_be_sent_and_written,
    ),
]
