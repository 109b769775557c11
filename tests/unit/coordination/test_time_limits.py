"""Calls with a time limit: those that answer at once, those that wait, and those that wait too long."""

import asyncio

import pytest

from conveyor.coordination.time_limits import call_within


async def test_a_call_that_does_not_wait_is_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "timeout", lambda _: pytest.fail("a timer"))

    async def answer() -> int:
        return 7

    async def fail() -> int:
        raise KeyError("no")

    assert await call_within(1.0, answer()) == 7
    with pytest.raises(KeyError, match="no"):
        await call_within(1.0, fail())


async def test_a_call_that_waits_gets_what_it_waits_for() -> None:
    first, second = asyncio.get_running_loop().create_future(), asyncio.get_running_loop().create_future()

    async def add() -> int:
        total = int(await first)
        try:
            await second
        except ValueError:
            total += 1
        await asyncio.sleep(0)
        return total

    call = asyncio.create_task(call_within(60.0, add()))
    await asyncio.sleep(0)
    first.set_result(5)
    await asyncio.sleep(0)
    second.set_exception(ValueError("caught"))
    assert await call == 6


async def test_a_call_that_waits_too_long_is_cancelled() -> None:
    seen: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("cleaned up")

    with pytest.raises(TimeoutError):
        await call_within(0.0, wait())
    assert seen == ["cleaned up"]


async def test_one_limit_inside_another() -> None:
    """The inner one is set first, because the outer call has begun before its timer exists."""

    async def inner(seconds: float) -> str:
        try:
            await call_within(seconds, asyncio.Event().wait())
        except TimeoutError:
            return "inner"
        return "never"

    assert await call_within(60.0, inner(0.0)) == "inner"
    with pytest.raises(TimeoutError):
        await call_within(0.0, inner(60.0))
    current = asyncio.current_task()
    assert current is not None
    assert current.cancelling() == 0


async def test_a_caller_that_is_cancelled_cancels_the_call() -> None:
    seen: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    call = asyncio.create_task(call_within(60.0, wait()))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert seen == ["cancelled"]
