"""What Conveyor makes in a data directory is for its owner alone, also in a directory that existed before."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from structlog.testing import capture_logs

from conveyor.settings import Settings
from conveyor.system import exposed_data, open_system

OTHERS = 0o077


@contextmanager
def open_directory() -> Iterator[Path]:
    """A directory that others can read, under a umask that lets them read new files."""
    before = os.umask(0o022)
    try:
        with TemporaryDirectory() as directory:
            Path(directory).chmod(0o755)
            yield Path(directory)
    finally:
        os.umask(before)


async def new_files_are_private() -> None:
    with open_directory() as data:
        async with open_system(Settings(data=data)) as system:
            await system.blobs.put("results/acme/job/run/body_1", b"body")
            made = {path.name: path.stat().st_mode for path in data.rglob("*")}
        assert {"conveyor.db", "conveyor.db-wal", "conveyor.db-shm", "owner.lock", "body_1"} <= made.keys()
        assert [name for name, mode in made.items() if mode & OTHERS] == []


async def test_new_files_are_private() -> None:
    await new_files_are_private()


async def test_what_others_can_read_is_named() -> None:
    with open_directory() as data:
        with capture_logs() as logs:
            async with open_system(Settings(data=data)):
                pass
        assert [(line["log_level"], line["files"]) for line in logs if "other users" in line["event"]] == [
            ("warning", [])
        ]
        (data / "conveyor.db").chmod(0o644)
        with capture_logs() as logs:
            async with open_system(Settings(data=data)):
                pass
        assert [line["files"] for line in logs if "other users" in line["event"]] == [["conveyor.db"]]


async def test_a_directory_that_keeps_others_out_needs_no_warning() -> None:
    with open_directory() as data:
        (data / "old").touch()
        assert [path.name for path in exposed_data(Settings(data=data))] == [data.name, "old"]
        data.chmod(0o700)
        assert exposed_data(Settings(data=data)) == []
        assert exposed_data(Settings(data=data / "missing")) == []
