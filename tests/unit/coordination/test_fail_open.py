"""Readers that answer without the coordinator."""

import asyncio
from typing import Any

import pytest

from conveyor.coordination.fail_open import FailOpen
from conveyor.engines.coordinator import Lease
from conveyor.errors import EngineFailed
from tests.support.clocks import ManualClock


class Missing:
    """A coordinator that fails, or never answers."""

    def __init__(self, *, hangs: bool = False) -> None:
        self._hangs = hangs
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        async def call(*_: object, **__: object) -> None:
            self.calls += 1
            if self._hangs:
                await asyncio.Event().wait()
            raise EngineFailed("it is away")

        return call


@pytest.mark.parametrize("hangs", [False, True])
async def test_what_is_only_shown_is_missing(hangs: bool) -> None:
    missing: Any = Missing(hangs=hangs)
    clock = ManualClock()
    reader = FailOpen(missing, clock, patience=0.01)
    assert await reader.cached("key") is None
    assert await reader.permits_in_use("slots") == 0
    assert await reader.add_counters("durations", {}, 1.0) == {}
    await reader.cache("key", b"value", 1.0)
    assert missing.calls == 1, "after a failure it is left alone"
    clock.advance(2.0)
    await reader.cached("key")
    assert missing.calls == 2


async def test_what_decides_something_raises() -> None:
    missing: Any = Missing()
    reader = FailOpen(missing, ManualClock())
    lease = Lease("name", "holder", 1)
    for call in (
        reader.lease("name", "holder", 1.0),
        reader.renew(lease, 1.0),
        reader.release(lease),
        reader.forget_leases("name"),
        reader.acquire("slots", "holder", 1, 1, 1.0),
        reader.reserve("bucket", 1, 1.0, 1),
        reader.swap("key", None, b"value", 1.0),
        reader.add_counters("count", {"one": 1}, 1.0),
    ):
        with pytest.raises(EngineFailed):
            await call
