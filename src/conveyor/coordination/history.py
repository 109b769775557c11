"""History: a run's counts over time, in the coordinator, and lost with it. Their number is bounded: as a run gets
longer, every other moment is dropped."""

import msgspec
import structlog

from conveyor.engines.coordinator import Coordinator
from conveyor.errors import ConveyorError
from conveyor.model import Counts, RunId

log = structlog.get_logger()

MAX_MOMENTS = 240

_KEEP_SECONDS = 86_400.0


class Moment(msgspec.Struct, frozen=True, array_like=True):
    """The counts of a run at one time."""

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


async def add_moment(coordinator: Coordinator, run_id: RunId, now: Moment) -> None:
    """Add a moment, best effort: of two concurrent additions one may be lost, and a coordinator that fails is only
    logged."""
    try:
        before = await history(coordinator, run_id)
        if before and now.at <= before[-1].at:
            return
        await coordinator.cache(_key(run_id), msgspec.json.encode(_thin([*before, now])), _KEEP_SECONDS)
    except ConveyorError as error:
        log.warning("run history not stored", run=run_id, error=str(error))


async def history(coordinator: Coordinator, run_id: RunId) -> list[Moment]:
    """Return the moments of a run, oldest first."""
    stored = await coordinator.cached(_key(run_id))
    try:
        return _moments.decode(stored) if stored else []
    except msgspec.MsgspecError:
        # Written by another version.
        return []


def _thin(moments: list[Moment]) -> list[Moment]:
    """Drop every other moment if there are too many, but never the last."""
    return moments if len(moments) <= MAX_MOMENTS else [*moments[:-1:2], moments[-1]]


def _key(run_id: RunId) -> str:
    return f"history:{run_id}"
