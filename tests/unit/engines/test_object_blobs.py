"""Blobs on an object store: what the suite of the seam does not say. URLs, parts that are left, rules, failures."""

import asyncio
import os
import socket
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from conveyor.clock import SystemClock
from conveyor.engines.object_blobs import ObjectEngine
from conveyor.errors import EngineFailed, InvalidSetting
from tests.servers import rclone, s3
from tests.servers.aws import REGION, aws

MIB = 1024 * 1024

pytestmark = pytest.mark.server


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[ObjectEngine]:
    async with s3.open_engine(tmp_path, SystemClock()) as opened:
        yield opened


async def unfinished(engine: ObjectEngine) -> list[Any]:
    """Multipart uploads of which parts are stored."""
    assert engine._bucket is not None
    async with engine._bucket.client() as client:
        found = (await client.list_multipart_uploads(Bucket=s3.BUCKET)).get("Uploads", [])
    return [one for one in found if one["Key"].startswith(f"{engine._bucket.prefix}/")]


@pytest.mark.parametrize(
    "url",
    [
        "",
        "s3://",
        "s3:///prefix",
        "s3://Upper/prefix",
        "s3://user:secret@bucket/prefix",
        "s3://bucket/../other?region=x",
        "s3://bucket/a//b?region=x",
        "s3://bucket/prefix?region=x&acl=public",
        "s3://bucket/prefix?region=x&endpoint=file:///etc",
        "s3://bucket/prefix?region=x&endpoint=http://user:secret@host",
        "gs://bucket/prefix?region=x",
        "https://bucket/prefix",
        "file:///tmp/blobs",
    ],
)
async def test_a_bad_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidSetting, match="CONVEYOR_BLOBS") as caught:
        async with ObjectEngine.open(url, SystemClock()):
            pass
    assert "secret" not in str(caught.value)


async def test_a_region_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(InvalidSetting, match="region"):
        async with ObjectEngine.open("s3://bucket/prefix", SystemClock()):
            pass
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    async with ObjectEngine.open("s3://bucket/prefix", SystemClock()) as engine:
        assert engine._bucket is not None
        assert engine._bucket.url_of("a/b#c") == "https://bucket.s3.eu-west-1.amazonaws.com/prefix/a/b%23c"


async def test_the_other_stores_sign_nothing() -> None:
    async with ObjectEngine.open("gs://bucket/prefix", SystemClock()) as engine:
        assert await engine.blobs.presigned_put("a/b", 1, "0" * 64, 60) is None
        assert await engine.blobs.presigned_get("a/b", 60, "text/plain", "x") is None
        await engine.migrate()


class TestStreams:
    async def test_a_stream_that_raises_leaves_no_parts(self, engine: ObjectEngine) -> None:
        async def broken() -> AsyncIterator[bytes]:
            for _ in range(5):
                yield b"x" * (6 * MIB)
            raise ConnectionResetError("cut")

        with pytest.raises(ConnectionResetError):
            await engine.blobs.put_stream("a/broken", broken())
        assert await unfinished(engine) == []

    async def test_a_cancelled_stream_leaves_no_parts(self, engine: ObjectEngine) -> None:
        waiting = asyncio.Event()

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(4):
                yield b"x" * (6 * MIB)
            waiting.set()
            await asyncio.Event().wait()

        put = asyncio.create_task(engine.blobs.put_stream("a/cancelled", endless()))
        await waiting.wait()
        put.cancel()
        with pytest.raises(asyncio.CancelledError):
            await put
        assert await unfinished(engine) == []
        assert await engine.blobs.size("a/cancelled") is None

    async def test_memory_is_flat(self, engine: ObjectEngine) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            for number in range(64):
                yield bytes([number]) * MIB

        tracemalloc.start()
        try:
            assert await engine.blobs.put_stream("a/large", pieces()) == 64 * MIB
            size = 0
            async for piece in engine.blobs.stream("a/large"):
                size += len(piece)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert size == 64 * MIB
        assert peak < 24 * MIB

    async def test_an_object_that_is_replaced_under_a_reader_is_an_error(self, engine: ObjectEngine) -> None:
        """Never the beginning of one and the end of the other."""
        await engine.blobs.put("a/b", b"x" * (20 * MIB))
        reader = engine.blobs.stream("a/b")
        assert (await anext(reader))[:1] == b"x"
        await engine.blobs.put("a/b", b"y" * (20 * MIB))
        with pytest.raises(EngineFailed):
            async for piece in reader:
                assert b"y" not in piece

    async def test_a_large_put_goes_in_parts(self, engine: ObjectEngine) -> None:
        data = os.urandom(MIB) * 65
        await engine.blobs.put("a/huge", data)
        assert await engine.blobs.get("a/huge") == data


