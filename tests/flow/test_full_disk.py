"""A disk that is full or read-only: everybody who asks is told so, and work goes on once there is room."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest

from conveyor import disk
from conveyor.cli import doctor_checks
from conveyor.coordination.waits import waiting
from conveyor.engines.data_directory import make_data_directory
from conveyor.engines.local_blobs import LocalBlobs
from conveyor.engines.sqlite.database import SqliteDatabase, open_database, own
from conveyor.engines.sqlite.soundness import open_error
from conveyor.errors import DiskReadOnly, DiskUnwritable, EngineFailed, is_outage
from conveyor.settings import Settings
from conveyor.states import RunState
from tests.support.api import Api
from tests.support.small_fleet import Fleet, open_fleet


class Statvfs:
    """What the system says about a disk."""

    def __init__(self, *, free: int = 1 << 30, flags: int = 0, size: int = 1 << 30) -> None:
        self.f_bavail, self.f_frsize, self.f_flag, self.f_blocks = free, 1, flags, size


def report(patch: pytest.MonkeyPatch, **state: int) -> None:
    patch.setattr(disk.os, "statvfs", lambda path: Statvfs(**state))


FULL: dict[str, int] = {"free": 100}
READ_ONLY: dict[str, int] = {"flags": os.ST_RDONLY}


@pytest.mark.parametrize(("state", "said"), [(FULL, "full"), (READ_ONLY, "read-only")])
async def test_readyz_and_doctor_say_why(
    server: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: dict[str, int], said: str
) -> None:
    assert (await server.get("/readyz")).status == 200
    report(monkeypatch, **state)
    answer = await server.get("/readyz")
    assert (answer.status, answer.json["status"]) == (503, 503)
    assert answer.json["code"] == f"disk_{said.replace('-', '_')}"
    assert answer.json["detail"].startswith(f"The server's disk is {said}.")
    check = doctor_checks._space(Settings(data=tmp_path))
    assert check.verdict == "fail"
    assert said in (check.advice or "")


def refuse_changes(patch: pytest.MonkeyPatch, number: int) -> None:
    """As a file system does after an error of its disk, though it says that it is writable."""

    def utime(path: Any, **times: Any) -> None:
        raise OSError(number, os.strerror(number))

    patch.setattr(disk.os, "utime", utime)


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (errno.EROFS, "disk_read_only", "is read-only"),
        (errno.EIO, "disk_unwritable", "cannot be written: Input/output error"),
    ],
)
async def test_a_disk_that_stopped_after_an_error_is_named(
    server: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: str, said: str
) -> None:
    refuse_changes(monkeypatch, number)
    answer = await server.get("/readyz")
    assert (answer.status, answer.json["code"]) == (503, code)
    problem = disk.disk_problem(tmp_path)
    assert problem is not None
    assert said in problem.message
    database = database_of(server.system)
    assert database._failed(apsw.IOError("disk I/O error")).code == code
    assert isinstance(open_error(tmp_path / "conveyor.db", apsw.CantOpenError("unable to open")), DiskUnwritable)


def test_nothing_is_said_about_the_disk_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_changes(monkeypatch, errno.EPERM)
    assert disk.disk_problem(tmp_path) is None


@pytest.mark.parametrize("make", [make_data_directory, LocalBlobs])
def test_a_start_on_a_disk_that_stopped_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object]
) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(disk, "sync", refuse)
    with pytest.raises(DiskReadOnly) as refused:
        make(tmp_path / "data")
    assert str(tmp_path / "data") in refused.value.message


def test_a_start_on_a_read_only_disk_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr("conveyor.engines.sqlite.database.os.open", refuse)
        with pytest.raises(DiskReadOnly, match=f"The disk of {tmp_path} is read-only"):
            own(tmp_path)


def test_a_filesystem_without_a_size_is_not_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk.disk_problem(tmp_path) is None
    report(monkeypatch, free=0, size=0)
    assert disk.disk_problem(tmp_path) is None


async def fill(database: SqliteDatabase) -> None:
    """Let the database grow no further: SQLite then says what it says of a full disk."""

    def work(db: apsw.Connection) -> None:
        db.pragma("max_page_count", int(db.pragma("page_count")))

    await database.read(lambda db: None)
    await database.write(lambda db: None)
    work(database._writer)


def database_of(system: Any) -> SqliteDatabase:
    engine: Any = system.records.documents
    while not hasattr(engine, "_database"):
        engine = engine._engine
    found: SqliteDatabase = engine._database
    return found


async def test_a_full_database_names_its_disk(tmp_path: Path) -> None:
    async with open_database(tmp_path) as database:
        await fill(database)
        with pytest.raises(DiskUnwritable, match=f"The disk of {tmp_path} is full. Free some space"):
            for _ in range(100):
                await database.change("INSERT INTO leases VALUES (hex(randomblob(5000)), '', 1, 1.0)", {})


async def test_a_submit_is_told_at_once(server: Api) -> None:
    await fill(database_of(server.system))
    answers = [await server.submit({"tasks": ["http://example.com/" + "x" * 1900] * 500}) for _ in range(3)]
    assert (answers[-1].status, answers[-1].json["code"]) == (507, "disk_full")
    assert "is full" in answers[-1].json["detail"]
    assert "retry-after" not in answers[-1].headers


@pytest.mark.parametrize(
    ("number", "said"), [(errno.ENOSPC, "is full"), (errno.EDQUOT, "is full"), (errno.EROFS, "read-only")]
)
async def test_blobs_name_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str) -> None:
    blobs = LocalBlobs(tmp_path)

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("conveyor.engines.local_files.os.write", refuse)
        with pytest.raises(DiskUnwritable, match=said) as unwritable:
            await blobs.put("results/x", b"data")
    assert is_outage(unwritable.value)
    await blobs.put("results/x", b"data")
    with pytest.raises(EngineFailed) as caught:
        await blobs._run(_interrupted)
    assert not isinstance(caught.value, DiskUnwritable)


def _interrupted() -> None:
    raise OSError(errno.EINTR, "for another reason")


async def test_a_job_says_that_it_waits_for_the_disk() -> None:
    async with open_fleet() as fleet:
        await check_wait(fleet)


async def check_wait(fleet: Fleet) -> None:
    job = await fleet.submit(5)
    queue: Any = fleet.system.queue
    is_full, receive = True, queue.receive_many

    async def full(*given: Any) -> Any:
        if is_full:
            raise disk.full(fleet.system.settings.data)
        return await receive(*given)

    queue.receive_many = full
    worker = fleet.worker()
    fleet.start(worker)

    async def wait() -> Any:
        return await waiting(fleet.system.coordinator, job.run.run_id)

    await fleet.until(lambda: bool(worker._lanes))
    await fleet.passing(1.0)
    found = await wait()
    assert found is not None and found.code == "disk"
    assert found.detail.startswith("The server's disk is full.")
    is_full = False
    await fleet.ended(job)
    assert (await fleet.job(job.job_id)).state is RunState.COMPLETED
