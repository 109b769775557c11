"""The ready index, a part of the Coordinator seam: which runs have work, when, and which workers serve them.

A run is listed at the time when its next message is due. A worker takes listed runs and gets a seat on each; a run with
a seat is listed again only if one of its workers asks for help. The seats of a worker that stops looking are free after
`ttl` seconds. The index may be lost at any time: Records hold the truth, and it is rebuilt from them.
"""

from collections.abc import Collection, Sequence
from enum import IntEnum
from math import inf
from typing import Protocol

import msgspec

from conveyor.model import JobId, RunId, TenantId

# Times of messages that are kept for one run. Of more, some are rounded up to the next.
MAX_DUE_TIMES = 16


class ReadyMark(msgspec.Struct, frozen=True, array_like=True):
    """News about a run. Without a tenant it changes only a run that the index knows."""

    run_id: RunId
    tenant: TenantId = TenantId("")
    job_id: JobId = JobId("")
    # Seconds until a message of the run is due; inf: no message was sent.
    delay: float = inf
    # The stored job has changed: workers that serve the run read it again.
    is_changed: bool = False
    # The run has finished, and leaves the index.
    is_finished: bool = False
    # List the run only if no worker serves it and it is not listed.
    is_restored: bool = False


class SeatAction(IntEnum):
    """What a worker reports of a run that it serves: it leaves, and the run may be due again; another may join; it
    still serves the run, whatever the index knows; it leaves, and the run has finished."""

    LEAVE = 0
    HELP = 1
    CLAIM = 2
    FINISH = 3


class SeatNews(msgspec.Struct, frozen=True, array_like=True):
    """News of a worker about a run that it serves."""

    run_id: RunId
    action: SeatAction
    # Of a worker that leaves: seconds until the run is due again, and the pause that the next worker begins with.
    delay: float = inf
    pause: float = 0.0
    # Of a claim: as in a mark.
    tenant: TenantId = TenantId("")
    job_id: JobId = JobId("")


class SeatedRun(msgspec.Struct, frozen=True, array_like=True):
    """A run on which a worker has a seat. `pause` is what the worker before it left."""

    run_id: RunId
    tenant: TenantId
    job_id: JobId
    pause: float = 0.0


class LookRequest(msgspec.Struct, frozen=True, array_like=True):
    """One look of a worker."""

    holder: str
    # The seats expire after this many seconds without a look; messages of a worker that died, after `visibility`.
    ttl: float
    visibility: float
    news: Sequence[SeatNews] = ()
    # How many seats the worker knows, after its news; -1: it asks for all.
    seat_count: int = 0
    # The last change that the worker has seen.
    since: int = 0
    # At most how many runs to take, and by how many seconds they must be overdue.
    limit: int = 0
    overdue: float = 0.0
    # Runs that the worker cannot serve, and tenants whose runs it does not join.
    skipped: Sequence[RunId] = ()
    unjoined: Sequence[TenantId] = ()
    # By how many seconds runs of these tenants must be overdue; None: as others.
    unjoined_overdue: float | None = None


class Look(msgspec.Struct, frozen=True, array_like=True):
    """The answer: runs that the worker has got a seat on, and runs of its own whose jobs have changed."""

    taken: list[SeatedRun]
    changed: list[RunId]
    # To be passed with the next look, once the changed jobs were read.
    seen: int
    # Whether `restore` has filled the index since it was lost.
    is_built: bool
    # All seats of the worker, before it took more, if their number is not what the worker knows.
    seats: list[SeatedRun] | None = None


class ReadyIndex(Protocol):
    """All times are by the engine's clock. Every call may be repeated."""

    async def mark_runs(self, marks: Sequence[ReadyMark], *, is_built: bool = False) -> None:
        """Apply marks. With `is_built` the index counts as filled."""

    async def hasten_tenant(self, tenant: TenantId) -> None:
        """Make all listed runs of a tenant due now."""

    async def look_for_runs(self, request: LookRequest) -> Look:
        """Renew a worker's seats, apply its news, and take runs that are due: of the tenants in turn, the least
        recently served first; of a tenant, the run that is due for longest. A run with a seat is taken only if one of
        its workers asked for help."""

    async def known_runs(self, run_ids: Collection[RunId]) -> frozenset[RunId]:
        """Which of these runs the index knows: they have not finished."""
