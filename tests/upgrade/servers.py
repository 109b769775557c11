"""`conveyor up` and single commands of one version or another, as processes."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.up_process import ROOT, Up, environment

APP = "tests.upgrade.app"

_CONVEYOR = "import sys; from conveyor.cli import main; main(sys.argv[1:])"
_MONITOR = "import json; from conveyor.recover.lambda_handler import handler; print(json.dumps(handler({}, None)))"


def server(place: Path, source: Path, settings: dict[str, str]) -> Up:
    """A server of the version in this folder; not started yet."""
    place.mkdir(exist_ok=True)
    return Up(place, "--app", APP, **{"PYTHONPATH": f"{source}:{ROOT}", **settings})


def conveyor(source: Path, settings: dict[str, str], *arguments: str) -> str:
    """Run a command of the version in this folder; what it prints."""
    return _python(source, settings, _CONVEYOR, *arguments)


def monitor_pass(source: Path, settings: dict[str, str], data: Path) -> dict[str, Any]:
    """One pass of the monitor of the version in this folder, as its Lambda function makes it; its counts."""
    printed = _python(source, {**settings, "CONVEYOR_DATA": str(data), "CONVEYOR_LOG_LEVEL": "error"}, _MONITOR)
    counts: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return counts


def _python(source: Path, settings: dict[str, str], code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=environment(**{"PYTHONPATH": str(source), **settings}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Passes:
    """Passes of a version's monitor, one after the other, while a block runs."""

    def __init__(self, source: Path, settings: dict[str, str], data: Path) -> None:
        self._given = (source, settings, data)
        self.number = 0

    def during(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            monitor_pass(*self._given)
            self.number += 1
