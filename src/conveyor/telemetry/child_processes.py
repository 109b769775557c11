"""The child processes of this process. They have no metrics of their own: the parent counts their work, and reads their
memory at each scrape."""

import os
from pathlib import Path

from conveyor.telemetry import metrics

_PAGE = os.sysconf("SC_PAGE_SIZE")

_processes: dict[str, set[int]] = {"fetcher": set(), "handler": set()}


def add_child(kind: str, process_id: int) -> None:
    """Register a child that has started."""
    _processes[kind].add(process_id)


def remove_child(kind: str, process_id: int, *, early: bool) -> None:
    """Remove a child that has exited; `early` if the parent did not stop it."""
    _processes[kind].discard(process_id)
    if early:
        metrics.CHILD_RESTARTS.add(1, kind)


def set_gauges() -> None:
    """Set the gauges of the child processes."""
    for kind, processes in _processes.items():
        metrics.CHILDREN.set(len(processes), kind)
        metrics.CHILD_BYTES.set(sum(map(_resident, processes)), kind)


def _resident(process_id: int) -> int:
    try:
        return int(Path(f"/proc/{process_id}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        # The process has just exited, or the system has no /proc.
        return 0
