"""Bugs that the state machine found."""

from functools import partial
from typing import Any

import pytest

from conveyor.coordination.breaker import Breakers
from conveyor.coordination.breaker_states import KEY, BreakerState, decode_states
from conveyor.engines.queue import Queue
from conveyor.ingest import pipeline
from conveyor.model import Run
from conveyor.process import outcome_writer
from conveyor.process.executors.fetch.remote_lane import RemoteLane
from conveyor.process.lane import LeasedRef
from conveyor.process.target_queues import TargetQueues
from conveyor.recover import overdue_runs, stuck, sweeper
from tests.faults.planted import Planted
from tests.flow import test_ended_ingest, test_lanes, test_lost_workers, test_requeued_too_late
from tests.unit.coordination import test_breaker


def queues_go_from_under_their_holders(patch: pytest.MonkeyPatch) -> None:
    """The ingest of an ended run dropped its queues while a worker held messages of it."""

    async def nobody(queue: Queue, run: Run, now: float) -> bool:
        return False

    patch.setattr(pipeline, "has_holders", nobody)


def queues_are_filled_behind_the_sweeper(patch: pytest.MonkeyPatch) -> None:
    """References were sent again without a look at whether the run had ended meanwhile."""

    async def leave(*_: Any) -> None:
        pass

    for module in (overdue_runs, stuck, sweeper):
        patch.setattr(module, "drop_if_ended", leave)


def a_stale_breaker_stays_as_it_is(patch: pytest.MonkeyPatch) -> None:
    """What was stored counted as a change by another worker, though nobody heeded it any more."""
    change = Breakers._change

    async def unless_stored(self: Breakers, key: str, old: BreakerState | None, new: BreakerState) -> None:
        if decode_states(await self._coordinator.cached(KEY)).get(key) == old:
            await change(self, key, old, new)

    patch.setattr(Breakers, "_change", unless_stored)


def a_reference_in_hand_is_no_demand(patch: pytest.MonkeyPatch) -> None:
    """The lane got no slots while a start was marked, and the reference had to wait for another pass."""

    async def send_one(self: RemoteLane, entry: LeasedRef, *, probes: bool) -> None:
        if (probes and not await self._acquire_probe(entry)) or not await self._mark_started([entry]):
            return
        entry.chunk.suspect = False
        if self._fetchers.capacity(self) > 0:
            self._hand_over([entry])
        else:
            self._targets.free_slot(entry)
            self._waiting.appendleft(entry)

    patch.setattr(RemoteLane, "_send_one", send_one)


def a_lost_reference_waits_for_its_target(patch: pytest.MonkeyPatch) -> None:
    """References whose message was lost were left out where they waited for a slot, and not at their targets."""

    def take(self: TargetQueues[Any]) -> Any:
        while self._ready:
            target = self._ready.popleft()
            target.is_ready = False
            ref = None
            if target.can_start(self._now()):
                ref = target.pop()
                self._count -= 1
            self._place(target)
            if ref is not None:
                return ref
        return None

    patch.setattr(TargetQueues, "take", take)


def retries_are_sent_without_a_lease(patch: pytest.MonkeyPatch) -> None:
    """Retries of a lost message were requeued, into queues that the sweeper may have dropped before."""
    patch.setattr(outcome_writer, "_is_lost_retry", lambda record: False)


PLANTED = [
    Planted(
        "tasks of a lost message start when their target has a slot",
        a_lost_reference_waits_for_its_target,
        partial(test_lost_workers.a_zombie_starts_nothing, {"concurrency_per_host": 5}),
    ),
    Planted(
        "retries of a lost message are sent",
        retries_are_sent_without_a_lease,
        test_lost_workers.a_zombie_requeues_nothing,
    ),
    Planted(
        "an ended ingest drops messages that are held",
        queues_go_from_under_their_holders,
        test_ended_ingest.test_its_queues_stay_while_a_worker_holds_messages_of_it,
    ),
    Planted(
        "an overdue run that ended is sent again",
        queues_are_filled_behind_the_sweeper,
        test_requeued_too_late.past_its_deadline,
    ),
    Planted(
        "a stuck task of a run that ended is sent again",
        queues_are_filled_behind_the_sweeper,
        test_requeued_too_late.stuck,
    ),
    Planted(
        "lost references of a run that ended are sent again",
        queues_are_filled_behind_the_sweeper,
        test_requeued_too_late.lost,
    ),
    Planted(
        "a breaker that went stale never opens again",
        a_stale_breaker_stays_as_it_is,
        test_breaker.a_breaker_opens_again,
    ),
    Planted(
        "a reference loses its turn while its start is marked",
        a_reference_in_hand_is_no_demand,
        partial(test_lanes.turns_at_a_target_while_starts_are_marked, remote=True),
    ),
]
