"""kill -9 in the middle of a run of 8,000 tasks, ten times in a row: after the last restart the run completes, with
every task ended once, counts that are the rows', and each body intact.

The whole process is killed, once as `conveyor run`, once as `conveyor up`; and the processes that fetch for it, while
it goes on.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from conveyor.client import Client
from conveyor.clock import SystemClock
from conveyor.model import JobId, TenantId
from conveyor.settings import Settings
from conveyor.states import RunState
from conveyor.system import open_system
from tests.support.processes import fetchers_of

CONVEYOR = str(Path(sys.executable).with_name("conveyor"))
TASKS = 8000
KILLS = 10
# A second: slow enough that ten kills fall into one run, on any machine.
RATE = 600
PATIENCE = 120

Start = Callable[..., "subprocess.Popen[bytes]"]


def environment(place: Path) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CONVEYOR_")}
    return {**clean, "NO_COLOR": "1", "CONVEYOR_DATA": str(place / "data"), "CONVEYOR_ALLOW_PRIVATE_TARGETS": "1"}


@pytest.fixture
def site() -> Iterator[str]:
    command = [sys.executable, "-m", "conveyor.demo.site"]
    # It ends when its standard input does.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()
        process.stdin.close()


@pytest.fixture
def urls(site: str, tmp_path: Path) -> Path:
    path = tmp_path / "urls.txt"
    path.write_text("".join(f"{site}/{'missing' if n % 50 == 0 else 'quick'}/{n}\n" for n in range(TASKS)))
    return path


def kill_after(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        return
    raise AssertionError(f"it ended before it was killed, with {process.returncode}")


async def check_rows(data: Path, job_id: str) -> None:
    async with open_system(Settings(data=data), SystemClock()) as system:
        job = await system.records.jobs.job(TenantId("local"), JobId(job_id))
        assert job is not None
        assert (job.state, job.run.total) == (RunState.COMPLETED, TASKS)
        kept, counted = await system.tasks.counts(job.key), await system.tasks.recount(job.key)
        assert kept == counted
        assert (counted.succeeded, counted.failed, counted.ended) == (TASKS - TASKS // 50, TASKS // 50, TASKS)
        page = await system.records.outbox.events(job.tenant, job.job_id, None, 1000)
        told = Counter(event.event for event in page.items)
        assert (told["job.accepted"], told["job.ingested"], told["run.completed"]) == (1, 1, 1)
        assert told["run.progress"] <= 3


def check_archive(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        tasks = [json.loads(line) for line in archive.read("manifest.jsonl").splitlines()]
        assert sorted(task["index"] for task in tasks) == list(range(TASKS))
        assert Counter(task["status"] for task in tasks) == {"succeeded": TASKS - TASKS // 50, "failed": TASKS // 50}
        for task in tasks:
            body = archive.read(task["file"])
            assert (len(body), sha256(body).hexdigest()) == (task["size"], task["sha256"])
            number = task["input"].rpartition("/")[2]
            assert task["status"] == "failed" or f"quick page {number}<".encode() in body


@pytest.mark.timeout(300)
async def test_run_killed_ten_times_in_a_row(urls: Path, tmp_path: Path, start: Start) -> None:
    chance = random.Random(7)
    command = [CONVEYOR, "run", str(urls), "-o", str(tmp_path / "out.zip"), "--rate", str(RATE), "--concurrency", "200"]
    environ = environment(tmp_path)
    for kill in range(KILLS):
        extra = ["--resume"] if kill else []
        process = start([*command, *extra], env=environ, stderr=subprocess.DEVNULL)
        # Before that there is nothing to resume.
        while not (tmp_path / "data" / "run.json").exists():
            assert process.poll() is None
            await asyncio.sleep(0.02)
        kill_after(process, 1.0 + chance.random() * 0.8)
    mark = json.loads((tmp_path / "data" / "run.json").read_text())
    ended = subprocess.run([*command, "--resume"], env=environ, capture_output=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 3, ended.stderr
    await check_rows(tmp_path / "data", mark["job_id"])
    check_archive(tmp_path / "out.zip")


@pytest.mark.timeout(300)
async def test_fetchers_killed_ten_times_in_a_row(urls: Path, tmp_path: Path, start: Start) -> None:
    chance = random.Random(13)
    command = [CONVEYOR, "run", str(urls), "-o", str(tmp_path / "out.zip"), "--rate", str(RATE), "--concurrency", "200"]
    # That one of them is killed by chance is no task's fault.
    environ = environment(tmp_path) | {"CONVEYOR_MAX_LOST_STARTS": "100"}
    process = start(command, env=environ, stderr=subprocess.DEVNULL)
    for _ in range(KILLS):
        await asyncio.sleep(0.7 + chance.random() * 0.3)
        while not (running := fetchers_of(process.pid)):
            assert process.poll() is None
        os.kill(chance.choice(running), signal.SIGKILL)
    assert process.wait(PATIENCE) == 3
    async with open_system(Settings(data=tmp_path / "data"), SystemClock()) as system:
        (job,) = (await system.records.jobs.jobs(TenantId("local"), None, 10)).items
    await check_rows(tmp_path / "data", job.job_id)
    check_archive(tmp_path / "out.zip")


def start_server(start: Start, environ: dict[str, str]) -> tuple["subprocess.Popen[bytes]", str]:
    address = Path(environ["CONVEYOR_DATA"]) / "local.url"
    address.unlink(missing_ok=True)
    process = start([CONVEYOR, "up", "--port", "0"], env=environ, stdout=subprocess.DEVNULL)
    while not address.exists() or not address.read_text().strip():
        assert process.poll() is None
        time.sleep(0.02)
    return process, address.read_text().strip()


@pytest.mark.timeout(300)
async def test_server_killed_ten_times_in_a_row(urls: Path, tmp_path: Path, start: Start) -> None:
    chance = random.Random(11)
    environ = environment(tmp_path)
    process, url = start_server(start, environ)
    key = (tmp_path / "data" / "local.key").read_text().strip()
    spec = {"tasks": urls.read_text().split(), "rate_per_host": RATE, "concurrency": 200}

    def submit() -> str:
        with Client(url, key) as client:
            made: str = client.request("POST", "/v1/jobs", body=spec, idempotency_key="once")["id"]
            return made

    job_id = submit()
    for _ in range(KILLS):
        kill_after(process, 0.4 + chance.random() * 0.6)
        process, url = start_server(start, environ)
        # A client that never learnt of its answer asks again, and gets the same job.
        assert submit() == job_id
    with Client(url, key) as client:
        client.job(job_id).wait(timeout=PATIENCE).export(tmp_path / "out.zip")
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0
    await check_rows(tmp_path / "data", job_id)
    check_archive(tmp_path / "out.zip")
