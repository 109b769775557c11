"""What the pages are shown of: a server with jobs of all kinds, a site that they fetch from, and one that webhooks go
to."""

import asyncio
import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from conveyor.jobs.breakdowns import Breakdown, FailedAttempt, add_part
from conveyor.model import Job, JobKind, ResultDetail, TaskEnd, TaskError, TaskSeed, TenantId
from conveyor.settings import Settings
from conveyor.states import RunState, TaskStatus
from conveyor.system import System, open_system
from tests.support.api import new_key
from tests.support.make_jobs import make_job, make_notice
from tests.support.up_process import Up, running

T = TypeVar("T")

LOCAL = TenantId("local")
LARGE = 100_000
LARGE_SECONDS = 7200.0
# Every 80th task of the large job failed, with one of these.
CODES = ("http_503", "http_404", "connect_timeout")
# What would run if anything of it were taken for more than text.
SCRIPT = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
HOSTILE = f"\"'>{SCRIPT}<svg onload=window.hacked=3>javascript:window.hacked=4"
PATIENCE = 20.0


class _Page(BaseHTTPRequestHandler):
    """Pages that succeed, fail, or are hostile; and a receiver of webhooks that fails the first time."""

    def do_GET(self) -> None:
        assert isinstance(self.server, Site)
        kind = "page" if self.server.mended else self.path.split("/")[1]
        status = {"fails": 503, "gone": 404}.get(kind, 200)
        if kind == "status":
            status = int(self.path.split("/")[2])
        if kind == "trickle":
            self._trickle(int(self.path.split("/")[2]))
            return
        if self.path.startswith("/slow/"):
            time.sleep(int(self.path.split("/")[2]) / 1000)
        if "authorization" in self.headers:
            self.server.authorized.append(self.headers["authorization"])
        body = HOSTILE if self.path.startswith("/hostile") else f"Page {self.path}\n" * 40
        self._answer(status, body.encode())

    def _trickle(self, rate: int) -> None:
        """A file of five minutes, at so many bytes a second."""
        self.send_response(200)
        self.send_header("content-type", "application/octet-stream")
        self.send_header("content-length", str(300 * rate))
        self.end_headers()
        with suppress(ConnectionError):
            for _ in range(3000):
                self.wfile.write(bytes(rate // 10))
                time.sleep(0.1)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        site = self.server
        assert isinstance(site, Site)
        site.told.append(self.headers["webhook-id"])
        # One of the receivers is down, whatever the others do.
        self._answer(200 if site.willing and not self.path.startswith("/hooks/stock") else 500, b"")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "text/html")
        self.send_header("x-hostile", SCRIPT)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Site(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Page)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.told: list[str] = []
        self.authorized: list[str] = []
        # Whether webhooks are taken, and whether pages that fail are there again.
        self.willing = False
        self.mended = False


class World:
    """The server as its user sees it, by key."""

    def __init__(self, up: Up, site: Site) -> None:
        self.up = up
        self.site = site
        self.url = up.url
        self.large = ""
        self.admin_key = ""

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {self.up.key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def submit(self, **spec: Any) -> str:
        job_id: str = self.ask("POST", "/v1/jobs", spec)["id"]
        return job_id

    def upload(self, text: str, **spec: Any) -> str:
        data = text.encode()
        promise = self.ask("POST", "/v1/uploads", {"size": len(data), "sha256": sha256(data).hexdigest()})
        request = urllib.request.Request(promise["url"], data, promise["headers"], method="PUT")
        urllib.request.urlopen(request, timeout=PATIENCE).close()
        return self.submit(source={"upload_id": promise["upload_id"]}, **spec)

    def napping(self, name: str, total: int = 400) -> str:
        """A job that takes long enough to be looked at."""
        tasks = [{"number": number, "seconds": 0.2} for number in range(total)]
        return self.submit(kind="python", handler="naps", name=name, concurrency=4, tasks=tasks)

    def state(self, job_id: str) -> str:
        found: str = self.ask("GET", f"/v1/jobs/{job_id}")["state"]
        return found

    def wait(self, look: Callable[[], T]) -> T:
        """What `look` finds, once it finds something."""
        deadline = time.monotonic() + PATIENCE
        while not (found := look()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return found

    def ended(self, job_id: str) -> None:
        try:
            self.wait(lambda: self.state(job_id) in {"completed", "failed", "cancelled"})
        except AssertionError:
            raise AssertionError(self.ask("GET", f"/v1/jobs/{job_id}")) from None


async def _admin_key(data: Path) -> str:
    async with open_system(Settings.load({}, data=data)) as system:
        return await new_key(system, LOCAL, admin=True)


async def _large_job(data: Path) -> str:
    """Written through the seams: running as many would take longer than looking at them."""
    settings = Settings.load({}, data=data)
    async with open_system(settings) as system:
        job = make_job(system.clock, tenant=LOCAL, total=LARGE, state=RunState.RUNNING, kind=JobKind.FETCH)
        began = system.clock.now() - LARGE_SECONDS
        run = msgspec.structs.replace(job.run, created_at=began)
        job = msgspec.structs.replace(job, name="100,000 pages", created_at=began, run=run)
        await system.records.jobs.create_job(job, make_notice(system.clock, job), None)
        for start in range(0, LARGE, 10_000):
            await _write(system, job, range(start, start + 10_000))
        moved = await system.records.jobs.move_run(
            job.job_id, job.run.run_id, {RunState.RUNNING}, RunState.COMPLETED, None, None
        )
        assert moved
        assert await add_part(system.records.documents, job.key, _breakdown(began), "worker", 1, began + LARGE_SECONDS)
        return job.job_id


async def _write(system: System, job: Job, indexes: range) -> None:
    seeds = [TaskSeed(index, f'"https://shop.example/items/{index}"') for index in indexes]
    await system.tasks.put(job.key, seeds)
    await system.tasks.finish(job.key, [_end(index, system.clock.now()) for index in indexes])


def _breakdown(began: float) -> Breakdown:
    """What workers would have collected of the large job."""
    part = Breakdown()
    for start in range(0, LARGE, 1000):
        at = began + LARGE_SECONDS * start / LARGE
        fine = [index for index in range(start, start + 1000) if index % 80]
        part.add_successes(["shop.example"] * len(fine), [0.05 + index % 7 / 50 for index in fine], at)
        failed = [index for index in range(start, start + 1000) if index % 80 == 0]
        errors = {index: TaskError(CODES[index // 80 % len(CODES)], "It did not work.") for index in failed}
        attempts = [FailedAttempt(index, 4, "shop.example", errors[index], None, 0.3, False) for index in failed]
        retried = [msgspec.structs.replace(attempt, attempt=1, is_retried=True) for attempt in attempts]
        part.add_failures([*attempts, *retried], at)
    return part


def _end(index: int, at: float) -> TaskEnd:
    if index % 80:
        detail = msgspec.json.encode(ResultDetail(elapsed=0.05 + index % 7 / 50)).decode()
        return TaskEnd(index, TaskStatus.SUCCEEDED, 1, 200, None, detail, at)
    code = CODES[index // 80 % len(CODES)]
    detail = msgspec.json.encode(ResultDetail(error=TaskError(code, "It did not work."), elapsed=0.3)).decode()
    return TaskEnd(index, TaskStatus.FAILED, 4, 503 if code == "http_503" else None, code, detail, at)


@contextmanager
def world(place: Path) -> Iterator[World]:
    settings = {
        "CONVEYOR_SAMPLE_SECONDS": "1",
        "CONVEYOR_BREAKER_LEAST": "3",
        "CONVEYOR_WEBHOOK_RETRIES": "600",
        "CONVEYOR_MAX_LOST_STARTS": "1",
        "CONVEYOR_PROGRESS_SHARE": "0.001",
    }
    site = Site()
    threading.Thread(target=site.serve_forever, daemon=True).start()
    large = asyncio.run(_large_job(place / "data"))
    admin_key = asyncio.run(_admin_key(place / "data"))
    try:
        with running(place, "--app", "tests.support.handlers_app:handlers", **settings) as up:
            found = World(up, site)
            found.large = large
            found.admin_key = admin_key
            yield found
    finally:
        site.shutdown()
        site.server_close()
