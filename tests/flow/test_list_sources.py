"""Lists that the server reads where they are: a tenant's bucket, or a URL. It reads one version, or fails."""

import asyncio
import gzip
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import botocore.session
import msgspec
import pytest

from conveyor import faults
from conveyor.accept.spec import JobSpec, decode_spec
from conveyor.accept.submit import Submit
from conveyor.egress.target_guard import TargetRefused
from conveyor.embedded import Embedded
from conveyor.engines import s3_source_buckets
from conveyor.engines.s3_source_buckets import S3SourceBuckets
from conveyor.errors import InvalidField, InvalidSetting, SourceRefused
from conveyor.ingest.ingester import Ingester
from conveyor.lists import url_lists
from conveyor.model import Job, RemoteSource, TenantId
from conveyor.recover.retention import SETTLE_SECONDS, Retention
from conveyor.settings import Settings
from conveyor.states import RunState
from conveyor.system import System, open_system
from tests.servers.aws import REGION, aws
from tests.servers.rclone import BUCKET as RCLONE_BUCKET
from tests.servers.rclone import rclone
from tests.support.clocks import JumpingClock
from tests.support.list_site import DATE, OLD, ListSite

ACME, BETA = TenantId("acme"), TenantId("beta")
LINES = 3000
DATA = b"".join(b'{"n": %d}\n' % number for number in range(LINES))
OTHER = DATA.replace(b'"n"', b'"m"')

pytestmark = pytest.mark.server


class Place:
    """A bucket on one of the servers."""

    def __init__(self, endpoint: str, bucket: str) -> None:
        self.endpoint = endpoint
        self.bucket = bucket
        self.client: Any = botocore.session.get_session().create_client("s3", region_name=REGION, endpoint_url=endpoint)

    def put(self, key: str, data: bytes) -> str:
        self.client.put_object(Bucket=self.bucket, Key=key, Body=data)
        return f"s3://{self.bucket}/{key}"

    def listed(self, tenant: str = ACME, prefix: str = "") -> str:
        return f"{tenant}=s3://{self.bucket}/{prefix}?region={REGION}&endpoint={self.endpoint}"


@pytest.fixture
def ministack(tmp_path: Path) -> Place:
    made = Place(aws(), f"sources-{sha256(str(tmp_path).encode()).hexdigest()[:16]}")
    made.client.create_bucket(Bucket=made.bucket, CreateBucketConfiguration={"LocationConstraint": REGION})
    return made


@pytest.fixture(params=["ministack", "rclone"])
def place(request: pytest.FixtureRequest) -> Place:
    if request.param == "rclone":
        return Place(rclone(), RCLONE_BUCKET)
    made: Place = request.getfixturevalue("ministack")
    return made


