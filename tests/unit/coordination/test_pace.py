"""The pace of a host, simulated: servers that degrade in several ways, on a clock of their own."""

import bisect
import heapq
import random
from collections.abc import Callable
from math import inf
from typing import Any

import pytest

from conveyor.coordination.host_lanes import LARGEST
from conveyor.coordination.pace import START, HostPace

WIDTH = 400


class Lane:
    """A lane that sends one reference at a time."""

    def __init__(self, width: int = WIDTH, *, keeps_part: bool = False) -> None:
        self.slots = self.width = self.bound = width
        self.keeps_part = keeps_part
        self.woken = 0
        self.lowered = 0

    def on_room(self, pace: HostPace) -> None:
        self.woken += 1

    def on_lower(self, pace: HostPace) -> None:
        self.lowered += 1


class Server:
    """Answers within `base` seconds up to `capacity` requests at once, and more slowly beyond that: with `power` 1 its
    throughput stays, as that of a queue, and with more it falls. Above `refuses` it answers 503 at once. Whatever the
    load, it answers 503 for the share `broken` of its pages, and the share `slow` takes 0.2 to 0.4 seconds."""

    def __init__(
        self,
        capacity: int,
        base: float,
        power: float = 1.0,
        refuses: float = 1e9,
        *,
        broken: float = 0.0,
        slow: float = 0.0,
        seed: int = 7,
    ) -> None:
        self.busy = 0
        self._capacity, self._base, self._power, self._refuses = capacity, base, power, refuses
        self._broken, self._slow = broken, slow
        # Whether its 503 has a Retry-After, which is about the page.
        self.is_flaky = broken > 0
        self._random = random.Random(seed)

    def answer(self) -> tuple[bool, float]:
        if self.busy > self._refuses:
            return False, 0.005
        if self._broken and self._random.random() < self._broken:
            return False, self._base
        seconds = self._base * self._random.uniform(0.8, 1.2)
        if self._slow and self._random.random() < self._slow:
            seconds = self._random.uniform(0.2, 0.4)
        load = max(1.0, self.busy / self._capacity)
        return True, seconds * load**self._power


class Figures:
    def __init__(self, throughput: float, refused: int, limits: list[int]) -> None:
        self.throughput, self.refused, self.limits = throughput, refused, limits


class Stalls:
    """Times in which the machine that sends the requests stands still: answers arrive when such a time is over."""

    def __init__(self, every: float, length: float, seconds: float, seed: int) -> None:
        drawn = random.Random(seed)
        self._times: list[tuple[float, float]] = []
        at = 0.0
        while at < seconds:
            at += drawn.expovariate(1 / every)
            self._times.append((at, at + drawn.uniform(0.5, 1.5) * length))
            at = self._times[-1][1]

    def arrival(self, at: float) -> float:
        place = bisect.bisect_right(self._times, (at, inf)) - 1
        return max(at, self._times[place][1]) if place >= 0 else at


class BusyClient:
    """The loop that sends the requests: it takes `cost` seconds for each answer, one after the other."""

    def __init__(self, cost: float, *, knows_lag: bool = True) -> None:
        self._cost, self._knows_lag = cost, knows_lag
        self._free_at = self._lag = 0.0

    def arrival(self, at: float) -> float:
        self._free_at = max(at, self._free_at) + self._cost
        # What becomes due in the middle of a step waits for half of it.
        self._lag += 0.1 * ((self._free_at - at) / 2 - self._lag)
        return self._free_at

    @property
    def lag(self) -> float:
        return self._lag if self._knows_lag else 0.0


def simulate(
    server: Server,
    seconds: float,
    fixed: int | None = None,
    lane: Lane | None = None,
    stalls: Stalls | None = None,
    client: BusyClient | None = None,
) -> Figures:
    lane = lane or Lane()
    pace = HostPace("acme", "a.example")
    answers: list[tuple[float, int, bool, float]] = []
    now, sent, done, refused, limits = 0.0, 0, 0, 0, []
    while now < seconds:
        room = fixed - len(answers) if fixed else min(pace.room(lane, now), lane.width - len(answers))
        for _ in range(room):
            sent += 1
            server.busy += 1
            pace.start(lane, 1)
            is_answered, elapsed = server.answer()
            if stalls is not None:
                elapsed = stalls.arrival(now + elapsed) - now
            heapq.heappush(answers, (now + elapsed, sent, is_answered, elapsed))
        if not answers:
            now = pace.paused_until
            continue
        now, _, is_answered, elapsed = heapq.heappop(answers)
        if client is not None:
            read_at = client.arrival(now)
            elapsed, now = elapsed + read_at - now, read_at
        server.busy -= 1
        if is_answered:
            done += 1
            pace.learn([elapsed], now, 0.0 if client is None else client.lag)
        else:
            refused += 1
            pace.fail(now, 1.0 if server.is_flaky else None)
        pace.finish(lane, 1, now)
        limits.append(int(pace.limit))
    return Figures(done / now, refused, limits)


