"""Submits while Redis is away: killed, or without an answer. Jobs are accepted, and run when it is back."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from conveyor.clock import SystemClock
from conveyor.settings import Settings
from conveyor.system import migrate
from tests.servers.redis import RedisServer
from tests.stacks.conftest import urls
from tests.support.api import Api

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=["postgres", "aws"])
def stack(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """A server of its own: others use the shared one."""
    server = RedisServer()
    yield server
    server.close()


@pytest.fixture
async def settings(stack: str, redis: RedisServer, tmp_path: Path) -> AsyncIterator[Settings]:
    given = {**urls(stack, tmp_path / "data"), "coordinator": redis.url}
    made = Settings.load({}, data=tmp_path / "data", **given)
    await migrate(made, SystemClock())
    yield made


async def accepted(server: Api) -> list[int]:
    tasks = ["http://example.com/1", "http://example.com/2"]
    answers = [
        await server.submit({"tasks": tasks}),
        opened := await server.submit({"mode": "open"}),
        await server.post(f"{opened.headers['location']}/tasks", {"tasks": tasks, "last_batch": True}),
        await server.post("/v1/uploads", {"size": 10, "sha256": "0" * 64}),
    ]
    results = await server.get(f"{answers[0].headers['location']}/results")
    assert len(results.json["items"]) == len(tasks)
    return [answer.status for answer in answers]


async def test_work_is_accepted_while_redis_is_away(server: Api, redis: RedisServer) -> None:
    expected = [201, 202, 202, 201]
    assert await accepted(server) == expected
    redis.freeze()
    assert await accepted(server) == expected
    redis.thaw()
    redis.kill()
    assert await accepted(server) == expected
    redis.start()
    assert await accepted(server) == expected
