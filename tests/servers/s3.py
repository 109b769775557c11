"""S3 on loopback: one bucket on the emulator of tests/servers/aws.py, a prefix of its own for each place."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path

from conveyor.clock import Clock
from conveyor.engines.object_blobs import ObjectEngine
from tests.servers.aws import REGION, aws

BUCKET = "conveyor-tests"

_made: set[str] = set()


def url_of(place: Path, endpoint: str | None = None, *, has_own_bucket: bool = False) -> str:
    prefix = sha256(str(place).encode()).hexdigest()[:16]
    bucket = f"{BUCKET}-{prefix}" if has_own_bucket else BUCKET
    return f"s3://{bucket}/{prefix}?region={REGION}&endpoint={endpoint or aws()}"


@asynccontextmanager
async def open_engine(place: Path, clock: Clock) -> AsyncIterator[ObjectEngine]:
    async with ObjectEngine.open(url_of(place), clock) as engine:
        # Once for each server: a fork has a server of its own.
        if aws() not in _made:
            await engine.migrate()
            _made.add(aws())
        yield engine