DEGRADING: dict[str, Callable[[], Server]] = {
    "queues above 20": lambda: Server(20, 0.05),
    "thrashes above 20": lambda: Server(20, 0.05, 2.0),
    "thrashes badly above 20": lambda: Server(20, 0.05, 3.0),
    "refuses above 20": lambda: Server(1000, 0.05, refuses=20),
    "queues above 20, refuses above 40": lambda: Server(20, 0.05, refuses=40),
}


@pytest.mark.parametrize("server", DEGRADING.values(), ids=DEGRADING.keys())
def test_a_server_that_degrades_is_used_as_well_as_by_the_best_fixed_setting(server: Callable[[], Server]) -> None:
    best = max(simulate(server(), 3, fixed).throughput for fixed in (10, 20, 22, 40))
    found = simulate(server(), 20)
    assert found.throughput >= 0.9 * best
    assert found.refused <= 0.02 * found.throughput * 20, "next to nothing, while the pace is found"


OWN: dict[str, dict[str, Any]] = {
    "2 % broken": {"broken": 0.02},
    "5 % broken": {"broken": 0.05},
    "20 % broken": {"broken": 0.2},
    "40 % broken": {"broken": 0.4},
    "5 % slow": {"slow": 0.05},
    "30 % slow": {"slow": 0.3},
    "as the demo": {"broken": 0.04, "slow": 0.08},
}


@pytest.mark.parametrize("own", OWN.values(), ids=OWN.keys())
def test_pages_that_fail_or_are_slow_by_themselves_do_not_slow_down_the_others(own: dict[str, Any]) -> None:
    for seed in (1, 2):
        fixed = simulate(Server(1000, 0.01, **own, seed=seed), 4, fixed=64)
        found = simulate(Server(1000, 0.01, **own, seed=seed), 4, lane=Lane(64))
        assert found.throughput >= 0.9 * fixed.throughput, seed


FAILING: dict[str, Callable[[int], bool]] = {
    "every fifth page": lambda index: index % 5 == 0,
    "a part of the list": lambda index: 100 <= index < 160,
    "the end of the list": lambda index: index >= 240,
}


@pytest.mark.parametrize("is_retry_known", [True, False], ids=["retries", "unknown retries"])
@pytest.mark.parametrize("fails", FAILING.values(), ids=FAILING.keys())
@pytest.mark.parametrize("attempts", [3, 5])
def test_retries_of_pages_that_fail_for_ever_do_not_slow_down_what_follows(
    fails: Callable[[int], bool], attempts: int, is_retry_known: bool
) -> None:
    """In the end only they are left, and all requests fail, at any load. Without `is_retry` that takes longer."""
    pace = HostPace("acme", "a.example")
    ended_at = attempt_all(pace, 0.0, [fails(index) for index in range(300)], attempts, is_retry_known=is_retry_known)
    assert pace.limit >= 4
    seconds = attempt_all(pace, ended_at, [False] * 300, attempts, is_retry_known=is_retry_known) - ended_at
    assert seconds < 1.1 * 300 * 0.2 / 4


def attempt_all(
    pace: HostPace, now: float, pages: list[bool], attempts: int, *, is_retry_known: bool, width: int = 4
) -> float:
    """Request all pages, of which these fail each time, until all have ended. Returns when."""
    drawn, lane = random.Random(1), Lane(width)
    due = [(now, index, 1) for index in range(len(pages))]
    running: list[tuple[float, int, int, float]] = []
    while due or running:
        room = min(pace.room(lane, now), width - len(running))
        while room > 0 and due and due[0][0] <= now:
            _, index, attempt = heapq.heappop(due)
            pace.start(lane, 1)
            heapq.heappush(running, (now + 0.2 * drawn.uniform(0.9, 1.1), index, attempt, now))
            room -= 1
        if not running:
            now = max(due[0][0], pace.paused_until)
            continue
        if room > 0 and due and due[0][0] < running[0][0]:
            now = due[0][0]
            continue
        now, index, attempt, began = heapq.heappop(running)
        if pages[index]:
            pace.fail(now, is_retry=is_retry_known and attempt > 1)
            if attempt < attempts:
                heapq.heappush(due, (now + 2 ** (attempt - 1) * drawn.random(), index, attempt + 1))
        else:
            pace.learn([now - began], now)
        pace.finish(lane, 1, now)
    return now


