"""`conveyor backup` and `restore`: a copy of a server that goes on working, in which rows refer to no missing body."""

import asyncio
import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from conveyor import Client, faults
from conveyor.cli import EXIT_BAD_INPUT
from conveyor.cli.guard import run_guarded
from conveyor.embedded import Embedded
from conveyor.model import JobId
from conveyor.settings import Settings
from conveyor.system import open_system
from tests.support.api import Api
from tests.support.installations import Used, use
from tests.support.places import quick_place
from tests.support.target_site import Site
from tests.support.up_process import ROOT, Up, environment, running
from tests.support.working import until

APP = "tests.everyday.app"
POINTS = ("backup.snapshot.before", "backup.snapshot.after", "backup.publish.before", "backup.publish.after")


@pytest.fixture
def settings() -> Any:
    with quick_place() as place:
        yield Settings.load({}, data=place, allow_private_targets=True, fetchers=1, app="tests.stacks.app")


@pytest.fixture
async def used(server: Api) -> AsyncIterator[Used]:
    async with Site() as site, Embedded(server.system).running():
        made = await use(server, site)
    yield made


def conveyor(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from conveyor.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment(**settings), capture_output=True, text=True, check=False)


def backed_up(data: Path, place: Path) -> Any:
    done = conveyor("backup", str(place), "--data", str(data), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def tasks(count: int) -> list[dict[str, Any]]:
    """Whose results are too large for their rows."""
    return [{"page": "plain", "n": number, "noise": random.randbytes(3000).hex()} for number in range(count)]


@contextmanager
def busy(up: Up) -> Iterator[list[str]]:
    """Jobs come and go while the block runs; those that stay, by id, each once the server has accepted it."""
    accepted: list[str] = []
    stopped = threading.Event()
    failures: list[BaseException] = []

    def load() -> None:
        try:
            with Client(up.url, key=up.key) as client:
                while not stopped.is_set():
                    accepted.append(client.submit(tasks(40), handler="everyday.quick").id)
                    client.submit(tasks(40), handler="everyday.quick").wait().delete()
        except BaseException as error:
            failures.append(error)

    loader = threading.Thread(target=load)
    loader.start()
    try:
        yield accepted
    finally:
        stopped.set()
        loader.join()
        assert failures == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_backup_of_a_busy_server(tmp_path: Path) -> None:
    (tmp_path / "restored").mkdir()
    with running(tmp_path, "--app", APP) as up, busy(up) as accepted:
        with Client(up.url, key=up.key) as client:
            accepted.append(client.submit(tasks(200), handler="everyday.quick").id)
        before = list(accepted)
        backed_up(up.data, tmp_path / "copy.tar.gz")
    data = tmp_path / "restored" / "data"
    done = conveyor("restore", str(tmp_path / "copy.tar.gz"), "--data", str(data), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["findings"] == {}
    with running(tmp_path / "restored", "--app", APP) as again, Client(again.url, key=again.key) as client:
        for job_id in before:
            job = client.job(job_id).wait()
            assert (job.ok, sum(1 for _ in job.results())) == (True, job.total)


async def test_what_is_deleted_meanwhile_is_not_missed(used: Used, server: Api, tmp_path: Path) -> None:
    """Jobs are deleted and purged after the database was copied, and before their bodies were."""
    data, loop = server.system.settings.data, asyncio.get_running_loop()
    gone: list[str] = []

    def purge(point: str) -> None:
        if point == "backup.snapshot.after" and not gone:
            gone.extend([used.fetched, used.objects])
            asyncio.run_coroutine_threadsafe(purged(server, gone), loop).result(60)

    faults.arm(purge)
    try:
        code = await asyncio.to_thread(run_guarded, ["backup", str(tmp_path / "copy"), "--data", str(data)])
    finally:
        faults.arm(None)
    assert code == 0
    assert gone
    done = conveyor("verify", "--data", str(tmp_path / "copy"), "--json")
    assert (done.returncode, json.loads(done.stdout)["findings"]) == (0, {})


async def purged(server: Api, job_ids: list[str]) -> None:
    for job_id in job_ids:
        assert (await server.request("DELETE", f"/v1/jobs/{job_id}")).status == 204
    async with Embedded(server.system).running():
        for job_id in job_ids:
            await until(partial(server.system.records.jobs.runs, JobId(job_id)), lambda runs: not runs)


async def test_a_backup_is_a_data_directory_for_its_owner_alone(used: Used, server: Api, tmp_path: Path) -> None:
    data, place = server.system.settings.data, tmp_path / "copy"
    figures = await asyncio.to_thread(backed_up, data, place)
    assert figures["checked"]["jobs"] == 6
    assert figures["files"] == 1 + sum(path.is_file() for path in (place / "blobs").rglob("*"))
    assert {path.name for path in place.iterdir()} == {"conveyor.db", "blobs", "signing.key"}
    assert {path.stat().st_mode & 0o077 for path in [place, *place.rglob("*")]} == {0}
    assert (place / "signing.key").read_text() == (data / "signing.key").read_text()
    # The server goes on.
    assert (await server.submit({"kind": "python", "handler": "tests.echo", "tasks": [1]})).status == 201
    assert (await server.get(f"/v1/jobs/{used.paused}")).status == 200


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
async def test_a_backup_that_dies(point: str, settings: Settings, tmp_path: Path) -> None:
    async with open_system(settings) as system:
        await system.blobs.put("lists/a/b", b"x")
    place = tmp_path / "copy"
    died = conveyor("backup", str(place), "--data", str(settings.data), CONVEYOR_CRASH_AT=point)
    assert died.returncode == -signal.SIGKILL
    # All of it, or nothing under its name.
    assert place.exists() == (point == "backup.publish.after")
    if not place.exists():
        backed_up(settings.data, place)
    assert not place.with_name("copy.partial").exists()
    assert (place / "blobs/lists/a/b").read_bytes() == b"x"


def test_what_cannot_be_backed_up_or_restored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    (tmp_path / "no.tar").write_text("x")
    for arguments, said in (
        (["backup", str(tmp_path / "full")], "exists already"),
        (["backup", str(tmp_path / "new"), "--data", str(tmp_path / "none")], "holds no database"),
        (["restore", str(tmp_path / "no.tar"), "--data", str(tmp_path / "full")], "is not empty"),
        (["restore", str(tmp_path / "no.tar"), "--data", str(tmp_path / "new")], "is not a backup"),
    ):
        assert run_guarded(arguments) != 0
        assert said in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"full", "no.tar"}


def test_shared_engines_have_backups_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CONVEYOR_RECORDS", "postgres://db.invalid/jobs")
    assert run_guarded(["backup", str(tmp_path / "new")]) == EXIT_BAD_INPUT
    assert "Use the backups of your database" in capsys.readouterr().err
