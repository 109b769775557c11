"""TrustedTime: the time by which retention purges, and runs and tasks reach their deadlines. A wall clock that jumps
forward makes everything look expired, and what is purged or failed does not come back when the clock is right again. So
a jump counts only after the clock has run on evenly for an hour. Until then trusted time goes on without the jump, and
only what expired by it is purged or failed.

The last trusted time is a document, so that a process that starts after the jump sees it, too.
"""

import asyncio

import msgspec
import structlog

from conveyor.clock import CLOCK_SLACK, Clock, iso_text
from conveyor.engines.records import Document, DocumentRecords
from conveyor.model import TenantId

log = structlog.get_logger()

# The kind, the tenant and the ids of the documents.
_KIND = "clock"
_TENANT = TenantId("~retention")
_PURGES = "trusted"
_DEADLINES = "deadlines"
# A jump that a process sees; it may have been suspended.
_JUMP = 3600.0
# A jump between two processes; there may have been none for a while. For deadlines it does not matter which it was:
# time in which nothing ran is not the run's fault.
_GAP = 86_400.0
_DEADLINE_GAP = 1800.0
# How long the clock must run on evenly after a jump.
_HOLD = 3600.0
# How often to look at the clock, in seconds, for a process that otherwise might not.
CLOCK_LOOK_SECONDS = 30.0
_WRITE_EVERY = 600.0
_WRITE_WHILE_AHEAD = 60.0


class TrustedMark(msgspec.Struct, frozen=True):
    """The body of the document: the last trusted time; since when the wall clock has been ahead of it (0: it is not);
    and for how many seconds processes have seen it run on evenly since."""

    at: float
    since: float = 0.0
    even: float = 0.0


_marks = msgspec.json.Decoder(TrustedMark)

_NOT_PURGED = "what expired since is purged after an hour"
_NOT_FAILED = "deadlines do not count that time for an hour"


class TrustedTime:
    """As one process sees it. Lives as long as the roles that ask."""

    def __init__(self, documents: DocumentRecords, clock: Clock, *, deadlines: bool = False) -> None:
        """With `deadlines`, for deadlines: they may be short, so that smaller jumps matter."""
        self._documents = documents
        self._clock = clock
        self._id = _DEADLINES if deadlines else _PURGES
        self._least_jump = CLOCK_SLACK if deadlines else _JUMP
        self._least_gap = _DEADLINE_GAP if deadlines else _GAP
        self._effect = _NOT_FAILED if deadlines else _NOT_PURGED
        self._asking = asyncio.Lock()
        # The wall clock at the last look; None before the first.
        self._wall: float | None = None
        self._looked_at = 0.0
        # By how many seconds the wall clock is ahead, and since when.
        self._ahead = 0.0
        self._since = 0.0
        # For how many seconds it has run on evenly since, in this process and those before it.
        self._even = 0.0
        self._written: tuple[float, float] | None = None

    async def now(self) -> float:
        """The trusted time. It is never ahead of the wall clock."""
        async with self._asking:
            return await self._look()

    def peek(self) -> float:
        """The trusted time as far as this process knows, without a call of the store: a jump that nobody has looked at
        yet does not count either. The wall clock before the first look."""
        wall = self._clock.now()
        if self._wall is None:
            return wall
        jump = wall - self._wall - (self._clock.monotonic() - self._looked_at)
        return wall - self._ahead - (jump if jump > self._least_jump else 0.0)

    async def _look(self) -> float:
        wall, monotonic = self._clock.now(), self._clock.monotonic()
        if self._wall is None:
            await self._start(wall)
        else:
            self._even += monotonic - self._looked_at
            self._compare(wall, wall - self._wall - (monotonic - self._looked_at))
        self._wall, self._looked_at = wall, monotonic
        # Not by the wall clock: it may have jumped once more while no process ran.
        if self._ahead and self._even >= _HOLD:
            log.info("clock has run evenly for an hour: it is trusted", seconds=round(self._ahead))
            self._ahead = self._since = 0.0
        await self._write(wall - self._ahead, monotonic)
        return wall - self._ahead

    async def is_held(self) -> bool:
        """Whether the wall clock is ahead of the trusted time."""
        await self.now()
        return self._ahead > 0

    async def _start(self, wall: float) -> None:
        mark = _mark(await self._documents.document(_KIND, _TENANT, self._id))
        if mark is not None and wall < mark.at - CLOCK_SLACK:
            log.warning("clock was set back", seconds=round(mark.at - wall))
        elif mark is not None and wall - mark.at > self._least_gap:
            # Somebody has switched it off, in nearly all cases.
            self._ahead, self._since = wall - mark.at, wall
            log.info(f"nothing ran for a while: {self._effect}", since=iso_text(mark.at), now=iso_text(wall))
            if 0 < mark.since <= wall:
                self._since, self._even = mark.since, mark.even

    def _compare(self, wall: float, jump: float) -> None:
        if jump > self._least_jump:
            self._jumped(wall, jump)
        elif jump < -CLOCK_SLACK:
            self._ahead = max(0.0, self._ahead + jump)
            # What is left is no jump of its own.
            if self._ahead <= self._least_jump:
                self._ahead = 0.0
            self._since, self._even = wall if self._ahead else 0.0, 0.0
            # At once: a process that starts after a jump forward must not compare its clock with the time before.
            self._written = None
            log.warning("clock was set back", seconds=round(-jump))

    def _jumped(self, wall: float, seconds: float) -> None:
        self._ahead += seconds
        self._since, self._even = wall, 0.0
        log.error(
            f"clock jumped forward, or the machine was asleep: {self._effect}; set the clock right before that if it is"
            " wrong",
            seconds=round(seconds),
            now=iso_text(wall),
            trusted=iso_text(wall - self._ahead),
        )

    async def _write(self, at: float, monotonic: float) -> None:
        """Store the trusted time every ten minutes, every minute while the clock is ahead, when a hold begins or ends,
        and when the clock was set back. Of several processes that write it at the same time, the first succeeds."""
        if self._written is not None:
            since, written_at = self._written
            pause = _WRITE_WHILE_AHEAD if self._ahead else _WRITE_EVERY
            if since == self._since and monotonic - written_at < pause:
                return
        body = msgspec.json.encode(TrustedMark(at, self._since, self._even if self._ahead else 0.0))
        stored = await self._documents.document(_KIND, _TENANT, self._id)
        if stored is None:
            await self._documents.create_documents([Document(_KIND, _TENANT, self._id, body)])
        else:
            await self._documents.replace_document(msgspec.structs.replace(stored, body=body))
        self._written = (self._since, monotonic)


async def clock_problem(documents: DocumentRecords, clock: Clock) -> str | None:
    """What is odd about the wall clock, compared with the last trusted time; None if nothing is."""
    mark, now = _mark(await documents.document(_KIND, _TENANT, _PURGES)), clock.now()
    if mark is None:
        return None
    if now < mark.at - CLOCK_SLACK:
        return f"{round(mark.at - now)} s behind the last stored time: it was set back, or had been ahead"
    if mark.since:
        return f"jumped forward from {iso_text(mark.at)}, or nothing ran since: {_NOT_PURGED}"
    return None


def _mark(row: Document | None) -> TrustedMark | None:
    try:
        return None if row is None else _marks.decode(row.body)
    except msgspec.MsgspecError:
        # Written by another version.
        return None
