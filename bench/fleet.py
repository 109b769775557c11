"""fleet: what many workers and many runs cost while nothing happens, and what a task costs while they are busy; beside
the design before the ready index, in which every worker looked at every active run.

Real: the workers with their lanes, seats, feeders and recorders, the sweeper, the SQS engine of each process, the ready
index and the semaphores of the embedded coordinator. Modelled: the services under them (fleet_services.py), which count
calls and charge what AWS would: SQS, on a virtual clock, and DynamoDB by the intent of each call. A call to Redis is
counted, not priced: a node has a price by the hour. The housekeeping roles beside the sweeper are a constant.

The design of before is the package at revision BEFORE, taken from the history of this repository when the bench runs.
A fleet of it that is too large to be simulated is extrapolated: its workers do not know of each other, so that what the
second idle one adds is what each of them costs, and what a task costs while a few are busy is what it costs while all
are. Shares of the largest fleet are those of a part of it with as many runs and tenants for each worker. The JSON of a
figure says what was simulated.
"""

import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from bench.child import ROOT, MeasurementFailed, Setup, measure
from bench.figures import Figure
from bench.fleet_services import READS
from bench.fleet_world import ARRIVALS, SLOTS
from conveyor.deploy.aws_prices import IDLE_READ_UNITS, PRICES

BEFORE = "8df530b"
# Workers and runs.
SIZES = ((10, 100), (100, 1_000), (100, 10_000))
# Each run has a queue of its own; with the setting as it comes, those beyond the limit share one.
QUEUE_LIMIT = 20_000
# Simulated seconds: until the pauses between two looks at a quiet run have grown, and of the measurement.
QUIET = {"warm": 130.0, "seconds": 60.0}
BUSY = {"warm": 15.0, "seconds": 20.0}
# Small jobs that arrive at the smallest fleet, whose seconds are cheap, are enough for a p99.
BUSY_SMALLEST = {"warm": 15.0, "seconds": 100.0}
# Of the design of before, pauses are at most a second.
QUIET_BEFORE = {"warm": 4.0, "seconds": 6.0}
BUSY_BEFORE = {"warm": 4.0, "seconds": 8.0}
# Workers of it that are simulated while they are busy, where not all are.
WORKERS_BEFORE = 2
# Of tasks whose tenants' shares are compared.
TASK_SECONDS = {"long": (0.5, 2.0), "short": (0.05, 0.2)}
# Turns of each tenant that a measurement of shares lasts for, at least: of one or two no part of a fleet is equal. A
# turn is a task, or as many as a slot does in a second.
SHARE_TURNS = 12
TURN_SECONDS = 1.0
# Runs of which shares are simulated at most: of a larger fleet a part. What is waited for before grows no further.
SHARE_RUNS = 2_000
SHARE_WARM = 40.0
# Workers that die of a hundred.
DYING = 0.1
IDLE_DOLLARS = 20.0
_DAY = 86_400


def run(setup: Setup) -> Iterator[Figure]:
    source = _source_before(setup.scratch)
    sizes = [size for size in SIZES if size[0] * size[1] <= SIZES[-1][0] * SIZES[-1][1] * setup.size] or [SIZES[0]]
    for workers, runs in sizes:
        yield from _idle(setup, source, workers, runs)
    first: dict[str, float] = {}
    for workers, runs in sizes:
        yield from _busy(setup, source, workers, runs, first)


def _idle(setup: Setup, source: Path, workers: int, runs: int) -> list[Figure]:
    ours = _ours(setup, "quiet", workers=workers, runs=runs, **QUIET)
    one, two = (_before(setup, source, "quiet", workers=count, runs=runs, **QUIET_BEFORE) for count in (1, 2))
    before = _extrapolated(one["units"], two["units"], workers)
    name = f"idle, {workers:,} x {runs:,}"
    spent = {"units_a_second": ours["units"], "calls_a_second": ours["calls"]}
    dollars = _dollars_a_day(ours["units"])
    more = {**spent, "before_units_a_second": before, "before": f"2 of {workers} workers simulated"}
    figures = [Figure("fleet", name, "$/day", [dollars], "before", [_dollars_a_day(before)], None, more)]
    if (workers, runs) == SIZES[1]:
        goal = ("at most", 1.0)
        figures.append(Figure("fleet", f"{name}: the goal", "$/day", [dollars], "$20", [IDLE_DOLLARS], goal))
    return figures


