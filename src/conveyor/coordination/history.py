"""How a run went: its counts at moments of the past, kept by the coordinator and lost with it. There are never many: as
a run gets longer, every other moment is forgotten."""

import msgspec
import structlog

from conveyor.engines.coordinator import Coordinator
from conveyor.errors import ConveyorError
from conveyor.model import Counts, RunId

log = structlog.get_logger()

MOST = 240

_KEEP_SECONDS = 86_400.0


class Moment(msgspec.Struct, frozen=True, array_like=True):
    """The counts of a run at a time."""

    at: float
    succeeded: int
    failed: int
    cancelled: int

    @property
    def ended(self) -> int:
        return self.succeeded + self.failed + self.cancelled


_moments = msgspec.json.Decoder(list[Moment])


def moment(at: float, counts: Counts) -> Moment:
    return Moment(at, counts.succeeded, counts.failed, counts.cancelled)


async def remember(coordinator: Coordinator, run_id: RunId, now: Moment) -> None:
    """Add what is known now. Two that add at the same time may lose one of it, and a coordinator that does not answer
    all of it: nobody fails for that."""
    try:
        before = await history(coordinator, run_id)
        if before and now.at <= before[-1].at:
            return
        await coordinator.cache(_key(run_id), msgspec.json.encode(_thinned([*before, now])), _KEEP_SECONDS)
    except ConveyorError as error:
        log.warning("the counts of a run were not kept", run=run_id, error=str(error))


async def history(coordinator: Coordinator, run_id: RunId) -> list[Moment]:
    """What is kept, oldest first."""
    kept = await coordinator.cached(_key(run_id))
    try:
        return _moments.decode(kept) if kept else []
    except msgspec.MsgspecError:
        # Another version's.
        return []


def _thinned(moments: list[Moment]) -> list[Moment]:
    """The last one stays, and half of the others if there are too many."""
    return moments if len(moments) <= MOST else [*moments[:-1:2], moments[-1]]


def _key(run_id: RunId) -> str:
    return f"history:{run_id}"
