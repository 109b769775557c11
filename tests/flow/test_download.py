"""Downloads from a site on loopback that cuts, stalls and lies: the file is whole and right, or it fails clearly."""

import asyncio
import zipfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conveyor.accept.spec import decode_spec
from conveyor.clock import SystemClock
from conveyor.egress.target_guard import TargetGuard
from conveyor.embedded import Embedded
from conveyor.engines.queue import Depth, run_queue
from conveyor.export.direct import export_to_file
from conveyor.model import PROGRESS, InputJson, Job, JobId, JobKind, Outcome, TaskProgress, TaskRef, progress_id
from conveyor.process.executors.download.download_executor import DownloadExecutor
from conveyor.process.executors.download.pieces import piece_size
from conveyor.process.task_progress import Superseded
from conveyor.read.results import stream_body
from conveyor.settings import Settings
from conveyor.states import RunState, TaskStatus
from conveyor.system import System, open_system
from tests.support.api import Api
from tests.support.clocks import EagerClock, JumpingClock
from tests.support.file_site import MIB, Behaviour, FileSite, digest
from tests.support.make_jobs import ACME, make_job
from tests.support.places import quick_place
from tests.support.target_site import Site
from tests.support.working import all_items, ended
from tests.support.working import until as seen

SIZE = 3 * MIB + 12_345


@pytest.fixture
def settings() -> Any:
    with quick_place() as place:
        yield Settings.load({}, data=place, allow_private_targets=True, fetchers=0)


@pytest.fixture
async def executor(settings: Settings, system: System) -> AsyncIterator[DownloadExecutor]:
    made = executor_on(settings, system)
    yield made
    await made.close()


def executor_on(settings: Settings, system: System, **changed: Any) -> DownloadExecutor:
    clock = system.clock
    guard = TargetGuard(allow_private=settings.allow_private_targets, clock=clock)
    settings = msgspec.structs.replace(settings, **changed)
    return DownloadExecutor(settings, clock, guard, system.records, system.blobs)


@pytest.fixture
async def site() -> AsyncIterator[FileSite]:
    async with FileSite(Behaviour(SIZE)) as made:
        yield made


def job_with(**options: Any) -> Job:
    return make_job(SystemClock(), kind=JobKind.DOWNLOAD, chunk_size=1, **options)


def ref_to(url: str, attempt: int = 1, **more: Any) -> TaskRef:
    return TaskRef(0, InputJson(msgspec.json.encode({"url": url, **more}).decode()), attempt)


async def attempt(
    executor: DownloadExecutor, url: str, job: Job | None = None, number: int = 1, **more: Any
) -> Outcome:
    (outcome,) = await executor.attempt(job or job_with(timeout=5.0), [ref_to(url, number, **more)])
    return outcome


def code(outcome: Outcome) -> str | None:
    return outcome.error.code if outcome.error else None


async def check_file(system: System, outcome: Outcome, size: int = SIZE, seed: int = 0) -> None:
    assert outcome.status is TaskStatus.SUCCEEDED, outcome.error
    assert outcome.kept is not None
    assert outcome.kept.length == size
    assert outcome.kept.sha256 == digest(size, seed)
    got = 0
    async for piece in stream_body(system.blobs, outcome.kept):
        got += len(piece)
    assert got == size


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  (seen from outside)
            await asyncio.sleep(0.001)


async def kept_keys(system: System, job: Job) -> list[str]:
    return [info.key async for info in system.blobs.listing(f"results/{job.tenant}/{job.job_id}")]


