"""`python -m tests.upgrade`: the version before beside and after the next one, under load, then a rollback.

SQLite has one process at a time: the earlier version, the later one, which is killed, and the earlier one again, on
the schema that the later one has expanded. On Postgres both run at once, on one set of engines; the later one is
killed, and the earlier one goes on alone. In the end every accepted job is finished under both versions, and `verify`
finds nothing.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.servers.aws import CREDENTIALS
from tests.support.up_process import ROOT, environment
from tests.upgrade.servers import Load, server
from tests.upgrade.versions import commit_of, earlier, later

_CONVEYOR = "import sys; from conveyor.cli import main; main(sys.argv[1:])"


def conveyor(source: Path, settings: dict[str, str], *arguments: str) -> str:
    """Run a command of the version in this folder; what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", _CONVEYOR, *arguments],
        cwd=ROOT,
        env=environment(**{"PYTHONPATH": str(source), **settings}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def on_sqlite(place: Path, old: Path, new: Path, seconds: float) -> dict[str, Any]:
    load, figures = Load(), {}
    before, after = server(place, old, {}), server(place, new, {})
    for name, each in (("before", before), ("after", after), ("rolled_back", before)):
        accepted = len(load.accepted)
        each.start()
        with load.on(each):
            time.sleep(seconds)
        if each is after:
            each.kill()
        figures[name] = len(load.accepted) - accepted
        if name == "rolled_back":
            figures["checked_by_earlier"] = load.check(before)
        each.stop()
    after.start()
    figures["checked_by_later"] = load.check(after)
    after.stop()
    conveyor(new, {}, "verify", "--data", str(after.data))
    return figures


def on_postgres(place: Path, old: Path, new: Path, seconds: float) -> dict[str, Any]:
    from tests.servers import postgres, redis, s3

    async def bucket() -> None:
        from conveyor.clock import SystemClock

        async with s3.open_engine(place, SystemClock()):
            pass

    asyncio.run(bucket())
    database = postgres.url_of(place)
    settings = {
        **CREDENTIALS,
        "CONVEYOR_RECORDS": database,
        "CONVEYOR_TASKS": database,
        "CONVEYOR_QUEUE": database,
        "CONVEYOR_COORDINATOR": f"{redis.redis().url}?prefix=upgrade",
        "CONVEYOR_BLOBS": s3.url_of(place),
        "CONVEYOR_SIGNING_KEY": "s" * 32,
    }
    load, figures = Load(), {}
    conveyor(old, settings, "migrate")
    before, after = server(place / "before", old, settings), server(place / "after", new, settings)
    before.start()
    with load.on(before):
        time.sleep(seconds)
        # While the earlier version works.
        conveyor(new, settings, "migrate")
    figures["before"] = len(load.accepted)
    after.start()
    with load.on(before, after):
        time.sleep(seconds)
    figures["both"] = len(load.accepted) - figures["before"]
    after.kill()
    # A new process of the earlier version starts on the newer schema, too.
    before.stop()
    before.start()
    with load.on(before):
        time.sleep(seconds)
    figures["rolled_back"] = len(load.accepted) - figures["before"] - figures["both"]
    figures["checked_by_earlier"] = load.check(before)
    before.stop()
    after.start()
    figures["checked_by_later"] = load.check(after)
    after.stop()
    conveyor(new, settings, "verify", "--share", "1", "--data", str(after.data))
    return figures


ENGINES = {"sqlite": on_sqlite, "postgres": on_postgres}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.upgrade", description=__doc__)
    parser.add_argument("--earlier", default="v0.1.0", help="The tag or commit of the version before.")
    parser.add_argument("--engine", choices=sorted(ENGINES), action="append", help="Default: all.")
    parser.add_argument("--seconds", type=float, default=5.0, help="How long each phase takes.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="conveyor-upgrade-") as folder:
        place = Path(folder)
        old, new = earlier(options.earlier, place), later(place)
        for engine in options.engine or sorted(ENGINES):
            (place / engine).mkdir()
            figures = ENGINES[engine](place / engine, old, new, options.seconds)
            print(json.dumps({"engine": engine, "earlier": commit_of(options.earlier)[:7], **figures}), flush=True)


if __name__ == "__main__":
    main()