@pytest.fixture
async def site() -> AsyncIterator[ListSite]:
    async with ListSite(DATA) as made:
        yield made


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a short list takes several requests."""
    monkeypatch.setattr(s3_source_buckets, "_BLOCK", 10_000)
    monkeypatch.setattr(url_lists, "_BLOCK", 10_000)


@asynccontextmanager
async def opened(data: Path, **settings: Any) -> AsyncIterator[System]:
    given = {"ingest_range_bytes": 8_000, "allow_private_targets": True, "ingesters": 1, **settings}
    async with open_system(Settings.load({}, data=data / "data", **given), JumpingClock()) as system:
        yield system


@asynccontextmanager
async def ingesting(system: System) -> AsyncIterator[Ingester]:
    (made,) = Embedded(system).ingesters()
    assert isinstance(made, Ingester)
    try:
        yield made
    finally:
        await made.close()


async def submit(system: System, url: str, tenant: TenantId = ACME, **source: Any) -> Job:
    spec = {"kind": "python", "handler": "any", "source": {"url": url, **source}}
    accepted = await Submit(system).submit(tenant, decode_spec(msgspec.json.encode(spec)))
    assert accepted.status == 202
    return await job_of(system, accepted.subject, tenant)


async def job_of(system: System, job_id: Any, tenant: TenantId = ACME) -> Job:
    job = await system.records.jobs.job(tenant, job_id)
    assert job is not None
    return job


async def finish(system: System, ingester: Ingester, job: Job) -> Job:
    """Let the ingest do all that it can, however often it has to be started."""
    for _ in range(200):
        if (job := await job_of(system, job.job_id, job.tenant)).run.state is not RunState.INGESTING:
            return job
        if await ingester.tick():
            # A retry waits for its backoff, and a message for its lease.
            await asyncio.sleep(0)
            advance(system, 5.0)
    raise AssertionError("the ingest does not end")


def advance(system: System, seconds: float) -> None:
    assert isinstance(system.clock, JumpingClock)
    system.clock.advance(seconds)


class Crash(BaseException):
    """The process dies."""


@contextmanager
def dying_at(point: str) -> Iterator[None]:
    def die(passed: str) -> None:
        if passed == point:
            raise Crash

    faults.arm(die)
    try:
        with pytest.raises(Crash):
            yield
    finally:
        faults.arm(None)


async def inputs(system: System, job: Job) -> list[bytes]:
    assert job.run.state is RunState.RUNNING, job.reason
    tasks = await system.tasks.at(job.key, list(range(job.run.total)))
    return [bytes(task.input) for task in tasks]


def expected(data: bytes = DATA) -> list[Any]:
    return [msgspec.json.decode(line) for line in data.splitlines()]


async def check_tasks(system: System, job: Job, data: bytes = DATA) -> None:
    assert [msgspec.json.decode(each) for each in await inputs(system, job)] == expected(data)


class TestBuckets:
    async def test_a_list_is_read_in_its_bucket(self, place: Place, tmp_path: Path) -> None:
        url = place.put("lists/today.jsonl", DATA)
        async with opened(tmp_path, source_buckets=place.listed()) as system, ingesting(system) as ingester:
            job = await finish(system, ingester, await submit(system, url))
            await check_tasks(system, job)
            ranges = await system.records.ingests.ranges(job.run.run_id)
            assert len(ranges) > 3
            # Nothing was copied.
            assert [info async for info in system.blobs.listing("lists")] == []

    async def test_a_compressed_list_and_a_key_of_any_characters(self, place: Place, tmp_path: Path) -> None:
        url = place.put("ünï/a b+c%20d#e?f=g.gz", gzip.compress(DATA))
        async with opened(tmp_path, source_buckets=place.listed()) as system, ingesting(system) as ingester:
            await check_tasks(system, await finish(system, ingester, await submit(system, url)))

    async def test_a_list_that_is_replaced_fails(self, place: Place, tmp_path: Path) -> None:
        url = place.put("replaced.jsonl", DATA)
        async with opened(tmp_path, source_buckets=place.listed()) as system, ingesting(system) as ingester:
            job = await submit(system, url)
            for _ in range(3):
                await ingester.tick()
            place.put("replaced.jsonl", OTHER)
            job = await finish(system, ingester, job)
            assert (job.state, job.run.reason_code) == (RunState.FAILED, "list_changed")
            written = await system.tasks.at(job.key, list(range(LINES)))
            assert {msgspec.json.decode(bytes(task.input)).popitem()[0] for task in written} == {"n"}

    async def test_a_version_is_read_whatever_replaces_it(self, ministack: Place, tmp_path: Path) -> None:
        ministack.client.put_bucket_versioning(Bucket=ministack.bucket, VersioningConfiguration={"Status": "Enabled"})
        url = ministack.put("versions.jsonl", DATA)
        old = ministack.client.head_object(Bucket=ministack.bucket, Key="versions.jsonl")["VersionId"]
        async with opened(tmp_path, source_buckets=ministack.listed()) as system, ingesting(system) as ingester:
            job = await submit(system, url)
            await ingester.tick()
            ministack.put("versions.jsonl", OTHER)
            await check_tasks(system, await finish(system, ingester, job))
            await check_tasks(system, await finish(system, ingester, await submit(system, url)), OTHER)
            await check_tasks(system, await finish(system, ingester, await submit(system, url, version_id=old)))

    async def test_the_named_version_or_none(self, place: Place, tmp_path: Path) -> None:
        url = place.put("named.jsonl", DATA)
        etag = place.client.head_object(Bucket=place.bucket, Key="named.jsonl")["ETag"]
        digest = sha256(DATA).hexdigest()
        async with opened(tmp_path, source_buckets=place.listed()) as system, ingesting(system) as ingester:
            for named in ({"etag": etag}, {"etag": etag.strip('"')}, {"sha256": digest.upper()}):
                await check_tasks(system, await finish(system, ingester, await submit(system, url, **named)))
            for named in ({"etag": '"0"'}, {"sha256": "0" * 64}):
                job = await finish(system, ingester, await submit(system, url, **named))
                assert (job.state, job.run.reason_code) == (RunState.FAILED, "list_changed")

    async def test_a_missing_list_fails_at_once(self, place: Place, tmp_path: Path) -> None:
        url = f"s3://{place.bucket}/nowhere.jsonl"
        async with opened(tmp_path, source_buckets=place.listed()) as system, ingesting(system) as ingester:
            job = await submit(system, url)
            await ingester.tick()
            job = await job_of(system, job.job_id)
            assert (job.state, job.run.reason_code) == (RunState.FAILED, "list_missing")
            # It can be resumed once it is there.
            assert job.source is not None
            assert job.source.remote == RemoteSource(url)

    async def test_a_list_that_is_too_large(self, ministack: Place, tmp_path: Path) -> None:
        url = ministack.put("large.jsonl", DATA)
        given = {"source_buckets": ministack.listed(), "max_list_bytes": len(DATA) - 1}
        async with opened(tmp_path, **given) as system, ingesting(system) as ingester:
            job = await finish(system, ingester, await submit(system, url))
            assert (job.state, job.run.reason_code) == (RunState.FAILED, "list_unreadable")

    async def test_an_empty_list(self, ministack: Place, tmp_path: Path) -> None:
        url = ministack.put("empty.jsonl", b"")
        async with opened(tmp_path, source_buckets=ministack.listed()) as system, ingesting(system) as ingester:
            job = await finish(system, ingester, await submit(system, url))
            assert (job.state, job.run.reason_code) == (RunState.FAILED, "no_tasks")

    async def test_another_ingester_resumes_where_one_died(self, place: Place, tmp_path: Path) -> None:
        url = place.put("resumed.jsonl", DATA)
        async with opened(tmp_path, source_buckets=place.listed()) as system:
            job = await submit(system, url)
            async with ingesting(system) as ingester:
                for _ in range(3):
                    await ingester.tick()
            async with ingesting(system) as other:
                await check_tasks(system, await finish(system, other, job))

    async def test_a_list_of_several_blocks(
        self, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(s3_source_buckets, "_BLOCK", 8 * 1024 * 1024)
        data = b'"%s"\n' % (b"x" * 997) * 20_000
        url = place.put("blocks.jsonl", data)
        async with opened(tmp_path, source_buckets=place.listed()) as system:
            pinned = await system.source_buckets.pin(ACME, RemoteSource(url))
            remote = RemoteSource(url, etag=pinned.etag)
            pieces = [piece async for piece in system.source_buckets.stream(ACME, remote, 5, len(data))]
            assert b"".join(pieces) == data[5:]


class TestPermission:
    async def test_no_bucket_is_read_by_default(self, ministack: Place, tmp_path: Path) -> None:
        async with opened(tmp_path) as system:
            with pytest.raises(SourceRefused) as refused:
                await submit(system, ministack.put("list.jsonl", DATA))
            assert (refused.value.code, refused.value.status) == ("source_refused", 403)

    @pytest.mark.parametrize(
        ("tenant", "key"),
        [
            (BETA, "mine/list.jsonl"),
            (ACME, "list.jsonl"),
            (ACME, "mine-too/list.jsonl"),
            (ACME, "mine/../list.jsonl"),
            (ACME, "mine/./list.jsonl"),
            (ACME, "mine"),
            (ACME, ""),
        ],
    )
    async def test_only_what_is_listed_for_the_tenant(
        self, ministack: Place, tmp_path: Path, tenant: TenantId, key: str
    ) -> None:
        async with opened(tmp_path, source_buckets=ministack.listed(ACME, "mine/")) as system:
            with pytest.raises(SourceRefused):
                await submit(system, f"s3://{ministack.bucket}/{key}", tenant)
            assert (await system.records.jobs.jobs(tenant, None, 10)).items == []
            await submit(system, f"s3://{ministack.bucket}/mine/list.jsonl")

    async def test_a_bucket_for_every_tenant(self, ministack: Place, tmp_path: Path) -> None:
        url = ministack.put("shared.jsonl", DATA)
        async with opened(tmp_path, source_buckets=ministack.listed("*")) as system, ingesting(system) as ingester:
            for tenant in (ACME, BETA):
                await check_tasks(system, await finish(system, ingester, await submit(system, url, tenant)))

    async def test_a_bucket_that_is_no_longer_listed(self, ministack: Place, tmp_path: Path) -> None:
        url = ministack.put("list.jsonl", DATA)
        async with opened(tmp_path, source_buckets=ministack.listed()) as system:
            job = await submit(system, url)
        async with opened(tmp_path) as system, ingesting(system) as ingester:
            job = await finish(system, ingester, job)
            assert (job.state, job.run.reason_code) == (RunState.FAILED, "list_unreadable")

    @pytest.mark.parametrize(
        "setting",
        ["acme", "s3://bucket", "acme=gs://bucket", "acme=s3://B", "acme=s3://bucket?role=x", "acme=s3://"],
    )
    async def test_an_invalid_setting(self, setting: str) -> None:
        with pytest.raises(InvalidSetting, match="CONVEYOR_SOURCE_BUCKETS"):
            async with S3SourceBuckets.open(setting):
                pass


class TestUrls:
    async def test_a_list_is_read_by_ranges(self, site: ListSite, tmp_path: Path) -> None:
        async with opened(tmp_path) as system, ingesting(system) as ingester:
            job = await finish(system, ingester, await submit(system, site.url, headers={"X-Key": "secret"}))
            await check_tasks(system, job)
            assert [info async for info in system.blobs.listing("lists")] == []
        assert all("range" in seen.headers and seen.headers["x-key"] == "secret" for seen in site.seen)
        assert {seen.headers.get("if-match") for seen in site.seen[1:]} == {site.tag}

    async def test_an_old_modification_time_identifies_it(self, site: ListSite, tmp_path: Path) -> None:
        site.etag, site.modified = False, OLD
        async with opened(tmp_path) as system, ingesting(system) as ingester:
            await check_tasks(system, await finish(system, ingester, await submit(system, site.url)))
        assert {seen.headers.get("if-unmodified-since") for seen in site.seen[1:]} == {OLD}

    @pytest.mark.parametrize("lacking", ["ranges", "validator", "strong validator"])
    async def test_a_list_that_cannot_be_pinned_is_copied(self, site: ListSite, tmp_path: Path, lacking: str) -> None:
        site.ranges = lacking != "ranges"
        site.etag = lacking == "ranges"
        site.modified = DATE if lacking == "strong validator" else None
        async with opened(tmp_path) as system, ingesting(system) as ingester:
            job = await submit(system, site.url)
            await ingester.tick()
            site.data = OTHER
            await check_tasks(system, await finish(system, ingester, job))
            (copy,) = [info async for info in system.blobs.listing(f"lists/{ACME}/{job.job_id}")]
            assert copy.size == len(DATA)
            await system.records.jobs.mark_deleted(ACME, job.job_id)
            advance(system, SETTLE_SECONDS + 1)
            retention = Retention(
                system.records, system.tasks, system.queue, system.coordinator, system.blobs, system.clock
            )
            await retention.tick()
            assert [info async for info in system.blobs.listing("lists")] == []

    @pytest.mark.parametrize("conditions", [True, False])
    async def test_a_list_that_changes_fails(self, site: ListSite, tmp_path: Path, conditions: bool) -> None:
        site.conditions = conditions
        async with opened(tmp_path) as system, ingesting(system) as ingester:
            job = await submit(system, site.url)
            for _ in range(3):
                await ingester.tick()
            site.data = OTHER
            job = await finish(system, ingester, job)
            assert (job.state, job.run.reason_code) == (RunState.FAILED, "list_changed")
            written = await system.tasks.at(job.key, list(range(LINES)))
            assert written
            assert {msgspec.json.decode(bytes(task.input)).popitem()[0] for task in written} == {"n"}

    @pytest.mark.parametrize(
        ("ranges", "weak"), [(True, False), (False, False), (True, True)], ids=["ranges", "whole", "weak"]
    )
    async def test_the_named_version_or_none(self, site: ListSite, tmp_path: Path, ranges: bool, weak: bool) -> None:
        """With a weak ETag, ranges are pinned by the time of the last change."""
        site.ranges, site.weak, site.modified = ranges, weak, OLD
        async with opened(tmp_path) as system, ingesting(system) as ingester:
            for named in ({"etag": site.tag}, {"etag": site.tag.strip('"')}, {"sha256": sha256(DATA).hexdigest()}):
                await check_tasks(system, await finish(system, ingester, await submit(system, site.url, **named)))
            for named in ({"etag": '"0"'}, {"sha256": "0" * 64}):
                job = await finish(system, ingester, await submit(system, site.url, **named))
                assert (job.state, job.run.reason_code) == (RunState.FAILED, "list_changed")

    async def test_failures_that_pass_are_retried(self, site: ListSite, tmp_path: Path) -> None:
        site.refusals = [503, 429]
        async with opened(tmp_path) as system, ingesting(system) as ingester:
            await check_tasks(system, await finish(system, ingester, await submit(system, site.url)))

    @pytest.mark.parametrize(("status", "code"), [(404, "list_missing"), (403, "list_unreadable")])
    async def test_a_refusal_fails_at_once(self, site: ListSite, tmp_path: Path, status: int, code: str) -> None:
        site.refusals = [status] * 5
        async with opened(tmp_path) as system, ingesting(system) as ingester:
            job = await submit(system, site.url)
            await ingester.tick()
            job = await job_of(system, job.job_id)
            assert (job.state, job.run.reason_code) == (RunState.FAILED, code)
            assert "signature" not in (job.reason or "")

    async def test_headers_stay_with_the_origin(self, site: ListSite, tmp_path: Path) -> None:
        url = f"http://127.0.0.1:{site.port}/redirect"
        async with opened(tmp_path) as system, ingesting(system) as ingester:
            job = await finish(system, ingester, await submit(system, url, headers={"X-Key": "secret"}))
            await check_tasks(system, job)
        there = [seen for seen in site.seen if seen.path == "/list.jsonl"]
        assert all("x-key" not in seen.headers and "range" in seen.headers for seen in there)

    async def test_the_guard_refuses_private_targets(self, site: ListSite, tmp_path: Path) -> None:
        async with opened(tmp_path) as system:
            job = await submit(system, site.url)
        async with opened(tmp_path, allow_private_targets=False) as system, ingesting(system) as ingester:
            with pytest.raises(TargetRefused):
                await submit(system, site.url)
            # The ingest checks the addresses again, as they are then.
            await ingester.tick()
            job = await job_of(system, job.job_id)
            assert (job.state, job.run.reason_code) == (RunState.FAILED, "list_unreadable")
        assert not site.seen

    @pytest.mark.parametrize("point", ["ingest.copy.before", "ingest.copy.after", "ingest.split.before"])
    async def test_a_crash_around_the_copy(self, site: ListSite, tmp_path: Path, point: str) -> None:
        site.ranges = False
        async with opened(tmp_path) as system, ingesting(system) as ingester:
            job = await submit(system, site.url)
            with dying_at(point):
                await ingester.tick()
            await check_tasks(system, await finish(system, ingester, job))


class TestRequests:
    @pytest.mark.parametrize(
        ("source", "field"),
        [
            ({}, "source"),
            ({"upload_id": "upload_x", "url": "https://example.com/"}, "source"),
            ({"upload_id": "upload_x", "etag": "x"}, "source.etag"),
            ({"url": "https://example.com/", "version_id": "x"}, "source.version_id"),
            ({"url": "https://example.com/", "etag": "a b"}, "source.etag"),
            ({"url": "https://example.com/", "sha256": "x"}, "source.sha256"),
            ({"url": "https://example.com/", "headers": {"a b": "x"}}, "source.headers"),
            ({"url": "s3://bucket/key", "headers": {"a": "x"}}, "source.headers"),
            ({"url": "ftp://example.com/"}, "source.url"),
        ],
    )
    async def test_an_invalid_source(self, tmp_path: Path, source: dict[str, Any], field: str) -> None:
        async with opened(tmp_path) as system:
            with pytest.raises(InvalidField) as refused:
                await Submit(system).submit(ACME, msgspec.convert({"source": source}, JobSpec))
            assert refused.value.details["field"] == field
