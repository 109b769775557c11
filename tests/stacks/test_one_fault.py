"""The scenarios of tests/faults/test_one_fault.py on the other stacks: a seed says which call fails, and the end is
that of the embedded stack without a fault. `CONVEYOR_ONE_FAULT_CASES` asks for more seeds.
"""

import asyncio
import os
import random
from collections.abc import Iterable

import pytest

from tests.faults.one_fault import Injector
from tests.faults.one_fault_scenarios import SCENARIOS, failure_of, outcome_of
from tests.support.logs import be_plain

STACKS = ("postgres", "aws")
CASES = int(os.environ.get("CONVEYOR_ONE_FAULT_CASES", "3"))

pytestmark = pytest.mark.timeout(300)


async def failure_on(stack: str, seed: int) -> str | None:
    """What is wrong with the scenario and the fault that a seed stands for."""
    chance = random.Random(f"{stack} {seed}")
    name = chance.choice(list(SCENARIOS))
    injector = Injector()
    right = await outcome_of(name, injector)
    # Rows are counted in SQLite alone.
    right["left"]["rows"] = {}
    fault = chance.choice(list(injector.faults()))
    print(f"{stack}, seed {seed}: {name}, {fault}", flush=True)
    return await failure_of(name, fault, right, stack)


@pytest.mark.parametrize("seed", range(CASES))
@pytest.mark.parametrize("stack", STACKS)
async def test_one_fault_changes_nothing(stack: str, seed: int) -> None:
    assert await failure_on(stack, seed) is None


def sweep(seeds: Iterable[int], stacks: Iterable[str] = STACKS) -> list[str]:
    """What was wrong with these seeds. For a soak, in a process of its own."""

    async def each(stack: str) -> list[str]:
        return [wrong for seed in seeds if (wrong := await failure_on(stack, seed))]

    be_plain()
    seeds = list(seeds)
    return [wrong for stack in stacks for wrong in asyncio.run(each(stack))]
