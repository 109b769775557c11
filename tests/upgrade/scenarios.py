"""An upgrade and a rollback on each stack, under load.

SQLite has one process at a time: the earlier version, the later one, which is killed, and the earlier one again, on
the schema that the later one has expanded. On shared engines both run at once; the later one is killed, and the
earlier one goes on alone, with its monitor as a Lambda function beside it all the time. In the end both versions find
every accepted job finished, each its own, and `verify` finds nothing.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.servers.aws import CREDENTIALS
from tests.upgrade.load import Load, shop
from tests.upgrade.servers import Passes, conveyor, server

# Tasks of a job.
_TASKS, _TASKS_ON_AWS = 60, 20


def on_sqlite(place: Path, old: Path, new: Path, seconds: float) -> dict[str, Any]:
    with shop() as site:
        return _on_sqlite(place, old, new, seconds, Load(site, _TASKS, old, new))


def _on_sqlite(place: Path, old: Path, new: Path, seconds: float, load: Load) -> dict[str, Any]:
    figures = {}
    before, after = server(place, old, {}), server(place, new, {})
    before.start()
    with load.on(before):
        time.sleep(seconds)
    figures["before"] = load.total
    before.stop()
    after.start()
    with load.on(later=after):
        time.sleep(seconds)
    after.kill()
    figures["after"] = load.total - figures["before"]
    before.start()
    with load.on(before):
        time.sleep(seconds)
    figures["rolled back"] = load.total - figures["before"] - figures["after"]
    figures["checked by earlier"] = load.check_by_earlier(before)
    before.stop()
    after.start()
    figures["checked by later"] = load.check_by_later(after)
    after.stop()
    conveyor(new, {}, "verify", "--data", str(after.data))
    return {**figures, "newer": len(load.newer), "kinds": load.kinds}


def on_postgres(place: Path, old: Path, new: Path, seconds: float) -> dict[str, Any]:
    from tests.servers import postgres, redis, s3

    asyncio.run(_make_bucket(place))
    database = postgres.url_of(place)
    settings = {
        "CONVEYOR_RECORDS": database,
        "CONVEYOR_TASKS": database,
        "CONVEYOR_QUEUE": database,
        "CONVEYOR_COORDINATOR": f"{redis.redis().url}?prefix=upgrade",
        "CONVEYOR_BLOBS": s3.url_of(place),
    }
    with shop() as site:
        return _on_shared(place, old, new, seconds, settings, Load(site, _TASKS, old, new))


def on_aws(place: Path, old: Path, new: Path, seconds: float) -> dict[str, Any]:
    from tests.servers import dynamodb, redis, s3, sqs

    settings = {
        "CONVEYOR_RECORDS": dynamodb.url_for(place),
        "CONVEYOR_TASKS": dynamodb.url_for(place),
        "CONVEYOR_QUEUE": sqs.url_of(place, wait=1),
        "CONVEYOR_COORDINATOR": f"{redis.redis().url}?prefix=upgrade-aws",
        "CONVEYOR_BLOBS": s3.url_of(place),
    }
    with shop() as site:
        return _on_shared(place, old, new, seconds, settings, Load(site, _TASKS_ON_AWS, old, new))


def _on_shared(
    place: Path, old: Path, new: Path, seconds: float, engines: dict[str, str], load: Load
) -> dict[str, Any]:
    settings = {**CREDENTIALS, "CONVEYOR_SIGNING_KEY": "s" * 32, **engines}
    figures = {}
    conveyor(old, settings, "migrate")
    before, after = server(place / "before", old, settings), server(place / "after", new, settings)
    monitor = Passes(old, settings, place / "monitor")
    before.start()
    with load.on(before):
        time.sleep(seconds)
        # While the earlier version works.
        conveyor(new, settings, "migrate")
    figures["before"] = load.total
    after.start()
    with load.on(before, later=after):
        monitor.during(seconds)
    figures["both"] = load.total - figures["before"]
    after.kill()
    # A new process of the earlier version starts on the newer schema, too.
    before.stop()
    before.start()
    with load.on(before):
        monitor.during(seconds)
    figures["rolled back"] = load.total - figures["before"] - figures["both"]
    figures["checked by earlier"] = load.check_by_earlier(before)
    before.stop()
    after.start()
    figures["checked by later"] = load.check_by_later(after)
    after.stop()
    conveyor(new, settings, "verify", "--share", "1", "--data", str(after.data))
    return {**figures, "newer": len(load.newer), "kinds": load.kinds, "passes of the earlier monitor": monitor.number}


async def _make_bucket(place: Path) -> None:
    from conveyor.clock import SystemClock
    from tests.servers import s3

    async with s3.open_engine(place, SystemClock()):
        pass


SCENARIOS: dict[str, Callable[[Path, Path, Path, float], dict[str, Any]]] = {
    "sqlite": on_sqlite,
    "postgres": on_postgres,
    "aws": on_aws,
}
