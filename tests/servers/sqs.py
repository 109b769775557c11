"""SQS on loopback: a prefix for each place on the emulator of tests/servers/aws.py, whose clock is then the test's.

What SQS can not keep is in rows, here of SQLite in the same place.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from conveyor.engines.sqlite import SqliteEngine
from conveyor.engines.sqs import SqsEngine
from tests.servers.aws import REGION, aws, server_time
from tests.support.clocks import ManualClock


def prefix_of(place: Path) -> str:
    return "t" + sha256(str(place).encode()).hexdigest()[:12]


def url_of(place: Path, endpoint: str | None = None, **options: object) -> str:
    """Without waiting and without settling, unless asked for: the clock stands still, and the emulator counts right."""
    prefix = prefix_of(place)
    given = {"endpoint": endpoint or aws(), "wait": 0, "settle": 0, **options}
    return f"sqs://{REGION}/{prefix}?" + "&".join(f"{name}={value}" for name, value in given.items())


@asynccontextmanager
async def open_engine(place: Path, clock: ManualClock, **options: Any) -> AsyncIterator[SqsEngine]:
    with together(clock):
        async with (
            SqliteEngine.open(place, clock) as beside,
            SqsEngine.open(url_of(place), clock, beside.records.documents, **options) as engine,
        ):
            yield engine


class together:
    """The emulator's clock stands where the test's does, and moves with it."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._advance = clock.advance

    def __enter__(self) -> None:
        def advance(seconds: float) -> None:
            self._advance(seconds)
            server_time().stand_at(self._clock.now())

        server_time().stand_at(self._clock.now())
        self._clock.advance = advance  # type: ignore[method-assign]  # this one clock, while the server follows it

    def __exit__(self, *_: object) -> None:
        self._clock.advance = self._advance  # type: ignore[method-assign]
        server_time().reset()
