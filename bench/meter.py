"""Meter: wall time, CPU time and peak memory of this process and those that it started, and CPU time by thread. Read
while the threads are still there."""

import re
import resource
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PROC = Path("/proc/self")
_NUMBER = re.compile(r"[-_]?\d+$")
_LOOK_SECONDS = 1.0

# Others may have this much of one core in a measurement that counts as undisturbed.
QUIET_CORES = 0.15


class Meter:
    """Started when made; `lap` says how long ago that was, `stop` what it took. `servers` are processes that belong to
    the measurement: the CPU time of all others is what disturbed it."""

    def __init__(self, servers: Sequence[int] = ()) -> None:
        self._servers = servers
        self._helpers = _children(servers)
        self._cpu = self._our_seconds()
        self._served = self._server_seconds()
        self._machine = _machine_seconds()
        self._started = time.perf_counter()

    def lap(self) -> float:
        return time.perf_counter() - self._started

    def stop(self) -> dict[str, Any]:
        seconds = self.lap()
        cpu = self._our_seconds() - self._cpu
        served = self._server_seconds() - self._served
        others = max(0.0, _machine_seconds() - self._machine - cpu - served)
        return {
            "seconds": seconds,
            "cpu_seconds": cpu,
            "cpu_by_thread": _cpu_by_thread(),
            "server_cpu_seconds": served,
            # In cores: how many of them other processes had on average.
            "disturbed": others / seconds,
            # With the processes that this one started; each counted whole, shared pages too.
            "peak_mib": peak_mib() + sum(peak_mib(Path(f"/proc/{helper}")) for helper in self._helpers),
        }

    def _our_seconds(self) -> float:
        return _own_seconds() + sum(_process_seconds(helper) for helper in self._helpers)

    def _server_seconds(self) -> float:
        return sum(_process_seconds(server) for server in self._servers)


def peak_mib(proc: Path = _PROC) -> float:
    """The most memory this process has held, or another. From /proc where it is: getrusage also counts the parent's
    before exec."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", (proc / "status").read_text())
    except OSError:
        found = None
    if found is not None:
        return int(found[1]) / 1024
    if proc != _PROC:
        return 0.0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / (1024 * 1024 if sys.platform == "darwin" else 1024)


def wait_for_quiet(most: float) -> None:
    """Until other processes leave the machine alone, but no longer than `most` seconds."""
    give_up = time.monotonic() + most
    while time.monotonic() < give_up:
        before = _machine_seconds()
        time.sleep(_LOOK_SECONDS)
        if _machine_seconds() - before <= QUIET_CORES * _LOOK_SECONDS:
            return


def _cpu_by_thread() -> dict[str, float]:
    """Seconds of CPU since each thread began, those of one kind added up; threads not made by Python are `native`."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    spent: dict[str, float] = {}
    for task in _tasks():
        name = _NUMBER.sub("", names.get(int(task.name), "native"))
        try:
            nanoseconds = int((task / "schedstat").read_text().split()[0])
        except OSError:
            continue
        spent[name] = spent.get(name, 0.0) + nanoseconds / 1e9
    return {name: round(seconds, 3) for name, seconds in sorted(spent.items(), key=lambda item: -item[1])}


def _tasks() -> list[Path]:
    try:
        return list((_PROC / "task").iterdir())
    except OSError:
        return []


def _own_seconds() -> float:
    """With what ended children took: a bare limit may be another program."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _children(servers: Sequence[int]) -> list[int]:
    """The processes that this one has started and that are no server of the measurement."""
    try:
        listed = [(task / "children").read_text().split() for task in _tasks()]
    except OSError:
        return []
    return [int(child) for each in listed for child in each if int(child) not in servers]


def _process_seconds(process: int) -> float:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / 100


def _machine_seconds() -> float:
    """CPU seconds of the whole machine so far; 0 where /proc does not say."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system, _idle, _wait, irq, softirq = (int(field) for field in fields[:7])
    return (user + nice + system + irq + softirq) / 100
