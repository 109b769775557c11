"""Progress of a long task, in a document. An executor reports progress; this writes it at an interval and tells when a
newer attempt has superseded this one.

An attempt begins by writing the document, which changes its version: an older attempt that still runs somewhere can
write nothing more, and learns so at its next write. Between attempts the document rests (`due_at` None): the queue has
the task and nothing is late. A document that does not rest when an attempt begins belonged to a lost attempt. Lost
attempts are counted here and not by the message, because a file of hours may outlive many workers and still advance
with each.
"""

import asyncio

import msgspec

from conveyor.clock import CLOCK_SLACK, Clock
from conveyor.engines.records import Document, Records
from conveyor.errors import EngineFailed
from conveyor.faults import crashpoint
from conveyor.model import PROGRESS, Job, TaskProgress, TaskRef, progress_id
from conveyor.settings import Settings

# The shortest time between two writes.
_MIN_SECONDS = 1.0
_MAX_TRIES = 10

_encode = msgspec.json.encode
_decode = msgspec.json.Decoder(TaskProgress).decode


class Superseded(Exception):
    """A newer attempt at this task has begun: this one no longer counts."""


class Track:
    """The progress document of one task, as one attempt writes it."""

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
        """The executor's last state, of this attempt or an earlier one."""
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
        """The highest progress at the start of any attempt."""
        return self._at.begun

    @property
    def note(self) -> str | None:
        return self._at.note

    @property
    def lost(self) -> int:
        """Lost attempts in a row before this one that made no progress."""
        return self._at.lost

    def start_at(self, done: int) -> None:
        """Set the progress at the start of this attempt. If it is higher than before, the lost attempts advanced the
        task and do not count."""
        if done > self._at.begun:
            self._at = msgspec.structs.replace(self._at, begun=done, lost=0)

    def is_due(self, done: int, total: int | None) -> bool:
        """Return whether to write again: after the interval, or after a good part of the total."""
        passed = self._clock.monotonic() - self._written_at
        if passed < _MIN_SECONDS:
            return False
        part = None if total is None else max(1.0, total * self._settings.progress_share)
        return passed >= self._settings.progress_seconds or (part is not None and done - self._at.done >= part)

    async def advance(self, done: int, total: int | None, note: str | None = None) -> None:
        """Write if it is due."""
        if self.is_due(done, total):
            await self.save(done, total, note=note)

    async def save(
        self, done: int, total: int | None, *, state: msgspec.Raw | None = None, note: str | None = None
    ) -> None:
        """Write now. The task counts as stuck if the next write is too late."""
        await self._write(done, total, state, note, self._clock.now() + self._stuck_after)

    async def rest(self, *, state: msgspec.Raw | None = None, note: str | None = None) -> None:
        """Write that no attempt runs."""
        await self._write(self._at.done, self._at.total, state, note, None)

    async def remove(self) -> None:
        """Remove the document: no attempt will resume the task."""
        crashpoint("progress.remove.before")
        if not await self._records.documents.remove_document(self._row):
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
        # A write changes the version even if the caller is cancelled meanwhile.
        writing = asyncio.ensure_future(self._replace(at, due_at))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing])
            if not writing.cancelled():
                # Whether it failed, or found a newer attempt, is of no concern to one that was cancelled.
                writing.exception()
            raise

    async def _replace(self, at: TaskProgress, due_at: float | None) -> None:
        crashpoint("progress.write.before")
        row = await self._records.documents.replace_document(
            msgspec.structs.replace(self._row, body=_encode(at), due_at=due_at)
        )
        crashpoint("progress.write.after")
        if row is None:
            raise Superseded
        self._row, self._at, self._written_at = row, at, self._clock.monotonic()


class ProgressBook:
    """Opens the progress documents of long tasks."""

    def __init__(self, records: Records, clock: Clock, settings: Settings) -> None:
        self._records = records
        self._clock = clock
        self._settings = settings

    async def begin(self, job: Job, ref: TaskRef) -> Track:
        """Begin an attempt: take over the task's document with its state, whichever attempt had it."""
        holder = self._clock.new_id("hold")
        now = self._clock.now()
        # A clock that was ahead may have set it.
        since = ref.since if 0 < ref.since <= now + CLOCK_SLACK else max(1, int(now))
        fresh = TaskProgress(job.run.run_id, ref.index, ref.attempt, holder, now, since=since)
        for _ in range(_MAX_TRIES):
            track = await self._take_over(job, fresh)
            if track is not None:
                return track
        raise EngineFailed("The progress of a task was not written: other attempts kept writing it.")

    async def _take_over(self, job: Job, fresh: TaskProgress) -> Track | None:
        now = self._clock.now()
        stuck_after = job.options.stuck_after or self._settings.stuck_after
        due_at = now + stuck_after
        name = progress_id(fresh.run_id, fresh.index)
        document = await self._records.documents.document(PROGRESS, job.tenant, name)
        if document is None:
            row = Document(PROGRESS, job.tenant, name, _encode(fresh), due_at=due_at, job_id=job.job_id)
            crashpoint("progress.begin.before")
            await self._records.documents.create_documents([row])
            crashpoint("progress.begin.after")
            # Creating leaves an existing document as it is: check whose it is.
            stored = await self._records.documents.document(PROGRESS, job.tenant, name)
            is_ours = stored is not None and stored.body == row.body
            return Track(self._records, self._clock, self._settings, row, fresh, stuck_after) if is_ours else None
        before = _decode(document.body)
        # A document that does not rest was left by a lost attempt. If it has no holder, the monitor has counted that
        # attempt already.
        lost = 0 if document.due_at is None else before.lost + (before.holder != "")
        at = msgspec.structs.replace(
            before,
            attempt=fresh.attempt,
            holder=fresh.holder,
            at=now,
            rate=0.0,
            lost=lost,
            # The earlier one: a reference that the sweeper made from the task's row has none.
            since=min(before.since or fresh.since, fresh.since),
        )
        crashpoint("progress.begin.before")
        replaced = await self._records.documents.replace_document(
            # An earlier version gave it a time to expire.
            msgspec.structs.replace(document, body=_encode(at), due_at=due_at, expires_at=None)
        )
        crashpoint("progress.begin.after")
        if replaced is None:
            return None
        return Track(self._records, self._clock, self._settings, replaced, at, stuck_after)
