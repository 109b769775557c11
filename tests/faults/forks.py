"""Children that a test can kill, each in a fork of one process that has imported what they run:

    python -m tests.faults.forks tests.faults.child

That module has `prepare()`, for once, and `run(directory, ...)`, for each child. What a child says is in DIRECTORY/log.
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.support.logs import be_plain

_ROOT = Path(__file__).parents[2]
_PR_SET_PDEATHSIG = 1
# Less than a test may take, so that it is the child that ends, with a log.
_LONGEST_SECONDS = 100

# open_system imports them when it needs them: each child would.
_LATE = ("conveyor.engines.local_blobs", "conveyor.engines.sqlite")


class Forks:
    """Starts children, one after the other."""

    def __init__(self, module: str, environ: Mapping[str, str] | None = None) -> None:
        self._lock = threading.Lock()
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.forks", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env={**os.environ, **(environ or {})},
        )

    def run(self, place: Path, **given: Any) -> int:
        """How it ended: its exit code, or the signal as a negative number."""
        assert self._server.stdin is not None and self._server.stdout is not None
        with self._lock:
            self._server.stdin.write(json.dumps({"directory": str(place), **given}) + "\n")
            self._server.stdin.flush()
            return int(self._server.stdout.readline())

    def close(self) -> None:
        assert self._server.stdin is not None and self._server.stdout is not None
        # A child that is left goes with it.
        self._server.kill()
        self._server.wait()
        self._server.stdin.close()
        self._server.stdout.close()


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(name: str) -> None:
    die_with_parent()
    module, *_ = map(importlib.import_module, (name, *_LATE))
    be_plain()
    module.prepare()
    gc.freeze()
    while line := sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            _leave(module, **json.loads(line))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _leave(module: ModuleType, directory: str, **given: Any) -> None:
    """In the fork: standard input and output belong to the server."""
    status = 1
    try:
        die_with_parent()
        signal.alarm(_LONGEST_SECONDS)
        log = os.open(Path(directory) / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream, file in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
            os.dup2(file, stream)
        module.run(Path(directory), **given)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve(sys.argv[1])