def _busy(setup: Setup, source: Path, workers: int, runs: int, first: dict[str, float]) -> Iterator[Figure]:
    name = f"busy, {workers:,} x {runs:,}"
    lasting = BUSY_SMALLEST if (workers, runs) == SIZES[0] else BUSY
    if (workers, runs) == SIZES[-1]:
        # Nearly all runs are quiet at any time: until the pauses between two looks at them have grown.
        lasting = {**BUSY, "warm": QUIET["warm"]}
    ours = _ours(setup, "steady", workers=workers, runs=runs, dying=int(workers * DYING), **lasting)
    calls, dollars = _calls_each(ours), _dollars_a_million(ours)
    first.setdefault("calls", calls)
    more = {key: ours[key] for key in ("units", "calls", "tasks", "first_start", "recovery")}
    smallest = f"{SIZES[0][0]} x {SIZES[0][1]}"
    goal: tuple[str, float] = ("at most", 1.5)
    yield Figure("fleet", f"{name}: calls", "calls/task", [calls], smallest, [first["calls"]], goal, more)
    yield Figure("fleet", f"{name}: first start, p99", "ms", [ours["first_start"]["p99"] * 1e3], "1 s", [1e3])
    if ours["recovery"]:
        yield Figure("fleet", f"{name}: recovery, last task", "s", [ours["recovery"]["most"]], "lease", [30.0])
    before = _busy_before(setup, source, workers, runs)
    more = {key: before[key] for key in ("units", "calls", "tasks", "first_start", "recovery", "simulated")}
    yield Figure("fleet", f"{name}: calls", "calls/task", [calls], "before", [_calls_each(before)], None, more)
    dollars_before = _dollars_a_million(before)
    yield Figure("fleet", f"{name}: cost", "$/million", [dollars], "before", [dollars_before], None)
    part = min(1.0, SHARE_RUNS / runs)
    some, few = int(workers * part), int(runs * part)
    for kind, (shortest, longest) in TASK_SECONDS.items():
        lasting = _lasting(some, few, (shortest + longest) / 2)
        shares = _ours(setup, "crowded", workers=some, runs=few, shortest=shortest, longest=longest, **lasting)
        more = {key: shares[key] for key in ("tenants", "least", "big", "tasks")} | {"simulated": [some, few]}
        what, goal = f"{name}: fairness, {kind} tasks", ("at least", 0.9)
        yield Figure("fleet", what, "Jain", [shares["fairness"]], "equal", [1.0], goal, more)
        each = shares["tasks"] / shares["tenants"]
        what = f"{name}: tasks of the tenant at every worker, {kind} tasks"
        yield Figure("fleet", what, "tasks", [shares["big"]], "each tenant", [each])


def _busy_before(setup: Setup, source: Path, workers: int, runs: int) -> dict[str, Any]:
    """A whole fleet with deaths, or a few workers and all runs."""
    if (workers, runs) == SIZES[0]:
        whole = _before(setup, source, "steady", workers=workers, runs=runs, dying=int(workers * DYING), **BUSY)
        return {**whole, "simulated": [workers, runs]}
    some = min(workers, WORKERS_BEFORE)
    arrivals = ARRIVALS * some / workers
    part = _before(setup, source, "steady", workers=some, runs=runs, dying=0, arrivals=arrivals, **BUSY_BEFORE)
    return {**part, "simulated": [some, runs]}


def _lasting(workers: int, runs: int, task_seconds: float) -> dict[str, float]:
    """How long to measure shares, and to wait before."""
    tenants = runs // 2 + 1
    seconds = SHARE_TURNS * max(task_seconds, TURN_SECONDS) * tenants / (SLOTS * workers)
    longer = max(1.0, seconds / BUSY["seconds"])
    return {"warm": min(BUSY["warm"] * longer, SHARE_WARM), "seconds": BUSY["seconds"] * longer}


def _ours(setup: Setup, what: str, **arguments: Any) -> dict[str, Any]:
    return measure(f"bench.fleet_world:{what}", setup.scratch, setup.profile, queue_limit=QUEUE_LIMIT, **arguments)


def _before(setup: Setup, source: Path, what: str, **arguments: Any) -> dict[str, Any]:
    return measure(f"bench.fleet_world:{what}", setup.scratch, source=source, queue_limit=QUEUE_LIMIT, **arguments)


def _source_before(scratch: Path) -> Path:
    """The package at the revision of before."""
    command = ["git", "-C", str(ROOT), "archive", BEFORE, "src"]
    packed = subprocess.run(command, capture_output=True, check=False)
    if packed.returncode:
        raise MeasurementFailed(f"the history has no revision {BEFORE}: {packed.stderr.decode().strip()}")
    place = scratch / "before"
    with tarfile.open(fileobj=BytesIO(packed.stdout)) as archive:
        archive.extractall(place, filter="data")
    return place / "src"


def _extrapolated(one: Mapping[str, float], two: Mapping[str, float], workers: int) -> dict[str, float]:
    return {name: one[name] + (workers - 1) * max(0.0, two[name] - one[name]) for name in one}


def _dollars(units: Mapping[str, float]) -> float:
    return sum(count * PRICES[name] / 1e6 for name, count in units.items() if name in PRICES)


def _dollars_a_day(units: Mapping[str, float]) -> float:
    return _DAY * (_dollars(units) + IDLE_READ_UNITS * PRICES[READS] / 1e6)


def _dollars_a_million(spent: Mapping[str, Any]) -> float:
    return 1e6 * _dollars(spent["units"]) * float(spent["seconds"]) / max(1, int(spent["tasks"]))


def _calls_each(spent: Mapping[str, Any]) -> float:
    return float(sum(spent["calls"].values())) * float(spent["seconds"]) / max(1, int(spent["tasks"]))
