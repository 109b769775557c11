"""What is the same all through an example: how large the system is, how long its calls take, what has trouble."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from conveyor.settings import Settings
from tests.machine.seams import Latency, Trouble

# Everything that waits, waits seconds: an example is some minutes of the clock.
SETTINGS: dict[str, Any] = {
    "allow_private_targets": True,
    "sync_task_limit": 25,
    "ingest_range_bytes": 400,
    "lease_seconds": 12.0,
    "stuck_after": 15.0,
    "monitor_seconds": 5.0,
    "deadline_tries": 1,
    "breaker_least": 3,
    "breaker_window": 10.0,
    "breaker_seconds": 2.0,
    "breaker_longest": 6.0,
    "ingesters": 1,
    "idempotency_lease_seconds": 5.0,
    "failure_notice_seconds": 5.0,
}


class Capacity(NamedTuple):
    """Workers, the slots and fetchers of each, and the limit of all together, if there is one."""

    workers: int = 1
    slots: int = 8
    fetchers: int = 2
    fleet: int = 0


class Profile(NamedTuple):
    """What is the same all through an example."""

    seed: int = 0
    latency: Latency = Latency()
    capacity: Capacity = Capacity()
    grain: int = 1
    trouble: Trouble = Trouble()
    deaths: Sequence[int] = ()
    flush_seconds: float = 0.05

    def settings(self, place: Path) -> Settings:
        sizes = {
            "worker_concurrency": self.capacity.slots,
            "fetchers": self.capacity.fetchers,
            "fleet_concurrency": self.capacity.fleet,
            "flush_seconds": self.flush_seconds,
        }
        return Settings.load({}, data=place, **sizes, **SETTINGS)
