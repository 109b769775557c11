"""kill -9 of the process that makes an export of 10,000 results, three times on the way: the archive is whole, its
manifest agrees with the rows, and what was done before a kill is not done again.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conveyor.engines.tasks import TaskFilter
from conveyor.export.exports import ExportState, part_range
from conveyor.model import Job
from conveyor.settings import Settings
from conveyor.system import System, open_system
from tests.support.export_jobs import asked, found, stored_job
from tests.support.places import quick_place

CHILD = Path(__file__).with_name("export_child.py")
TOTAL = 10_000
KILLS = 3
ROWS = 250
PATIENCE = 120
# A batch that is worked on, one of which the bodies are read, one that is read, and those of a piece.
REPEATED = 6 * ROWS

Start = Callable[..., "subprocess.Popen[bytes]"]


def start_export(start: Start, place: Path) -> "subprocess.Popen[bytes]":
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CONVEYOR_")}
    environ["PYTHONPATH"] = str(CHILD.parents[2])
    return start([sys.executable, str(CHILD), str(place), str(ROWS)], env=environ)


def rows_read(place: Path) -> int:
    path = place / "reads"
    return sum(map(int, path.read_text().split())) if path.exists() else 0


def kill_at(start: Start, place: Path, rows: int) -> None:
    """Start it, and kill it once so many rows were read in all."""
    process = start_export(start, place)
    until = time.monotonic() + PATIENCE
    while rows_read(place) < rows:
        assert process.poll() is None, "it ended before it was killed"
        assert time.monotonic() < until
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


async def manifest_rows(system: System, job: Job) -> list[dict[str, Any]]:
    """What the rows say, for comparison with a manifest."""
    rows: list[dict[str, Any]] = []
    after = None
    while page := await system.tasks.page(job.key, 0, after, 5000, TaskFilter()):
        after = page[-1].task_id
        for task in page:
            body = task.detail.body
            rows.append(
                {
                    "index": task.index,
                    "task_id": task.task_id,
                    "input": json.loads(bytes(task.input)),
                    "status": task.status.label,
                    "http_status": task.http_status,
                    "attempts": task.attempts,
                    "size": body.length if body else None,
                    "sha256": body.sha256 if body else None,
                    "content_type": task.detail.content_type,
                    "error": task.detail.error
                    and {"code": task.detail.error.code, "message": task.detail.error.message},
                    "final_url": task.detail.final_url,
                    "id": None,
                    "tag": json.loads(bytes(task.input))["tag"],
                    "data": None,
                    "extracted": None,
                    "unchanged": False,
                }
            )
    return sorted(rows, key=lambda row: row["index"])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("compression", ["none", "deflate"])
async def test_killed_three_times_on_the_way(compression: str, start: Start) -> None:
    with quick_place() as place:
        settings = Settings.load({}, data=place / "data")
        async with open_system(settings) as system:
            job = await stored_job(system, TOTAL)
            export_id = await asked(system, job, compression=compression)
        chance = random.Random(3)
        for kill in range(KILLS):
            kill_at(start, place, int(TOTAL * (kill + 0.5 + chance.random() * 0.5) / (KILLS + 1)))
        last = start_export(start, place)
        assert last.wait(PATIENCE) == 0
        assert TOTAL <= rows_read(place) <= TOTAL + KILLS * REPEATED
        async with open_system(settings) as system:
            export = await found(system, export_id)
            assert (export.state, export.attempt) == (ExportState.READY, KILLS + 1)
            archive = place / "out.zip"
            with archive.open("wb") as file:
                async for piece in part_range(system.blobs, export.parts[0], 0, export.parts[0].size):
                    file.write(piece)
            check(archive, await manifest_rows(system, job))
            events = (await system.records.outbox.events(job.tenant, job.job_id, None, 100)).items
            assert Counter(event.event for event in events) == {"job.accepted": 1, "export.ready": 1}


def check(archive: Path, rows: list[dict[str, Any]]) -> None:
    with zipfile.ZipFile(archive) as made:
        assert made.testzip() is None
        lines = [json.loads(line) for line in made.read("manifest.jsonl").splitlines()]
        files = [line.pop("file") for line in lines]
        # Not as lists: their difference would take minutes to show.
        assert [line for line, row in zip(lines, rows, strict=True) if line != row][:3] == []
        assert [name for name in files if name] == made.namelist()[:-1]
    if unzip := shutil.which("unzip"):
        checked = subprocess.run([unzip, "-tqq", str(archive)], capture_output=True, check=False)
        assert checked.returncode == 0, checked.stdout[-500:]
