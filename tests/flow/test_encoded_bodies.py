"""The body that is stored is the decoded body: the one that `curl --compressed` writes, by fetches and downloads."""

import asyncio
import gzip
import resource
import shutil
from collections.abc import AsyncIterator, Callable
from hashlib import sha256
from typing import Any

import brotli
import msgspec
import pytest

from conveyor.clock import SystemClock
from conveyor.egress.decoding import PIECE, BodyDecoder
from conveyor.egress.failures import Failure
from conveyor.egress.target_guard import TargetGuard
from conveyor.model import InputJson, JobKind, Outcome, TaskRef
from conveyor.process.executors.download.download_executor import DownloadExecutor
from conveyor.process.executors.fetch.fetch_executor import FetchExecutor
from conveyor.read.results import stream_body
from conveyor.settings import Settings
from conveyor.states import TaskStatus
from conveyor.system import System
from tests.support.encoded_pages import ENCODED, LARGE, zstd
from tests.support.make_jobs import make_job
from tests.support.places import quick_place
from tests.support.target_site import MIB, Site

CURL = shutil.which("curl")


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with Site() as made:
        yield made


@pytest.fixture
async def fetching() -> AsyncIterator[FetchExecutor]:
    clock = SystemClock()
    made = FetchExecutor(Settings(), clock, TargetGuard(allow_private=True, clock=clock))
    yield made
    await made.close()


@pytest.fixture
def settings() -> Any:
    with quick_place() as place:
        yield Settings.load({}, data=place, allow_private_targets=True, fetchers=0)


@pytest.fixture
async def downloading(settings: Settings, system: System) -> AsyncIterator[DownloadExecutor]:
    guard = TargetGuard(allow_private=True, clock=system.clock)
    made = DownloadExecutor(settings, system.clock, guard, system.records, system.blobs)
    yield made
    await made.close()


async def attempt(executor: FetchExecutor | DownloadExecutor, url: str, **options: Any) -> Outcome:
    kind = JobKind.FETCH if isinstance(executor, FetchExecutor) else JobKind.DOWNLOAD
    job = make_job(SystemClock(), kind=kind, **options)
    (outcome,) = await executor.attempt(job, [TaskRef(0, InputJson(msgspec.json.encode(url).decode()))])
    return outcome


async def curl(url: str) -> tuple[int | None, bytes]:
    assert CURL is not None
    process = await asyncio.create_subprocess_exec(CURL, "-sS", "--compressed", url, stdout=-1, stderr=-1)
    body, _ = await process.communicate()
    return process.returncode, body


def check(outcome: Outcome, body: bytes | None, name: str) -> None:
    given = ENCODED[name]
    if given.body is None:
        assert outcome.error is not None
        assert (outcome.error.code, outcome.http_status) == (given.code, 200)
        assert outcome.final_url is not None
        assert body is None
        return
    assert outcome.error is None, outcome.error
    assert body == given.body
    names = {header for header, _ in outcome.headers or []}
    # They would be those of another body.
    assert given.codings in {(), ("identity",), ("",)} or not names & {"content-encoding", "content-length"}


class TestFetch:
    @pytest.mark.parametrize("name", ENCODED)
    async def test_the_body_is_that_of_curl(self, fetching: FetchExecutor, site: Site, name: str) -> None:
        url = site.url(f"/encoded/{name}")
        outcome = await attempt(fetching, url)
        check(outcome, outcome.body, name)
        if CURL is not None and ENCODED[name].as_curl:
            status, body = await curl(url)
            assert (status == 0) is (outcome.status is TaskStatus.SUCCEEDED)
            assert outcome.body in {None, body}

    @pytest.mark.parametrize("chunk", [1, 7, 65_536])
    @pytest.mark.parametrize("name", [name for name, page in ENCODED.items() if len(page.sent) < 100_000])
    async def test_pieces_may_end_anywhere(self, fetching: FetchExecutor, site: Site, name: str, chunk: int) -> None:
        outcome = await attempt(fetching, site.url(f"/encoded/{name}?chunk={chunk}"))
        check(outcome, outcome.body, name)

    async def test_a_request_accepts_what_can_be_decoded(self, fetching: FetchExecutor, site: Site) -> None:
        for headers, sent in [
            ({}, "gzip, deflate, br, zstd"),
            ({"Accept-Encoding": "br"}, "br"),
            ({"Range": "bytes=0-9"}, "identity"),
        ]:
            await attempt(fetching, site.url("/echo"), headers=headers)
            assert site.seen[-1].headers["accept-encoding"] == sent

    @pytest.mark.parametrize("name", ["two-members", "br-large", "zstd-large", "stacked-four", "raw-deflate-large"])
    async def test_the_cap_is_that_of_the_decoded_body(self, fetching: FetchExecutor, site: Site, name: str) -> None:
        body = ENCODED[name].body
        assert body is not None
        url = site.url(f"/encoded/{name}")
        assert (await attempt(fetching, url, max_body_bytes=len(body))).body == body
        outcome = await attempt(fetching, url, max_body_bytes=len(body) - 1)
        assert outcome.error is not None
        assert (outcome.error.code, outcome.http_status, outcome.body) == ("body_too_large", 200, None)


