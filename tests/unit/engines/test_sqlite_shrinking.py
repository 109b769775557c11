"""The database file becomes smaller after deletes: in steps, while nothing is written, and in older databases too."""

import asyncio
from itertools import pairwise
from pathlib import Path

import apsw
import pytest

from conveyor.engines.sqlite import database, shrinking
from conveyor.engines.sqlite.database import open_database, rewrite_database
from conveyor.engines.sqlite.shrinking import is_shrinkable, shrink
from tests.support.places import quick_place

MIB = 1024 * 1024


def size_of(place: Path) -> int:
    return (place / "conveyor.db").stat().st_size


async def fill_and_empty(opened: database.SqliteDatabase) -> None:
    """Leave a few megabytes of free pages."""

    def fill(db: apsw.Connection) -> None:
        db.execute("CREATE TABLE filling (value BLOB)")
        db.execute(
            "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 2000) "
            "INSERT INTO filling SELECT zeroblob(3000) FROM n"
        )

    await opened.write(fill)
    await opened.change("DELETE FROM filling", {})


def wait_for_no_write(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(database, "IDLE_SECONDS", 0.0)
    patch.setattr(database, "PAUSE_SECONDS", 0.0)
    patch.setattr(shrinking, "KEPT_PAGES", 100)


async def the_file_shrinks_while_nothing_is_written() -> None:
    with pytest.MonkeyPatch.context() as patch, quick_place() as place:
        wait_for_no_write(patch)
        async with open_database(place) as opened:
            await fill_and_empty(opened)
            for _ in range(500):
                [pages] = await opened.row("SELECT page_count FROM pragma_page_count", {})
                if pages * 4096 < 2 * MIB:
                    break
                await asyncio.sleep(0.01)
            assert pages * 4096 < 2 * MIB
            assert await opened.row("SELECT count(*) FROM filling", {}) == (0,)
        assert size_of(place) < 2 * MIB


async def test_the_file_shrinks_while_nothing_is_written() -> None:
    await the_file_shrinks_while_nothing_is_written()


async def test_a_step_is_bounded_and_some_pages_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrinking, "KEPT_PAGES", 500)
    monkeypatch.setattr(database, "IDLE_SECONDS", 3600.0)
    async with open_database(tmp_path) as opened:
        await fill_and_empty(opened)
        free = [opened._writer.pragma("freelist_count")]
        while shrink(opened._writer):
            free.append(opened._writer.pragma("freelist_count"))
        free.append(opened._writer.pragma("freelist_count"))
    steps = [before - after for before, after in pairwise(free)]
    assert set(steps[:-1]) == {shrinking.STEP_PAGES}
    assert free[-1] == 500


async def make_old(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database as earlier versions made it."""
    with monkeypatch.context() as patch:
        patch.setattr(database, "WRITER_PRAGMAS", database.WRITER_PRAGMAS[1:])
        patch.setattr(shrinking, "_QUICKLY_REWRITTEN", 0)
        async with open_database(place) as opened:
            await fill_and_empty(opened)
            assert not is_shrinkable(opened._writer)


async def test_a_small_older_database_is_rewritten_when_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await make_old(tmp_path, monkeypatch)
    before = size_of(tmp_path)
    async with open_database(tmp_path) as opened:
        assert is_shrinkable(opened._writer)
        assert await opened.row("SELECT count(*) FROM filling", {}) == (0,)
    assert size_of(tmp_path) < before / 2


async def test_a_large_older_database_is_rewritten_by_migrate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await make_old(tmp_path, monkeypatch)
    monkeypatch.setattr(shrinking, "_QUICKLY_REWRITTEN", 0)
    async with open_database(tmp_path) as opened:
        assert not is_shrinkable(opened._writer)
    assert rewrite_database(tmp_path)
    assert not rewrite_database(tmp_path)
    assert not rewrite_database(tmp_path / "missing")
    async with open_database(tmp_path) as opened:
        assert is_shrinkable(opened._writer)