class TestBucket:
    async def test_rules_of_others_stay(self, engine: ObjectEngine, tmp_path: Path) -> None:
        url = f"s3://conveyor-rules/one?region={REGION}&endpoint={aws()}"
        async with ObjectEngine.open(url, SystemClock()) as one:
            await one.migrate()
            assert one._bucket is not None
            theirs = {
                "ID": "theirs",
                "Status": "Enabled",
                "Filter": {"Prefix": "logs/"},
                "Expiration": {"Days": 3},
            }
            # A rule of earlier versions, which took the lists of jobs that are not finished.
            by_age = {**theirs, "ID": "conveyor-one-uploads", "Filter": {"Prefix": "one/uploads/"}}
            async with one._bucket.client() as client:
                await client.put_bucket_lifecycle_configuration(
                    Bucket="conveyor-rules", LifecycleConfiguration={"Rules": [theirs, by_age]}
                )
            assert any("conveyor migrate" in (wrong or "") for _, wrong in await one.checks())
            await one.migrate()
            await one.migrate()
            async with one._bucket.client() as client:
                found = await client.get_bucket_lifecycle_configuration(Bucket="conveyor-rules")
            rules = {rule["ID"]: rule for rule in found["Rules"]}
            assert set(rules) == {"theirs", "conveyor-one-abandoned"}
            async with one._bucket.client() as client:
                await client.put_bucket_lifecycle_configuration(
                    Bucket="conveyor-rules", LifecycleConfiguration={"Rules": [*rules.values(), by_age]}
                )
            assert any("conveyor-one-uploads" in (wrong or "") for _, wrong in await one.checks())

    async def test_a_store_without_lifecycle_rules_gets_its_bucket(self, capsys: pytest.CaptureFixture[str]) -> None:
        """rclone takes the rules for a call that creates the bucket. The checks say what else it lacks."""
        url = f"s3://without-rules/some?region={REGION}&endpoint={rclone.rclone()}"
        async with ObjectEngine.open(url, SystemClock()) as engine:
            for _ in range(2):
                await engine.migrate()
                assert "no lifecycle rules" in capsys.readouterr().out
            await engine.blobs.put("key", b"body")
            assert await engine.blobs.get("key") == b"body"
            wrong = {name: found for name, found in await engine.checks() if found}
        assert "unless the store has no such rules" in wrong["lifecycle of the bucket"]
        # It answers them with 200.
        assert "range" in wrong["read a part of it"]

    async def test_checks_find_nothing_wrong_and_leave_nothing(self, engine: ObjectEngine) -> None:
        await engine.migrate()
        assert {wrong for _, wrong in await engine.checks()} == {None}
        assert [info async for info in engine.blobs.listing("")] == []

    async def test_checks_say_what_failed(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as nobody:
            port = nobody.getsockname()[1]
        aws()
        url = f"s3://bucket/prefix?region={REGION}&endpoint=http://127.0.0.1:{port}"
        async with ObjectEngine.open(url, SystemClock()) as engine:
            found = await engine.checks()
        assert all(wrong for _, wrong in found)

    async def test_a_bucket_that_is_not_there_is_said(self) -> None:
        url = f"s3://no-such-bucket/prefix?region={REGION}&endpoint={aws()}"
        async with ObjectEngine.open(url, SystemClock()) as engine:
            with pytest.raises(EngineFailed, match="object store failed"):
                await engine.blobs.put("a/b", b"x")