class TestDownload:
    @pytest.mark.parametrize("name", ENCODED)
    async def test_a_file_is_decoded(
        self, downloading: DownloadExecutor, system: System, site: Site, name: str
    ) -> None:
        outcome = await attempt(downloading, site.url(f"/encoded/{name}?chunk=5000"))
        body: bytes | None = None
        if outcome.kept is not None:
            body = b"".join([piece async for piece in stream_body(system.blobs, outcome.kept)])
        check(outcome, body, name)

    async def test_an_encoded_file_is_not_resumed(self, downloading: DownloadExecutor, site: Site) -> None:
        """Its ranges would be those of the encoded file: after a cut it starts over."""
        job = make_job(SystemClock(), kind=JobKind.DOWNLOAD)
        ref = TaskRef(0, InputJson(f'"{site.url("/encoded-cut")}"'))
        (first,) = await downloading.attempt(job, [ref])
        assert first.error is not None
        assert (first.error.code, first.http_status, first.spends_attempt) == ("read_failed", 200, True)
        (second,) = await downloading.attempt(job, [ref])
        assert second.kept is not None, second.error
        assert (second.kept.length, second.kept.sha256) == (len(LARGE), sha256(LARGE).hexdigest())
        assert [seen.headers.get("range") for seen in site.seen] == [None, None]

    async def test_a_bomb_ends_at_the_limit(self, downloading: DownloadExecutor, site: Site) -> None:
        job = make_job(SystemClock(), kind=JobKind.DOWNLOAD)
        limited = msgspec.structs.replace(job.options.download, max_bytes=4 * MIB)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        outcome = await attempt(downloading, site.url("/bomb"), download=limited)
        assert outcome.error is not None
        assert (outcome.error.code, outcome.http_status) == ("body_too_large", 200)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


class TestDecoder:
    @pytest.mark.parametrize(
        ("codings", "pack"),
        [
            (["gzip"], lambda: gzip.compress(bytes(64 * MIB))),
            (["gzip"], lambda: gzip.compress(bytes(MIB)) * 64),
            (["br"], lambda: brotli.compress(bytes(64 * MIB), quality=5)),
            (["gzip", "gzip"], lambda: gzip.compress(gzip.compress(bytes(64 * MIB)))),
        ],
        ids=["gzip", "members", "br", "stacked"],
    )
    def test_pieces_are_bounded(self, codings: list[str], pack: Callable[[], bytes]) -> None:
        decoder = BodyDecoder(codings, 64 * MIB)
        sizes = [len(piece) for piece in decoder.decode(pack())]
        decoder.finish()
        assert sum(sizes) == 64 * MIB
        assert max(sizes) <= 2 * PIECE

    @pytest.mark.parametrize(
        ("coding", "empty"), [("gzip", gzip.compress(b"")), ("zstd", zstd.compress(b""))], ids=["gzip", "zstd"]
    )
    def test_a_body_of_nothing_lets_others_run(self, coding: str, empty: bytes) -> None:
        """Each part takes time, and none has a byte for the reader to wait for."""
        assert len(list(BodyDecoder([coding], MIB).decode(empty * 1000))) >= 990

    def test_what_is_between_two_codings_is_bounded(self) -> None:
        """A small body that decodes to a huge one, which decodes to nothing."""
        nothing = gzip.compress(b"") * 300_000
        with pytest.raises(Failure) as failed:
            for _ in BodyDecoder(["gzip", "gzip"], MIB).decode(gzip.compress(nothing, 1)):
                pass
        assert failed.value.error.code == "body_too_large"

    def test_a_large_window_is_refused(self) -> None:
        """RFC 9659 allows 8 MiB; a larger one would take memory that no limit counts."""
        options = {zstd.CompressionParameter.window_log: 27}
        packer = zstd.ZstdCompressor(options=options)
        packed = packer.compress(LARGE) + packer.flush()
        with pytest.raises(Failure) as failed:
            list(BodyDecoder(["zstd"], MIB).decode(packed))
        assert failed.value.error.code == "decode_failed"
