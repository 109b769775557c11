"""What an operator does on shared engines: migrate, doctor, and roles in processes of their own."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conveyor.clock import SystemClock
from conveyor.settings import Settings
from conveyor.system import migrate, open_system
from tests.servers.aws import CREDENTIALS
from tests.stacks.conftest import urls
from tests.support.api import client, new_key

CONVEYOR = str(Path(sys.executable).with_name("conveyor"))
# Every engine is in one of them.
SHARED = ("aws", "postgres")

pytestmark = pytest.mark.timeout(300)


def environment(stack: str, place: Path) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CONVEYOR_")}
    given = {f"CONVEYOR_{name.upper()}": value for name, value in urls(stack, place).items()}
    return {
        **clean,
        **CREDENTIALS,
        **given,
        "NO_COLOR": "1",
        "CONVEYOR_DATA": str(place),
        "CONVEYOR_APP": "tests.stacks.app",
        "CONVEYOR_SIGNING_KEY": "s" * 32,
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }


@pytest.mark.parametrize("stack", SHARED)
def test_doctor_says_to_migrate_and_then_that_all_is_fine(stack: str, tmp_path: Path) -> None:
    environ = environment(stack, tmp_path / "data")

    def doctor() -> list[dict[str, str]]:
        ended = subprocess.run(
            [CONVEYOR, "doctor", "--json"], env=environ, capture_output=True, check=False, timeout=120
        )
        found: list[dict[str, str]] = json.loads(ended.stdout)
        return found

    before = [check for check in doctor() if check["name"].startswith("records:") and check["verdict"] == "fail"]
    assert any("conveyor migrate" in (check["advice"] or "") for check in before), before
    made = subprocess.run([CONVEYOR, "migrate"], env=environ, capture_output=True, check=False, timeout=120)
    assert made.returncode == 0, made.stderr
    after = [check for check in doctor() if ":" in check["name"]]
    assert {check["name"].partition(":")[0] for check in after} >= {"records", "coordinator"}
    failed = [check for check in after if check["verdict"] == "fail"]
    # The test servers keep nothing safe on disk, for speed, and the doctor sees it.
    assert [check for check in failed if not check["name"].endswith("durable commits")] == []


@pytest.fixture
def started() -> Iterator[list["subprocess.Popen[str]"]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        process.wait(60)
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.parametrize("stack", SHARED)
async def test_each_role_in_a_process_of_its_own(
    stack: str, tmp_path: Path, started: list["subprocess.Popen[str]"]
) -> None:
    environ = environment(stack, tmp_path / "data")
    settings = Settings.load(environ)
    await migrate(settings, SystemClock())
    async with open_system(settings, SystemClock()) as system:
        key = await new_key(system, "acme")
    commands = (["api", "--port", "0"], ["work"], ["work"], ["ingest"], ["sweep"], ["schedule"])
    ports = free_ports(len(commands))
    started.extend(
        subprocess.Popen(
            [CONVEYOR, *command],
            env={**environ, "CONVEYOR_METRICS_PORT": str(port)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for command, port in zip(commands, ports, strict=True)
    )
    assert started[0].stdout is not None
    url = started[0].stdout.readline().split()[-1]
    listed = tmp_path / "list.jsonl"
    listed.write_text("".join(f'{{"n": {n}}}\n' for n in range(3000)))
    command = [CONVEYOR, "submit", str(listed), "--handler", "tests.echo"]
    caller = {**environ, "CONVEYOR_URL": url, "CONVEYOR_API_KEY": key}
    made = await asyncio.to_thread(
        subprocess.run, command, env=caller, capture_output=True, text=True, check=False, timeout=120
    )
    assert made.returncode == 0, made.stderr
    watched = await asyncio.to_thread(
        subprocess.run,
        [CONVEYOR, "watch", made.stdout.split()[0]],
        env=caller,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert watched.returncode == 0, watched.stderr
    said = [await scraped(port) for port in ports]
    ended = [each.get('conveyor_tasks_finished_total{status="succeeded"}', 0.0) for each in said]
    assert sum(ended) == sum(ended[1:3]) == 3000
    assert [each['conveyor_ingested_total{result="task"}'] for each in said] == [0, 0, 0, 3000, 0, 0]
    assert ['conveyor_role_tick_seconds_count{role="sampler"}' in each for each in said].index(True) == 4
    assert 'conveyor_queue_messages{queue="runs",state="ready"}' in said[4]


def free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


async def scraped(port: int) -> dict[str, float]:
    """Every series of a role and what it is at."""
    async with client() as http:
        response = await http.get(f"http://127.0.0.1:{port}/metrics").build().send()
        lines = bytes(await response.bytes()).decode().splitlines()
    pairs = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    return {name: float(value) for name, _, value in pairs}
