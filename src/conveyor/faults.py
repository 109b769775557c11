"""Crash points. `crashpoint("name")` stands before and after every durable step.

Outside tests it compares one global with None. A test arms it, in its own process with `arm`, or in a child
through CONVEYOR_CRASH_AT=name:hit, and the process dies there as `kill -9` would have it.
"""

import os
import signal
from collections.abc import Callable

_hook: Callable[[str], None] | None = None


def crashpoint(name: str) -> None:
    """Die here if a test wants it so."""
    if _hook is not None:
        _hook(name)


def arm(hook: Callable[[str], None] | None) -> None:
    """Call `hook` with the name of every crash point that is passed; None disarms."""
    global _hook  # noqa: PLW0603  (one process has one fate)
    _hook = hook


def kill_at(spec: str) -> Callable[[str], None]:
    """A hook that kills this process at the n-th passing of a point, from "name:n"."""
    name, _, nth = spec.partition(":")
    left = int(nth or 1)

    def hook(passed: str) -> None:
        nonlocal left
        if passed == name:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook
