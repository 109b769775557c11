"""latency: how soon a real `conveyor up` answers, how little it does while nothing happens, how fast it starts.

One task: a job of one task on an idle server, from the submit until its state over HTTP is completed. The bare limit is
what any durable queue has to do for it: a row inserted and updated, each in a synced transaction of its own.

Idle: the CPU of a server with many open or paused jobs, minus that of one without jobs, as points of a core.

Start: from the command until /readyz answers; with a job that was killed half-way, also until it goes on.

Listing: pages of ten from a list of many jobs, and one job, against the same on a list of ten.

Where a time is the goal, it stands in the column of the bare limit, and the ratio is to it.
"""

import asyncio
import http.client
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench import nginx
from bench.child import MeasurementFailed, Setup
from bench.figures import Figure
from bench.postgres import SETTINGS, fresh_schema
from bench.small import _FINISHED, Connection, _cpu, _metric, _seeded, _tenant, _up, _watched

JOBS = 60
IDLE_JOBS = 300
LISTED_JOBS = 10_000
HALF_DONE = 1_000_000
# Fewer tasks could end before the server is killed.
LEAST_HALF_DONE = 20_000
STARTS = 5
LOOKS = 200

# What is asked for, in milliseconds, points of a core, and seconds.
EMBEDDED_MS, POSTGRES_MS = 30.0, 50.0
POINTS = 1.0
READY, READY_HALF_DONE = 1.0, 3.0

_PAGE = 10
_LOOK_SECONDS = 0.002
# Between two jobs: the server is idle again.
_REST_SECONDS = 0.2
_SETTLE_SECONDS = 15.0
_IDLE_SECONDS = 20.0
_PATIENCE = 600.0


def run(setup: Setup) -> list[Figure]:
    from tests.servers.postgres import Server

    figures: list[Figure] = []
    server = Server(setup.scratch.parent, SETTINGS)
    try:
        for postgres, goal in ((None, EMBEDDED_MS), (server.url, POSTGRES_MS)):
            figures += _one_task(setup, postgres, goal) + _idle(setup, postgres)
    finally:
        server.close()
    return figures + _starts(setup) + _listing(setup)


def _one_task(setup: Setup, postgres: str | None, goal: float) -> list[Figure]:
    figures = []
    count = setup.count(JOBS, 20)
    for kind in ("noop", "fetch"):
        bare = [setup.bare("bench.latency:bare_pairs", count=count)["ms"] for _ in range(setup.repeat)]
        got = [setup.ours("bench.latency:one_task", kind=kind, count=count, postgres=postgres) for _ in bare]
        ours = [each["ms"] for each in got]
        name = f"{kind}, {_stack(postgres)}: a job of one task"
        more = {"submit_ms": [each["submit_ms"] for each in got], "p90_ms": [each["p90_ms"] for each in got]}
        limits = [goal] * len(ours)
        figures.append(Figure("latency", name, "ms", ours, "the goal", limits, ("at most", 1.0), more))
        figures.append(Figure("latency", name, "ms", ours, "insert and update, synced", bare))
    return figures


def _idle(setup: Setup, postgres: str | None) -> list[Figure]:
    figures = []
    given = {"postgres": postgres, "settle": setup.seconds(_SETTLE_SECONDS), "seconds": setup.seconds(_IDLE_SECONDS)}
    for state in ("open", "paused"):
        points, shares = [], []
        for _ in range(setup.repeat):
            none = setup.ours("bench.latency:idled", jobs=0, state=state, **given)["percent"]
            many = setup.ours("bench.latency:idled", jobs=IDLE_JOBS, state=state, **given)["percent"]
            points.append(max(0.0, many - none))
            shares.append((none, many))
        name = f"{_stack(postgres)}: {IDLE_JOBS} {state} jobs, CPU"
        bare, goal = [POINTS] * len(points), ("at most", 1.0)
        figures.append(Figure("latency", name, "points", points, "the goal", bare, goal, {"percent": shares}))
    return figures


def _starts(setup: Setup) -> list[Figure]:
    empty = [setup.ours("bench.latency:started", count=STARTS) for _ in range(setup.repeat)]
    tasks = max(LEAST_HALF_DONE, setup.count(HALF_DONE))
    half = [setup.ours("bench.latency:started_half_done", tasks=tasks) for _ in range(setup.repeat)]
    commands = [setup.ours("bench.latency:commands", count=STARTS) for _ in range(setup.repeat)]
    name = f"ready with a half-done job of {tasks:,}"

    def figure(name: str, ours: list[dict[str, Any]], goal: float, **more: Any) -> Figure:
        return Figure(
            "latency", name, "s", [each["seconds"] for each in ours], "the goal", [goal] * len(ours), _AT_MOST, more
        )

    figures = [
        figure("conveyor up is ready", empty, READY, cpu_seconds=[each["cpu_seconds"] for each in empty]),
        figure(name, half, READY_HALF_DONE, first_task_seconds=[each["first_task"] for each in half]),
    ]
    for command in ("--help", "version"):
        ours, bare = ([each[which] for each in commands] for which in (command, "bare"))
        figures.append(Figure("latency", f"conveyor {command}, CPU", "ms", ours, "an empty script", bare))
    return figures


