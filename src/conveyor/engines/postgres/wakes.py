"""Wake-ups: senders notify waiting receivers by LISTEN and NOTIFY.

A hint on top of polling: a receiver may miss a wake-up while it reconnects, and a sender sends at most ten per second
and queue. Postgres commits one transaction with NOTIFY at a time, in all its databases, and writes each to disk. So
wake-ups are transactions of their own, which hold up no others, and those that come up while one is being committed go
together in the next.

Listening needs a session. Behind a pooler in transaction mode there is none unless the URL names the server itself
(`direct=`): then nobody listens, nobody notifies, and receivers poll.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncpg
import structlog

from conveyor.clock import Clock
from conveyor.engines.postgres.connections import connect
from conveyor.engines.postgres.database import PostgresDatabase
from conveyor.engines.postgres.queries import parse
from conveyor.engines.postgres.url import PostgresPlace
from conveyor.engines.queue import QueueName
from conveyor.errors import EngineFailed

log = structlog.get_logger()

Wake = Callable[[QueueName], None]

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0


# A message that becomes visible later than this wakes nobody: polling finds it soon enough.
WAKE_WITHIN = 1.0
# Only the first of many messages wakes receivers.
_WAKE_EVERY = 0.1
_MAX_KNOWN = 10_000

_NOTIFY = parse("SELECT pg_notify(:channel, queue) FROM unnest(:queues::text[]) AS queue")


class Waker:
    """The senders' side, in one process."""

    def __init__(self, database: PostgresDatabase, clock: Clock, channel: str | None) -> None:
        self._database = database
        self._clock = clock
        # None if nobody can listen.
        self._channel = channel
        self._woken: dict[QueueName, float] = {}
        self._waiting: set[QueueName] = set()
        self._turn = asyncio.Lock()

    async def wake(self, queue: QueueName) -> None:
        """Notify the listeners of a queue that it has a message."""
        now = self._clock.monotonic()
        if self._channel is None or now - self._woken.get(queue, -_WAKE_EVERY) < _WAKE_EVERY:
            return
        if len(self._woken) >= _MAX_KNOWN:
            self._woken.clear()
        self._woken[queue] = now
        self._waiting.add(queue)
        async with self._turn:
            # Whoever had the turn before may have notified for this one.
            if queue in self._waiting:
                queues, self._waiting = sorted(self._waiting), set()
                try:
                    await self._database.rows(_NOTIFY, {"channel": self._channel, "queues": queues})
                except EngineFailed as error:
                    # The messages are stored: a send that raised now would be repeated.
                    log.warning("receivers were not woken; polling finds the messages", error=error.message)


@asynccontextmanager
async def listening(place: PostgresPlace, clock: Clock, wake: Wake) -> AsyncIterator[None]:
    """Call `wake` with the name of each queue that gets a message, on a connection of its own. Yields once it
    listens."""
    ready = asyncio.Event()
    task = asyncio.create_task(_listen(place, clock, wake, ready))
    try:
        await ready.wait()
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _listen(place: PostgresPlace, clock: Clock, wake: Wake, ready: asyncio.Event) -> None:
    pause = _FIRST_PAUSE
    while True:
        try:
            connection = await connect(place)
        except EngineFailed as error:
            log.warning("not listening for new messages; polling continues", error=error.message)
        else:
            pause = _FIRST_PAUSE
            await _hear(connection, place.channel, wake, ready)
        ready.set()
        await clock.sleep(pause)
        pause = min(pause * 2, _LONGEST_PAUSE)


async def _hear(connection: Any, channel: str, wake: Wake, ready: asyncio.Event) -> None:
    """Wait until the connection is lost."""
    lost = asyncio.Event()
    connection.add_termination_listener(lambda _: lost.set())
    try:
        with suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            await connection.add_listener(channel, lambda _connection, _pid, _channel, queue: wake(QueueName(queue)))
            ready.set()
            await lost.wait()
    finally:
        connection.terminate()
