"""Why a run waits. The component that delays a run reports it, and status pages show it. A report expires unless it is
repeated, so that none has to be withdrawn."""

from collections.abc import Sequence

import msgspec

from conveyor.engines.coordinator import Coordinator
from conveyor.errors import DiskUnwritable
from conveyor.model import RunId


class Wait(msgspec.Struct, frozen=True):
    """Why a run waits. `code` is stable; `until` is when it ends, if known. A breaker has a `target`, and the error
    that opened it."""

    code: str
    detail: str
    until: float | None = None
    target: str | None = None
    error: str | None = None


# Longer than a worker whose ticks fail waits for the next.
_DISK_TTL = 60.0

_waits = msgspec.json.Decoder(Wait)


async def publish_wait(coordinator: Coordinator, run_id: RunId, wait: Wait, ttl: float) -> None:
    """Report why a run waits, for `ttl` seconds."""
    await coordinator.cache(_key(run_id), msgspec.json.encode(wait), ttl)


async def publish_disk_wait(coordinator: Coordinator, run_ids: Sequence[RunId], error: DiskUnwritable) -> None:
    """Report that these runs wait for a disk that can be written. Tenants see it: without the path."""
    for run_id in run_ids:
        await publish_wait(coordinator, run_id, Wait("disk", type(error)().message), _DISK_TTL)


async def waiting(coordinator: Coordinator, run_id: RunId) -> Wait | None:
    """Return the last report about a run, unless it has expired."""
    stored = await coordinator.cached(_key(run_id))
    try:
        return _waits.decode(stored) if stored else None
    except msgspec.MsgspecError:
        # Written by another version.
        return None


def _key(run_id: RunId) -> str:
    return f"waits:{run_id}"
