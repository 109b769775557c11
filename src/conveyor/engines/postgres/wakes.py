"""Wake-ups: senders notify waiting receivers by LISTEN and NOTIFY.

A hint on top of polling: a receiver may miss a wake-up while it reconnects, and a sender sends at most ten per second
and queue.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncpg
import structlog

from conveyor.clock import Clock
from conveyor.engines.postgres.database import connect
from conveyor.engines.postgres.url import PostgresPlace
from conveyor.engines.queue import QueueName
from conveyor.errors import EngineFailed

log = structlog.get_logger()

Wake = Callable[[QueueName], None]

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0


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