def test_a_limit_of_few_requests_is_soon_tried_again() -> None:
    """After a host took one request at once for a while, and refused two."""
    pace, lane, now = HostPace("acme", "a.example"), Lane(), 0.0
    for _ in range(2000):
        count = pace.room(lane, now)
        pace.start(lane, count)
        now += 0.1
        for _ in range(count - 1):
            pace.refuse(now)
        pace.learn([0.1], now)
        pace.finish(lane, count, now)
    assert pace.limit < 3
    ended_at = now + 30
    while now < ended_at:
        count = pace.room(lane, now)
        pace.start(lane, count)
        now += 0.1
        pace.learn([0.1] * count, now)
        pace.finish(lane, count, now)
    assert pace.limit > START


def test_a_host_that_is_down_as_a_whole_is_paused_and_then_used_as_before() -> None:
    pace, lane = HostPace("acme", "a.example"), Lane()
    now = 0.0
    for number in range(60):
        count = min(pace.room(lane, now), WIDTH)
        pace.start(lane, count)
        if 20 <= number < 24:
            for _ in range(count):
                pace.fail(now, 2.0)
        else:
            pace.learn([0.05] * count, now)
        pace.finish(lane, count, now)
        now = max(now + 0.05, pace.paused_until)
    assert now > 4, "Retry-After of all of them is about the host"
    assert pace.limit > 4 * START, "and then it goes on"


def test_a_fast_server_gets_the_whole_width_at_once() -> None:
    unlimited = simulate(Server(1000, 0.002), 2, fixed=WIDTH)
    found = simulate(Server(1000, 0.002), 2)
    assert found.throughput >= 0.98 * unlimited.throughput
    assert found.limits[4 * WIDTH] >= WIDTH, "after four times as many answers as run at once"


def test_stalls_of_this_machine_are_no_reason_to_go_slow() -> None:
    for seed in (1, 3):
        fixed, found = (
            simulate(Server(1000, 0.002), 1, width, Lane(64), Stalls(0.03, 0.02, 1, seed)) for width in (64, None)
        )
        assert found.throughput >= 0.9 * fixed.throughput, seed


def test_low_latency_is_no_reason_to_go_slow_however_much_lower_it_was_without_load() -> None:
    """A machine that has more to do answers later, and so does one that shares it with whoever asks."""
    for seed in (1, 2, 3):
        found = simulate(Server(10, 0.003, seed=seed), 2, lane=Lane(100), stalls=Stalls(0.1, 0.02, 2, seed))
        assert min(found.limits[500:]) >= 100, seed


def test_the_slow_start_sees_latency_rise_before_requests_are_refused() -> None:
    """The quickest answers come first: they met less load than the limit allows by now."""
    assert simulate(Server(32, 0.05, 2.0, refuses=96), 5).refused == 0


def test_latency_that_is_the_same_with_fewer_requests_lowers_no_limit_for_long() -> None:
    """All that waits for a machine that stands still is answered when it goes on: the more, the more there is of it."""
    for seed in (1, 2, 3):
        fixed, found = (
            simulate(Server(40, 0.002, seed=seed), 20, width, Lane(100), Stalls(0.02, 0.1, 20, seed))
            for width in (100, None)
        )
        assert found.throughput >= 0.8 * fixed.throughput, seed


def test_a_host_that_is_slow_now_and_then_is_used_as_before() -> None:
    for seed in (1, 2, 3):
        fixed, found = (
            simulate(Server(32, 0.05, 2.0), 30, width, stalls=Stalls(0.7, 0.1, 30, seed)) for width in (32, None)
        )
        assert found.throughput >= 0.8 * fixed.throughput, seed


def test_a_busy_process_of_ours_is_no_reason_to_go_slow() -> None:
    """It is at its limit: responses wait for it, and the more so the more of them there are."""
    for width, cost in ((100, 0.001), (WIDTH, 0.0002)):
        lane = Lane(width)
        blind = simulate(Server(1000, 0.002), 3, lane=lane, client=BusyClient(cost, knows_lag=False))
        found = simulate(Server(1000, 0.002), 3, lane=lane, client=BusyClient(cost))
        assert min(blind.limits[2000:]) < width, "the lag is what matters"
        assert min(found.limits[2000:]) >= width


