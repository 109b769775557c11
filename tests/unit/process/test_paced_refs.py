"""The references of a lane that wait for the pace of their hosts: who is woken, what is kept, and what is postponed."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
import pytest

from conveyor.coordination.pace import START
from conveyor.coordination.paces import Paces
from conveyor.engines.queue import QueueName
from conveyor.model import InputJson, JobKind, Outcome, Pace, TaskError, TaskRef
from conveyor.process.lane import LeasedRef
from conveyor.process.paced_refs import PacedRefs
from conveyor.process.recorder import LeasedChunk
from conveyor.states import TaskStatus
from tests.support.clocks import ManualClock
from tests.support.in_process_fetchers import idle
from tests.support.make_jobs import make_job


class PacedLane:
    """A lane that remembers what was postponed, and whether it was woken."""

    def __init__(self, clock: ManualClock, paces: Paces) -> None:
        self.postponed: list[tuple[int, float]] = []
        self.woken = 0
        self.sent: list[LeasedRef] = []
        job = make_job(clock, kind=JobKind.FETCH, pace=Pace.AUTO, concurrency=64)
        self.refs: PacedRefs[LeasedRef] = PacedRefs(
            paces, job, host_of, clock, 4, self._wake, lambda: None, self._postpone, self._spawn
        )
        assert self.refs.is_on
        self.refs.set_slots(64)

    def _wake(self) -> None:
        self.woken += 1

    def _postpone(self, entry: LeasedRef, delay: float) -> None:
        self.postponed.append((entry.ref.index, delay))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        return asyncio.create_task(work)

    def finish(self, entries: Sequence[LeasedRef]) -> None:
        self.refs.learn(entries, [Outcome(TaskStatus.SUCCEEDED) for _ in entries])
        self.refs.release(entries)


def host_of(ref: TaskRef) -> str:
    return ref.input.split("/")[2]


def entries_of(host: str, count: int) -> list[LeasedRef]:
    chunk = LeasedChunk(QueueName("run"), "receipt", count)
    return [LeasedRef(chunk, TaskRef(index, InputJson(f'"http://{host}/{index}"'))) for index in range(count)]


def refusal(retry_after: float) -> Outcome:
    return Outcome(TaskStatus.FAILED, http_status=429, error=TaskError("http_429", "slow"), retry_after=retry_after)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def paces(clock: ManualClock) -> Paces:
    unused: Any = None
    return Paces(unused, clock, "worker")


async def test_a_host_that_nothing_is_sent_to_is_forgotten(clock: ManualClock, paces: Paces) -> None:
    lane = PacedLane(clock, paces)
    for number in range(50):
        sent = lane.refs.admit(entries_of(f"{number}.example", 2))
        lane.finish(sent[:1])
        assert len(lane.refs._used) == 1, "one is still sent"
        lane.finish(sent[1:])
    assert not lane.refs._used


async def test_a_lane_whose_references_are_lost_passes_its_turn_on(clock: ManualClock, paces: Paces) -> None:
    first, second, third = (PacedLane(clock, paces) for _ in range(3))
    sent = first.refs.admit(entries_of("a.example", START))
    assert len(sent) == START
    lost = entries_of("a.example", 1)
    assert not second.refs.admit(lost)
    assert not third.refs.admit(entries_of("a.example", 1))
    first.finish(sent[:1])
    await idle()
    assert (second.woken, third.woken) == (1, 0), "there is room for one"
    lost[0].chunk.lost = True
    assert not second.refs.take(1)
    await idle()
    assert third.woken == 1
    assert len(third.refs.take(1)) == 1


async def test_a_lane_that_is_drained_passes_its_turn_on(clock: ManualClock, paces: Paces) -> None:
    first, second, third = (PacedLane(clock, paces) for _ in range(3))
    sent = first.refs.admit(entries_of("a.example", START))
    second.refs.admit(entries_of("a.example", 1))
    third.refs.admit(entries_of("a.example", 1))
    first.finish(sent[:1])
    await idle()
    assert (second.woken, third.woken) == (1, 0)
    second.refs.stop()
    await idle()
    assert third.woken == 1


async def a_lane_with_more_than_its_share_leaves_room_to_others() -> None:
    clock = ManualClock()
    unused: Any = None
    first, second = (PacedLane(clock, paces) for paces in [Paces(unused, clock, "worker")] for _ in range(2))
    sent = first.refs.admit(entries_of("a.example", START + 1))
    assert (len(sent), len(first.refs)) == (START, 1), "it waits for its turn, too, and is first"
    assert not second.refs.admit(entries_of("a.example", 1))
    first.refs.release(sent[:1])
    await idle()
    assert (first.woken, second.woken) == (0, 1), "the first has more than half of the limit"
    assert len(second.refs.take(1)) == 1


async def test_a_lane_with_more_than_its_share_leaves_room_to_others() -> None:
    await a_lane_with_more_than_its_share_leaves_room_to_others()


async def test_what_is_found_to_be_ready_can_be_taken(clock: ManualClock, paces: Paces) -> None:
    first, second = (PacedLane(clock, paces) for _ in range(2))
    sent = first.refs.admit(entries_of("a.example", START))
    assert not second.refs.admit(entries_of("a.example", 2))
    assert second.refs.find_ready(64) == 0
    first.refs.release(sent[:1])
    second.refs._ready.clear()
    assert second.refs.find_ready(64) == 1, "whether it was woken or not"
    assert len(second.refs.take(64)) == 1
    assert (second.refs.find_ready(64), second.refs.take(64)) == (0, [])


async def test_references_of_a_host_with_a_long_pause_do_not_wait_in_the_lane(clock: ManualClock, paces: Paces) -> None:
    lane = PacedLane(clock, paces)
    entries = entries_of("a.example", START + 4)
    sent = lane.refs.admit(entries[:-1])
    assert len(lane.refs) == 3
    lane.refs.learn(sent[:1], [refusal(3600.0)])
    assert [index for index, _ in lane.postponed] == [START, START + 1, START + 2], "those that waited"
    assert not lane.refs.admit(entries[-1:])
    assert lane.postponed[-1] == (START + 3, pytest.approx(3600))
    assert (len(lane.refs), lane.refs.has_ready) == (0, False)
    assert len(lane.refs.admit(entries_of("b.example", 1))) == 1


async def test_references_of_a_host_with_a_short_pause_wait_in_the_lane(clock: ManualClock, paces: Paces) -> None:
    lane = PacedLane(clock, paces)
    sent = lane.refs.admit(entries_of("a.example", START + 3))
    lane.refs.learn(sent[:1], [refusal(3.0)])
    assert (len(lane.refs), lane.postponed) == (3, [])
    lane.refs.close()


async def test_a_full_lane_keeps_what_its_hosts_start_soon(clock: ManualClock, paces: Paces) -> None:
    lane = PacedLane(clock, paces)
    lane.refs.admit(entries_of("dead.example", 500 + START))
    sent = lane.refs.admit(entries_of("fast.example", 400 + START))
    lane.refs.thin_out()
    for _ in range(25):
        clock.advance(0.2)
        lane.finish(sent)
        sent = lane.refs.take(8)
    before = len(lane.refs)
    lane.refs.thin_out()
    assert len(lane.postponed) == 400, "100 of the dead host stay, and all of the fast one"
    assert {delay for _, delay in lane.postponed} == {60.0}
    assert len(lane.refs) == before - 400
    assert len({index for index, _ in lane.postponed}) == 400
    lane.refs.thin_out()
    assert len(lane.postponed) == 400
    lane.refs.close()


async def test_a_full_lane_postpones_nothing_of_hosts_of_which_it_knows_nothing_yet(
    clock: ManualClock, paces: Paces
) -> None:
    """Of a list in order of hosts that would be most of it, for a minute."""
    lane = PacedLane(clock, paces)
    lane.refs.admit(entries_of("dead.example", 500 + START))
    lane.refs.thin_out()
    clock.advance(4.0)
    lane.refs.admit(entries_of("new.example", 500 + START))
    clock.advance(2.0)
    lane.refs.thin_out()
    assert len(lane.postponed) == 400, "100 of the dead host stay"
    assert len(lane.refs) == 600
    lane.refs.close()


async def test_a_full_lane_without_slots_blames_no_host(clock: ManualClock, paces: Paces) -> None:
    lane = PacedLane(clock, paces)
    lane.refs.admit(entries_of("a.example", 500 + START))
    lane.refs.thin_out()
    lane.refs.set_slots(0)
    for _ in range(3):
        clock.advance(6.0)
        lane.refs.thin_out()
    lane.refs.set_slots(64)
    lane.refs.thin_out()
    assert not lane.postponed
    clock.advance(6.0)
    lane.refs.thin_out()
    assert len(lane.postponed) == 400
    lane.refs.close()


async def test_a_lane_without_slots_keeps_no_turn_from_the_others(clock: ManualClock, paces: Paces) -> None:
    """There are more lanes than requests at once. Which of them have slots is for the worker to say."""
    lanes = [PacedLane(clock, paces) for _ in range(START + 3)]
    for number, lane in enumerate(lanes):
        lane.refs.set_slots(1)
        lane.sent = lane.refs.admit(entries_of("a.example", 1 if number < START else 2))
    assert [len(lane.sent) for lane in lanes] == [1] * START + [0] * 3
    for lane in lanes[START:-1]:
        lane.refs.set_slots(0)
    lanes[0].finish(lanes[0].sent)
    await asyncio.sleep(0)
    assert [lane.woken for lane in lanes[START:]] == [0, 0, 1], "the last one, which has a slot"
    assert len(lanes[-1].refs.take(1)) == 1
    lanes[1].finish(lanes[1].sent)
    lanes[-2].refs.set_slots(1)
    assert len(lanes[-2].refs.take(1)) == 1, "once it has a slot"
    for lane in lanes:
        lane.refs.close()


async def test_a_lane_that_loses_its_slots_passes_its_turn_on(clock: ManualClock, paces: Paces) -> None:
    lanes = [PacedLane(clock, paces) for _ in range(START + 2)]
    for number, lane in enumerate(lanes):
        lane.refs.set_slots(1)
        lane.sent = lane.refs.admit(entries_of("a.example", 1 if number < START else 2))
    lanes[0].finish(lanes[0].sent)
    await asyncio.sleep(0)
    assert [lane.woken for lane in lanes[START:]] == [1, 0]
    lanes[START].refs.set_slots(0)
    await asyncio.sleep(0)
    assert [lane.woken for lane in lanes[START:]] == [1, 1]
    assert not lanes[START].refs.take(1)
    for lane in lanes:
        lane.refs.close()


async def test_a_list_in_any_order_of_hosts_is_admitted_and_learned_from_by_host(
    clock: ManualClock, paces: Paces
) -> None:
    lane = PacedLane(clock, paces)
    by_host = [entries_of(f"{number}.example", 3 * START) for number in range(3)]
    mixed = [entry for neighbours in zip(*by_host, strict=True) for entry in neighbours]
    sent = lane.refs.admit(mixed)
    assert sent == mixed[: 3 * START]
    assert len(lane.refs) == 6 * START
    found = [pace for pace in {entry.pace for entry in sent} if pace is not None]
    assert [pace.lanes.in_flight for pace in found] == [START] * 3
    lane.refs.learn_pages(sent, [0.1] * len(sent))
    assert [pace.limit for pace in found] == [2 * START] * 3
    lane.refs.release(sent)
    assert len(lane.refs.take(100)) == 6 * START
    lane.refs.close()


async def test_references_of_one_host_are_not_sent_ahead_if_others_come_with_them(
    clock: ManualClock, paces: Paces
) -> None:
    """Which of them run is not known then, so that all of the first host might at once."""
    lane = PacedLane(clock, paces)
    lane.refs.keep_part()
    entries = entries_of("a.example", 100)
    lane.refs.expect(entries[0].ref)
    assert len(lane.refs.admit(entries + entries_of("b.example", 1))) == START + 1
    lane.refs.close()


async def test_a_page_that_fails_again_in_a_retry_lowers_no_limit(clock: ManualClock, paces: Paces) -> None:
    broken = Outcome(TaskStatus.PENDING, http_status=503, error=TaskError("http_503", "always"))
    for attempt, is_lowered in ((2, False), (1, True)):
        lane = PacedLane(clock, paces)
        refs = entries_of(f"{attempt}.example", START)
        for entry in refs:
            entry.ref = msgspec.structs.replace(entry.ref, attempt=attempt)
        sent = lane.refs.admit(refs)
        pace = sent[0].pace
        assert pace is not None
        lane.refs.learn(sent, [broken] * START)
        lane.refs.release(sent)
        assert (pace.limit < START) is is_lowered


class EarlyClock(ManualClock):
    """Its sleeps end a little early, as those of a loop do, by up to its resolution."""

    def __init__(self) -> None:
        super().__init__()
        self.sleeps = 0

    async def sleep(self, seconds: float) -> None:
        self.sleeps += 1
        await super().sleep(seconds - 1e-9)


async def test_a_pause_whose_sleep_ends_early_is_not_looked_at_again_and_again(paces: Paces) -> None:
    clock = EarlyClock()
    lane = PacedLane(clock, paces)
    sent = lane.refs.admit(entries_of("a.example", START + 3))
    lane.refs.learn(sent[:1], [refusal(3.0)])
    await asyncio.sleep(0)
    clock.advance(3.0 - 1e-9)
    for _ in range(20):
        await asyncio.sleep(0)
    assert clock.sleeps == 1
    clock.advance(1e-6)
    await asyncio.sleep(0)
    assert lane.refs.has_ready
    assert clock.sleeps == 1
    lane.refs.close()
