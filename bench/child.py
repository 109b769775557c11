"""Child: one measurement in a process of its own, so that no memory, cache or warm connection is left from another.

The parent calls `measure`; the child is `python -m bench.child CALL`, where CALL is the JSON of a Call.
"""

import asyncio
import importlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.meter import QUIET_CORES, wait_for_quiet
from bench.profiles import Profiler

ROOT = Path(__file__).resolve().parent.parent
# A large fleet is simulated for a quarter of an hour where it has a core for itself.
_TIMEOUT = 3600
_LEAST = 1000
_LEAST_SECONDS = 2.0


class MeasurementFailed(Exception):
    """A measurement did not come to an end, or its results were not right."""


@dataclass(frozen=True)
class Call:
    """What a child is to do: `function` is module:name, called with `arguments`."""

    function: str
    arguments: dict[str, Any]
    answer: str
    profile: bool = False


@dataclass(frozen=True)
class Setup:
    """How a bench is run: the scale of its counts, how often, in which directory, and how long it may wait for a quiet
    machine before each measurement. No count is below `least` or the least of its bench, and no time below
    `least_seconds`."""

    scratch: Path
    size: float = 1.0
    repeat: int = 1
    profile: bool = False
    patience: float = 0.0
    least: int = _LEAST
    least_seconds: float = _LEAST_SECONDS

    def count(self, full: int, least: int = _LEAST) -> int:
        return max(min(least, self.least), int(full * self.size))

    def seconds(self, full: float) -> float:
        """A larger size does not take longer."""
        return max(self.least_seconds, full * min(1.0, self.size))

    def ours(self, function: str, **arguments: Any) -> dict[str, Any]:
        """A measurement of our side: the one that is profiled."""
        return self._measure(function, self.profile, arguments)

    def bare(self, function: str, **arguments: Any) -> dict[str, Any]:
        """A measurement of a bare limit."""
        return self._measure(function, False, arguments)

    def _measure(self, function: str, profile: bool, arguments: dict[str, Any]) -> dict[str, Any]:
        """The first undisturbed one, or the least disturbed one when patience ends."""
        give_up = time.monotonic() + self.patience
        best: dict[str, Any] | None = None
        while best is None or (best.get("disturbed", 0) > QUIET_CORES and time.monotonic() < give_up):
            # What the one before left to be written would be written on the time of this one.
            os.sync()
            wait_for_quiet(give_up - time.monotonic())
            result = measure(function, self.scratch, profile, **arguments)
            if best is None or result.get("disturbed", 0) < best["disturbed"]:
                best = result
        return best


def measure(
    function: str, scratch: Path, profile: bool = False, source: Path | None = None, **arguments: Any
) -> dict[str, Any]:
    """Run a measurement in a fresh process, with a directory of its own as `place`; what it returned. `source` has
    another revision of the package."""
    with tempfile.TemporaryDirectory(dir=scratch) as place:
        answer = Path(place) / "answer.json"
        call = Call(function, {"place": place, **arguments}, str(answer), profile)
        command = [sys.executable, "-m", "bench.child", json.dumps(asdict(call))]
        # Settings of this machine's user must not change what is measured.
        environ = {name: value for name, value in os.environ.items() if not name.startswith("CONVEYOR_")}
        if source is not None:
            environ["PYTHONPATH"] = str(source)
        try:
            ended = subprocess.run(command, cwd=ROOT, env=environ, timeout=_TIMEOUT, check=False)
        except subprocess.TimeoutExpired:
            raise MeasurementFailed(f"{function} did not end within {_TIMEOUT} seconds") from None
        if ended.returncode != 0 or not answer.exists():
            raise MeasurementFailed(f"{function} ended with code {ended.returncode}")
        return dict(json.loads(answer.read_text()))


def run_async(work: Any) -> Any:
    """On the loop that the command line runs on."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def main() -> None:
    call = Call(**json.loads(sys.argv[1]))
    module, _, name = call.function.partition(":")
    function = getattr(importlib.import_module(module), name)
    profiler = Profiler()
    if call.profile:
        profiler.start()
    try:
        result = function(**call.arguments)
        if inspect.iscoroutine(result):
            result = run_async(result)
    finally:
        profiler.stop()
    if call.profile:
        profiler.show(call.function)
    Path(call.answer).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
