"""For every call of every seam in a scenario: that call fails once, and the end is the same.

`make test` takes the first and the last call of each kind (seam, method, caller), each kind in one scenario.
`CONVEYOR_ONE_FAULT=all` takes every call of every scenario.
"""

import asyncio
import itertools
import os
from collections.abc import Collection

import pytest

from tests.faults.one_fault import Fault, Injector, Kind
from tests.faults.one_fault_scenarios import SCENARIOS, State, failure_of, outcome_of
from tests.support.logs import be_plain

ALL = os.environ.get("CONVEYOR_ONE_FAULT") == "all"
# So that several processes share the work.
PARTS = 8 if ALL else 4

pytestmark = pytest.mark.timeout(1800 if ALL else 300)


# How each scenario ends without a fault, and the calls of it; they are the same for all tests of a process.
_without: dict[str, tuple[State, Injector]] = {}


async def without_fault(name: str) -> tuple[State, Injector]:
    if name not in _without:
        injector = Injector()
        _without[name] = await outcome_of(name, injector), injector
    return _without[name]


async def chosen(name: str, every: bool = ALL) -> tuple[State, list[Fault]]:
    """How the scenario ends without a fault, and the faults that are tried in it."""
    right, injector = await without_fault(name)
    if every:
        return right, list(injector.faults())
    kinds: set[Kind] = set()
    for earlier in itertools.takewhile(lambda each: each != name, SCENARIOS):
        kinds |= (await without_fault(earlier))[1].calls.keys()
    return right, [fault for fault in injector.some_faults() if fault.kind not in kinds]


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", SCENARIOS)
async def test_one_fault_changes_nothing(name: str, part: int) -> None:
    right, faults = await chosen(name)
    mine = faults[part::PARTS]
    wrong = [await failure_of(name, fault, right) for fault in mine]
    print(f"{name}: {len(mine)} of {len(faults)} faults")
    assert not any(wrong), "\n".join(filter(None, wrong))


def sweep(names: Collection[str] = tuple(SCENARIOS)) -> list[str]:
    """Every fault of these scenarios, one after the other; what was wrong. For a soak, in a process of its own."""

    async def all_of(name: str) -> list[str]:
        right, faults = await chosen(name, every=True)
        print(f"{name}: {len(faults)} faults", flush=True)
        return [wrong for fault in faults if (wrong := await failure_of(name, fault, right))]

    be_plain()
    return [wrong for name in names for wrong in asyncio.run(all_of(name))]
