"""What an operator does on shared engines: migrate, doctor, and roles in processes of their own."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conveyor.clock import SystemClock
from conveyor.settings import Settings
from conveyor.system import migrate, open_system
from tests.api import new_key
from tests.servers.aws import CREDENTIALS
from tests.stacks.conftest import urls

CONVEYOR = str(Path(sys.executable).with_name("conveyor"))
SHARED = ("aws", "postgres", "mixture")

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
    started.extend(
        subprocess.Popen([CONVEYOR, *command], env=environ, stdout=subprocess.PIPE, text=True) for command in commands
    )
    assert started[0].stdout is not None
    url = started[0].stdout.readline().split()[-1]
    listed = tmp_path / "list.jsonl"
    listed.write_text("".join(f'{{"n": {n}}}\n' for n in range(3000)))
    command = [CONVEYOR, "submit", str(listed), "--handler", "tests.echo"]
    client = {**environ, "CONVEYOR_URL": url, "CONVEYOR_API_KEY": key}
    made = await asyncio.to_thread(
        subprocess.run, command, env=client, capture_output=True, text=True, check=False, timeout=120
    )
    assert made.returncode == 0, made.stderr
    watched = await asyncio.to_thread(
        subprocess.run,
        [CONVEYOR, "watch", made.stdout.split()[0]],
        env=client,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert watched.returncode == 0, watched.stderr
