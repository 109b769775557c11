"""Monitor: finds what is late. Stuck tasks, tasks of dead workers, overdue runs; each by the time at which its document
is due, never by a scan.

It runs as a role of `conveyor up`, as `conveyor monitor`, and as a Lambda handler (lambda_handler.py): the same pass.
Several monitors share the load: each change is written on the version that was read, and one of them wins.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import msgspec
import structlog

from conveyor.coordination.isolation import run_all
from conveyor.coordination.trusted_time import TrustedTime
from conveyor.lifecycle import Lifecycle
from conveyor.notify.callback_monitor import Callbacks
from conveyor.recover.future_documents import FutureDocuments
from conveyor.recover.monitored import Monitored
from conveyor.recover.overdue_runs import Deadlines
from conveyor.recover.stuck import OnTakeover, Stuck
from conveyor.settings import Settings
from conveyor.system import System
from conveyor.telemetry import metrics

log = structlog.get_logger()

# An additional step of each pass. It returns counts of its own.
Part = Callable[[], Awaitable[Mapping[str, int]]]


class Monitor:
    """A role."""

    def __init__(self, stuck: Stuck, deadlines: Deadlines, settings: Settings, parts: Sequence[Part]) -> None:
        self.name = "monitor"
        self.wake: Callable[[], None] = lambda: None
        self.stopping = False
        self._stuck = stuck
        self._deadlines = deadlines
        self._settings = settings
        self._parts = parts

    async def tick(self) -> float:
        seen = await self.run_once()
        metrics.add_counts(metrics.MONITORED, seen)
        if seen != Monitored():
            log.info("monitored", **msgspec.structs.asdict(seen))
        return self._settings.monitor_seconds

    async def close(self) -> None:
        """Nothing to release between ticks."""

    async def run_once(self) -> Monitored:
        seen = Monitored()
        parts = (partial(self._add, part, seen) for part in self._parts)
        await run_all(partial(self._stuck.run_once, seen), partial(self._deadlines.run_once, seen), *parts)
        return seen

    async def _add(self, part: Part, seen: Monitored) -> None:
        seen.others = {**seen.others, **await part()}


def monitor_of(
    system: System,
    *,
    told: OnTakeover | None = None,
    parts: Sequence[Part] = (),
    trusted: TrustedTime | None = None,
) -> Monitor:
    """The monitor of a system. It calls `told` for each task that it takes over. `trusted` is the time of deadlines, if
    another role of the process asks for it, too."""
    records, tasks, queue, clock = system.records, system.tasks, system.queue, system.clock
    lifecycle = Lifecycle(records, tasks, clock)
    stuck = Stuck(records, tasks, queue, clock, system.settings, told)
    trusted = trusted or TrustedTime(records.documents, clock, deadlines=True)
    deadlines = Deadlines(records, tasks, queue, system.coordinator, lifecycle, clock, system.settings, trusted)
    parts = [*parts, FutureDocuments(records, clock, system.settings).part]
    if system.step_functions is not None:
        parts = [*parts, Callbacks(system, system.step_functions).part]
    return Monitor(stuck, deadlines, system.settings, parts)
