"""The clocks: ids that sort, and a clock for tests that keeps its promises."""

import asyncio
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.clock import SystemClock, sortable_id
from tests.support.clocks import ManualClock


@given(
    times=st.lists(st.integers(0, (1 << 44)), min_size=2, max_size=2, unique=True),
    entropy=st.lists(st.integers(0, (1 << 90)), min_size=2, max_size=2),
)
def test_ids_sort_by_time_whatever_the_entropy(times: list[int], entropy: list[int]) -> None:
    early, late = sorted(times)
    assert sortable_id("job", early / 1000, entropy[0]) <= sortable_id("job", late / 1000 + 0.001, entropy[1])


def test_ids_of_the_machine_are_different() -> None:
    clock = SystemClock()
    ids = {clock.new_id("job") for _ in range(1000)}
    assert len(ids) == 1000
    assert {len(each) for each in ids} == {len("job_") + 26}


_FORKED = """
import os
from conveyor.clock import SystemClock
clock = SystemClock()
clock.new_id("job")
child = os.fork()
if child:
    os.waitpid(child, 0)
print(clock.new_id("job")[-16:], flush=True)
"""


def test_ids_of_a_forked_process_are_its_own() -> None:
    ended = subprocess.run([sys.executable, "-c", _FORKED], capture_output=True, check=True, text=True)
    assert len(set(ended.stdout.split())) == 2


class TestManualClock:
    def test_time_stands_still(self) -> None:
        clock = ManualClock(start=100.0)
        assert (clock.now(), clock.now()) == (100.0, 100.0)
        before = clock.monotonic()
        clock.advance(2.5)
        assert clock.now() == 102.5
        assert clock.monotonic() - before == 2.5
        with pytest.raises(ValueError, match="back"):
            clock.advance(-1)

    def test_chance_comes_from_the_seed(self) -> None:
        one, two, other = ManualClock(seed=7), ManualClock(seed=7), ManualClock(seed=8)
        assert [one.jitter() for _ in range(5)] == [two.jitter() for _ in range(5)]
        assert one.new_id("job") == two.new_id("job") != other.new_id("job")
        assert 0 <= one.jitter() < 1

    def test_ids_of_one_moment_sort_by_their_making(self) -> None:
        clock = ManualClock()
        ids = [clock.new_id("job") for _ in range(200)]
        assert ids == sorted(set(ids))

    async def test_sleepers_wake_in_order(self) -> None:
        clock = ManualClock()
        woken: list[float] = []

        async def sleeper(seconds: float) -> None:
            await clock.sleep(seconds)
            woken.append(seconds)

        tasks = [asyncio.create_task(sleeper(seconds)) for seconds in (3, 1, 2)]
        await asyncio.sleep(0)
        assert clock.sleepers == 3
        assert clock.next_wake() == 1
        clock.advance(0.9)
        await asyncio.sleep(0)
        assert woken == []
        clock.advance(1.1)
        await asyncio.sleep(0)
        assert woken == [1, 2]
        clock.advance(10)
        await asyncio.gather(*tasks)
        assert woken == [1, 2, 3]
        assert clock.next_wake() is None

    async def test_a_cancelled_sleeper_is_forgotten(self) -> None:
        clock = ManualClock()
        task = asyncio.create_task(clock.sleep(5))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert clock.sleepers == 0
        clock.advance(10)

    async def test_no_sleep_is_one_turn(self) -> None:
        await ManualClock().sleep(0)
