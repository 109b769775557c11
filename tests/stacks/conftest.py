"""The whole system on each stack: embedded, AWS, Postgres with Redis, and a mixture. Real servers, real processes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from conveyor.api.server import serve
from conveyor.clock import SystemClock
from conveyor.embedded import Embedded
from conveyor.settings import Settings
from conveyor.system import System, migrate, open_system
from tests.servers import sources
from tests.servers.event_targets import shared_targets
from tests.support.api import Api, client, new_key
from tests.support.target_site import Site

STACKS = ("embedded", "aws", "postgres", "mixture")


def urls(stack: str, place: Path) -> dict[str, Any]:
    """What a user would set, on servers that are started when they are first asked for."""
    from tests.servers import dynamodb, pgbouncer, postgres, redis, redis_cluster, s3, sqs

    if stack == "embedded":
        return {}
    server = redis_cluster.redis_cluster().url if stack == "mixture" else redis.redis().url
    coordinator = f"{server}?prefix={place.parent.name}"
    if stack in ("postgres", "pgbouncer"):
        database = postgres.url_of(place) if stack == "postgres" else pgbouncer.url_of(place)
        shared = {"records": database, "tasks": database, "queue": database, "coordinator": coordinator}
        return {**shared, "blobs": f"file://{place.absolute()}/blobs"}
    return {
        "records": dynamodb.url_for(place),
        "tasks": postgres.url_of(place) if stack == "mixture" else dynamodb.url_for(place),
        "queue": sqs.url_of(place, wait=1),
        "coordinator": coordinator,
        "blobs": s3.url_of(place),
    }


@pytest.fixture(params=STACKS)
def stack(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
async def settings(stack: str, tmp_path: Path) -> Settings:
    given = urls(stack, tmp_path / "data")
    ours = {
        "allow_private_targets": True,
        "fetchers": 1,
        "app": "tests.stacks.app",
        "ingest_range_bytes": 100_000,
        "source_buckets": sources.listed("acme"),
        "event_targets": shared_targets().listed("acme"),
    }
    made = Settings.load({}, data=tmp_path / "data", **ours, **given)
    await migrate(made, SystemClock())
    return made


@pytest.fixture
async def system(settings: Settings) -> AsyncIterator[System]:
    async with open_system(settings, SystemClock()) as opened:
        yield opened


@pytest.fixture
async def embedded(system: System) -> AsyncIterator[Embedded]:
    """All roles at work."""
    made = Embedded(system)
    async with made.running():
        yield made


@pytest.fixture
async def api(system: System, embedded: Embedded) -> AsyncIterator[Api]:
    stop = asyncio.Event()
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(system, "127.0.0.1", 0, stop, url.set_result))
    await asyncio.wait({serving, url}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
    async with client() as http:
        yield Api(url.result(), system, await new_key(system, "acme"), http)
    stop.set()
    await serving


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with Site() as made:
        yield made
