"""The small fleet on each queue engine: on SQLite, on Postgres, on SQS with a queue for each run, and on SQS where all
runs share one."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from structlog.testing import capture_logs

from conveyor.settings import Settings
from conveyor.system import migrate, open_system
from tests.faults.shim_sqs import Shim
from tests.servers import postgres
from tests.servers.sqs import together, url_of
from tests.support.clocks import ManualClock
from tests.support.places import quick_place
from tests.support.small_fleet import Fleet, Threads

ENGINES = ("sqlite", "postgres", "sqs", "sqs shared")


class Calls:
    """Calls of Postgres under way."""

    def __init__(self, database: Any) -> None:
        self.busy = 0
        tried: Callable[..., Awaitable[Any]] = database._tried

        async def counted(*given: Any) -> Any:
            self.busy += 1
            try:
                return await tried(*given)
            finally:
                self.busy -= 1

        database._tried = counted


class Everything:
    """Whatever is under way at several engines."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    @property
    def busy(self) -> int:
        return sum(part.busy for part in self._parts)


@asynccontextmanager
async def open_fleet_on(engine: str, **settings: Any) -> AsyncIterator[Fleet]:
    clock = ManualClock()
    async with AsyncExitStack() as stack:
        place = stack.enter_context(quick_place())
        logs = stack.enter_context(capture_logs())
        shim = Shim(1)
        urls: dict[str, Any] = {}
        if engine == "postgres":
            urls = dict.fromkeys(("records", "tasks", "queue"), postgres.url_of(place))
        elif engine.startswith("sqs"):
            stack.enter_context(together(clock))
            await stack.enter_async_context(shim.running())
            limit = 0 if engine == "sqs shared" else 500
            urls = {"queue": url_of(place, shim.endpoint), "run_queue_limit": limit}
        given = {"data": place, "flush_seconds": 0.0, "sync_task_limit": 100_000, **urls, **settings}
        chosen = Settings.load({}, **given)
        if engine == "postgres":
            await migrate(chosen, clock)
        system = await stack.enter_async_context(open_system(chosen, clock))
        parts: Any = system
        busy = Calls(parts.records.jobs._database) if engine == "postgres" else Threads(system)
        fleet = Fleet(system, clock, logs, Everything(busy, shim))
        stack.push_async_callback(fleet.close)
        yield fleet
