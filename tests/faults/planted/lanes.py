"""Bugs of lanes and of what they share with other workers: limits for each target, and breakers."""

import asyncio
from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import islice
from typing import Any

import pytest

from conveyor.accept import control
from conveyor.coordination import limits
from conveyor.coordination.breaker import Breakers
from conveyor.coordination.breaker_states import LEVELS
from conveyor.coordination.host_lanes import HostLanes, PaceUser
from conveyor.model import RunId
from conveyor.process import feeder, limit_requests, target_queue
from conveyor.process.chunk_decision import ChunkDecision
from conveyor.process.executors.fetch.remote_lane import RemoteLane
from conveyor.process.gate import Gate
from conveyor.process.lane import Lane, LeasedRef
from conveyor.process.limit_requests import LimitRequests
from conveyor.process.local_lane import LocalLane
from conveyor.process.recorder import LeasedChunk, Recorder
from conveyor.process.slot_dealer import SlotDealer
from conveyor.process.slot_times import SlotTimes
from conveyor.process.target_queue import TargetQueue
from conveyor.process.target_queues import TargetQueues
from tests.faults.planted import Planted
from tests.flow import test_blocked_jobs, test_lanes, test_lost_workers
from tests.support.small_fleet import Recording, open_fleet
from tests.unit.coordination import test_breaker
from tests.unit.process import test_paced_refs, test_remote_lane, test_slot_dealer, test_slot_times, test_target_queues

Plant = Callable[[pytest.MonkeyPatch], None]


def _nothing(*_: object) -> None:
    pass


def references_in_hand_are_dropped(lane: type[Lane]) -> Plant:
    """A call fails between taking a reference and starting it, and nobody has it any more."""
    return lambda monkeypatch: monkeypatch.setattr(lane, "_put_back", _nothing)


def a_failed_mark_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start of a message could not be marked, and is never tried again."""

    async def mark_started(self: Recorder, chunk: LeasedChunk) -> None:
        if chunk.marking is None:
            chunk.marking = asyncio.create_task(self._queue.mark_started(chunk.queue, [chunk.receipt]))
        await asyncio.shield(chunk.marking)

    monkeypatch.setattr(Recorder, "mark_started", mark_started)


def a_failed_ask_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of a target could not be asked for, and are not asked for again."""
    monkeypatch.setattr(LimitRequests, "_next_try", lambda self, target: 1e12)


def the_first_that_waits_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that has its share of a host already is woken, and those behind it are not."""

    def find_next(self: HostLanes, finished: PaceUser | None = None) -> list[PaceUser]:
        return list(islice(self.waiting, max(0, self.limit - self.in_flight)))

    monkeypatch.setattr(HostLanes, "find_next", find_next)


def slots_are_freed_in_one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that could not be given back counts as free here and as taken elsewhere."""

    def has_surplus(self: TargetQueue[Any]) -> bool:
        return self.free > 0 and not (self.refs and self._limits.slots)

    monkeypatch.setattr(TargetQueue, "has_surplus", has_surplus)


def slots_without_a_pass_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that wait for a pass count as idle, and as long as there are idle ones nobody asks for passes."""

    def count_idle(self: TargetQueues[Any], target: TargetQueue[Any]) -> None:
        idle = max(0, target.free)
        self._idle, target.idle = self._idle + idle - target.idle, idle

    monkeypatch.setattr(TargetQueues, "_count_idle", count_idle)


def late_references_keep_their_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that frees slots when attempts are over frees none of those that had no attempt."""
    fail_late = Lane._fail_late

    def keep_slots(self: Lane, entries: list[LeasedRef]) -> list[LeasedRef]:
        slots = [entry.slot for entry in entries]
        for entry in entries:
            entry.slot = None
        in_time = fail_late(self, entries)
        for entry, slot in zip(entries, slots, strict=True):
            entry.slot = slot
        return in_time

    monkeypatch.setattr(Lane, "_fail_late", keep_slots)


def passes_are_reserved_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all that the lane could start, however long it takes until they may."""
    monkeypatch.setattr(limits, "AHEAD", 1e9)
    monkeypatch.setattr(limit_requests, "AHEAD", 1e9)
    for module in (limit_requests, target_queue):
        monkeypatch.setattr(module, "RESERVED_SECONDS", 1e9)


def nothing_is_fed_to_a_closed_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks that should end for lack of patience stay in their queue, where nobody looks at them."""

    def open_until(self: Gate) -> float | None:
        shared = [f"upstream:{self._upstream}"] if self._upstream is not None else self._gateways
        blocked = self._first_open(shared) if self.is_watching else None
        return None if blocked is None else blocked.state.until

    monkeypatch.setattr(Gate, "open_until", open_until)


