"""`conveyor migrate --wait`: engines that start at the same time are waited for."""

import asyncio
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from conveyor.cli.role_commands import _migrated
from conveyor.errors import EngineFailed
from conveyor.settings import Settings
from tests.servers import redis
from tests.support.clocks import EagerClock
from tests.support.up_process import Relay, environment

pytestmark = pytest.mark.server


def _redis(relay: Relay) -> str:
    return f"redis://{urlsplit(relay.url).netloc}/0?prefix=waits"


async def test_an_engine_that_starts_later(tmp_path: Path) -> None:
    relay = Relay()
    process = await asyncio.create_subprocess_exec(
        *(Path(sys.executable).parent / "conveyor", "migrate", "--wait", "60"),
        env=environment(CONVEYOR_DATA=str(tmp_path), CONVEYOR_COORDINATOR=_redis(relay)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    while b"Trying again for" not in (said := await process.stderr.readline()):
        assert said, "it gave up"
    place = urlsplit(redis.redis().url)
    assert place.hostname is not None
    assert place.port is not None
    relay.target = (place.hostname, place.port)
    done, failed = await process.communicate()
    assert process.returncode == 0, (done, failed)
    assert b"coordinator: redis://" in done


@pytest.mark.parametrize("wait", [0.0, 60.0])
async def test_it_waits_no_longer(wait: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings.load({}, data=tmp_path, coordinator=_redis(Relay()))
    with pytest.raises(EngineFailed, match="Redis"):
        await _migrated(settings, EagerClock(), wait)
    said = capsys.readouterr().err.splitlines()
    assert all("Trying again" in line for line in said), said
    # The engine has patience of its own.
    assert len(said) in (range(1, 30) if wait else [0])
