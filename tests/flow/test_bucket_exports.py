"""Exports into a bucket of the caller's own: S3, Google Cloud Storage (the emulator's S3 answers its requests too), and
a directory."""

import asyncio
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conveyor import AsyncClient, Client
from conveyor.client.bucket_exports import BEGIN, END
from conveyor.client.export_files import CopyProgress
from conveyor.client.object_stores import StoredPrefix, open_prefix
from conveyor.errors import BadInput, DestinationUnavailable
from tests.flow.test_cli import Cli, serving
from tests.flow.test_sdk import blocking
from tests.servers import sources
from tests.servers.aws import CREDENTIALS, aws
from tests.support.api import Api
from tests.support.demo_site import demo_site
from tests.support.export_jobs import stored_job
from tests.support.working import working

TASKS = 700
# The smallest that there is: the job takes several.
PARTS: Any = {"format": "jsonl", "compression": "none", "part_bytes": 64 * 1024}

pytestmark = pytest.mark.server


class Broken(Exception):
    """The caller dies."""


@pytest.fixture(autouse=True)
def own_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As a user has them."""
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL_S3": aws()}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", sources.google_account(tmp_path))
    sources.put("exists", b"")


@pytest.fixture(params=["s3", "gs", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/results/"
    return f"{request.param}://{sources.BUCKET}/{tmp_path.name}/date=2026-01-01/"


def lines_of(prefix: StoredPrefix, manifest: Any) -> list[Any]:
    data = [prefix.read(part["name"]) for part in manifest["parts"]]
    return [json.loads(line) for one in data for line in (one or b"").splitlines()]


async def used(server: Api, use: Callable[[Client], Any]) -> Any:
    async with working(server.system):
        return await blocking(server, use)


async def test_parts_then_the_manifest(server: Api, place: str) -> None:
    job = await stored_job(server.system, TASKS)
    seen: list[int] = []

    def use(client: Client) -> None:
        progress = CopyProgress(None, lambda size, total: seen.append(size))
        done = client.job(job.job_id).export_to(place, progress=progress, **PARTS)
        prefix = open_prefix(place)
        manifest = json.loads(prefix.read(END) or b"")
        assert len(done.urls) > 2
        assert done.urls == [place + part["name"] for part in manifest["parts"]]
        assert [line["index"] for line in lines_of(prefix, manifest)] == list(range(TASKS))
        assert seen[-1] == sum(part["size"] for part in manifest["parts"])
        with pytest.raises(BadInput, match="complete export already"):
            client.job(job.job_id).export_to(place)
        prefix.write("mine.txt", b"kept")
        again = client.job(job.job_id).export_to(place, overwrite=True, format="csv")
        names = {url.removeprefix(place) for url in again.urls}
        assert set(prefix.names(100)) == {*names, BEGIN, END, "mine.txt"}
        with pytest.raises(BadInput, match=r"not empty \(it has mine.txt\)"):
            client.job(job.job_id).export_to(place)

    await used(server, use)


async def test_the_same_call_continues(server: Api, place: str) -> None:
    job = await stored_job(server.system, TASKS)
    other = await stored_job(server.system, 10)

    def use(client: Client) -> None:
        def die(size: int, total: int | None) -> None:
            if size > 80 * 1024:
                raise Broken

        handle = client.job(job.job_id)
        with pytest.raises(Broken):
            handle.export_to(place, progress=CopyProgress(None, die), **PARTS)
        prefix = open_prefix(place)
        [first] = [name for name in prefix.names(100) if name.startswith("part-")]
        with pytest.raises(BadInput, match=f"files of job {job.job_id}"):
            client.job(other.job_id).export_to(place)
        rest: list[int] = []
        done = handle.export_to(place, progress=CopyProgress(None, lambda size, total: rest.append(size)), **PARTS)
        assert done.urls[0] == place + first
        assert rest[0] > 64 * 1024 - 4096, "the first part was copied again"
        manifest = json.loads(prefix.read(END) or b"")
        assert [line["index"] for line in lines_of(prefix, manifest)] == list(range(TASKS))
        assert len(list(handle.exports())) == 1

    await used(server, use)


async def test_nothing_is_made_where_nothing_can_be_written(
    server: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await stored_job(server.system, 10)
    (tmp_path / "file").write_text("in the way")

    def use(client: Client) -> None:
        handle = client.job(job.job_id)
        with pytest.raises(DestinationUnavailable, match="bucket s3://no-such-bucket does not exist"):
            handle.export_to("s3://no-such-bucket/a/")
        with pytest.raises(DestinationUnavailable, match=f"Cannot open file://{tmp_path}/file/a/"):
            handle.export_to(f"file://{tmp_path}/file/a/")
        with pytest.raises(DestinationUnavailable, match="Cannot list gs://no-such-bucket/a/"):
            handle.export_to("gs://no-such-bucket/a/")
        for wrong in ("ftp://a/b/", "s3://", "s3:///b/", "s3://a/../b/", "s3://a//b/", "s3://a/b?c", "file://host/b/"):
            with pytest.raises(BadInput, match="Invalid destination"):
                handle.export_to(wrong)
        with pytest.raises(BadInput, match="name of a file"):
            handle.export_to("s3://bucket/results.parquet")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        with pytest.raises(DestinationUnavailable, match="credentials"):
            handle.export_to(f"s3://{sources.BUCKET}/a/")
        assert list(handle.exports()) == []

    await used(server, use)


async def test_on_a_loop(server: Api) -> None:
    job = await stored_job(server.system, 20)
    async with AsyncClient(server.url, server.key) as client, working(server.system):
        found = await client.job(job.job_id)
        done = await found.export_to(f"s3://{sources.BUCKET}/loop/", idempotency_key="once")
    [url] = done.urls
    assert url.endswith(".jsonl.gz")
    data = await asyncio.to_thread(open_prefix(f"s3://{sources.BUCKET}/loop/").read, url.rpartition("/")[2])
    assert len(gzip.decompress(data or b"").splitlines()) == 20


def test_the_command(tmp_path: Path) -> None:
    with serving(tmp_path) as up, demo_site() as site:
        cli = Cli(up.place, {**up.settings, **CREDENTIALS, "AWS_ENDPOINT_URL_S3": aws()})
        cli.write("pages.txt", *(f"{site}/quick/{number}" for number in range(30)))
        job = cli("submit", "pages.txt").stdout.strip()
        assert cli("watch", job).returncode == 0
        to = f"s3://{sources.BUCKET}/{tmp_path.name}/command"
        done = cli.json("export", job, "--to", to, "--format", "parquet")
        [url] = done["files"]
        assert url.startswith(f"{to}/part-0001-{done['export']}.parquet")
        refused = cli("export", job, "--to", to)
        assert refused.returncode == 2
        assert "complete export already" in refused.stderr
        both = cli("export", job, "--to", to, "-o", "x.zip")
        assert (both.returncode, "either -o FILE or --to URL" in both.stderr) == (2, True)