_AT_MOST = ("at most", 1.0)


def _listing(setup: Setup) -> list[Figure]:
    count, settle = setup.count(LISTED_JOBS), setup.seconds(_SETTLE_SECONDS)
    many = [setup.ours("bench.latency:listed", jobs=count, settle=settle) for _ in range(setup.repeat)]
    few = [setup.bare("bench.latency:listed", jobs=_PAGE, settle=settle) for _ in range(setup.repeat)]
    return [
        Figure(
            "latency",
            f"{what} of {count:,} jobs",
            "ms",
            [each[what] for each in many],
            f"of {_PAGE} jobs",
            [each[what if what in each else "first page"] for each in few],
            ("at most", 1.25),
        )
        for what in ("first page", "middle page", "one job")
    ]


def _stack(postgres: str | None) -> str:
    return "embedded" if postgres is None else "postgres"


def _engines(postgres: str | None, place: str) -> dict[str, str]:
    if postgres is None:
        return {}
    url = asyncio.run(fresh_schema(postgres, "latency"))
    engines = dict.fromkeys(("CONVEYOR_RECORDS", "CONVEYOR_TASKS", "CONVEYOR_QUEUE"), url)
    blobs = f"file://{Path(place).absolute()}/data/blobs"
    return {**engines, "CONVEYOR_BLOBS": blobs, "CONVEYOR_SIGNING_KEY": "s" * 32}


def one_task(kind: str, count: int, postgres: str | None, place: str) -> dict[str, Any]:
    """Submit one job after the other. The first ones warm the server up and do not count."""
    with _up(place, _engines(postgres, place)) as server, nginx.serving(Path(place)) as site:
        client = Connection(server)
        submits, whole = [], []
        for number in range(-5, count):
            job: dict[str, Any] = {"kind": "fetch", "tasks": [f"{site.url}/{number + 5}"]}
            if kind == "noop":
                job = {"kind": "python", "handler": "bench.noop", "tasks": [number]}
            submit, done = _timed_job(client, job)
            if number >= 0:
                submits.append(submit)
                whole.append(done)
            time.sleep(_REST_SECONDS)
    p90 = sorted(whole)[int(0.9 * count)]
    return {"ms": median(whole), "submit_ms": round(median(submits), 1), "p90_ms": round(p90, 1), "disturbed": 0}


def _timed_job(client: Connection, job: dict[str, Any]) -> tuple[float, float]:
    """Milliseconds until the job was accepted, and until it was shown as completed."""
    began = time.perf_counter()
    accepted = json.loads(client.send("POST", "/v1/jobs", job))["id"]
    submitted = time.perf_counter()
    while True:
        state = json.loads(client.send("GET", f"/v1/jobs/{accepted}"))["state"]
        now = time.perf_counter()
        if state == "completed":
            return (submitted - began) * 1000, (now - began) * 1000
        if now - began > _PATIENCE or state not in ("queued", "running"):
            raise MeasurementFailed(f"a job of one task is {state} after {now - began:.1f} s")
        time.sleep(_LOOK_SECONDS)


def bare_pairs(count: int, place: str) -> dict[str, Any]:
    import apsw

    from conveyor.engines.sqlite.database import WRITER_PRAGMAS

    db = apsw.Connection(str(Path(place) / "bare.db"))
    for pragma in WRITER_PRAGMAS:
        db.execute(pragma)
    db.execute("CREATE TABLE tasks (id INTEGER PRIMARY KEY, body TEXT)")
    taken = []
    for number in range(count):
        began = time.perf_counter()
        db.execute("INSERT INTO tasks VALUES (?, ?)", (number, "x" * 1000))
        db.execute("UPDATE tasks SET body = ? WHERE id = ?", ("y" * 1000, number))
        taken.append((time.perf_counter() - began) * 1000)
    return {"ms": median(taken), "disturbed": 0}


def idled(jobs: int, state: str, postgres: str | None, settle: float, seconds: float, place: str) -> dict[str, Any]:
    """The share of a core, in percent, that a server takes whose jobs have nothing to do."""
    with _up(place, _engines(postgres, place)) as server:
        client = Connection(server)
        for _ in range(jobs):
            job = json.loads(client.send("POST", "/v1/jobs", {"kind": "fetch", "mode": "open"}))["id"]
            if state == "paused":
                client.send("POST", f"/v1/jobs/{job}/pause", {})
        time.sleep(settle)
        before, began = _cpu(server), time.perf_counter()
        time.sleep(seconds)
        share = (_cpu(server) - before) / (time.perf_counter() - began)
    return {"percent": round(100 * share, 2), "disturbed": 0}


