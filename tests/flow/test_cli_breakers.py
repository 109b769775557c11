"""Targets that are down, from the command line: `run` says so and ends, `breakers` lists and resets."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from conveyor.cli import local_run
from conveyor.cli.bar import progress_bar
from conveyor.cli.bar_view import view_job
from conveyor.cli.guard import run_guarded
from conveyor.cli.snapshot import Snapshot
from tests.flow.test_cli import PATIENCE, Cli, manifest, serving
from tests.support.demo_site import demo_site


@pytest.fixture
def dead() -> str:
    """The address of a host that is down."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def write_list(place: Path, *urls: str) -> str:
    (place / "urls.txt").write_text("".join(f"{url}\n" for url in urls))
    return "urls.txt"


def wait_for_breaker(up: Cli) -> None:
    end = time.monotonic() + PATIENCE
    while not up.json("breakers"):
        assert time.monotonic() < end


@contextmanager
def serving_quickly(place: Path) -> Iterator[Cli]:
    with serving(place, CONVEYOR_BREAKER_LEAST="5", CONVEYOR_BREAKER_SECONDS="600") as cli:
        yield cli


def test_run_says_that_a_host_is_down_and_ends(tmp_path: Path, dead: str) -> None:
    cli = Cli(tmp_path, {"CONVEYOR_ALLOW_PRIVATE_TARGETS": "1"})
    with demo_site() as site:
        urls = [f"{dead}/{number}" for number in range(100)] + [f"{site}/quick/{number}" for number in range(5)]
        done = cli("run", write_list(tmp_path, *urls), "-o", "out.zip", "--patience", "4")
    assert done.returncode == 3, done.stderr
    assert f"out.zip: {dead} is down (connect_failed). Its tasks wait for it, at most 4.0 s, then fail." in done.stderr
    assert done.stderr.count("is down") == 1
    assert "target_down (the host was down" in done.stdout
    lines = manifest(tmp_path / "out.zip")
    assert sum(line["status"] == "succeeded" for line in lines) == 5
    assert {line["error"]["code"] for line in lines if line["status"] == "failed"} <= {"connect_failed", "target_down"}


def test_errors_and_hosts_of_a_job_are_shown(tmp_path: Path, dead: str) -> None:
    with serving(tmp_path) as up, demo_site() as site:
        urls = [f"{dead}/{number}" for number in range(3)] + [f"{site}/quick/{number}" for number in range(5)]
        job = up("submit", write_list(tmp_path, *urls), "--attempts", "1", "--no-breaker").stdout.strip()
        up("watch", job)
        errors, hosts = up("errors", job), up("hosts", job)
        assert (errors.returncode, hosts.returncode) == (0, 0), errors.stderr + hosts.stderr
        assert "connect_failed" in errors.stdout
        assert "127.0.0.1" in hosts.stdout
        (group,) = up.json("errors", job)["items"]
        assert (group["code"], group["failed"], group["host"]) == ("connect_failed", 3, "127.0.0.1")
        assert [host["attempts"] for host in up.json("hosts", job)["items"]] == [8]
        assert f"conveyor errors {job}" in up("show", job).stdout


def test_run_without_a_breaker_tries_every_task(tmp_path: Path, dead: str) -> None:
    cli = Cli(tmp_path, {"CONVEYOR_ALLOW_PRIVATE_TARGETS": "1"})
    urls = [f"{dead}/{number}" for number in range(100)]
    done = cli("run", write_list(tmp_path, *urls), "-o", "out.zip", "--attempts", "1", "--no-breaker")
    assert done.returncode == 3, done.stderr
    assert "is down" not in done.stderr
    assert {line["error"]["code"] for line in manifest(tmp_path / "out.zip")} == {"connect_failed"}
    refused = cli("run", "urls.txt", "-o", "other.zip", "--no-breaker", "--patience", "3")
    assert (refused.returncode, "--no-breaker" in refused.stderr) == (2, True)


def test_breakers_are_listed_and_reset(tmp_path: Path, dead: str) -> None:
    with serving_quickly(tmp_path) as up:
        assert "All breakers are closed." in up("breakers").stderr
        urls = [f"{dead}/{number}" for number in range(100)]
        job = up.json("submit", write_list(tmp_path, *urls))["id"]
        wait_for_breaker(up)
        listed = up("breakers")
        assert dead in listed.stdout
        assert "connect_failed" in listed.stdout
        # Its worker says so a moment after the breaker opens.
        end = time.monotonic() + PATIENCE
        while "breaker" not in up("jobs").stdout:
            assert time.monotonic() < end
        assert f"breaker open for {dead}" in up("show", job).stdout
        unknown = up("breakers", "reset", "https://unknown.example")
        assert (unknown.returncode, "conveyor breakers" in unknown.stderr) == (1, True)
        assert up("breakers", "reset").returncode == 2
        assert up("breakers", "reset", dead).stdout == f"Reset {dead}.\n"
        # It is still down: the breaker opens again.
        wait_for_breaker(up)
        assert json.loads(up("breakers", "reset", "--all", "--json").stdout)["reset"] == [
            {"tenant": "local", "target": dead}
        ]
        assert up("breakers", "--all-tenants", "--json").returncode == 0
        up("cancel", job)
        assert up.json("breakers") == []


@pytest.mark.parametrize(
    ("flags", "breaker"),
    [([], {"patience": 60.0}), (["--patience", "5"], {"patience": 5.0}), (["--no-breaker"], {"enabled": False})],
)
def test_run_waits_for_a_minute_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], breaker: dict[str, object]
) -> None:
    plans: list[local_run.RunPlan] = []

    def keep(plan: local_run.RunPlan, as_json: bool) -> int:
        plans.append(plan)
        return 0

    monkeypatch.setattr(local_run, "run_here", keep)
    monkeypatch.chdir(tmp_path)
    assert run_guarded(["run", write_list(tmp_path, "https://a.example/"), "-o", "out.zip", *flags]) == 0
    assert plans[0].spec["breaker"] == breaker


def test_an_alert_is_printed_once_and_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    waiting = {"code": "breaker", "detail": "waiting", "until": None, "target": "upstream:erp", "error": "timeout"}
    counts = {"succeeded": 0, "failed": 0, "cancelled": 0}
    job = {"id": "job_1", "state": "running", "run": {"total": 9, "counts": counts}, "waiting": waiting, "options": {}}
    with progress_bar("list") as show:
        for _ in range(3):
            show(view_job(Snapshot.of(job)))
    assert capsys.readouterr().err == (
        "list: upstream:erp is down (timeout). Its tasks wait for it, at most 1 h 00 min, then fail.\n"
    )