def test_a_busy_process_of_ours_does_not_hide_a_host_that_degrades() -> None:
    best = max(simulate(Server(20, 0.05, 2.0), 3, fixed).throughput for fixed in (20, 22))
    found = simulate(Server(20, 0.05, 2.0), 20, client=BusyClient(0.001))
    assert found.throughput >= 0.9 * best


def test_latency_that_does_not_depend_on_the_number_of_requests_is_no_reason_to_go_slow() -> None:
    """Pages that take longer and longer: the pace gives in and goes on."""
    pace, lane = HostPace("acme", "a.example"), Lane()
    now = 0.0
    for number in range(400):
        room = pace.room(lane, now)
        pace.start(lane, min(room, WIDTH))
        now += 0.1
        sent = pace.lanes.in_flight
        pace.learn([0.1 if number < 100 else 0.3] * sent, now)
        pace.finish(lane, sent, now)
    assert pace.limit > 100


def test_retry_after_pauses_the_host_and_then_it_begins_with_a_fraction() -> None:
    pace, lane = HostPace("acme", "a.example"), Lane()
    now = 0.0
    while pace.limit < 64:
        pace.start(lane, pace.room(lane, now))
        count = pace.lanes.in_flight
        pace.learn([0.05] * count, now)
        pace.finish(lane, count, now)
        now += 0.05
    pace.start(lane, 64)
    pace.lanes.wait(lane, is_waiting=True)
    for _ in range(32):
        pace.refuse(now, 30.0)
    assert pace.room(lane, now + 29.9) == 0
    assert lane.lowered > 0, "what was sent and has not started goes back"
    pace.finish(lane, 64, now)
    assert lane.woken == 0, "not before the pause is over"
    assert 1 <= pace.room(lane, now + 30) <= 16
    pace.wake(now + 30)
    assert lane.woken == 1


def test_single_failures_are_the_fault_of_single_urls() -> None:
    pace, lane = HostPace("acme", "a.example"), Lane()
    pace.start(lane, START)
    pace.fail(1.0, 30.0)
    pace.fail(1.0, 30.0)
    assert (pace.limit, pace.paused_until) == (START, 0.0)
    for _ in range(4):
        pace.fail(1.0)
    assert pace.limit < START, "but not if there are many at once"


def test_lanes_share_the_limit_or_take_turns() -> None:
    pace = HostPace("acme", "a.example")
    first, second = Lane(), Lane()
    pace.start(first, pace.room(first, 0.0))
    pace.lanes.wait(first, is_waiting=True)
    pace.lanes.wait(second, is_waiting=True)
    assert (pace.room(first, 0.0), pace.room(second, 0.0)) == (0, 0)
    pace.finish(first, 2, 0.0)
    assert second.woken > 0
    assert pace.room(first, 0.0) == 0, "it has more than its share"
    assert pace.room(second, 0.0) == 2
    many = [Lane() for _ in range(20)]
    for lane in many:
        pace.lanes.wait(lane, is_waiting=True)
    pace.lanes.wait(first, is_waiting=False)
    pace.lanes.wait(second, is_waiting=True)
    assert [pace.room(lane, 0.0) for lane in (*many[:3], second)] == [1, 1, 0, 0]


def test_lanes_that_keep_to_their_parts_divide_the_limit_and_send_ahead() -> None:
    pace = HostPace("acme", "a.example")
    lanes = [Lane(keeps_part=True) for _ in range(3)]
    assert pace.lanes.part(lanes[0]) == START, "it is alone"
    assert pace.room(lanes[0], 0.0) > 10 * START
    for lane in lanes:
        lane.width = 0
        pace.start(lane, 100)
    parts = [pace.lanes.part(lane) for lane in lanes]
    assert (sorted(parts), pace.lanes.in_flight) == ([2, 3, 3], 300)
    for lane, part in zip(lanes, parts, strict=True):
        lane.width = part
        pace.lanes.note_width(lane)
    assert pace.lanes.in_use == START, "what is sent ahead does not run"
    lanes[2].slots = 1
    pace.lanes.note_width(lanes[2])
    assert [pace.lanes.part(lane) for lane in lanes] == [4, 3, 1], "what one cannot use is for the others"
    pace.finish(lanes[0], 100, 0.0)
    pace.finish(lanes[2], 100, 0.0)
    assert pace.lanes.part(lanes[1]) == START
    lanes[1].slots = 5
    pace.lanes.note_width(lanes[1])
    assert pace.lanes.part(lanes[1]) >= LARGEST, "the pace is not what limits it"
    lanes[1].slots = 100
    pace.lanes.note_width(lanes[1])
    assert pace.lanes.part(lanes[1]) == START, "it has more slots by now"


