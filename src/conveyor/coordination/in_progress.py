"""In progress: which tasks of a run its workers attempt now, in the coordinator, and lost with it. It is for people who
look at a list of tasks, so it is a few seconds old, and leaves out attempts that would be over before anybody sees
them."""

import msgspec

from conveyor.engines.coordinator import Coordinator
from conveyor.model import RunId

# Seconds after which what a worker shared is taken for old.
KEEP_SECONDS = 8.0
# Other workers of the run share theirs at the same time.
_TRIES = 3


class SharedTasks(msgspec.Struct, frozen=True, array_like=True):
    """The indexes that one worker attempts, and when it said so."""

    at: float
    indexes: list[int]


_shared = msgspec.json.Decoder(dict[str, SharedTasks])


async def share_in_progress(
    coordinator: Coordinator, run_id: RunId, worker: str, indexes: list[int], now: float
) -> None:
    """Replace what a worker shared of a run; best effort."""
    for _ in range(_TRIES):
        stored = await coordinator.cached(_key(run_id))
        known = {name: shared for name, shared in _decoded(stored).items() if name != worker and _is_fresh(shared, now)}
        if indexes:
            known[worker] = SharedTasks(now, indexes)
        if (stored is None and not known) or await coordinator.swap(
            _key(run_id), stored, msgspec.json.encode(known), KEEP_SECONDS
        ):
            return


async def read_in_progress(coordinator: Coordinator, run_id: RunId, now: float) -> dict[int, str]:
    """The tasks of a run that are in progress, by index, each with its worker."""
    known = _decoded(await coordinator.cached(_key(run_id)))
    return {index: worker for worker, shared in known.items() if _is_fresh(shared, now) for index in shared.indexes}


def _is_fresh(shared: SharedTasks, now: float) -> bool:
    return abs(now - shared.at) < KEEP_SECONDS


def _decoded(stored: bytes | None) -> dict[str, SharedTasks]:
    try:
        return _shared.decode(stored) if stored else {}
    except msgspec.MsgspecError:
        # Written by another version.
        return {}


def _key(run_id: RunId) -> str:
    return f"in_progress:{run_id}"
