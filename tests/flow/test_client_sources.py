"""Lists in buckets and behind URLs, from the client's side: the server reads them, or the client does and uploads."""

import asyncio
import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from conveyor import AsyncClient, Client, RemoteList
from conveyor.errors import BadInput, ListChanged, ListMissing, ListUnreadable
from conveyor.model import JobId
from conveyor.settings import Settings
from tests.flow.test_cli import Cli, manifest, serving
from tests.flow.test_sdk import blocking
from tests.servers import sources
from tests.servers.aws import CREDENTIALS, aws
from tests.support.api import Api
from tests.support.demo_site import demo_site
from tests.support.list_site import ListSite
from tests.support.make_jobs import ACME

LINES = 2000
DATA = b"".join(b'{"n": %d}\n' % number for number in range(LINES))
PYTHON: Any = {"handler": "any"}

pytestmark = pytest.mark.server


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    listed = sources.listed("acme", "listed")
    return Settings(data=tmp_path / "data", source_buckets=listed, allow_private_targets=True)


@pytest.fixture(autouse=True)
def own_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user has them."""
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL_S3": aws()}.items():
        monkeypatch.setenv(name, value)


async def source_of(server: Api, job_id: str) -> Any:
    job = await server.system.records.jobs.job(ACME, JobId(job_id))
    assert job is not None
    assert job.source is not None
    return job.source


async def test_the_server_reads_a_bucket_that_is_listed(server: Api) -> None:
    url = sources.put("listed/list.jsonl", DATA)
    job = await blocking(server, lambda client: client.submit(url, **PYTHON).id)
    source = await source_of(server, job)
    assert (source.key, source.remote.url, source.format) == ("", url, "jsonl")


async def test_the_client_reads_any_other_and_uploads_it(server: Api) -> None:
    url = sources.put("other/list.jsonl", DATA)

    def use(client: Client) -> list[str]:
        first = client.submit(url, idempotency_key="once", **PYTHON)
        again = client.submit(url, idempotency_key="once", **PYTHON)
        return [first.id, again.id]

    first, again = await blocking(server, use)
    assert first == again
    source = await source_of(server, first)
    assert source.key.startswith("uploads/acme/")
    assert (source.size, source.sha256, source.format) == (len(DATA), sha256(DATA).hexdigest(), "jsonl")
    assert await server.system.blobs.get(source.key) == DATA


async def test_the_same_on_a_loop(server: Api) -> None:
    url = sources.put("other/loop.jsonl", DATA)
    async with AsyncClient(server.url, server.key) as client:
        job = await client.submit(url, **PYTHON)
        assert (await source_of(server, job.id)).sha256 == sha256(DATA).hexdigest()
        upload = await client.upload(url)
        assert (await server.get(f"/v1/uploads/{upload.upload_id}")).json["stored"]
        assert upload.format == "jsonl"


async def test_a_version_that_the_caller_names(server: Api) -> None:
    url = sources.put("other/named.jsonl", DATA)

    def use(client: Client) -> None:
        client.submit(RemoteList(url, sha256=sha256(DATA).hexdigest()), **PYTHON)
        for wrong in (RemoteList(url, sha256="0" * 64), RemoteList(url, etag='"0"')):
            with pytest.raises(ListChanged):
                client.submit(wrong, **PYTHON)
        with pytest.raises(ListMissing):
            client.submit(f"s3://{sources.BUCKET}/other/nowhere.jsonl", **PYTHON)
        with pytest.raises(ListUnreadable, match="s3://BUCKET/KEY"):
            client.submit("s3://bucket", **PYTHON)
        with pytest.raises(BadInput, match="RemoteList"):
            client.submit("https://example.com/list.txt")

    await blocking(server, use)


async def test_a_url_that_the_server_reads(server: Api) -> None:
    async with ListSite(DATA) as site:
        remote = RemoteList(site.url, etag=site.tag, headers={"X-Key": "secret"}, format="jsonl")
        job = await blocking(server, lambda client: client.submit(remote, **PYTHON).id)
        found = (await source_of(server, job)).remote
        assert (found.url, found.etag, found.headers) == (site.url, site.tag, {"X-Key": "secret"})
        shown = await server.get(f"/v1/jobs/{job}")
        assert b"secret" not in shown.body
        assert b"signature" not in shown.body


@pytest.fixture
def google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = sources.google_account(tmp_path)
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", path)
    return path


async def test_an_object_of_google(server: Api, google: str) -> None:
    url = sources.put("other/google.jsonl", DATA * 40).replace("s3://", "gs://")

    def use(client: Client) -> str:
        with pytest.raises(ListMissing, match=r"nowhere\.jsonl not found"):
            client.submit(f"gs://{sources.BUCKET}/other/nowhere.jsonl", **PYTHON)
        for wrong, said in ((RemoteList(url, etag='"0"'), "cannot be named"), ("gs://bucket", "gs://BUCKET/KEY")):
            with pytest.raises(ListUnreadable, match=said):
                client.submit(wrong, **PYTHON)
        return client.submit(url, **PYTHON).id

    source = await source_of(server, await blocking(server, use))
    assert (source.sha256, source.format) == (sha256(DATA * 40).hexdigest(), "jsonl")


class TestCommands:
    @pytest.fixture
    def site(self) -> Iterator[str]:
        with demo_site() as url:
            yield url

    @pytest.fixture
    def up(self, tmp_path: Path) -> Iterator[Cli]:
        with serving(tmp_path) as cli:
            own = {**CREDENTIALS, "AWS_ENDPOINT_URL_S3": aws()}
            yield Cli(cli.place, {**cli.settings, **own})

    def test_submit_and_run(self, up: Cli, site: str) -> None:
        pages = "".join(f"{site}/quick/{number}\n" for number in range(20)).encode()
        url = sources.put("other/pages.txt", pages)
        done = up("submit", url, "--wait", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["run"]["counts"]["succeeded"] == 20
        up.write("more.txt", f"{site}/quick/21")
        both = up("submit", url, "more.txt", "--wait", "--json")
        assert both.returncode == 0, both.stderr
        assert json.loads(both.stdout)["run"]["counts"]["succeeded"] == 21
        missing = up("submit", f"s3://{sources.BUCKET}/nowhere.txt")
        assert missing.returncode != 0
        assert "list_missing" in missing.stderr
        ran = up("run", url, "-o", "out.zip", "--data", "run-data")
        assert ran.returncode == 0, ran.stderr
        assert len(manifest(up.place / "out.zip")) == 20

    def test_run_an_object_of_google(self, up: Cli, site: str, google: str) -> None:
        url = sources.put("other/google.csv", f"url,id\n{site}/quick/1,one\n".encode()).replace("s3://", "gs://")
        cli = Cli(up.place, {**up.settings, "GOOGLE_SERVICE_ACCOUNT": google})
        ran = cli("run", url, "-o", "google.zip", "--data", "google-data")
        assert ran.returncode == 0, ran.stderr
        assert [line["id"] for line in manifest(up.place / "google.zip")] == ["one"]
        done = cli("submit", url, "--wait", "--json")
        assert json.loads(done.stdout)["run"]["counts"]["succeeded"] == 1

    async def test_submit_a_list_behind_a_url(self, up: Cli, site: str) -> None:
        async with ListSite(f"{site}/quick/1\n{site}/quick/2\n".encode()) as lists:
            url = lists.url.replace("list.jsonl", "list.txt")
            done = await asyncio.to_thread(up, "submit", url, "--wait", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["run"]["counts"]["succeeded"] == 2
        assert "hidden" not in done.stdout + done.stderr
