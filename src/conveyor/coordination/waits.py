"""Why a run waits, said by whoever holds it back and read by whoever shows it. It lapses unless it is said again, so
that nobody has to take it back."""

import msgspec

from conveyor.engines.coordinator import Coordinator
from conveyor.model import RunId


class Wait(msgspec.Struct, frozen=True):
    """What a run waits for. `code` is stable; `until` is a time, if one is known."""

    code: str
    detail: str
    until: float | None = None


_waits = msgspec.json.Decoder(Wait)


async def say_waiting(coordinator: Coordinator, run_id: RunId, wait: Wait, ttl: float) -> None:
    """Have it shown for `ttl` seconds."""
    await coordinator.cache(_key(run_id), msgspec.json.encode(wait), ttl)


async def waiting(coordinator: Coordinator, run_id: RunId) -> Wait | None:
    """What was last said of the run."""
    said = await coordinator.cached(_key(run_id))
    try:
        return _waits.decode(said) if said else None
    except msgspec.MsgspecError:
        # Another version's.
        return None


def _key(run_id: RunId) -> str:
    return f"waits:{run_id}"
