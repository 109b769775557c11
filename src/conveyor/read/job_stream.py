"""The stream of a job, as server-sent events: its outbox events, each with its id; between them its counts and why it
waits, at most once a second and only if they changed; a comment now and then, so that no proxy closes an idle
connection. It ends when the run is finished.

A client that reconnects sends the last id that it saw and misses nothing. A client that has seen the last event gets
204 No Content, so that it does not reconnect.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from conveyor.clock import Clock
from conveyor.engines.records import Records
from conveyor.engines.tasks import Tasks
from conveyor.errors import TooManyStreams
from conveyor.jobs.job_counts import counts_json, job_counts
from conveyor.model import EventRecord, Job, TenantId
from conveyor.read.event_pages import event_json
from conveyor.read.status import wait_json, wait_of
from conveyor.states import ENDED
from conveyor.system import System

LOOK_SECONDS = 1.0
KEEP_ALIVE_SECONDS = 15.0
# How long a client waits before it reconnects.
RETRY_MILLISECONDS = 2000

_PAGE = 100

# Whether the client may still see the stream: its key may be revoked, its session ended.
IsAllowed = Callable[[], Awaitable[bool]]


class Streams:
    """The streams of this process: how many each tenant has open, and whether they have to end."""

    def __init__(self, max_per_tenant: int, stop: asyncio.Event) -> None:
        self._max_per_tenant = max_per_tenant
        self._open: Counter[TenantId] = Counter()
        self._stop = stop

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    @contextmanager
    def place(self, tenant: TenantId) -> Iterator[None]:
        """Count one more stream while the block runs. Raises TooManyStreams."""
        if self._open[tenant] >= self._max_per_tenant:
            raise TooManyStreams(limit=self._max_per_tenant)
        self._open[tenant] += 1
        try:
            yield
        finally:
            self._open[tenant] -= 1
            if not self._open[tenant]:
                del self._open[tenant]

    async def rest(self, clock: Clock, seconds: float) -> None:
        """Wait, unless the process has to stop."""
        timer = asyncio.ensure_future(clock.sleep(seconds))
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({timer, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
            stopped.cancel()


class JobStream:
    """The stream of one job to one client."""

    def __init__(self, system: System, streams: Streams, job: Job, is_allowed: IsAllowed) -> None:
        self._records: Records = system.records
        self._tasks: Tasks = system.tasks
        self._coordinator = system.coordinator
        self._clock = system.clock
        self._streams = streams
        self._job = job
        self._is_allowed = is_allowed
        # The last event that was sent, or that the client has.
        self._cursor: str | None = None

    async def resume(self, last_id: str | None) -> bool:
        """Resume after the event that the client saw last; from the beginning if the job has no such event. False if
        no event will follow."""
        last = await self._find(last_id) if last_id else None
        if last is None:
            return True
        self._cursor = str(last.seq)
        return self._job.state not in ENDED or bool(await self._new_events(1))

    async def frames(self) -> AsyncIterator[bytes]:
        """The frames, until the run is finished, or the client is no longer allowed to see them."""
        with self._streams.place(self._job.tenant):
            yield f"retry: {RETRY_MILLISECONDS}\n\n".encode()
            sent: dict[str, Any] | None = None
            sent_at = self._clock.monotonic()
            while not self._streams.stopping and await self._is_allowed():
                # Before the events: the last event of a finished run is then among them.
                job = await self._records.jobs.job(self._job.tenant, self._job.job_id)
                if job is None:
                    return
                self._job = job
                counts = await self._progress()
                if counts != sent:
                    sent, sent_at = counts, self._clock.monotonic()
                    yield frame("progress", counts)
                async for event in self._events():
                    sent_at = self._clock.monotonic()
                    yield event
                if job.state in ENDED:
                    return
                if self._clock.monotonic() - sent_at >= KEEP_ALIVE_SECONDS:
                    sent_at = self._clock.monotonic()
                    yield b": still here\n\n"
                await self._streams.rest(self._clock, LOOK_SECONDS)

    async def _events(self) -> AsyncIterator[bytes]:
        while events := await self._new_events(_PAGE):
            for event in events:
                self._cursor = str(event.seq)
                yield frame(event.event, event_json(event), event.id)

    async def _new_events(self, limit: int) -> list[EventRecord]:
        return (await self._records.outbox.events(self._job.tenant, self._job.job_id, self._cursor, limit)).items

    async def _find(self, event_id: str) -> EventRecord | None:
        cursor: str | None = None
        while True:
            page = await self._records.outbox.events(self._job.tenant, self._job.job_id, cursor, _PAGE)
            for event in page.items:
                if event.id == event_id:
                    return event
            cursor = page.next_cursor
            if cursor is None:
                return None

    async def _progress(self) -> dict[str, Any]:
        job = self._job
        counted = await job_counts(self._records, self._tasks, job, self._coordinator, top_errors=0)
        wait = await wait_of(self._coordinator, self._clock, job, counted.run)
        return {
            "job_id": job.job_id,
            "run_id": job.run.run_id,
            "state": job.state,
            "reason": job.reason,
            "reason_code": job.run.reason_code,
            "waiting": None if wait is None else wait_json(wait),
            "total": job.run.total,
            "counts": msgspec.structs.asdict(counted.run),
            "job": counts_json(counted),
        }


def frame(event: str, data: Any, id: str | None = None) -> bytes:
    """A server-sent event."""
    # Encoded JSON has no line breaks.
    named = f"id: {id}\n" if id else ""
    return f"{named}event: {event}\ndata: ".encode() + msgspec.json.encode(data) + b"\n\n"
