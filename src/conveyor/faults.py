"""Crash points: `crashpoint("name")` stands before and after every durable step.

Outside tests it compares one global with None. A test arms a point, in its own process with `arm` or in a child process
with CONVEYOR_CRASH_AT=name:hit, and the process dies there as if by `kill -9`.
"""

import os
import signal
from collections.abc import Callable

_hook: Callable[[str], None] | None = None


def crashpoint(name: str) -> None:
    """Die here if a test has armed this point."""
    if _hook is not None:
        _hook(name)


def arm(hook: Callable[[str], None] | None) -> None:
    """Call `hook` with the name of each crash point that the process passes; None disarms."""
    global _hook  # noqa: PLW0603  (one process has one fate)
    _hook = hook


def kill_at(spec: str) -> Callable[[str], None]:
    """A hook that kills this process when it passes a point for the n-th time, from "name:n"."""
    name, _, nth = spec.partition(":")
    left = int(nth or 1)

    def hook(passed: str) -> None:
        nonlocal left
        if passed == name:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook
