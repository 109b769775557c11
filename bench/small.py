"""small: as many tasks in many small jobs as in one large job, on a real `conveyor up`.

Drain: jobs are accepted while no server runs, then `conveyor up` works them off. A rate counts from the first flush to
the end of the last run, by the rows, so that starting up is no part of it. The bare limit is one large job with as many
tasks, in the same run.

Submit: eight clients submit jobs of ten tasks over HTTP (submits.py). The bare limit is one writer that commits the
rows of such a job, and nothing else, in a transaction for each.

Kill: the server is killed with SIGKILL on its way and started again. What is fetched a second time is held against
twice the slots of the worker and half a second of its throughput.
"""

import asyncio
import http.client
import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench import nginx
from bench.child import MeasurementFailed, Setup
from bench.figures import Figure, rates
from bench.postgres import SETTINGS, fresh_schema
from bench.submits import TASKS, cpu_seconds

SHAPES = ((30, 1000, 0.8), (300, 100, 0.7), (1000, 10, 0.5))
SUBMITS = 1000
# What a worker may have in flight; it is shared by all its runs.
SLOTS = 256

# A scrape takes the server some milliseconds, which are no part of what is measured.
_LOOK_SECONDS = 1.0
_CLOSE_LOOK = 0.05
_PATIENCE = 300.0
_FINISHED = re.compile(rb'^conveyor_tasks_finished_total\{status="succeeded"\} (\S+)', re.M)
_COMPLETED = re.compile(rb'^conveyor_runs_finished_total\{state="completed"\} (\S+)', re.M)


def run(setup: Setup) -> list[Figure]:
    from tests.servers.postgres import Server

    figures: list[Figure] = []
    server = Server(setup.scratch.parent, SETTINGS)
    try:
        with nginx.serving(setup.scratch) as site:
            for stack in ("embedded", "postgres"):
                where = {"postgres": server.url if stack == "postgres" else None, "site": site.url}
                for kind in ("noop", "fetch"):
                    figures += _drains(setup, stack, kind, where)
                if stack == "embedded":
                    figures += _submits(setup) + _kills(setup, where)
    finally:
        server.close()
    return figures


def _drains(setup: Setup, stack: str, kind: str, where: dict[str, Any]) -> list[Figure]:
    figures = []
    for full, tasks, goal in SHAPES:
        jobs = max(1, round(full * min(1.0, setup.size)))
        ours, bare = [], []
        for _ in range(setup.repeat):
            bare.append(setup.bare("bench.small:drained", kind=kind, jobs=1, tasks=jobs * tasks, **where))
            ours.append(setup.ours("bench.small:drained", kind=kind, jobs=jobs, tasks=tasks, **where))
        more = {"cpu_us": [each["cpu_us"] for each in ours], "bare_cpu_us": [each["cpu_us"] for each in bare]}
        name = f"{kind}, {stack}: {jobs:,} jobs of {tasks:,}"
        figures.append(Figure("small", name, "tasks/s", rates(ours), "one job", rates(bare), ("at least", goal), more))
    return figures


def _submits(setup: Setup) -> list[Figure]:
    """With workers, which run the jobs at the same time, and without."""
    count = setup.count(SUBMITS, 100)
    ours: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    bare = []
    for _ in range(setup.repeat):
        bare.append(setup.bare("bench.submits:bare_commits", count=count))
        for with_workers, measured in ours.items():
            measured.append(setup.ours("bench.submits:submitted", count=count, with_workers=with_workers))
    figures = []
    for with_workers, measured in ours.items():
        name = f"{count:,} submits of {TASKS} tasks" + ("" if with_workers else ", none runs")
        more = {what: [each[what] for each in measured] for what in ("cpu_us", "client_cpu_us")}
        limit, goal = "bare transactions", ("at least", 0.5)
        figures.append(Figure("small", name, "jobs/s", rates(measured), limit, rates(bare), goal, more))
    return figures


def _kills(setup: Setup, where: dict[str, Any]) -> list[Figure]:
    figures = []
    for jobs, tasks in ((1, setup.count(30_000)), (setup.count(300, 10), 100)):
        got = [setup.ours("bench.small:killed", jobs=jobs, tasks=tasks) for _ in range(setup.repeat)]
        name = f"fetched again after kill -9, {jobs:,} x {tasks:,}"
        again, bound = [each["again"] for each in got], [each["bound"] for each in got]
        limit = "2 x slots + half a second"
        figures.append(Figure("small", name, "pages", again, limit, bound, ("at most", 1.0)))
    return figures


def drained(kind: str, jobs: int, tasks: int, postgres: str | None, site: str, place: str) -> dict[str, Any]:
    """How fast accepted jobs are worked off."""
    settings = asyncio.run(_seeded(kind, jobs, tasks, postgres, site, place))
    with _up(place, settings) as server:
        cpu = _watched(server, jobs, jobs * tasks)
        _check(server, jobs, tasks)
    seconds, counted = asyncio.run(_taken(settings, place))
    return {"count": counted, "seconds": seconds, "cpu_us": cpu / (jobs * tasks) * 1e6, "disturbed": 0}


async def _taken(settings: dict[str, str], place: str) -> tuple[float, int]:
    """Seconds from the first flush to the end of the last run, by the rows; and the tasks that finished after it."""
    from conveyor.engines.tasks import TaskFilter
    from conveyor.settings import Settings
    from conveyor.system import open_system

    ended: list[float] = []
    finished: list[float] = []
    urls: dict[str, Any] = {name.removeprefix("CONVEYOR_").lower(): url for name, url in settings.items()}
    async with open_system(Settings.load({}, data=Path(place) / "data", **urls)) as system:
        cursor = None
        while True:
            page = await system.records.jobs.jobs(_tenant(), cursor, 100)
            for job in page.items:
                ended.append(job.run.ended_at or 0.0)
                after = None
                while rows := await system.tasks.page(job.key, 0, after, 1000, TaskFilter()):
                    finished += [row.finished_at or 0.0 for row in rows]
                    after = rows[-1].task_id
            cursor = page.next_cursor
            if cursor is None:
                break
    first = min(finished)
    return max(max(ended) - first, 0.001), max(1, len(finished) - finished.count(first))


async def _seeded(kind: str, jobs: int, tasks: int, postgres: str | None, site: str, place: str) -> dict[str, str]:
    """Accept the jobs as the server does. Returns the settings of the server that finds them."""
    from msgspec import Raw

    from conveyor.accept.spec import JobSpec
    from conveyor.accept.submit import Submit
    from conveyor.model import JobKind, ResultLayout
    from conveyor.settings import Settings
    from conveyor.system import open_system
    from conveyor.telemetry.logs import configure_log

    configure_log("info", quiet=True)
    urls = {}
    if postgres is not None:
        urls = dict.fromkeys(("records", "tasks", "queue"), await fresh_schema(postgres, "small"))
        urls |= {"blobs": f"file://{Path(place).absolute()}/data/blobs", "signing_key": "s" * 32}
    data = Path(place) / "data"
    limit = max(1000, tasks)
    settings = Settings.load(
        {}, data=data, sync_task_limit=limit, max_request_bytes=1 << 30, tenant_jobs=max(1000, jobs), **urls
    )
    kinds = {"noop": (JobKind.PYTHON, "bench.noop"), "fetch": (JobKind.FETCH, None)}
    job_kind, handler = kinds[kind]
    async with open_system(settings) as system:
        submit = Submit(system)
        for job in range(jobs):
            numbers = range(job * tasks, (job + 1) * tasks)
            inputs = [Raw(f'"{site}/{number}"' if kind == "fetch" else f"{number}") for number in numbers]
            # A large job is ingested, and so has this layout in every version.
            layout = ResultLayout.PACKED if jobs == 1 else None
            spec = JobSpec(kind=job_kind, tasks=inputs, handler=handler, result_layout=layout)
            await submit.submit(_tenant(), spec)
    return {f"CONVEYOR_{name.upper()}": url for name, url in urls.items()}


def _tenant() -> Any:
    from conveyor.cli.connection import LOCAL_TENANT

    return LOCAL_TENANT


@contextmanager
def _up(place: str, settings: dict[str, str]) -> Iterator[Any]:
    from tests.support.up_process import Up

    up = Up(Path(place), "--app", "bench.app", CONVEYOR_LOG_LEVEL="error", **settings)
    up.start()
    try:
        yield up
    finally:
        up.close()


class Connection:
    """A client with one connection."""

    def __init__(self, up: Any) -> None:
        at = urlsplit(up.direct)
        self._http = http.client.HTTPConnection(str(at.hostname), at.port, timeout=60)
        self._headers = {"authorization": f"Bearer {up.key}", "content-type": "application/json"}

    def send(self, method: str, path: str, body: object = None, **headers: str) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        self._http.request(method, path, data, {**self._headers, **headers})
        response = self._http.getresponse()
        answer = response.read()
        if response.status >= 400:
            raise MeasurementFailed(f"{method} {path} was answered {response.status}: {answer[:200]!r}")
        return answer


def _watched(up: Any, jobs: int, tasks: int) -> float:
    """Wait until all runs are complete. Returns the CPU seconds of the server. A look costs it some milliseconds."""
    client = Connection(up)
    give_up = time.monotonic() + _PATIENCE
    while time.monotonic() < give_up:
        shown = client.send("GET", "/metrics")
        finished, completed = _metric(_FINISHED, shown), _metric(_COMPLETED, shown)
        if completed >= jobs:
            return _cpu(up)
        time.sleep(_LOOK_SECONDS)
    raise MeasurementFailed(f"{completed} of {jobs} jobs and {finished} of {tasks} tasks after {_PATIENCE:.0f} s")


def _metric(pattern: re.Pattern[bytes], shown: bytes) -> int:
    found = pattern.search(shown)
    return 0 if found is None else int(float(found[1]))


def _cpu(up: Any) -> float:
    """Seconds of the server and of the processes that it started."""
    return cpu_seconds(up._process.pid)


def _check(up: Any, jobs: int, tasks: int) -> None:
    """Every job is there and complete; of some, the bodies are those that belong to their tasks."""
    client, cursor, seen = Connection(up), "", []
    while True:
        page = json.loads(client.send("GET", f"/v1/jobs?limit=200{cursor}"))
        seen += [item["id"] for item in page["items"]]
        wrong = [item for item in page["items"] if item["state"] != "completed"]
        if wrong:
            raise MeasurementFailed(f"a job is not complete: {wrong[0]}")
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"
    if len(seen) != jobs:
        raise MeasurementFailed(f"{len(seen)} jobs, not {jobs}")
    for job in random.Random(jobs).sample(seen, min(5, jobs)):
        shown = json.loads(client.send("GET", f"/v1/jobs/{job}/results?limit=50"))
        for item in shown["items"]:
            body = client.send("GET", f"/v1/jobs/{job}/tasks/{item['task_id']}/body")
            wanted = b"null" if item["http_status"] is None else nginx.page(int(item["input"].rpartition("/")[2]))
            if body != wanted:
                raise MeasurementFailed(f"the body of task {item['index']} of {job} is {body[:40]!r}")


def killed(jobs: int, tasks: int, place: str) -> dict[str, Any]:
    """What is fetched a second time because the server was killed on its way."""
    log = Path(place) / "access"
    total = jobs * tasks
    with nginx.serving(Path(place), log) as site:
        settings = asyncio.run(_seeded("fetch", jobs, tasks, None, site.url, place))
        with _up(place, settings) as server:
            rate = _kill_on_its_way(server, total)
            server.start()
            client = Connection(server)
            give_up = time.monotonic() + _PATIENCE
            while time.monotonic() < give_up:
                page = json.loads(client.send("GET", "/v1/jobs?limit=200"))
                if all(item["state"] == "completed" for item in page["items"]) and _active(client) == 0:
                    break
                time.sleep(0.1)
            _check(server, jobs, tasks)
    fetched = Counter(log.read_text().split())
    if len(fetched) != total:
        raise MeasurementFailed(f"{len(fetched)} of {total} pages were fetched")
    return {"again": fetched.total() - total, "bound": 2 * SLOTS + rate / 2, "disturbed": 0}


def _active(client: Connection) -> int:
    return sum(1 for _ in re.finditer(rb'"state":"(?:running|ingesting)"', client.send("GET", "/v1/jobs?limit=1000")))


def _kill_on_its_way(server: Any, total: int) -> float:
    """Kill the server once a third is done. Returns its tasks a second until then."""
    client, began, before = Connection(server), 0.0, 0
    while True:
        finished = _metric(_FINISHED, client.send("GET", "/metrics"))
        now = time.perf_counter()
        if not before and finished:
            began, before = now, finished
        if finished > total / 3:
            server.kill()
            return (finished - before) / max(now - began, _CLOSE_LOOK)
        time.sleep(_CLOSE_LOOK)
