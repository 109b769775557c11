"""Results as files in a directory: by a run, as its tasks finish, and by an export of a server."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from conveyor import Client
from conveyor.client.export_files import CopyProgress
from conveyor.client.export_folder import STATE
from conveyor.errors import BadInput
from conveyor.export import growing_directory as growing
from conveyor.export.direct import export_to_file
from conveyor.export.growing_directory import GrowingDirectory
from conveyor.model import Job
from conveyor.states import RunState
from conveyor.system import System
from tests.flow.test_bucket_exports import Broken, used
from tests.flow.test_cli import Cli
from tests.flow.test_growing_archive import contents, finish, put
from tests.support.api import Api
from tests.support.demo_site import demo_site
from tests.support.export_jobs import has_body, new_job, stored_job

BATCH = 20


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "ROWS", BATCH)


def directory_of(system: System, job: Job, place: Path) -> GrowingDirectory:
    place.mkdir(exist_ok=True)
    return GrowingDirectory(system.tasks, system.blobs, system.clock, job, place, None, True)


def files_of(place: Path) -> dict[str, bytes]:
    return {path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file()}


async def look(directory: GrowingDirectory) -> None:
    assert directory._engine is not None
    await directory._look(directory._engine)


async def test_files_come_as_tasks_finish(system: System, tmp_path: Path) -> None:
    """In any order; in the end they are those of the archive."""
    job = new_job(system, 65, state=RunState.RUNNING)
    await put(system, job, list(range(65)))
    directory = directory_of(system, job, tmp_path / "out")
    for indexes in ([41], [0, 2, 4], [*range(20, 40)], [1, 3]):
        await finish(system, job, indexes)
        await look(directory)
        there = {int(name.partition("/")[2][:7]) for name in files_of(tmp_path / "out")}
        assert there >= {index for index in indexes if has_body(index)}
    assert not (tmp_path / "out" / "manifest.jsonl").exists()
    await finish(system, job, [*range(5, 20), 40, *range(42, 60)])
    size = await directory.finish(job, lambda _: None)
    directory.discard()
    bodies, lines = contents(await archive(system, job, tmp_path))
    found = files_of(tmp_path / "out")
    assert found.pop("manifest.jsonl").splitlines() == lines
    assert found == bodies
    assert size == sum(map(len, bodies.values())) + sum(len(line) + 1 for line in lines)


async def archive(system: System, job: Job, place: Path) -> Path:
    await export_to_file(system.tasks, system.blobs, job, place / "same.zip")
    return place / "same.zip"


async def test_the_next_process_keeps_what_is_right(system: System, tmp_path: Path) -> None:
    job = new_job(system, 40, state=RunState.RUNNING)
    await put(system, job, list(range(40)))
    first = directory_of(system, job, tmp_path / "out")
    await finish(system, job, list(range(20)))
    await look(first)
    first.discard()
    kept, *rest = sorted((tmp_path / "out" / "bodies").iterdir())
    before = kept.stat().st_ino
    rest[0].write_bytes(b"torn")
    # A name that only another order of the tasks gave.
    (tmp_path / "out" / "bodies" / "0000003_3~3.html").write_bytes(b"stray")
    # What a process wrote when it was killed.
    (tmp_path / "out" / ".part-1").write_bytes(b"half")
    await finish(system, job, list(range(20, 40)))
    second = directory_of(system, job, tmp_path / "out")
    await second.finish(job, lambda _: None)
    second.discard()
    bodies, lines = contents(await archive(system, job, tmp_path))
    found = files_of(tmp_path / "out")
    assert found.pop("manifest.jsonl").splitlines() == lines
    assert found == bodies
    assert kept.stat().st_ino == before


async def test_a_failure_on_the_way_begins_anew(
    system: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = new_job(system, 40, state=RunState.RUNNING)
    await put(system, job, list(range(40)))
    await finish(system, job, list(range(40)))
    directory = directory_of(system, job, tmp_path / "out")
    written: list[str] = []
    real = growing._BodyFiles.write

    def fails_once(files: Any, name: str, data: bytes) -> None:
        written.append(name)
        if len(written) == 7:
            raise OSError("no space")
        real(files, name, data)

    monkeypatch.setattr(growing._BodyFiles, "write", fails_once)
    await directory.follow()
    await directory.finish(job, lambda _: None)
    directory.discard()
    bodies, _ = contents(await archive(system, job, tmp_path))
    assert {name for name in files_of(tmp_path / "out") if name != "manifest.jsonl"} == set(bodies)


class TestExportOfAServer:
    pytestmark = pytest.mark.server

    async def test_unpacked_part_by_part(self, server: Api, tmp_path: Path) -> None:
        job = await stored_job(server.system, 700)
        place = tmp_path / "out"

        def use(client: Client) -> None:
            def die(size: int, total: int | None) -> None:
                if size > 100 * 1024:
                    raise Broken

            handle = client.job(job.job_id)
            with pytest.raises(Broken):
                handle.export_files(place, progress=CopyProgress(None, die), part_bytes=64 * 1024)
            assert (place / STATE).exists()
            assert not (place / "manifest.jsonl").exists()
            handle.export_files(place)
            assert len(list(handle.exports())) == 1
            with pytest.raises(BadInput, match="is not empty"):
                handle.export_files(place)
            with pytest.raises(BadInput, match="For a table, name a file"):
                handle.export_files(tmp_path / "table", format="csv")
            (place / "mine.txt").write_bytes(b"kept")
            again = handle.export_files(place, overwrite=True, status="failed")
            assert again.data["counts"]["failed"] == 70
            handle.export_files(place, overwrite=True)

        await used(server, use)
        found = files_of(place)
        assert found.pop("mine.txt") == b"kept"
        lines = [json.loads(line) for line in found.pop("manifest.jsonl").splitlines()]
        assert [line["index"] for line in lines] == list(range(700))
        named = {line["file"]: line["sha256"] for line in lines if line["file"]}
        assert {name: sha256(data).hexdigest() for name, data in found.items()} == named


def test_the_command(tmp_path: Path) -> None:
    cli = Cli(tmp_path, {"CONVEYOR_ALLOW_PRIVATE_TARGETS": "1"})
    with demo_site() as site:
        cli.write("list.csv", "url,id", f"{site}/quick/1,one", f"{site}/quick/2,two", f"{site}/quick/3,one", "x,y")
        done = cli("run", "list.csv", "-o", "out/")
        assert done.returncode == 0, done.stderr
        found = files_of(tmp_path / "out")
        lines = [json.loads(line) for line in found.pop("manifest.jsonl").splitlines()]
        assert [line["file"] for line in lines] == ["bodies/one.html", "bodies/two.html", "bodies/one~2.html"]
        assert set(found) == {line["file"] for line in lines}
        assert (tmp_path / "out.invalid.jsonl").exists()
        assert not (tmp_path / "out.conveyor").exists()
        refused = cli("run", "list.csv", "-o", "out")
        assert (refused.returncode, "out/ is not empty" in refused.stderr) == (2, True)
        (tmp_path / "out" / "mine.txt").write_bytes(b"kept")
        again = cli("run", "list.csv", "-o", "out", "--overwrite", "--names", "{index}{ext}")
        assert again.returncode == 0, again.stderr
        assert {name for name in files_of(tmp_path / "out") if name.startswith("bodies/")} == {
            f"bodies/000000{index}.html" for index in range(3)
        }
        assert (tmp_path / "out" / "mine.txt").exists()
        (tmp_path / "out.conveyor").mkdir()
        (tmp_path / "out.conveyor" / "run.json").write_text('{"lists": ["list.csv"], "sha256": null, "out": "out"}')
        stopped = cli("run", "list.csv", "-o", "out/")
        assert "out.conveyor has an unfinished run of list.csv. Pass --resume" in stopped.stderr
        unknown = cli("run", "list.csv", "-o", "nothing")
        assert "or with / for a directory" in unknown.stderr
