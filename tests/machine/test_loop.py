"""The loop of the machine: its time moves only when nothing else can happen, and each run of it is the same."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.machine.loop import LoopClock, VirtualLoop
from tests.machine.seams import AFTER, BEFORE, CLIENT, Arm, Faults, Latency, Trouble


@contextmanager
def new_loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    try:
        yield loop
    finally:
        loop.close()


def run(doing: Coroutine[Any, Any, Any]) -> float:
    """Seconds of the clock that it took."""
    with new_loop() as loop:
        loop.run_until_complete(doing)
        return loop.now


def test_a_day_passes_at_once() -> None:
    assert run(asyncio.sleep(86_400.0)) == pytest.approx(86_400.0)


def test_timeouts_are_on_the_same_clock() -> None:
    async def wait() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30.0):
                await asyncio.Event().wait()

    assert run(wait()) == pytest.approx(30.0)


def test_work_for_threads_takes_no_time() -> None:
    async def work() -> None:
        assert await asyncio.to_thread(lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)

    assert run(work()) == 0.0


def test_nothing_to_wait_for_is_said() -> None:
    async def for_ever() -> None:
        await asyncio.Event().wait()

    with new_loop() as loop:
        task = loop.create_task(for_ever())
        with pytest.raises(AssertionError, match="nobody has anything to do"):
            loop.run_until_complete(task)
        task.cancel()
        loop.run_until_complete(asyncio.wait([task]))


def test_the_clock_is_the_loops() -> None:
    async def sleep(clock: LoopClock) -> float:
        before = clock.now()
        await clock.sleep(5.0)
        return clock.now() - before

    with new_loop() as loop:
        assert loop.run_until_complete(sleep(LoopClock(loop))) == pytest.approx(5.0)


async def _leave(*_: object) -> None:
    """Nobody meddles."""


@pytest.mark.parametrize("when", [BEFORE, AFTER])
def test_the_nth_call_fails_once(when: str) -> None:
    async def calls() -> list[str | None]:
        faults = Faults(0, Latency(), Trouble(), lambda *_: None, _leave)
        faults.arm(Arm("queue.send", 2, when))
        return [await faults.meet(name) for name in ("queue.send", "queue.ack", "queue.send", "queue.send")]

    with new_loop() as loop:
        assert loop.run_until_complete(calls()) == [None, None, when, None]


def _failures(trouble: Trouble, calls: list[str], role: str = CLIENT) -> tuple[list[str], float]:
    """Which of these calls fail, and how long all of them take."""

    async def meet_all(loop: VirtualLoop) -> tuple[list[str], float]:
        faults = Faults(1, Latency(), trouble, lambda *_: None, _leave)
        failed = [call for call in calls if await faults.meet(call, role) is not None]
        return failed, loop.now

    with new_loop() as loop:
        return loop.run_until_complete(meet_all(loop))


def test_a_flaky_call_fails_a_few_times() -> None:
    failed, _ = _failures(Trouble(flaky=["queue.send"]), ["queue.send", "queue.ack"] * 50)
    assert 1 <= len(failed) <= 4
    assert set(failed) == {"queue.send"}


def test_fresh_calls_fail_when_they_are_made_for_the_first_times() -> None:
    calls = [f"queue.{number}" for number in range(50)]
    failed, _ = _failures(Trouble(fresh=True), calls * 2)
    assert 20 <= len(failed) <= 60
    assert _failures(Trouble(fresh=True), ["queue.send"] * 50)[0] in ([], ["queue.send"], ["queue.send"] * 2)


def test_the_calls_of_a_role_that_is_far_away_take_long() -> None:
    assert _failures(Trouble(far=["sweeper"]), ["queue.send"] * 20, "sweeper")[1] > 5
    assert _failures(Trouble(far=["sweeper"]), ["queue.send"] * 20, "worker")[1] == 0
    assert _failures(Trouble(slow=["queue.send"]), ["queue.send"] * 20, "worker")[1] > 5
