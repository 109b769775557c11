"""Profiles: cProfile of every thread of a child, shown as one table for each kind of thread."""

import cProfile
import io
import pstats
import re
import sys
import threading
from typing import Any

_TOP = 25
_NUMBER = re.compile(r"[-_]?\d+$")
# Below this a thread is not worth a table.
_LEAST_SECONDS = 0.05


class Profiler:
    """Profiles the thread that starts it and all Python threads that begin after."""

    def __init__(self) -> None:
        self._main = cProfile.Profile()
        self._kept: list[tuple[str, cProfile.Profile]] = []
        self._run = threading.Thread.run
        self._on = False

    def start(self) -> None:
        kept, plain = self._kept, self._run

        def run(thread: threading.Thread) -> None:
            profile = cProfile.Profile()
            kept.append((_NUMBER.sub("", thread.name), profile))
            profile.runcall(plain, thread)

        threading.Thread.run = run  # type: ignore[method-assign,assignment]
        self._on = True
        self._main.enable()

    def stop(self) -> None:
        if self._on:
            self._main.disable()
            threading.Thread.run = self._run  # type: ignore[method-assign]
            self._on = False

    def show(self, title: str) -> None:
        """On standard error: standard output is for figures."""
        by_kind: dict[str, list[cProfile.Profile]] = {"main": [self._main]}
        for name, profile in self._kept:
            by_kind.setdefault(name, []).append(profile)
        for name, profiles in by_kind.items():
            text = _table(profiles)
            if text:
                print(f"\n--- {title}, thread {name} ({len(profiles)}), by tottime\n{text}", file=sys.stderr)


def _table(profiles: list[Any]) -> str:
    out = io.StringIO()
    first, *others = profiles
    stats = pstats.Stats(first, stream=out)
    stats.add(*others)
    if stats.total_tt < _LEAST_SECONDS:  # type: ignore[attr-defined]
        return ""
    stats.sort_stats("tottime").print_stats(_TOP)
    lines = out.getvalue().splitlines()
    return "\n".join(line for line in lines if line.strip() and "List reduced" not in line)