class TestWhole:
    @pytest.mark.parametrize("size", [0, 1, 256 * 1024, 256 * 1024 + 1, 512 * 1024, SIZE])
    @pytest.mark.parametrize("chunked", [False, True])
    async def test_a_file_of_any_size(
        self, executor: DownloadExecutor, site: FileSite, system: System, size: int, chunked: bool
    ) -> None:
        site.file.size, site.file.chunked = size, chunked
        outcome = await attempt(executor, site.url("/redirect/file.bin"), sha256=digest(size).upper())
        await check_file(system, outcome, size)
        assert outcome.http_status == 200
        assert outcome.content_type == "application/zip"
        assert outcome.final_url == site.url("/file.bin")
        assert site.seen[-1].headers["accept-encoding"] == "identity"
        assert "range" not in site.seen[-1].headers

    async def test_what_was_asked_for_is_sent(self, executor: DownloadExecutor, site: FileSite) -> None:
        job = job_with(headers={"X-All": "1", "X-Both": "job", "Range": "bytes=5-", "Accept-Encoding": "gzip"})
        outcome = await attempt(executor, site.url(), job, headers={"X-Both": "task", "if-none-match": '"one"'})
        assert outcome.status is TaskStatus.SUCCEEDED
        sent = site.seen[0].headers
        assert sent["accept-encoding"] == "identity"
        assert not {"range", "if-none-match"} & set(sent)
        assert (sent["x-all"], sent["x-both"]) == ("1", "task")

    async def test_a_file_that_is_not_the_expected_one(
        self, executor: DownloadExecutor, site: FileSite, system: System
    ) -> None:
        job = job_with()
        outcome = await attempt(executor, site.url(), job, sha256="0" * 64)
        assert code(outcome) == "checksum_mismatch"
        assert await kept_keys(system, job) == []

    @pytest.mark.parametrize("chunked", [False, True])
    async def test_a_file_that_is_too_large(
        self, executor: DownloadExecutor, site: FileSite, system: System, chunked: bool
    ) -> None:
        site.file.chunked = chunked
        job = msgspec.convert({"max_bytes": SIZE - 1}, type(job_with().options.download))
        outcome = await attempt(executor, site.url(), made := job_with(download=job))
        assert code(outcome) == "body_too_large"
        assert await kept_keys(system, made) == []

    async def test_a_body_that_says_it_is_encoded_and_is_not(
        self, executor: DownloadExecutor, site: FileSite, system: System
    ) -> None:
        site.file.encoding = "gzip"
        outcome = await attempt(executor, site.url("/redirect/file.bin"), job := job_with())
        assert (code(outcome), outcome.http_status) == ("decode_failed", 200)
        assert outcome.final_url == site.url("/file.bin")
        assert await kept_keys(system, job) == []

    @pytest.mark.parametrize(
        ("path", "expected", "status", "end"),
        [
            ("/loop", "too_many_redirects", 302, "/loop"),
            ("/redirect?to=ftp://x/", "bad_redirect", 302, "/redirect?to=ftp://x/"),
            ("/redirect?status=307&to=/hang-up", "read_failed", 307, "/hang-up"),
            ("/redirect?to=/cut", "read_failed", 200, "/cut"),
            ("/redirect?to=/status/404", "http_404", 404, "/status/404"),
        ],
    )
    async def test_a_chain_that_fails_keeps_how_far_it_came(
        self, executor: DownloadExecutor, path: str, expected: str, status: int, end: str
    ) -> None:
        async with Site() as site:
            outcome = await attempt(executor, site.url(path))
            found = (code(outcome), outcome.http_status, outcome.final_url)
            assert found == (expected, status, site.url(end))

    async def test_a_chain_has_cookies_and_letters_of_its_own(self, executor: DownloadExecutor) -> None:
        async with Site() as site:
            for _ in range(2):
                outcome = await attempt(executor, site.url("/consent"))
                assert outcome.status is TaskStatus.SUCCEEDED, outcome.error
            assert [seen.headers.get("cookie") for seen in site.seen[3:5]] == [None, "region=eu"]
            outcome = await attempt(executor, site.url("/foreign-letters?status=302"))
            assert outcome.final_url == site.url("/caf%C3%A9")
            outcome = await attempt(executor, site.url("/latin-letters"))
            assert ("x-name", "\xa0\xff") in (outcome.headers or [])

    @pytest.mark.parametrize(("status", "retry"), [(404, None), (503, 7.0), (204, None), (206, None), (416, None)])
    async def test_an_error_of_the_target(
        self, executor: DownloadExecutor, site: FileSite, status: int, retry: float | None
    ) -> None:
        site.file.refusals = [(status, f"Retry-After: {retry:g}\r\n" if retry else "")]
        outcome = await attempt(executor, site.url())
        assert (code(outcome), outcome.http_status) == (f"http_{status}", status)
        assert outcome.retry_after == retry

    @pytest.mark.parametrize("url", ["http://10.0.0.1/x", "http://127.0.0.1:1/"])
    async def test_the_guard_stands_before_it(self, settings: Settings, system: System, url: str) -> None:
        made = executor_on(msgspec.structs.replace(settings, allow_private_targets=False), system)
        assert code(await attempt(made, url)) == "target_refused"
        await made.close()

    async def test_the_guard_stands_before_redirects(self, executor: DownloadExecutor, site: FileSite) -> None:
        site.file.refusals = [(302, "Location: ftp://nowhere/\r\n")]
        assert code(await attempt(executor, site.url())) == "bad_redirect"

    async def test_input_that_is_no_download(self, executor: DownloadExecutor) -> None:
        for text in ('{"url":"http://a.example/","sha256":"x"}', "1", '{"url":"http://a.example/","method":"POST"}'):
            (outcome,) = await executor.attempt(job_with(), [TaskRef(0, InputJson(text))])
            assert code(outcome) == "bad_input"