def test_what_runs_beyond_a_width_that_has_become_less_is_in_use_until_it_is_finished() -> None:
    """Else as many more would begin, which the host refuses."""
    pace, first, second = HostPace("acme", "a.example"), Lane(START, keeps_part=True), Lane(keeps_part=True)
    pace.start(first, START)
    first.slots = first.width = 0
    pace.lanes.note_width(first)
    assert pace.lanes.in_use == START
    pace.finish(first, 3, 0.0)
    assert pace.lanes.in_use == START - 3
    for lane in [Lane(keeps_part=True) for _ in range(START)]:
        pace.lanes.wait(lane, is_waiting=True)
    pace.lanes.wait(second, is_waiting=True)
    assert pace.lanes.takes_turns
    assert len(pace.lanes.find_next()) == 3


def test_more_lanes_than_requests_at_once_take_turns_also_if_they_keep_to_their_parts() -> None:
    pace = HostPace("acme", "a.example")
    lanes = [Lane(keeps_part=True) for _ in range(START + 2)]
    for lane in lanes:
        pace.lanes.wait(lane, is_waiting=True)
    assert pace.lanes.takes_turns
    assert [pace.room(lane, 0.0) for lane in lanes] == [1] * START + [0, 0]
    assert {pace.lanes.part(lane) for lane in lanes} == {1}


def test_a_lane_that_cannot_run_more_than_the_limit_may_send_ahead() -> None:
    pace = HostPace("acme", "a.example")
    assert pace.room(Lane(START), 0.0) == LARGEST
    assert pace.room(Lane(START + 1), 0.0) == START


def test_long_attempts_let_the_limit_grow_while_none_fails() -> None:
    pace, lane = HostPace("acme", "a.example"), Lane()
    pace.start(lane, START)
    pace.grow_while_alive(1.0)
    assert pace.limit == START
    pace.grow_while_alive(2.0)
    assert pace.limit == 2 * START
    pace.grow_while_alive(10.0)
    assert pace.limit == 2 * START, "it is not in use"


def test_the_limit_doubles_with_each_second_round_trip_while_latency_is_flat() -> None:
    """What began before the load had doubled does not count, and that takes no longer where latency is high."""
    latency = 1.0
    server, pace, lane = Server(100_000, latency), HostPace("acme", "a.example"), Lane(1000)
    answers: list[tuple[float, int, float]] = []
    now, sent = 0.0, 0
    while pace.limit < 32 * START:
        for _ in range(pace.room(lane, now)):
            sent += 1
            pace.start(lane, 1)
            elapsed = server.answer()[1]
            heapq.heappush(answers, (now + elapsed, sent, elapsed))
        now, _, elapsed = heapq.heappop(answers)
        pace.learn([elapsed], now)
        pace.finish(lane, 1, now)
    assert now < 5 * 2 * latency


def test_lanes_that_have_no_slots_and_run_nothing_have_no_part_in_the_limit() -> None:
    """Of many small jobs few have slots at a time. The others must not make them take turns."""
    pace = HostPace("acme", "a.example")
    lanes = [Lane(keeps_part=True) for _ in range(100)]
    for number, lane in enumerate(lanes):
        lane.slots = 4 if number < 2 else 0
        pace.lanes.wait(lane, is_waiting=True)
    assert not pace.lanes.takes_turns
    assert [pace.lanes.part(lane) for lane in lanes[:2]] == [LARGEST, LARGEST], "there are no more slots than that"
    assert pace.room(lanes[1], 0.0) == LARGEST


def test_what_a_lane_finishes_wakes_no_others_whose_parts_it_leaves_as_they_are() -> None:
    """With hundreds of lanes, all of them for each batch of outcomes took most of the time of a worker."""
    pace = HostPace("acme", "a.example")
    lanes = [Lane(keeps_part=True) for _ in range(4)]
    lanes[3].slots = 0
    for lane in lanes:
        pace.start(lane, 100)
        pace.lanes.wait(lane, is_waiting=True)
    pace.finish(lanes[0], 1, 0.0)
    before = [lane.woken for lane in lanes]
    pace.finish(lanes[0], 99, 0.0)
    assert [lane.woken - each for lane, each in zip(lanes, before, strict=True)] == [1, 0, 0, 0]
    pace.lanes.wait(lanes[0], is_waiting=False)
    pace.finish(lanes[1], 100, 0.0)
    assert [lane.woken - each for lane, each in zip(lanes, before, strict=True)] == [1, 1, 1, 0], "it has a larger part"
