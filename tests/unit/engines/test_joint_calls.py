"""Calls that are made at the same time are one call of the engine."""

import asyncio
from collections.abc import Sequence

import pytest

from conveyor.callers import enter_role
from conveyor.engines.postgres.joint_calls import JointCalls


class Doubling:
    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.go = asyncio.Event()
        self.go.set()

    async def work(self, items: Sequence[int]) -> list[int]:
        self.batches.append(list(items))
        await self.go.wait()
        if 13 in items:
            raise LookupError("13")
        return [2 * item for item in items]


async def test_calls_of_one_turn_are_one() -> None:
    doubling = Doubling()
    joint = JointCalls(doubling.work)
    assert await asyncio.gather(*map(joint.call, (1, 2, 3))) == [2, 4, 6]
    assert await joint.call(4) == 8
    assert doubling.batches == [[1, 2, 3], [4]]


async def test_a_failure_is_that_of_every_caller() -> None:
    joint = JointCalls(Doubling().work)
    answers = await asyncio.gather(*map(joint.call, (1, 13)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [LookupError, LookupError]
    assert await joint.call(1) == 2


async def test_a_caller_that_leaves_takes_nobody_along() -> None:
    doubling = Doubling()
    joint = JointCalls(doubling.work)
    doubling.go.clear()
    first, second = asyncio.create_task(joint.call(1)), asyncio.create_task(joint.call(2))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.cancel()
    doubling.go.set()
    assert await second == 4
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_requests_do_not_join_roles() -> None:
    async def in_role(item: int) -> int:
        enter_role()
        return await joint.call(item)

    doubling = Doubling()
    joint = JointCalls(doubling.work)
    await asyncio.gather(asyncio.create_task(in_role(1)), asyncio.create_task(joint.call(2)))
    assert sorted(doubling.batches) == [[1], [2]]
