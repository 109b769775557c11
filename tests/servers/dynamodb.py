"""The DynamoDB engine on the emulator: a pair of tables for each directory."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

from conveyor.clock import Clock
from conveyor.engines.dynamodb import DynamoEngine
from tests.servers.aws import REGION, aws


def url_for(place: Path, endpoint: str | None = None) -> str:
    """The tables that stand for a directory."""
    prefix = f"test-{sha256(str(place).encode()).hexdigest()[:20]}"
    return f"dynamodb://{REGION}/{prefix}?endpoint={quote(endpoint or aws(), safe='')}"


@asynccontextmanager
async def open_engine(place: Path, clock: Clock) -> AsyncIterator[DynamoEngine]:
    async with DynamoEngine.open(url_for(place), clock) as engine:
        await engine.migrate()
        yield engine