class TestCuts:
    @pytest.mark.parametrize("reset", [False, True])
    async def test_cuts_are_not_attempts(
        self, executor: DownloadExecutor, site: FileSite, system: System, reset: bool
    ) -> None:
        site.file.reset = reset
        site.file.cuts = [SIZE * part // 21 for part in range(1, 21)]
        await check_file(system, await attempt(executor, site.url(), sha256=digest(SIZE)))
        assert site.statuses == [200] + [206] * 20
        assert site.seen[-1].headers["if-range"] == '"one"'
        # A reset throws away what is on the way.
        assert site.sent <= SIZE + (20 * 64 * 1024 if reset else 0)

    async def test_a_date_serves_where_there_is_no_etag(
        self, executor: DownloadExecutor, site: FileSite, system: System
    ) -> None:
        site.file.etag, site.file.modified = None, "Sun, 15 Nov 2026 10:00:00 GMT"
        site.file.cuts = [SIZE // 2]
        await check_file(system, await attempt(executor, site.url()))
        assert site.ranges() == [None, f"bytes={SIZE // 2}-"]

    @pytest.mark.parametrize(
        ("etag", "modified"), [('W/"one"', None), (None, None), (None, "Sun, 15 Nov 2026 11:59:59 GMT"), ("one", None)]
    )
    async def test_without_a_strong_validator_it_starts_over(
        self, executor: DownloadExecutor, site: FileSite, system: System, etag: str | None, modified: str | None
    ) -> None:
        site.file.etag, site.file.modified = etag, modified
        site.file.cuts = [SIZE // 2]
        job = job_with()
        outcome = await attempt(executor, site.url(), job)
        assert code(outcome) == "read_failed"
        assert outcome.spends_attempt
        await check_file(system, await attempt(executor, site.url(), job, 2))
        assert site.ranges() == [None, None]

    async def test_a_stall_is_a_cut(self, executor: DownloadExecutor, site: FileSite, system: System) -> None:
        site.file.stall_at = SIZE // 2
        await check_file(system, await attempt(executor, site.url(), job_with(timeout=0.3)))
        assert site.statuses == [200, 206]

    async def test_an_attempt_that_moves_nothing_ends(
        self, executor: DownloadExecutor, site: FileSite, system: System
    ) -> None:
        site.file.cuts = [SIZE // 2]
        site.file.range_lie = "empty"
        job = job_with()
        outcome = await attempt(executor, site.url(), job)
        assert code(outcome) == "read_failed"
        # It left more than it found, so that the next attempt is the same one.
        assert not outcome.spends_attempt
        site.file.lies = 0
        await check_file(system, await attempt(executor, site.url(), job))

    async def test_too_slow(self, executor: DownloadExecutor, site: FileSite) -> None:
        site.file.rate = 100_000
        slow = msgspec.convert({"min_rate": 10_000_000, "min_rate_seconds": 1}, type(job_with().options.download))
        outcome = await attempt(executor, site.url(), job_with(download=slow))
        assert code(outcome) == "too_slow"

    async def test_an_error_in_the_middle_ends_the_attempt_and_not_the_file(
        self, executor: DownloadExecutor, site: FileSite, system: System
    ) -> None:
        site.file.cuts = [SIZE // 2]
        job = job_with(attempts=1)
        attempting = asyncio.create_task(attempt(executor, site.url(), job))
        await until(lambda: site.seen)
        site.file.refusals = [(503, "")]
        outcome = await attempting
        assert code(outcome) == "http_503"
        assert not outcome.spends_attempt
        await check_file(system, await attempt(executor, site.url(), job))
        assert site.statuses == [200, 503, 206]


class TestLies:
    @pytest.mark.parametrize(
        "lie", ["ignore", "wrong_start", "star", "other_etag", "other_total", "416", "multipart", "gzip"]
    )
    @pytest.mark.parametrize("cut", [1, 65_536, SIZE // 2, SIZE - 1])
    async def test_what_does_not_fit_starts_the_file_over(
        self, executor: DownloadExecutor, site: FileSite, system: System, lie: str, cut: int
    ) -> None:
        site.file.cuts = [cut]
        site.file.range_lie = lie
        job = job_with()
        await check_file(system, await attempt(executor, site.url(), job))
        # Nothing is left of what was there before.
        assert len(await kept_keys(system, job)) == -(-SIZE // piece_size(SIZE, 16 * MIB))

    async def test_short_parts_are_put_together(
        self, executor: DownloadExecutor, site: FileSite, system: System
    ) -> None:
        site.file.cuts = [SIZE // 4]
        site.file.range_lie, site.file.lies = "short", 3
        await check_file(system, await attempt(executor, site.url()))
        assert site.statuses == [200, 206, 206, 206, 206]

    async def test_more_than_was_said_is_trusted_in_nothing(
        self, executor: DownloadExecutor, site: FileSite, system: System
    ) -> None:
        site.file.cuts = [SIZE // 2]
        site.file.range_lie = "longer"
        job = job_with()
        assert code(await attempt(executor, site.url(), job)) == "range_failed"
        assert await kept_keys(system, job) == []

    async def test_a_file_that_changes_is_taken_anew(
        self, executor: DownloadExecutor, site: FileSite, system: System
    ) -> None:
        site.file.cuts = [SIZE // 2]
        attempting = asyncio.create_task(attempt(executor, site.url()))
        await until(lambda: site.seen and not site.file.cuts)
        site.file.etag, site.file.seed = '"two"', 9
        await check_file(system, await attempting, seed=9)
        assert site.statuses == [200, 200]

    async def test_a_file_that_changes_without_a_word_is_found_by_its_hash(
        self, executor: DownloadExecutor, site: FileSite, system: System
    ) -> None:
        site.file.cuts = [SIZE // 2]
        job = job_with()
        attempting = asyncio.create_task(attempt(executor, site.url(), job, sha256=digest(SIZE, 9)))
        await until(lambda: site.seen and not site.file.cuts)
        site.file.seed = 9
        assert code(await attempting) == "file_changed"
        await check_file(system, await attempt(executor, site.url(), job, 2, sha256=digest(SIZE, 9)), seed=9)

    async def test_a_target_that_never_fits_is_given_up(self, executor: DownloadExecutor, site: FileSite) -> None:
        site.file.cuts = [SIZE // 2] * 9
        site.file.range_lie = "wrong_start"
        assert code(await attempt(executor, site.url())) == "range_failed"


@asynccontextmanager
async def opened(
    behaviour: Behaviour, clock: JumpingClock | None = None
) -> AsyncIterator[tuple[DownloadExecutor, FileSite, System]]:
    """An executor and a site, for tests that bring no fixtures. It does not wait between two requests."""
    with quick_place() as place:
        settings = Settings.load({}, data=place, allow_private_targets=True, fetchers=0)
        async with open_system(settings, clock or EagerClock()) as system, FileSite(behaviour) as site:
            executor = executor_on(settings, system)
            yield executor, site, system
            await executor.close()


async def attempts_until_spent(executor: DownloadExecutor, site: FileSite, job: Job, most: int) -> int:
    """How many attempts there are that spend nothing, up to one that does."""
    for number in range(most):
        outcome = await attempt(executor, site.url(), job)
        assert outcome.status is TaskStatus.FAILED
        if outcome.spends_attempt:
            return number
    raise AssertionError(f"{most} attempts have spent nothing")


async def test_to_take_the_same_bytes_again_spends_an_attempt() -> None:
    """It has an ETag, ignores Range, and cuts every answer in the middle."""
    async with opened(Behaviour(MIB, cuts=[MIB // 2] * 100, range_lie="ignore")) as (executor, site, system):
        job = job_with(timeout=5.0)
        # The first comes further than nothing; every one after it comes as far as that.
        assert await attempts_until_spent(executor, site, job, 3) == 1
        assert (await attempt(executor, site.url(), job)).spends_attempt
        site.file.cuts = []
        await check_file(system, await attempt(executor, site.url(), job), MIB)


@pytest.mark.parametrize("lie", ["wrong_start", "star", "other_etag", "other_total", "416", "multipart", "gzip"])
async def test_a_target_whose_answers_never_fit_spends_attempts(lie: str) -> None:
    async with opened(Behaviour(MIB, cuts=[MIB // 2] * 100, range_lie=lie)) as (executor, site, _):
        assert await attempts_until_spent(executor, site, job_with(timeout=5.0), 4) <= 1


async def test_a_file_that_changes_all_the_time_spends_attempts() -> None:
    async with opened(Behaviour(MIB, cuts=[MIB // 2] * 100, changes=True)) as (executor, site, _):
        assert await attempts_until_spent(executor, site, job_with(timeout=5.0), 4) <= 1


async def test_only_the_furthest_counts_for_a_file_that_is_begun_anew() -> None:
    """It comes further and less far by turns: taken each for itself, every second attempt would have moved on."""
    async with opened(Behaviour(2 * MIB, range_lie="ignore")) as (executor, site, _):
        job = job_with(timeout=5.0)
        spent = []
        for cut in (MIB, MIB // 2, MIB, MIB // 2, MIB):
            site.file.cuts = [cut] * 10
            spent.append((await attempt(executor, site.url(), job)).spends_attempt)
        assert spent == [False, True, True, True, True]


async def test_a_file_that_really_moves_on_spends_nothing() -> None:
    """Each attempt gets a little of the rest and then an error, which the site has learned of while it waited."""
    async with opened(Behaviour(2 * MIB), JumpingClock()) as (executor, site, system):
        job = job_with(timeout=5.0, attempts=1)
        for part in range(1, 4):
            site.file.cuts = [part * MIB // 2]
            attempting = asyncio.create_task(attempt(executor, site.url(), job))
            await until(lambda: not site.file.cuts)
            site.file.refusals = [(503, "")]
            assert not (await attempting).spends_attempt
        await check_file(system, await attempt(executor, site.url(), job), 2 * MIB)


async def test_a_reference_that_knows_of_no_attempt_keeps_to_the_deadline_of_its_task() -> None:
    """The sweeper makes references again from rows, which do not say when the first attempt was; the progress does."""
    async with opened(Behaviour(MIB, refusals=[(503, "")])) as (executor, site, system):
        clock = system.clock
        assert isinstance(clock, JumpingClock)
        job = job_with(timeout=5.0, task_deadline=100.0)
        began = int(clock.now())
        first = await attempt(executor, site.url(), job)
        assert code(first) == "http_503"
        assert began <= first.since <= began + 5
        clock.advance(200.0)
        second = await attempt(executor, site.url(), job)
        assert (code(second), second.since) == ("deadline", first.since)
        assert len(site.seen) == 1


class TestRows:
    async def test_progress_is_kept_on_the_way(self, settings: Settings, system: System, clock: JumpingClock) -> None:
        made = executor_on(settings, system, progress_seconds=0.01)
        job = job_with()
        async with FileSite(Behaviour(SIZE, rate=2 * MIB)) as site:
            attempting = asyncio.create_task(attempt(made, site.url(), job))
            row = None
            seen: TaskProgress | None = None
            while not attempting.done() and (seen is None or seen.done == 0):
                await asyncio.sleep(0.02)
                row = await system.records.documents.document(PROGRESS, job.tenant, progress_id(job.run.run_id, 0))
                seen = msgspec.json.decode(row.body, type=TaskProgress) if row else None
            assert row is not None and seen is not None
            assert (seen.index, seen.total, seen.attempt) == (0, SIZE, 1)
            assert 0 < seen.done < SIZE
            assert 0 < seen.rate < 8 * MIB
            assert row.job_id == job.job_id
            assert row.due_at is not None
            assert abs(row.due_at - clock.now() - settings.stuck_after) < 60
            assert [due.id for due in await system.records.documents.due_documents(PROGRESS, row.due_at, 10)] == [
                row.id
            ]
            await check_file(system, await attempting)
        await made.close()

    async def test_who_begins_later_has_it(self, settings: Settings, system: System) -> None:
        made = executor_on(settings, system, progress_seconds=0.01)
        job = job_with(timeout=30.0)
        async with FileSite(Behaviour(SIZE, stall_at=SIZE // 2)) as site:
            first = asyncio.create_task(attempt(made, site.url(), job))
            await seen(lambda: kept_keys(system, job), lambda keys: len(keys) >= 3)
            await check_file(system, await attempt(made, site.url(), job))
            assert site.statuses == [200, 206]
            for writer in list(site._open):
                writer.cancel()
            with pytest.raises(Superseded):
                await first
        await made.close()

    async def test_a_worker_that_stops_leaves_the_row_at_rest(self, executor: DownloadExecutor, system: System) -> None:
        job = job_with()
        async with FileSite(Behaviour(SIZE, stall_at=SIZE // 2)) as site:
            first = asyncio.create_task(attempt(executor, site.url(), job))
            await seen(lambda: kept_keys(system, job), lambda keys: len(keys) >= 3)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            row = await system.records.documents.document(PROGRESS, job.tenant, progress_id(job.run.run_id, 0))
            assert row is not None
            assert row.due_at is None
            await check_file(system, await attempt(executor, site.url(), job))
            assert site.statuses == [200, 206]

    async def test_what_is_all_there_is_not_asked_for_again(
        self, executor: DownloadExecutor, site: FileSite, system: System
    ) -> None:
        """As after a crash between the last byte and the record of the outcome."""
        job = job_with()
        one = await attempt(executor, site.url(), job)
        other = await attempt(executor, site.url(), job)
        assert other.kept == one.kept
        assert len(site.seen) == 1
        await check_file(system, other)

    async def test_the_last_failure_leaves_nothing(
        self, executor: DownloadExecutor, site: FileSite, system: System
    ) -> None:
        site.file.etag = None
        site.file.cuts = [SIZE // 2]
        job = job_with(attempts=2)
        assert code(await attempt(executor, site.url(), job, 2)) == "read_failed"
        assert await kept_keys(system, job) == []
        assert await system.records.documents.document(PROGRESS, job.tenant, progress_id(job.run.run_id, 0)) is None


async def test_a_job_of_downloads_from_submit_to_archive(server: Api, tmp_path: Path) -> None:
    system = server.system
    sizes = [0, 5, 300_000, SIZE]
    async with FileSite(Behaviour(SIZE)) as site:
        files = [FileSite(Behaviour(size, cuts=[size // 2] if size > 100 else [])) for size in sizes]
        for file in files:
            await file.__aenter__()
        tasks = [{"url": file.url(), "sha256": digest(size)} for file, size in zip(files, sizes, strict=True)]
        submitted = await server.submit({"kind": "download", "tasks": [*tasks, site.url()], "chunk_size": 50})
        assert submitted.status == 201, submitted.body
        async with Embedded(system).running():
            job = await ended(server, submitted.json["id"])
        for file in files:
            await file.__aexit__()
    assert job["state"] == RunState.COMPLETED
    assert job["run"]["counts"]["succeeded"] == 5
    items = sorted(await all_items(server, f"/v1/jobs/{job['id']}/results"), key=lambda item: item["index"])
    assert [item["size"] for item in items] == [*sizes, SIZE]
    large = items[3]
    whole = await server.get(large["body_url"])
    assert (whole.status, len(whole.body)) == (200, SIZE)
    assert whole.headers["accept-ranges"] == "bytes"
    found = await system.records.jobs.job(ACME, job["id"])
    assert found is not None
    await export_to_file(system.tasks, system.blobs, found, tmp_path / "out.zip")
    with zipfile.ZipFile(tmp_path / "out.zip") as archive:
        bodies = [archive.read(name) for name in sorted(archive.namelist()) if name.startswith("bodies/")]
    assert [len(body) for body in bodies] == [*sizes, SIZE]
    assert bodies[3] == whole.body


RANGES: list[tuple[str, Callable[[bytes], bytes] | None]] = [
    ("bytes=0-0", lambda body: body[:1]),
    ("bytes=100-199", lambda body: body[100:200]),
    ("bytes=262140-262150", lambda body: body[262140:262151]),
    ("bytes=3000000-", lambda body: body[3000000:]),
    ("bytes=-7", lambda body: body[-7:]),
    ("bytes=0-99999999", lambda body: body),
    (f"bytes={SIZE}-", None),
    ("bytes=-0", None),
]


async def test_a_body_is_served_by_range(server: Api) -> None:
    async with FileSite(Behaviour(SIZE)) as site:
        submitted = await server.submit({"kind": "download", "tasks": [site.url()]})
        async with Embedded(server.system).running():
            await ended(server, submitted.json["id"])
    (item,) = await all_items(server, f"/v1/jobs/{submitted.json['id']}/results")
    whole = (await server.get(item["body_url"])).body
    etag = f'"{item["sha256"]}"'
    for asked, part in RANGES:
        got = await server.get(item["body_url"], headers={"range": asked})
        if part is None:
            assert got.status == 416
            assert got.headers["content-range"] == f"bytes */{SIZE}"
            continue
        want = part(whole)
        assert (got.status, got.body) == (206, want)
        first, _, rest = got.headers["content-range"].removeprefix("bytes ").partition("-")
        assert whole[int(first) : int(first) + len(want)] == want
        assert rest == f"{int(first) + len(want) - 1}/{SIZE}"
        assert got.headers["content-length"] == str(len(want))
        assert got.headers["etag"] == etag
    # What is no range of ours, or of another version, is the whole.
    for headers in ({"range": "lines=1-2"}, {"range": "bytes=5-1"}, {"range": "bytes=0-1,5-6"}, {"range": "x"}):
        assert (await server.get(item["body_url"], headers=headers)).status == 200
    for condition, status in [(etag, 206), ('"other"', 200), (f"W/{etag}", 200)]:
        got = await server.get(item["body_url"], headers={"range": "bytes=0-9", "if-range": condition})
        assert got.status == status


async def test_a_long_task_that_has_no_slot_is_left_to_others(settings: Settings, clock: JumpingClock) -> None:
    chosen = msgspec.structs.replace(settings, worker_concurrency=1)
    async with open_system(chosen, clock) as system, FileSite(Behaviour(SIZE, stall_at=SIZE // 2)) as site:
        embedded = Embedded(system)
        spec = {"kind": "download", "tasks": [site.url("/a"), site.url("/b")], "timeout": 30}
        accepted = await embedded.submit.submit(ACME, decode_spec(msgspec.json.encode(spec)))
        job = await embedded.job(ACME, JobId(accepted.subject))
        async with embedded.running():
            await until(lambda: site.file.stall_at is None)
            # The other one is taken and given back, so that a second worker would find it.
            await seen(lambda: system.queue.depth(run_queue(job.run.run_id)), lambda depth: depth == Depth(1, 1, 0))
            for connection in list(site._open):
                connection.cancel()
            await seen(lambda: embedded.job(ACME, job.job_id), lambda found: found.run.ended_at is not None)
        assert (await system.tasks.counts(job.key)).succeeded == 2
