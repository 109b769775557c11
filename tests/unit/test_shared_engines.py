"""Processes on shared engines: what all of them need in common, and blobs in a directory that they share."""

from pathlib import Path

import pytest

from conveyor.cli import EXIT_BAD_INPUT
from conveyor.cli.guard import run_guarded
from conveyor.clock import SystemClock
from conveyor.engines.shared_logs import open_shared_logs
from conveyor.errors import DatabaseUnusable, InvalidSetting
from conveyor.recover.lambda_handler import handler
from conveyor.settings import Settings
from conveyor.system import SEAMS, check_shared_engines, engine_findings, open_system

KEY = "k" * 32
URLS = {
    "records": "postgres://db.invalid/jobs",
    "tasks": "dynamodb://eu-central-1/conveyor",
    "queue": "sqs://eu-central-1/conveyor",
    "coordinator": "redis://cache.invalid/0",
}


def test_the_embedded_engines_need_neither() -> None:
    check_shared_engines(Settings())
    check_shared_engines(Settings(blobs="s3://bucket"))


@pytest.mark.parametrize("seam", [seam for seam in SEAMS if seam != "blobs"])
def test_one_shared_engine_needs_both(seam: str) -> None:
    for answered, missing in (
        ({}, "CONVEYOR_BLOBS .* and CONVEYOR_SIGNING_KEY"),
        ({"signing_key": KEY}, "CONVEYOR_BLOBS"),
        ({"blobs": "s3://bucket"}, "CONVEYOR_SIGNING_KEY"),
    ):
        with pytest.raises(InvalidSetting, match=f"Shared engines need {missing}"):
            check_shared_engines(Settings.load({}, **{seam: URLS[seam]}, **answered))
    check_shared_engines(Settings.load({}, **{seam: URLS[seam]}, signing_key=KEY, blobs="file:///srv/blobs"))


@pytest.mark.parametrize("role", ["api", "work", "ingest", "sweep", "schedule", "monitor", "up", "monitor --once"])
def test_no_role_starts_without_them(
    role: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("CONVEYOR_DATA", str(tmp_path / "data"))
    for seam, url in URLS.items():
        monkeypatch.setenv(f"CONVEYOR_{seam.upper()}", url)
    monkeypatch.setenv("CONVEYOR_BLOBS", "s3://bucket")
    assert run_guarded(role.split()) == EXIT_BAD_INPUT
    assert "Shared engines need CONVEYOR_SIGNING_KEY" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_nor_does_the_monitor_in_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVEYOR_RECORDS", URLS["records"])
    with pytest.raises(InvalidSetting, match="Shared engines need"):
        handler({}, None)


async def test_blobs_in_a_directory_with_an_address(tmp_path: Path) -> None:
    place = tmp_path / "my blobs"
    settings = Settings.load({}, data=tmp_path / "data", blobs=f"file://{tmp_path}/my%20blobs")
    async with open_system(settings) as system:
        await system.blobs.put("lists/a/b", b"one")
        assert (place / "lists" / "a" / "b").read_bytes() == b"one"
        assert not (tmp_path / "data" / "blobs").exists()
    # A fetcher appends to the same directory.
    logs = open_shared_logs(settings)
    assert logs is not None
    logs.append([("results/acme/x", b"two")])
    assert [path.suffix for path in (place / ".logs").rglob("*.log")] == [".log"]
    assert ("blobs: the directory can be written", None) in await engine_findings(settings, SystemClock())


async def test_a_database_that_is_lost_beside_them_is_missed(tmp_path: Path) -> None:
    settings = Settings.load({}, data=tmp_path / "data", blobs=f"file://{tmp_path}/blobs")
    async with open_system(settings) as system:
        await system.blobs.put("results/acme/x", b"one")
    for file in (tmp_path / "data").glob("conveyor.db*"):
        file.unlink()
    with pytest.raises(DatabaseUnusable, match="holds lists or results"):
        async with open_system(settings):
            raise AssertionError("it began anew")


async def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "data").mkdir()
    settings = Settings.load({}, data=tmp_path / "data", blobs=f"file://{tmp_path}/file/blobs")
    findings = dict(await engine_findings(settings, SystemClock()))
    assert "cannot be used: Not a directory" in (findings["blobs: opens"] or "")
