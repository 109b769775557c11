"""Databases that are damaged, missing, empty or of another program: a clear error, and never a new installation."""

import asyncio
import shutil
from pathlib import Path

import apsw
import pytest

from conveyor.cli import doctor_checks
from conveyor.engines.sqlite.database import MIGRATIONS, open_database
from conveyor.errors import ConveyorError, DatabaseUnusable
from conveyor.settings import Settings
from conveyor.system import open_system


async def installed(place: Path) -> Path:
    """A directory with a list in its blobs; the path of its database."""
    async with open_system(Settings(data=place)) as system:
        await system.blobs.put("uploads/acme/upload_1", b"http://example.com/")
    return place / "conveyor.db"


async def refused(place: Path, said: str) -> None:
    with pytest.raises(DatabaseUnusable, match=said) as caught:
        async with open_system(Settings(data=place)):
            pass
    assert "Restore the data directory from a backup" in caught.value.message


@pytest.mark.parametrize("state", ["missing", "empty"])
async def test_a_database_that_is_gone_beside_its_blobs(tmp_path: Path, state: str) -> None:
    path = await installed(tmp_path)
    path.unlink()
    if state == "empty":
        path.touch()
    await refused(tmp_path, f"conveyor.db is {state}, but .*blobs holds lists or results")
    assert state == "empty" or not path.exists(), "no new one was made"
    check = await asyncio.to_thread(doctor_checks._owner, Settings(data=tmp_path))
    assert check.verdict == "fail"
    assert state in (check.advice or "")


async def a_missing_database_is_refused(place: Path) -> None:
    (await installed(place)).unlink()
    await refused(place, "conveyor.db is missing")


@pytest.mark.parametrize("state", ["missing", "empty"])
async def test_a_directory_without_blobs_is_a_new_one(tmp_path: Path, state: str) -> None:
    if state == "empty":
        (tmp_path / "conveyor.db").touch()
    async with open_system(Settings(data=tmp_path)):
        pass
    shutil.rmtree(tmp_path / "blobs")
    (tmp_path / "conveyor.db").unlink()
    async with open_system(Settings(data=tmp_path)):
        pass


async def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    path = await installed(tmp_path)
    path.write_bytes(b"garbage " * 1000)
    await refused(tmp_path, "conveyor.db is damaged")
    assert path.read_bytes() == b"garbage " * 1000


async def test_damaged_pages(tmp_path: Path) -> None:
    path = await installed(tmp_path)
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(data)
    with pytest.raises(DatabaseUnusable, match=r"conveyor\.db is damaged"):
        async with open_database(tmp_path) as database:
            await database.rows("SELECT * FROM jobs, keys, documents, messages, leases", {})
            await database.change("INSERT INTO leases VALUES ('a', '', 1, 1.0)", {})


@pytest.mark.parametrize("version", [0, 3, len(MIGRATIONS)])
async def test_the_database_of_another_program(tmp_path: Path, version: int) -> None:
    connection = apsw.Connection(str(tmp_path / "conveyor.db"))
    connection.execute("CREATE TABLE songs (title)")
    connection.pragma("user_version", version)
    connection.close()
    await refused(tmp_path, "is not a database of Conveyor")


async def test_a_newer_schema(tmp_path: Path) -> None:
    path = await installed(tmp_path)
    connection = apsw.Connection(str(path))
    connection.pragma("user_version", len(MIGRATIONS) + 1)
    connection.close()
    with pytest.raises(ConveyorError, match="Use the Conveyor version that wrote it, or a newer one"):
        async with open_system(Settings(data=tmp_path)):
            pass
