"""Progress: how far a long task is, kept in its row while it runs. Gets what an executor reports, writes it at an
interval, and says when another attempt has taken the task over.

Whoever begins an attempt writes the row, which moves its version: from then on the attempt before, should it still be
alive somewhere, can write nothing more and learns so at its next write. Between attempts the row is at rest
(`due_at` None): the queue has the task then, and nobody is late. A row that is not at rest when an attempt begins was
left by one that was lost; those are counted here, and not by the message, because a file of hours may outlive many
workers and yet move on with each of them.
"""

import asyncio

import msgspec

from conveyor.clock import Clock
from conveyor.engines.records import Document, Records
from conveyor.errors import EngineFailed
from conveyor.faults import crashpoint
from conveyor.model import PROGRESS, Job, TaskProgress, TaskRef, progress_id
from conveyor.settings import Settings

# However short a task is, its row is not written more often than this.
_LEAST_SECONDS = 1.0
_TRIES = 10

_encode = msgspec.json.encode
_decode = msgspec.json.Decoder(TaskProgress).decode


class Superseded(Exception):
    """Another attempt at this task has begun: nothing of this one counts any more."""


class Track:
    """One attempt's hold on the row of its task."""

    def __init__(
        self, records: Records, clock: Clock, settings: Settings, row: Document, at: TaskProgress, stuck_after: float
    ) -> None:
        self._records = records
        self._clock = clock
        self._settings = settings
        self._stuck_after = stuck_after
        self._row = row
        self._at = at
        self._written_at = clock.monotonic()

    @property
    def state(self) -> msgspec.Raw:
        """What the executor kept last, in this attempt or in an earlier one."""
        return self._at.state

    @property
    def done(self) -> int:
        return self._at.done

    @property
    def since(self) -> int:
        """When the task's first attempt began, in seconds since 1970."""
        return self._at.since

    @property
    def begun(self) -> int:
        """The most that was there when any attempt began."""
        return self._at.begun

    @property
    def note(self) -> str | None:
        return self._at.note

    @property
    def lost(self) -> int:
        """Attempts in a row before this one that were lost with their workers and left nothing."""
        return self._at.lost

    def found(self, done: int) -> None:
        """So much was there when this attempt began. If it is more than before, the attempts that were lost have moved
        the task on all the same, and do not count."""
        if done > self._at.begun:
            self._at = msgspec.structs.replace(self._at, begun=done, lost=0)

    def is_due(self, done: int, total: int | None) -> bool:
        """Whether it is time to write again: after the interval, or when a good part was done since."""
        passed = self._clock.monotonic() - self._written_at
        if passed < _LEAST_SECONDS:
            return False
        part = None if total is None else max(1.0, total * self._settings.progress_share)
        return passed >= self._settings.progress_seconds or (part is not None and done - self._at.done >= part)

    async def advance(self, done: int, total: int | None, note: str | None = None) -> None:
        """Write, if it is time to."""
        if self.is_due(done, total):
            await self.save(done, total, note=note)

    async def save(
        self, done: int, total: int | None, *, state: msgspec.Raw | None = None, note: str | None = None
    ) -> None:
        """Write now; the task counts as stuck if the next write is too late."""
        await self._write(done, total, state, note, self._clock.now() + self._stuck_after)

    async def rest(self, *, state: msgspec.Raw | None = None, note: str | None = None) -> None:
        """Write that no attempt is under way."""
        await self._write(self._at.done, self._at.total, state, note, None)

    async def remove(self) -> None:
        """The task has come to its end, and nobody goes on with it."""
        crashpoint("progress.remove.before")
        if not await self._records.documents.remove_row(self._row):
            raise Superseded

    async def _write(
        self, done: int, total: int | None, state: msgspec.Raw | None, note: str | None, due_at: float | None
    ) -> None:
        passed = self._clock.monotonic() - self._written_at
        changed = {
            "at": self._clock.now(),
            "done": done,
            "total": total,
            "rate": max(0, done - self._at.done) / passed if passed > 0 else 0.0,
            "note": note,
            "state": self._at.state if state is None else state,
        }
        at = msgspec.structs.replace(self._at, **changed)
        # A write that the caller does not wait for to its end moves the version all the same.
        writing = asyncio.ensure_future(self._replace(at, due_at))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing])
            raise

    async def _replace(self, at: TaskProgress, due_at: float | None) -> None:
        crashpoint("progress.write.before")
        row = await self._records.documents.replace_row(
            msgspec.structs.replace(self._row, body=_encode(at), due_at=due_at)
        )
        crashpoint("progress.write.after")
        if row is None:
            raise Superseded
        self._row, self._at, self._written_at = row, at, self._clock.monotonic()


class ProgressBook:
    """Opens the rows of long tasks."""

    def __init__(self, records: Records, clock: Clock, settings: Settings) -> None:
        self._records = records
        self._clock = clock
        self._settings = settings

    async def begin(self, job: Job, ref: TaskRef) -> Track:
        """Take the task's row, whoever had it; it keeps its state."""
        holder = self._clock.new_id("hold")
        now = self._clock.now()
        since = ref.since or max(1, int(now))
        fresh = TaskProgress(job.run.run_id, ref.index, ref.attempt, holder, now, since=since)
        for _ in range(_TRIES):
            track = await self._taken(job, fresh)
            if track is not None:
                return track
        raise EngineFailed("The progress of a task could not be written: others write it all the time.")

    async def _taken(self, job: Job, fresh: TaskProgress) -> Track | None:
        now = self._clock.now()
        stuck_after = job.options.stuck_after or self._settings.stuck_after
        due_at = now + stuck_after
        name = progress_id(fresh.run_id, fresh.index)
        found = await self._records.documents.document(PROGRESS, job.tenant, name)
        if found is None:
            row = Document(
                PROGRESS, job.tenant, name, _encode(fresh), due_at=due_at, expires_at=job.expires_at, job_id=job.job_id
            )
            crashpoint("progress.begin.before")
            await self._records.documents.create_rows([row])
            crashpoint("progress.begin.after")
            # One that is there already is left as it is: see whose it is.
            standing = await self._records.documents.document(PROGRESS, job.tenant, name)
            ours = standing is not None and standing.body == row.body
            return Track(self._records, self._clock, self._settings, row, fresh, stuck_after) if ours else None
        before = _decode(found.body)
        # One that is due was left by nobody who could have said so; the monitor has counted that already where it took
        # the row from whoever had it.
        lost = 0 if found.due_at is None else before.lost + (before.holder != "")
        at = msgspec.structs.replace(
            before,
            attempt=fresh.attempt,
            holder=fresh.holder,
            at=now,
            rate=0.0,
            lost=lost,
            # Whichever knows of an earlier one: a reference that was made again from its row knows of none.
            since=min(before.since or fresh.since, fresh.since),
        )
        crashpoint("progress.begin.before")
        taken = await self._records.documents.replace_row(
            msgspec.structs.replace(found, body=_encode(at), due_at=due_at)
        )
        crashpoint("progress.begin.after")
        if taken is None:
            return None
        return Track(self._records, self._clock, self._settings, taken, at, stuck_after)
