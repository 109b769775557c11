"""Machine: the facts without which a figure means nothing. No host names, no paths."""

import os
import platform
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import apsw

_SYNCS = 100


def facts(scratch: Path) -> dict[str, Any]:
    """Of this machine, now."""
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu": _cpu(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "sqlite": apsw.sqlite_lib_version(),
        "fsync_ms": round(_fsync_seconds(scratch) * 1000, 3),
        "load": round(os.getloadavg()[0], 2),
    }


def line(known: dict[str, Any]) -> str:
    """For a reader."""
    return (
        f"{known['cores']} cores ({known['cpu']}), {known['memory_gib']} GiB, {known['system']}, "
        f"Python {known['python']}, SQLite {known['sqlite']}, fsync {known['fsync_ms']} ms, load {known['load']} before"
    )


def _cpu() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1].strip() if found else platform.machine()


def _fsync_seconds(scratch: Path) -> float:
    """What it costs to have 4 KiB on disk: every durable figure hangs on it."""
    with tempfile.TemporaryFile(dir=scratch) as file:
        taken = []
        for _ in range(_SYNCS):
            file.write(bytes(4096))
            file.flush()
            started = time.perf_counter()
            os.fsync(file.fileno())
            taken.append(time.perf_counter() - started)
    return statistics.median(taken)
