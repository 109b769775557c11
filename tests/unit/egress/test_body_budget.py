"""The byte budget: those who hold and those who wait, in the order of asking, and nothing leaks."""

import asyncio

import pytest

from conveyor.egress.body_budget import SMALL, BodyBudget, largest_body

MIB = 1024 * 1024


async def holding(budget: BodyBudget, amount: int, log: list[str], name: str, leave: asyncio.Event) -> None:
    async with budget.taking(amount):
        log.append(name)
        await leave.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_who_does_not_fit_waits_and_nobody_overtakes() -> None:
    budget, log, leave = BodyBudget(10 * MIB), [], [asyncio.Event() for _ in range(4)]
    tasks = [
        asyncio.create_task(holding(budget, amount * MIB, log, str(number), leave[number]))
        for number, amount in enumerate([6, 6, 1, 20])
    ]
    await settle()
    assert (log, budget.taken) == (["0"], 6 * MIB), "the third would fit, but the second came before"
    leave[0].set()
    await settle()
    assert (log, budget.taken) == (["0", "1", "2"], 7 * MIB)
    leave[1].set()
    leave[2].set()
    await settle()
    assert (log[3:], budget.taken) == (["3"], 10 * MIB), "what is larger than all of it takes all of it"
    leave[3].set()
    await asyncio.gather(*tasks)
    assert budget.taken == 0


async def test_small_ones_do_not_wait() -> None:
    budget = BodyBudget(MIB)
    async with budget.taking(MIB), budget.taking(SMALL):
        assert budget.taken == MIB


@pytest.mark.parametrize("granted", [False, True])
async def test_who_gives_up_while_waiting_leaves_no_trace(granted: bool) -> None:
    budget, log = BodyBudget(MIB), []
    first, second = asyncio.Event(), asyncio.Event()
    holder = asyncio.create_task(holding(budget, MIB, log, "a", first))
    await settle()
    waiter = asyncio.create_task(holding(budget, MIB, log, "b", second))
    last = asyncio.create_task(holding(budget, MIB, log, "c", second))
    await settle()
    if granted:
        # Cancelled in the moment in which it is its turn.
        first.set()
        await asyncio.wait([holder])
    waiter.cancel()
    first.set()
    second.set()
    await asyncio.gather(holder, waiter, last, return_exceptions=True)
    assert log[-1] == "c"
    assert budget.taken == 0


async def test_it_is_held_until_there_is_room() -> None:
    room = asyncio.Event()
    budget = BodyBudget(MIB, room.wait)

    async def read() -> None:
        async with budget.taking(MIB):
            pass

    reading = asyncio.create_task(read())
    await settle()
    assert budget.taken == MIB
    room.set()
    await reading
    assert budget.taken == 0


async def test_what_may_be_large_counts_with_its_copies() -> None:
    """A body larger than the whole budget took no more than the budget, whatever it held."""
    budget = BodyBudget(256 * MIB)
    assert largest_body(512 * MIB, 2) == 64 * MIB
    async with budget.taking(64 * MIB):
        assert budget.taken == 256 * MIB
    async with budget.taking(32 * MIB):
        assert budget.taken == 32 * MIB
