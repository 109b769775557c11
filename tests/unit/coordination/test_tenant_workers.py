"""How many workers serve a tenant, as each of them knows it."""

from typing import Any, cast

from conveyor.coordination.tenant_workers import TenantWorkers
from conveyor.engines.sqlite.coordinator import SqliteCoordinator
from conveyor.model import TenantId
from tests.support.clocks import ManualClock

A, B = TenantId("a"), TenantId("b")


async def test_workers_count_each_other() -> None:
    clock = ManualClock()
    coordinator = SqliteCoordinator(cast(Any, None), clock)
    one, two = (TenantWorkers(coordinator, name) for name in ("one", "two"))
    assert one.count(A) == 1, "before anything is shared"
    await one.share({A, B})
    await two.share({B})
    await one.share({A, B})
    assert (one.count(A), one.count(B), two.count(B)) == (1, 2, 2)
    await two.share(set())
    await one.share({A, B})
    assert (one.count(B), two.count(B)) == (1, 1), "one that no longer serves it"


async def test_a_worker_that_died_counts_no_longer() -> None:
    clock = ManualClock()
    coordinator = SqliteCoordinator(cast(Any, None), clock)
    one, two = (TenantWorkers(coordinator, name) for name in ("one", "two"))
    await two.share({A})
    await one.share({A})
    assert one.count(A) == 2
    clock.advance(11.0)
    await one.share({A})
    assert one.count(A) == 1
