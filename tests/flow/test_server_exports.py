"""Exports that the server writes, with its own credentials, below the places that its operator lists for the tenant: on
S3, Google Cloud Storage (the emulator's S3 answers its requests too), and in a directory."""

import asyncio
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conveyor import AsyncClient, Client
from conveyor.client.object_stores import StoredPrefix, open_prefix
from conveyor.errors import BadInput, DestinationRefused, ExportFailed
from conveyor.export.export_copier import ExportCopier
from conveyor.export.exporter import Exporter
from conveyor.export.exports import Exports, ExportState
from conveyor.model import Job
from conveyor.recover import retention
from conveyor.recover.retention import Removed, Retention
from conveyor.settings import Settings
from conveyor.system import System
from tests.flow.test_bucket_exports import PARTS, TASKS, lines_of, own_credentials, used  # noqa: F401  (a fixture)
from tests.flow.test_cli import Cli
from tests.flow.test_cli import serving as cli_serving
from tests.servers import sources
from tests.servers.aws import CREDENTIALS, aws
from tests.support.api import Api
from tests.support.demo_site import demo_site
from tests.support.export_jobs import ACME, asked, exporter, found, stored_job
from tests.support.working import working

pytestmark = pytest.mark.server


@pytest.fixture(params=["s3", "gs", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/results/"
    return f"{request.param}://{sources.BUCKET}/{tmp_path.name}/by-server/"


@pytest.fixture
def settings(settings: Settings, tmp_path: Path) -> Settings:
    names = (f"acme={scheme}://{sources.BUCKET}/{tmp_path.name}/" for scheme in ("s3", "gs"))
    listed = " ".join([*names, f"acme=file://{tmp_path}/results/ other=file://{tmp_path}/others/"])
    return msgspec.structs.replace(settings, export_buckets=listed, export_piece_bytes=64 * 1024)


def as_manifest(prefix: StoredPrefix) -> Any:
    return json.loads(prefix.read("_manifest.json") or b"")


async def done(system: System, export_id: str, role: Exporter | None = None) -> None:
    role = role or exporter(system)
    while (await found(system, export_id)).state not in (ExportState.READY, ExportState.FAILED):
        if delay := await role.tick():
            await system.clock.sleep(delay)


async def test_the_files_then_the_manifest(server: Api, place: str) -> None:
    job = await stored_job(server.system, TASKS)

    def use(client: Client) -> None:
        handle = client.job(job.job_id)
        written = handle.export_to(place.removesuffix("/"), by_server=True, **PARTS)
        prefix = open_prefix(place)
        manifest = as_manifest(prefix)
        assert len(written.urls) > 2
        assert written.urls == [place + part["name"] for part in manifest["parts"]]
        assert written.manifest == f"{place}_manifest.json"
        names = [url.removeprefix(place) for url in written.urls]
        assert set(prefix.names(100)) == {*names, "_export.json", "_manifest.json"}
        assert [line["index"] for line in lines_of(prefix, manifest)] == list(range(TASKS))
        for part in manifest["parts"]:
            data = prefix.read(part["name"]) or b""
            assert (len(data), sha256(data).hexdigest()) == (part["size"], part["sha256"])
        begun = {"job_id": job.job_id, "export_id": written.data["id"], "format": "jsonl"}
        assert json.loads(prefix.read("_export.json") or b"") == begun
        assert (written.data["to"], written.data["state"]) == (place, "ready")

        again = handle.export_to(place, by_server=True, export_id=written.data["id"])
        assert again.urls == written.urls
        with pytest.raises(ExportFailed, match="is not empty") as failed:
            handle.export_to(place, by_server=True)
        assert failed.value.details["reason"] == "bad_input"
        assert as_manifest(prefix) == manifest
        with pytest.raises(BadInput, match="never writes over"):
            handle.export_to(place, overwrite=True, by_server=True)
        with pytest.raises(BadInput, match="is of another job, or is not one"):
            handle.export_to(place, by_server=True, export_id=handle.start_export(format="csv").id)

    await used(server, use)


async def test_both_ways_write_the_same(server: Api, tmp_path: Path) -> None:
    job = await stored_job(server.system, 40)
    mine, theirs = tmp_path / "mine", tmp_path / "results" / "theirs"

    def use(client: Client) -> None:
        handle = client.job(job.job_id)
        handle.export_to(f"file://{mine}/")
        handle.export_to(f"file://{theirs}/", by_server=True)

    await used(server, use)
    shapes = []
    for directory in (mine, theirs):
        manifest = json.loads((directory / "_manifest.json").read_text())
        [part] = manifest["parts"]
        begun = json.loads((directory / "_export.json").read_text())
        assert part["name"] == f"part-0001-{manifest['export_id']}.jsonl.gz"
        shapes.append((sorted(manifest), sorted(part), sorted(begun), len(list(directory.iterdir()))))
        assert (directory / "_manifest.json").read_text() == json.dumps(manifest, indent=1) + "\n"
    assert shapes[0] == shapes[1]


async def test_only_below_a_listed_place(server: Api, tmp_path: Path) -> None:
    job = await stored_job(server.system, 10)
    path = f"/v1/jobs/{job.job_id}/exports"
    others = await server.post(path, {"to": f"file://{tmp_path}/others/x/"})
    nobodys = await server.post(path, {"to": f"file://{tmp_path}/nobodys/x/"})
    assert (others.status, others.json["code"]) == (403, "destination_refused")
    same = {name: value for name, value in others.json.items() if name not in ("request_id", "instance")}
    assert same == {name: value for name, value in nobodys.json.items() if name not in ("request_id", "instance")}
    for wrong in (f"file://{tmp_path}/results/../others/", f"file://{tmp_path}/results/%2e%2e/", "s3://k:s@data/x/"):
        answer = await server.post(path, {"to": wrong})
        assert (answer.status, answer.json["code"], answer.json["field"]) == (400, "invalid_field", "to")
    too_large = await server.post(path, {"to": f"file://{tmp_path}/results/", "part_bytes": 2 << 30})
    assert (too_large.status, too_large.json["field"]) == (400, "part_bytes")
    assert (await server.get(path)).json["items"] == []
    assert not (tmp_path / "others").exists()
    assert not (tmp_path / "results").exists()

    other = await server.as_tenant("other")
    assert (await other.post(path, {"to": f"file://{tmp_path}/others/x/"})).status == 404


async def test_a_place_that_is_no_longer_listed(system: System, tmp_path: Path) -> None:
    job = await stored_job(system, 10)
    export_id = await asked(system, job, to=f"file://{tmp_path}/results/a/")
    bare = msgspec.structs.replace(system.settings, export_buckets=None)
    object.__setattr__(system, "settings", bare)
    await done(system, export_id)
    export = await found(system, export_id)
    assert export.error is not None
    assert (export.state, export.error.code) == (ExportState.FAILED, "destination_refused")
    assert not (tmp_path / "results").exists()


async def test_what_the_store_says_is_for_the_operator(system: System, tmp_path: Path) -> None:
    job = await stored_job(system, 10)
    (tmp_path / "results").write_text("a file is in the way")
    to = f"file://{tmp_path}/results/a/"
    export_id = await asked(system, job, to=to)
    await done(system, export_id)
    export = await found(system, export_id)
    assert export.error is not None
    assert export.tries == 5
    assert export.error.code == "destination_unavailable"
    assert export.error.message == f"The server cannot write to {to}. Its log says why."


async def test_nothing_of_others_is_touched(system: System, tmp_path: Path) -> None:
    """Neither what is there, nor, when another export takes the prefix, its manifest."""
    job = await stored_job(system, 10)
    place = tmp_path / "results"
    place.mkdir()
    (place / "mine.txt").write_text("kept")
    first = await asked(system, job, to=f"file://{place}/")
    await done(system, first)
    error = (await found(system, first)).error
    assert error is not None
    assert error.message == f"file://{place}/ is not empty. Choose another prefix."
    assert [path.name for path in place.iterdir()] == ["mine.txt"]

    second = await asked(system, job, to=f"file://{place}/a/")
    begin = ExportCopier.begin

    async def overtaken(self: ExportCopier) -> None:
        await begin(self)
        (place / "a" / "_export.json").write_text('{"export_id": "another"}')

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExportCopier, "begin", overtaken)
        await done(system, second)
    error = (await found(system, second)).error
    assert error is not None
    assert "has files of another export" in error.message
    assert not (place / "a" / "_manifest.json").exists()


async def test_a_claim_is_small(system: System, place: str) -> None:
    """The tenant may write there, too, and a file of any size would be in memory."""
    job = await stored_job(system, 10)
    prefix = await asyncio.to_thread(open_prefix, place)
    ends = {}
    for name, padding in {"small": 100, "large": 5000}.items():
        export_id = await asked(system, job, to=f"{place}{name}/")
        claim = json.dumps({"export_id": export_id}) + " " * padding
        await asyncio.to_thread(prefix.write, f"{name}/_export.json", claim.encode())
        await done(system, export_id)
        ends[name] = (await found(system, export_id)).state
    assert ends == {"small": ExportState.READY, "large": ExportState.FAILED}


async def test_neither_delete_nor_expiry_removes_it(
    server: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "SETTLE_SECONDS", -1.0)
    system = server.system
    job = await stored_job(system, 10)
    place = tmp_path / "results" / "a"
    export_id = await asked(system, job, to=f"file://{place}/")
    await done(system, export_id)
    shown = (await server.get(f"/v1/exports/{export_id}")).json
    [part] = shown["parts"]
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    assert part["to"] == f"file://{place}/part-0001-{export_id}.zip"
    assert (await server.request("DELETE", f"/v1/exports/{export_id}")).status == 204
    role = Retention(system.records, system.tasks, system.queue, system.coordinator, system.blobs, system.clock)
    while await role.run_once() != Removed():
        pass
    assert (await server.get(f"/v1/exports/{export_id}")).status == 404
    assert [info async for info in system.blobs.listing("exports")] == []
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before


async def test_a_stop_between_two_files_resumes(system: System, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt stops after one file; no file that is there is written again."""
    job = await stored_job(system, TASKS)
    export_id = await asked(system, job, to=place, **PARTS)
    written: list[str] = []
    write = StoredPrefix.write_stream
    roles: list[Exporter] = []

    async def stopping(self: StoredPrefix, name: str, pieces: Any, size: int) -> None:
        await write(self, name, pieces, size)
        written.append(name)
        roles[-1].stopping = True

    monkeypatch.setattr(StoredPrefix, "write_stream", stopping)
    while (await found(system, export_id)).state is not ExportState.READY:
        roles.append(exporter(system, f"exporter {len(roles)}"))
        await roles[-1].tick()
    export = await found(system, export_id)
    assert len(written) == len(set(written)) == len(export.parts) > 2
    assert len(roles) >= len(written)
    prefix = await asyncio.to_thread(open_prefix, place)
    lines = await asyncio.to_thread(lambda: lines_of(prefix, as_manifest(prefix)))
    assert [line["index"] for line in lines] == list(range(TASKS))


async def test_a_deleted_job_gets_no_manifest(system: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await stored_job(system, TASKS)
    place = tmp_path / "results" / "a"
    export_id = await asked(system, job, to=f"file://{place}/", **PARTS)
    write = StoredPrefix.write_stream

    async def deleting(self: StoredPrefix, name: str, pieces: Any, size: int) -> None:
        await write(self, name, pieces, size)
        await Exports(system).delete(ACME, export_id)

    monkeypatch.setattr(StoredPrefix, "write_stream", deleting)
    await exporter(system).tick()
    assert len(list(place.iterdir())) == 2
    assert not (place / "_manifest.json").exists()


async def test_on_a_loop(server: Api, tmp_path: Path) -> None:
    job: Job = await stored_job(server.system, 20)

    async with AsyncClient(server.url, server.key) as client, working(server.system):
        found_job = await client.job(job.job_id)
        with pytest.raises(DestinationRefused, match="CONVEYOR_EXPORT_BUCKETS"):
            await found_job.export_to("s3://elsewhere/a/", by_server=True)
        written = await found_job.export_to(f"file://{tmp_path}/results/loop", by_server=True, format="csv")
    [url] = written.urls
    assert Path(url.removeprefix("file://")).read_text().startswith("index,")


def test_the_command(tmp_path: Path) -> None:
    place = f"s3://{sources.BUCKET}/{tmp_path.name}/"
    server = {**CREDENTIALS, "AWS_ENDPOINT_URL_S3": aws(), "CONVEYOR_EXPORT_BUCKETS": f"local={place}"}
    with cli_serving(tmp_path, **server) as up, demo_site() as site:
        # The command has no credentials.
        cli = Cli(up.place, {**{name: value for name, value in up.settings.items() if name not in server}})
        cli.write("pages.txt", *(f"{site}/quick/{number}" for number in range(30)))
        job = cli("submit", "pages.txt").stdout.strip()
        assert cli("watch", job).returncode == 0
        written = cli.json("export", job, "--to", f"{place}command", "--by-server", "--format", "csv")
        [url] = written["files"]
        assert url == f"{place}command/part-0001-{written['export']}.csv"
        refused = cli("export", job, "--to", "s3://elsewhere/a/", "--by-server")
        assert (refused.returncode, "CONVEYOR_EXPORT_BUCKETS" in refused.stderr) == (1, True)
        without = cli("export", job, "-o", "x.zip", "--by-server")
        assert (without.returncode, "--by-server needs --to" in without.stderr) == (2, True)
