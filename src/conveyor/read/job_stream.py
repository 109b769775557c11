"""Stream: what happens to a job, as it happens, as server-sent events. The job's notices, each under its id; between
them its counts, at most once a second and only while they change; a comment now and then, so that nobody on the way
takes the line for dead. It ends with the end of the run.

A client that was cut off names the last id that it saw and misses nothing. One that has seen the end is told, by an
answer without content, that it need not come again.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from conveyor.clock import Clock
from conveyor.engines.records import Records
from conveyor.engines.tasks import Tasks
from conveyor.errors import TooManyStreams
from conveyor.model import EventRecord, Job, TenantId
from conveyor.read.event_pages import event_json
from conveyor.states import ENDED
from conveyor.system import System

LOOK_SECONDS = 1.0
KEEP_ALIVE_SECONDS = 15.0
# How long a client waits before it comes again.
RETRY_MILLISECONDS = 2000

_PAGE = 100


class Streams:
    """All streams of this process: how many each tenant has, and whether they are to end."""

    def __init__(self, most: int, stop: asyncio.Event) -> None:
        self._most = most
        self._open: Counter[TenantId] = Counter()
        self._stop = stop

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    @contextmanager
    def place(self, tenant: TenantId) -> Iterator[None]:
        """Room for one more. Raises TooManyStreams."""
        if self._open[tenant] >= self._most:
            raise TooManyStreams(limit=self._most)
        self._open[tenant] += 1
        try:
            yield
        finally:
            self._open[tenant] -= 1
            if not self._open[tenant]:
                del self._open[tenant]

    async def rest(self, clock: Clock, seconds: float) -> None:
        """Let time pass, unless the process is to stop."""
        timer = asyncio.ensure_future(clock.sleep(seconds))
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({timer, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
            stopped.cancel()


class JobStream:
    """One client's look at one job."""

    def __init__(self, system: System, streams: Streams, job: Job) -> None:
        self._records: Records = system.records
        self._tasks: Tasks = system.tasks
        self._clock = system.clock
        self._streams = streams
        self._job = job
        # Of the last event that was sent, or that the client has.
        self._cursor: str | None = None

    async def resume(self, last_id: str | None) -> bool:
        """Go on behind the event that the client saw last; from the beginning if that is none of this job's. False if
        there is nothing more to come."""
        seen = await self._find(last_id) if last_id else None
        if seen is None:
            return True
        self._cursor = str(seen.seq)
        return self._job.state not in ENDED or bool(await self._news(1))

    async def frames(self) -> AsyncIterator[bytes]:
        """The frames, until the end of the run."""
        with self._streams.place(self._job.tenant):
            yield f"retry: {RETRY_MILLISECONDS}\n\n".encode()
            shown: dict[str, Any] | None = None
            said = self._clock.monotonic()
            while not self._streams.stopping:
                # Before the events: a run that is seen to have ended has its last one among them.
                job = await self._records.job(self._job.tenant, self._job.job_id)
                if job is None:
                    return
                self._job = job
                counts = await self._progress()
                if counts != shown:
                    shown, said = counts, self._clock.monotonic()
                    yield frame("progress", counts)
                async for told in self._events():
                    said = self._clock.monotonic()
                    yield told
                if job.state in ENDED:
                    return
                if self._clock.monotonic() - said >= KEEP_ALIVE_SECONDS:
                    said = self._clock.monotonic()
                    yield b": still here\n\n"
                await self._streams.rest(self._clock, LOOK_SECONDS)

    async def _events(self) -> AsyncIterator[bytes]:
        while news := await self._news(_PAGE):
            for event in news:
                self._cursor = str(event.seq)
                yield frame(event.event, event_json(event), event.id)

    async def _news(self, limit: int) -> list[EventRecord]:
        return (await self._records.notices(self._job.tenant, self._job.job_id, self._cursor, limit)).items

    async def _find(self, event_id: str) -> EventRecord | None:
        cursor: str | None = None
        while True:
            page = await self._records.notices(self._job.tenant, self._job.job_id, cursor, _PAGE)
            for event in page.items:
                if event.id == event_id:
                    return event
            cursor = page.next_cursor
            if cursor is None:
                return None

    async def _progress(self) -> dict[str, Any]:
        job = self._job
        counts = await self._tasks.counts(job.key)
        return {
            "job_id": job.job_id,
            "run_id": job.run.run_id,
            "state": job.state,
            "reason": job.reason,
            "reason_code": job.run.reason_code,
            "total": job.run.total,
            "counts": msgspec.structs.asdict(counts),
        }


def frame(event: str, data: Any, id: str | None = None) -> bytes:
    """A server-sent event."""
    # JSON has no line breaks of its own.
    named = f"id: {id}\n" if id else ""
    return f"{named}event: {event}\ndata: ".encode() + msgspec.json.encode(data) + b"\n\n"
