"""The one loop of every role, on a clock that only the test moves."""

import asyncio
from collections.abc import Callable

import pytest

from conveyor.callers import is_in_role
from conveyor.service import Service, run_until
from tests.support.clocks import ManualClock


class Scripted:
    """A role that does what the script says: a delay to return, or an error to raise."""

    name = "scripted"
    wake: Callable[[], None]

    def __init__(self, *script: float | Exception) -> None:
        self.script = list(script)
        self.ticks = 0
        self.closed = 0
        self.closing_error: Exception | None = None
        self.gate: asyncio.Event | None = None

    async def tick(self) -> float:
        self.ticks += 1
        if self.gate is not None:
            await self.gate.wait()
        step = self.script.pop(0) if self.script else 1000.0
        if isinstance(step, Exception):
            raise step
        return step

    async def close(self) -> None:
        self.closed += 1
        if self.closing_error is not None:
            raise self.closing_error


class Slow(Scripted):
    """It takes a while to close."""

    async def close(self) -> None:
        await turns(50)
        await super().close()


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def started(role: Scripted, clock: ManualClock) -> tuple[Service, asyncio.Task[None]]:
    service = Service(role, clock)
    task = asyncio.create_task(service.run())
    await turns()
    return service, task


async def stop(service: Service, task: asyncio.Task[None]) -> None:
    service.stop()
    await asyncio.wait_for(task, 5)


async def test_it_ticks_when_the_delay_is_over() -> None:
    clock, role = ManualClock(), Scripted(2.0, 3.0)
    service, task = await started(role, clock)
    assert role.ticks == 1
    clock.advance(1.9)
    await turns()
    assert role.ticks == 1
    clock.advance(0.1)
    await turns()
    assert role.ticks == 2
    clock.advance(3.0)
    await turns()
    assert role.ticks == 3
    await stop(service, task)
    assert role.closed == 1


async def test_no_delay_ticks_at_once_and_lets_others_run() -> None:
    clock, role = ManualClock(), Scripted(0.0, 0.0, -1.0)
    service, task = await started(role, clock)
    assert role.ticks == 4
    await stop(service, task)


async def test_a_wake_ends_the_rest() -> None:
    clock, role = ManualClock(), Scripted()
    service, task = await started(role, clock)
    role.wake()
    await turns()
    assert role.ticks == 2
    role.wake()
    role.wake()
    await turns()
    assert role.ticks == 3
    assert clock.sleepers == 1, "the timers of cut rests are gone"
    await stop(service, task)


async def test_a_wake_during_a_tick_is_not_lost() -> None:
    clock, role = ManualClock(), Scripted()
    role.gate = asyncio.Event()
    service, task = await started(role, clock)
    role.wake()
    role.gate.set()
    await turns()
    assert role.ticks == 2
    await stop(service, task)


async def test_stop_finishes_the_tick_and_closes() -> None:
    clock, role = ManualClock(), Scripted()
    role.gate = asyncio.Event()
    service, task = await started(role, clock)
    service.stop()
    await turns()
    assert not task.done()
    assert role.closed == 0
    role.gate.set()
    await asyncio.wait_for(task, 5)
    assert (role.ticks, role.closed) == (1, 1)


async def test_stop_before_the_first_tick() -> None:
    role = Scripted()
    service = Service(role, ManualClock())
    service.stop()
    await service.run()
    assert (role.ticks, role.closed) == (0, 1)


async def test_errors_back_off_and_success_resets() -> None:
    errors = [RuntimeError(f"error {number}") for number in range(3)]
    clock, role = ManualClock(), Scripted(*errors, 5.0, RuntimeError("again"))
    service, task = await started(role, clock)
    expected_ticks = 1
    for pause in (0.2, 0.4, 0.8, 5.0, 0.2):
        assert role.ticks == expected_ticks
        clock.advance(pause * 0.99)
        await turns()
        assert role.ticks == expected_ticks, f"it did not wait {pause}"
        clock.advance(pause * 0.0101)
        await turns()
        expected_ticks += 1
    assert role.ticks == 6
    await stop(service, task)


async def test_the_pause_after_errors_is_bounded() -> None:
    clock, role = ManualClock(), Scripted(*(RuntimeError("down") for _ in range(50)))
    service, task = await started(role, clock)
    for _ in range(12):
        clock.advance(30.0)
        await turns()
    assert role.ticks == 13
    role.wake()
    await turns()
    assert role.ticks == 14, "a wake ends the pause after an error too"
    await stop(service, task)
    assert role.closed == 1


async def test_a_cancelled_service_closes_its_role() -> None:
    clock, role = ManualClock(), Scripted()
    _, task = await started(role, clock)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert role.closed == 1


async def test_what_a_role_starts_calls_for_it() -> None:
    """Engines keep readers apart for roles."""
    seen: list[bool] = []

    class Starting(Scripted):
        async def tick(self) -> float:
            async def part() -> None:
                seen.append(is_in_role())

            await asyncio.create_task(part())
            return 1.0

    service = Service(Starting(), ManualClock())
    running = asyncio.create_task(service.run())
    await turns()
    service.stop()
    await running
    assert seen == [True]
    assert not is_in_role(), "who started it does not"


async def test_run_until_stops_them_all() -> None:
    clock = ManualClock()
    roles = [Scripted(), Scripted(1.0), Scripted(RuntimeError("x"))]
    over = asyncio.Event()

    async def end() -> None:
        await turns()
        over.set()

    ending = asyncio.create_task(end())
    await asyncio.wait_for(run_until([Service(role, clock) for role in roles], over.wait), 5)
    await ending
    assert [role.closed for role in roles] == [1, 1, 1]
    assert all(role.ticks >= 1 for role in roles)


async def test_run_until_stops_them_when_waiting_fails() -> None:
    role = Scripted()

    async def fails() -> None:
        await turns()
        raise KeyError("gone")

    with pytest.raises(KeyError):
        await asyncio.wait_for(run_until([Service(role, ManualClock())], fails), 5)
    assert role.closed == 1


async def test_an_error_at_closing_is_told_and_the_others_are_closed() -> None:
    clock = ManualClock()
    bad, good = Scripted(), Scripted()
    bad.closing_error = RuntimeError("could not give back")

    async def soon() -> None:
        await turns()

    with pytest.raises(RuntimeError, match="could not give back"):
        await asyncio.wait_for(run_until([Service(bad, clock), Service(good, clock)], soon), 5)
    assert (bad.closed, good.closed) == (1, 1)


async def test_an_error_at_closing_is_told_when_all_the_others_have_given_back_what_they_hold() -> None:
    clock = ManualClock()
    bad, slow = Scripted(), Slow()
    bad.closing_error = RuntimeError("could not give back")

    with pytest.raises(RuntimeError, match="could not give back"):
        await asyncio.wait_for(run_until([Service(bad, clock), Service(slow, clock)], turns), 5)
    assert slow.closed == 1, "whoever called takes the engines away now"


async def test_it_knows_for_how_long_every_tick_has_failed() -> None:
    clock, role = ManualClock(), Scripted(1.0, OSError("away"), OSError("away"), 1.0)
    service, task = await started(role, clock)
    assert service.failing_seconds() == 0
    clock.advance(1.0)
    await turns()
    clock.advance(0.2)
    await turns()
    assert (role.ticks, service.failing_seconds()) == (3, pytest.approx(0.2))
    clock.advance(0.4)
    await turns()
    assert (role.ticks, service.failing_seconds()) == (4, 0)
    await stop(service, task)
