"""Values that expire: what is seen of them, and that neither time nor memory is spent on those that are gone."""

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from conveyor.engines.sqlite import SqliteEngine
from conveyor.engines.sqlite.expiring import Expiring
from tests.support.clocks import ManualClock
from tests.support.places import quick_place

LIVE = 5000
# Comparisons and look-ups of one call, on the way through a heap of that many.
FEW = 200

writes = st.tuples(st.sampled_from("abcd"), st.floats(0.1, 50.0), st.floats(0.0, 20.0))


@given(st.lists(writes, max_size=60))
def test_a_value_is_seen_until_it_expires(steps: list[tuple[str, float, float]]) -> None:
    values: Expiring[int] = Expiring()
    model: dict[str, tuple[int, float]] = {}
    now = 0.0
    for number, (key, ttl, passed) in enumerate(steps):
        values.put(key, number, now + ttl, now)
        model[key] = (number, now + ttl)
        now += passed
        for each in "abcd":
            value, until = model.get(each, (None, 0.0))
            assert values.get(each, now) == (value if until > now else None)
        assert len(values) <= len(model)


def test_what_expired_is_thrown_out_as_others_come() -> None:
    values: Expiring[int] = Expiring()
    for number in range(1000):
        values.put(f"old {number}", number, 10.0, 0.0)
    for number in range(400):
        values.put(f"new {number}", number, 100.0, 20.0)
    assert len(values) == len(values._heap) == 400


def test_writing_a_value_again_takes_no_more_memory() -> None:
    values: Expiring[int] = Expiring()
    for second in range(1000):
        for key in ("long", "short"):
            values.put(key, second, second + (60.0 if key == "long" or second % 2 else 1.0), float(second))
    assert len(values) == len(values._heap) == 2


class Counted(str):
    """A name that counts how often it is looked up or compared."""

    __slots__ = ()
    uses = 0

    def __hash__(self) -> int:
        Counted.uses += 1
        return str.__hash__(self)

    def __lt__(self, other: Any) -> bool:
        Counted.uses += 1
        return str.__lt__(self, other)

    __eq__ = str.__eq__


async def test_a_call_costs_the_same_however_many_are_live() -> None:
    """Of tallies, buckets and the cache of the embedded coordinator."""
    clock = ManualClock()
    with quick_place() as place:
        async with SqliteEngine.open(place, clock) as engine:
            coordinator = engine.coordinator
            calls = {
                "tally": lambda name: coordinator.add_counters(name, {"failed": 1}, 1000.0),
                "reserve": lambda name: coordinator.reserve(name, 1, 0.001, 1),
                "cache": lambda name: coordinator.cache(name, b"value", 1000.0),
            }
            for what, call in calls.items():
                for number in range(LIVE):
                    await call(Counted(f"host {number}"))
                Counted.uses = 0
                for name in ("host 7", "another"):
                    await call(Counted(name))
                assert Counted.uses < FEW, what
                await asyncio.sleep(0)