@contextmanager
def _timed_start(up: Any) -> Iterator[Callable[[], float]]:
    """Start a server. Gives the seconds since the command was given."""
    began = time.perf_counter()
    up.start()
    _until_ready(up)
    yield lambda: time.perf_counter() - began


def _until_ready(up: Any) -> None:
    give_up = time.monotonic() + _PATIENCE
    while time.monotonic() < give_up:
        connection = http.client.HTTPConnection(up.direct.removeprefix("http://"), timeout=60)
        connection.request("GET", "/readyz")
        if connection.getresponse().status == 200:
            return
        time.sleep(_LOOK_SECONDS)
    raise MeasurementFailed("the server does not get ready")


def started(count: int, place: str) -> dict[str, Any]:
    """The median of some starts with an empty store. The first makes it and does not count."""
    from tests.support.up_process import Up

    up = Up(Path(place))
    seconds, cpu = [], []
    try:
        for _ in range(count + 1):
            with _timed_start(up) as passed:
                seconds.append(passed())
                cpu.append(_cpu(up))
            up.stop()
    finally:
        up.close()
    return {"seconds": median(seconds[1:]), "cpu_seconds": round(median(cpu[1:]), 2), "disturbed": 0}


def started_half_done(tasks: int, place: str) -> dict[str, Any]:
    """A server that is killed half-way through a large job: when it is ready again, and when the job goes on."""
    from tests.support.up_process import Up

    asyncio.run(_staged(tasks, place))
    up = Up(Path(place), "--app", "bench.app")
    try:
        up.start()
        _until_finished(Connection(up), tasks // 2)
        up.kill()
        with _timed_start(up) as passed:
            ready = passed()
            _until_finished(Connection(up), 1)
            first = passed()
    finally:
        up.close()
    return {"seconds": ready, "first_task": round(first, 2), "disturbed": 0}


async def _staged(tasks: int, place: str) -> None:
    from conveyor.embedded import Embedded
    from conveyor.settings import Settings
    from conveyor.system import open_system
    from conveyor.telemetry.logs import configure_log

    configure_log("info", quiet=True)
    path = Path(place) / "list.jsonl"
    path.write_text("".join(f"{number}\n" for number in range(tasks)))
    async with open_system(Settings.load({}, data=Path(place) / "data", app="bench.app")) as system:
        spec: dict[str, object] = {"kind": "python", "handler": "bench.noop"}
        await Embedded(system).submit_list([str(path)], spec, _tenant())


def _until_finished(client: Connection, count: int) -> None:
    """Wait until the server that runs now has finished so many tasks."""
    give_up = time.monotonic() + _PATIENCE
    while time.monotonic() < give_up:
        if _metric(_FINISHED, client.send("GET", "/metrics")) >= count:
            return
        time.sleep(0.01)
    raise MeasurementFailed(f"fewer than {count} tasks finished")


def commands(count: int, place: str) -> dict[str, Any]:
    """Milliseconds of CPU of commands that do next to nothing, and of a script that does nothing."""
    main = "import sys; from conveyor.cli import main; main(sys.argv[1:])"
    scripts = {"--help": (main, "--help"), "version": (main, "version"), "bare": ("pass",)}
    return {name: median(_child_cpu(script) for _ in range(count)) for name, script in scripts.items()} | {
        "disturbed": 0
    }


def _child_cpu(script: tuple[str, ...]) -> float:
    import resource

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", *script], stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1000


def listed(jobs: int, settle: float, place: str) -> dict[str, Any]:
    """Milliseconds of a page of ten at both places, and of one job."""
    settings = asyncio.run(_seeded("noop", jobs, 1, None, "", place))
    with _up(place, settings) as server:
        _watched(server, jobs, jobs)
        time.sleep(settle)
        client = Connection(server)
        page = json.loads(client.send("GET", f"/v1/jobs?limit={_PAGE}"))
        paths = {"first page": f"/v1/jobs?limit={_PAGE}", "one job": f"/v1/jobs/{page['items'][0]['id']}"}
        if (middle := _middle(client, jobs // 2)) is not None:
            paths["middle page"] = f"/v1/jobs?limit={_PAGE}&cursor={middle}"
        taken: dict[str, list[float]] = {what: [] for what in paths}
        # In turn, so that a mood of the machine meets all of them.
        for _ in range(LOOKS):
            for what, path in paths.items():
                began = time.perf_counter()
                client.send("GET", path)
                taken[what].append((time.perf_counter() - began) * 1000)
    return {what: median(times) for what, times in taken.items()} | {"disturbed": 0}


def _middle(client: Connection, skip: int) -> str | None:
    """A cursor behind so many jobs; None if the list is one page."""
    cursor = None
    while skip >= _PAGE:
        after = "" if cursor is None else f"&cursor={cursor}"
        page = json.loads(client.send("GET", f"/v1/jobs?limit={min(200, skip)}{after}"))
        cursor, skip = page["next_cursor"], skip - len(page["items"])
        if cursor is None:
            return None
    return cursor