def a_breaker_that_opens_again_is_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those that another worker opened are: what waits for a pass of its target is not looked at before that."""
    refresh = Breakers.refresh

    async def others_only(self: Breakers, *args: Any) -> bool:
        before = set(self._open)
        await refresh(self, *args)
        return not set(self._open) <= before

    monkeypatch.setattr(Breakers, "refresh", others_only)


def what_runs_is_as_wide_as_its_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """A narrower lane gives back the permits of attempts that go on."""

    def within_width(self: RemoteLane) -> int:
        return min(self._fetchers.attempts(self), self.width)

    monkeypatch.setattr(RemoteLane, "attempts", property(within_width))


def each_slot_goes_back_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits has to ask the coordinator for it."""
    free_slot = TargetQueues.free_slot

    def free_and_report(self: TargetQueues[Any], ref: Any) -> None:
        target = self._targets.get(ref.slot)
        if target is not None:
            target.slots -= 1
        free_slot(self, ref)

    monkeypatch.setattr(TargetQueues, "free_slot", free_and_report)


def canaries_are_counted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first place that can not be freed keeps all others taken, and they are renewed."""

    async def release_probes(self: Breakers) -> None:
        probed, self._probed = self._probed, {}
        for key, count in probed.items():
            await self._hold(key, self._count_probed(key, count), 1 << LEVELS)

    monkeypatch.setattr(Breakers, "_release_probes", release_probes)


def resume_leaves_parked_tasks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The breaker closed while the run was paused: nobody made its tasks visible."""

    class Nothing:
        pass

    monkeypatch.setattr(control, "Hastens", Nothing)


async def _resumed_after_the_breaker_closed() -> None:
    site = test_blocked_jobs.Site()
    async with open_fleet() as fleet:
        fleet.executor = Recording(fleet.clock, site.act, target=test_blocked_jobs.host)
        await test_blocked_jobs.test_after_it_was_resumed(fleet, site)


def dead_letter_what_ran_at_a_death(patch: pytest.MonkeyPatch) -> None:
    """A message of one task has half as many lost starts."""

    def decided(kind: Any, delivery: Any, chunk: Any, refs: Any, *limits: Any, **more: Any) -> ChunkDecision:
        found = decide(kind, delivery, chunk, refs, *limits, **more)
        return ChunkDecision.DEAD_LETTER if found is ChunkDecision.SPLIT and len(refs) == 1 else found

    decide = feeder.decide
    patch.setattr(feeder, "decide", decided)


def slots_in_use_are_dealt(patch: pytest.MonkeyPatch) -> None:
    """A lane is as wide at once as it was dealt slots, whether or not attempts of others have them."""

    def set_widths(self: SlotDealer, lanes: Collection[Lane], widths: Mapping[RunId, int]) -> None:
        for lane in lanes:
            lane.set_width(widths.get(lane.job.run.run_id, 0))
            self._count(lane, self._clock.monotonic())

    patch.setattr(SlotDealer, "_set_widths", set_widths)


def slots_wait_for_the_next_tick(patch: pytest.MonkeyPatch) -> None:
    """A slot whose attempt ended goes to no lane before the next tick."""
    patch.setattr(SlotDealer, "on_slots_freed", lambda dealer, lane: dealer._count(lane, dealer._clock.monotonic()))


def workers_owe_a_tenant_its_slots_at_the_same_time(patch: pytest.MonkeyPatch) -> None:
    """Each of a hundred workers gives a tenant one slot at once, and then none for a hundred turns."""
    patch.setattr(SlotTimes, "_draw_weight", lambda times, workers: float(workers))


def slots_wait_for_their_targets(patch: pytest.MonkeyPatch) -> None:
    """The slots of a stopped lane go to no other before the coordinator has those of its targets back."""
    stop = RemoteLane.stop

    async def stop_unheard(lane: RemoteLane, grace: float) -> list[LeasedChunk]:
        heard = lane._owner.on_slots_freed
        patch.setattr(lane._owner, "on_slots_freed", _nothing)
        left = await stop(lane, grace)
        patch.setattr(lane._owner, "on_slots_freed", heard)
        heard(lane)
        return left

    patch.setattr(RemoteLane, "stop", stop_unheard)


