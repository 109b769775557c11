"""Marks: a task of a queue appends one byte to a file, so that the sender sees when the last one has run."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

_LOOK_SECONDS = 0.005
_PATIENCE = 600.0


def arguments() -> dict[str, Any]:
    """What the bench passes to a program."""
    return dict(json.loads(sys.argv[1]))


def marker(path: str) -> int:
    """The file that tasks append to, as a descriptor that forked workers share."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def until_marked(path: str, count: int) -> None:
    """Wait until `count` tasks have run."""
    give_up = time.monotonic() + _PATIENCE
    while (done := Path(path).stat().st_size) < count:
        if time.monotonic() > give_up:
            raise SystemExit(f"{done} of {count} tasks ran within {_PATIENCE:g} s")
        time.sleep(_LOOK_SECONDS)


def report(**measured: Any) -> None:
    """Hand the result to the bench: the last line of standard output."""
    print(json.dumps(measured), flush=True)
