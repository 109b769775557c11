"""The child processes of this one. They have no metrics of their own: what they do is counted by whoever gave it to
them, and how large they are is looked up when somebody asks."""

import os
from pathlib import Path

from conveyor.telemetry import metrics

_PAGE = os.sysconf("SC_PAGE_SIZE")

_there: dict[str, set[int]] = {"fetcher": set(), "handler": set()}


def born(kind: str, process_id: int) -> None:
    _there[kind].add(process_id)


def gone(kind: str, process_id: int, *, early: bool) -> None:
    """`early`: nobody asked it to end."""
    _there[kind].discard(process_id)
    if early:
        metrics.CHILD_RESTARTS.add(1, kind)


def look() -> None:
    """Set the gauges of them."""
    for kind, processes in _there.items():
        metrics.CHILDREN.set(len(processes), kind)
        metrics.CHILD_BYTES.set(sum(map(_resident, processes)), kind)


def _resident(process_id: int) -> int:
    try:
        return int(Path(f"/proc/{process_id}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        # It has just ended, or this system has no such place.
        return 0
