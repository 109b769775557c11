"""The ready index in memory: what a look costs."""

import sys
from typing import Any

from conveyor.engines.ready import LookRequest, ReadyMark
from conveyor.engines.sqlite.ready_index import MemoryReadyIndex
from conveyor.model import JobId, RunId, TenantId
from tests.support.clocks import ManualClock


async def calls_of_a_look(tenants: int) -> int:
    index = MemoryReadyIndex(ManualClock())
    runs = range(2 * tenants)
    marks = [ReadyMark(RunId(f"run {n}"), TenantId(f"tenant {n // 2}"), JobId("job"), 0.0) for n in runs]
    await index.mark_runs(marks)
    await index.look_for_runs(LookRequest("worker", 30.0, 30.0))
    calls = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event.endswith("call")

    sys.setprofile(count)
    try:
        look = await index.look_for_runs(LookRequest("worker", 30.0, 30.0, limit=4))
    finally:
        sys.setprofile(None)
    assert len(look.taken) == 4
    return calls


async def test_a_look_among_thousands_of_tenants_is_as_much_work_as_among_hundreds() -> None:
    few = await calls_of_a_look(300)
    assert await calls_of_a_look(3000) <= few + 50