PLANTED = [
    Planted(
        "a tenant at every worker has a slot of each at once, and then none",
        workers_owe_a_tenant_its_slots_at_the_same_time,
        test_slot_times.test_a_tenant_at_every_worker_has_its_part_within_seconds,
    ),
    Planted(
        "slots of a stopped lane wait for the coordinator",
        slots_wait_for_their_targets,
        test_remote_lane.test_slots_of_a_stopped_lane_are_free_at_once,
    ),
    Planted(
        "slots are dealt that attempts of other lanes have",
        slots_in_use_are_dealt,
        test_slot_dealer.test_a_slot_goes_to_who_waits_when_an_attempt_ends,
    ),
    Planted(
        "a slot that is free waits for the next tick",
        slots_wait_for_the_next_tick,
        test_slot_dealer.test_a_slot_goes_to_who_waits_when_an_attempt_ends,
    ),
    Planted(
        "a task that ran when its worker was killed is poison",
        dead_letter_what_ran_at_a_death,
        partial(test_lost_workers.killed_workers_condemn_nobody, 1),
    ),
    Planted(
        "resumed_and_still_parked",
        resume_leaves_parked_tasks_alone,
        _resumed_after_the_breaker_closed,
    ),
    Planted(
        "reference_dropped_by_a_lane",
        references_in_hand_are_dropped(LocalLane),
        partial(test_lanes.a_start_that_could_not_be_marked, remote=False),
    ),
    Planted(
        "reference_dropped_by_a_remote_lane",
        references_in_hand_are_dropped(RemoteLane),
        partial(test_lanes.a_start_that_could_not_be_marked, remote=True),
    ),
    Planted(
        "canary_dropped_by_a_lane",
        references_in_hand_are_dropped(RemoteLane),
        partial(test_lanes.a_canary_that_could_not_ask, remote=True),
    ),
    Planted(
        "failed_mark_kept", a_failed_mark_is_kept, partial(test_lanes.a_start_that_could_not_be_marked, remote=True)
    ),
    Planted(
        "limits_asked_for_once",
        a_failed_ask_is_the_last,
        partial(test_lanes.limits_that_could_not_be_asked_for, "reserve", remote=False),
    ),
    Planted("slots_freed_in_one_try", slots_are_freed_in_one_try, test_lanes.a_slot_that_could_not_be_freed),
    Planted("canaries_kept_for_ever", canaries_are_counted_one_by_one, test_breaker.probes_that_could_not_be_freed),
    Planted(
        "late_reference_keeps_its_slot",
        late_references_keep_their_slot,
        partial(test_lanes.late_references_leave_their_target, remote=True),
    ),
    Planted(
        "passes_lost_with_a_paused_lane",
        passes_are_reserved_far_ahead,
        partial(test_lanes.passes_are_not_lost_with_a_lane, remote=True),
    ),
    Planted("passes_lost_with_a_dead_worker", passes_are_reserved_far_ahead, test_lanes.passes_of_a_worker_that_died),
    Planted("no_patience_with_an_upstream", nothing_is_fed_to_a_closed_gate, test_lanes.patience_with_an_upstream),
    Planted("no_patience_with_a_gateway", nothing_is_fed_to_a_closed_gate, test_lanes.patience_with_a_gateway),
    Planted(
        "passes_for_tasks_without_patience",
        a_breaker_that_opens_again_is_no_news,
        partial(test_lanes.no_pass_is_needed_once_patience_is_over, remote=True),
    ),
    Planted(
        "permits_of_attempts_that_go_on",
        what_runs_is_as_wide_as_its_lane,
        partial(test_lanes.what_was_begun_keeps_its_permit, remote=True),
    ),
    Planted(
        "slots_asked_for_one_by_one",
        each_slot_goes_back_first,
        partial(test_lanes.slots_are_handed_on_without_a_call, remote=True),
    ),
    Planted(
        "no_pass_asked_for_a_held_slot",
        slots_without_a_pass_are_idle,
        test_target_queues.test_slots_that_wait_for_passes_keep_nobody_from_asking_for_them,
    ),
    Planted(
        "room_offered_to_a_lane_with_its_share",
        the_first_that_waits_is_woken,
        test_paced_refs.a_lane_with_more_than_its_share_leaves_room_to_others,
    ),
]
