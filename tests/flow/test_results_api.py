"""Results over HTTP: filters, runs, all of them as lines, and bodies by range, of every layout and number of shards."""

import asyncio
import gzip
import json
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from conveyor.api.schemas.task_shapes import ResultsPage, TaskShape
from conveyor.client import AsyncClient
from conveyor.engines.blobs import Presigned
from conveyor.engines.records import Document
from conveyor.engines.sqlite import tasks as sqlite_tasks
from conveyor.errors import EngineFailed
from conveyor.jobs.body_coding import deflate
from conveyor.model import (
    PROGRESS,
    BodyRef,
    Job,
    JobId,
    ResultDetail,
    RunKey,
    TaskEnd,
    TaskProgress,
    TenantId,
    piece_key,
    progress_id,
    task_id,
)
from conveyor.read import latest, list_order, listing, merge
from conveyor.settings import Settings
from conveyor.states import TaskStatus
from tests.support.api import Answer, Api, parsed, raw
from tests.support.make_jobs import seeds
from tests.support.working import Flaky, all_items, ended, until, working

ACME = TenantId("acme")
LINES = {"accept": "application/x-ndjson"}


@pytest.fixture(params=[1, 4], ids=["one shard", "four shards"])
def settings(request: pytest.FixtureRequest, settings: Settings) -> Settings:
    return Settings.load(
        {},
        data=settings.data,
        sync_task_limit=1 if request.param > 1 else 10_000,
        force_task_shards=request.param > 1,
        task_shard_count=request.param,
    )


def inputs(count: int) -> list[Any]:
    """With tags in every third, and input that is laid out over lines in every seventh."""
    made: list[Any] = []
    for number in range(count):
        url = f"http://example.com/{number}"
        made.append({"url": url, "tag": f"é{number % 2}"} if number % 3 == 0 else url)
    return made


async def ran(api: Api, count: int, **spec: Any) -> str:
    """A job that has ended; every fourth of its tasks failed."""
    async with working(api.system, Flaky(lambda job, index: 404 if index % 4 == 0 else None)):
        job_id: str = (await api.submit({"tasks": inputs(count), "attempts": 1, **spec})).json["id"]
        await ended(api, job_id)
    return job_id


async def job_of(api: Api, job_id: str) -> Job:
    job = await api.system.records.jobs.job(ACME, JobId(job_id))
    assert job is not None
    return job


async def indexes(api: Api, job_id: str, query: str, limit: int = 9) -> list[int]:
    return [item["index"] for item in await all_items(api, f"/v1/jobs/{job_id}/results{query}", limit)]


async def lines(api: Api, job_id: str, query: str = "") -> list[dict[str, Any]]:
    answer = await api.get(f"/v1/jobs/{job_id}/results{query}", headers=LINES)
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    assert answer.headers["content-disposition"] == f'attachment; filename="{job_id}.jsonl"'
    return [json.loads(line) for line in answer.body.splitlines()]


class TestFilters:
    async def test_by_tag(self, server: Api) -> None:
        job_id = await ran(server, 60)
        tagged = {"%C3%A90": range(0, 60, 6), "%C3%A91": range(3, 60, 6), "x": range(0)}
        for tag, wanted in tagged.items():
            assert sorted(await indexes(server, job_id, f"?tag={tag}")) == list(wanted)
            both = await indexes(server, job_id, f"?tag={tag}&status=failed")
            assert sorted(both) == [index for index in wanted if index % 4 == 0]
            assert sorted(item["index"] for item in await lines(server, job_id, f"?tag={tag}")) == list(wanted)

    async def test_by_all_of_them(self, server: Api) -> None:
        job_id = await ran(server, 40)
        failed = list(range(0, 40, 4))
        for query, wanted in (
            ("?status=failed", failed),
            ("?error_code=http_404", failed),
            ("?http_status=404", failed),
            ("?http_status=200&status=succeeded", [index for index in range(40) if index % 4]),
            ("?status=pending", []),
            ("?status=failed&http_status=200", []),
        ):
            assert sorted(await indexes(server, job_id, query)) == wanted
            assert sorted(item["index"] for item in await lines(server, job_id, query)) == wanted

    async def test_while_it_runs(self, server: Api) -> None:
        async with working(server.system) as echo:
            echo.gate.clear()
            job_id: str = (await server.submit({"tasks": inputs(30)})).json["id"]
            await until(lambda: indexes(server, job_id, "?status=pending"), lambda found: len(found) == 30)
            assert len(await lines(server, job_id, "?status=pending")) == 30
            assert await lines(server, job_id, "?status=succeeded") == []
            echo.gate.set()
            await ended(server, job_id)
        assert len(await lines(server, job_id, "?status=succeeded")) == 30

    async def test_a_task_in_progress_says_how_far_it_is(self, server: Api) -> None:
        """In lists as alone: what is running looks running."""
        async with working(server.system) as echo:
            echo.gate.clear()
            job_id: str = (await server.submit({"kind": "download", "tasks": inputs(3)})).json["id"]
            await until(lambda: indexes(server, job_id, "?status=pending"), lambda found: len(found) == 3)
            job = await job_of(server, job_id)
            at = TaskProgress(job.run.run_id, 1, 1, "hold", 1.0, 300, 1000, 10.0)
            name, body = progress_id(job.run.run_id, 1), msgspec.json.encode(at)
            row = Document(PROGRESS, ACME, name, body, due_at=1e12, job_id=job.job_id)
            await server.system.records.documents.create_documents([row])
            for path in ("results", "search?text=example"):
                items = await all_items(server, f"/v1/jobs/{job_id}/{path}", 9)
                found = {item["index"]: (item.get("progress") or {}).get("done") for item in items}
                assert found == {0: None, 1: 300, 2: None}
            echo.gate.set()
            await ended(server, job_id)
        assert all("progress" not in item for item in await all_items(server, f"/v1/jobs/{job_id}/results", 9))

    @pytest.mark.parametrize(
        ("query", "status", "code"),
        [
            ("?run=0", 400, "invalid_field"),
            ("?run=first", 400, "invalid_field"),
            ("?run=-1", 400, "invalid_field"),
            ("?run=", 400, "invalid_field"),
            ("?run=2", 404, "not_found"),
            ("?run=run_" + "0" * 26, 404, "not_found"),
            ("?status=ended", 400, "invalid_field"),
            ("?tag=" + "x" * 1025, 400, "invalid_field"),
            ("?tags=x", 400, "unknown_field"),
            ("?cursor=nonsense", 400, "bad_cursor"),
            ("?cursor=nonsense&run=latest-per-task", 400, "bad_cursor"),
        ],
    )
    async def test_wrong_ones(self, server: Api, query: str, status: int, code: str) -> None:
        job_id = (await server.submit({"tasks": inputs(2)})).json["id"]
        for headers in ({}, LINES):
            answer = await server.get(f"/v1/jobs/{job_id}/results{query}", headers=headers)
            assert (answer.status, answer.json["code"]) == (status, code)

    async def test_a_run_of_another_job_is_none(self, server: Api) -> None:
        jobs = [(await server.submit({"tasks": inputs(2)})).json for _ in range(2)]
        answer = await server.get(f"/v1/jobs/{jobs[0]['id']}/results?run={jobs[1]['run']['id']}")
        assert (answer.status, answer.json["code"]) == (404, "not_found")


class TestListOrder:
    """SQL engines list tasks in the order of the list."""

    async def _pages(self, api: Api, path: str) -> list[int]:
        """The indexes of all tasks, a few at a time."""
        found: list[int] = []
        cursor: str | None = ""
        while cursor is not None:
            page = (await api.get(f"{path}&limit=7" + (f"&cursor={cursor}" if cursor else ""))).json
            msgspec.convert(page, ResultsPage)
            assert page["order"] == "index"
            found += [item["index"] for item in page["items"]]
            cursor = page["next_cursor"]
        return found

    async def test_pages_and_lines(self, server: Api, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(list_order, "_ROWS", 20)
        job_id = await ran(server, 60)
        failed = [index for index in range(60) if index % 4 == 0]
        for _ in range(2):
            fine = [index for index in range(60) if index not in failed]
            for query, expected in {
                "tag=é1": list(range(3, 60, 6)),
                "status=failed": failed,
                "error_code=http_404": failed,
                "http_status=200": fine,
                "status=pending": [],
                "status=succeeded&tag=é1": [index for index in range(3, 60, 6) if index in fine],
                "run=latest-per-task": list(range(60)),
            }.items():
                path = f"/v1/jobs/{job_id}/results?{quote(query, safe='=&')}"
                assert await self._pages(server, path) == expected, query
                after = expected[len(expected) // 2] if expected else 0
                rest = await lines(server, job_id, f"?{quote(query, safe='=&')}&cursor=ix:{after}")
                assert [item["index"] for item in rest] == [index for index in expected if index > after]
            # A rerun mends half of what fails.
            async with working(server.system, Flaky(lambda job, index: 404 if index % 8 == 0 else None)):
                await server.post(f"/v1/jobs/{job_id}/rerun", {"select": "failed"})
                await ended(server, job_id)
            failed = [index for index in range(60) if index % 8 == 0]

    async def test_an_old_cursor_keeps_its_order(self, server: Api) -> None:
        job_id = await ran(server, 30)
        path = f"/v1/jobs/{job_id}/results"
        with pytest.MonkeyPatch.context() as before:
            before.setattr(list_order, "by_index", lambda tasks, run: None)
            first = (await server.get(f"{path}?limit=10")).json
            expected = [item["task_id"] for item in await all_items(server, path)]
            assert first["order"] == "task_id"
            answer = await server.get(f"{path}?cursor=ix:3")
            assert (answer.status, answer.json["code"]) == (400, "bad_cursor")
        second = (await server.get(f"{path}?limit=10&cursor={first['next_cursor']}")).json
        assert second["order"] == "task_id"
        assert [item["task_id"] for item in second["items"]] == expected[10:20]
        for wrong in ("ix:", "ix:-1", "ix:x", "ix:" + "9" * 16):
            answer = await server.get(f"{path}?cursor={wrong}")
            assert (answer.status, answer.json["code"]) == (400, "bad_cursor")

    async def test_a_page_reads_a_bounded_number_of_rows(self, server: Api, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(list_order, "_ROWS", 5)
        monkeypatch.setattr(list_order, "MAX_SCANNED", 12)
        job_id = (await server.submit({"tasks": inputs(60)})).json["id"]
        async with working(server.system):
            await ended(server, job_id)
        page = (await server.get(f"/v1/jobs/{job_id}/results?tag=none")).json
        assert (page["items"], page["next_cursor"]) == ([], "ix:14")


@pytest.mark.usefixtures("by_task_id")
class TestLines:
    async def test_all_of_them_are_the_pages(self, server: Api, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(listing, "_ROWS", 7)
        job_id = await ran(server, 100)
        found = await lines(server, job_id)
        for item in found:
            msgspec.convert(item, TaskShape)
        paged = await all_items(server, f"/v1/jobs/{job_id}/results")
        for item in (*found, *paged):
            # A link is signed anew for each answer, until a later second.
            item["body_url"] = item["body_url"] and item["body_url"].partition("?")[0]
        assert sorted(found, key=lambda item: item["task_id"]) == paged

    async def test_of_nothing(self, server: Api) -> None:
        job_id = (await server.submit({"mode": "open"})).json["id"]
        assert await lines(server, job_id) == []

    async def test_from_a_cursor_on(self, server: Api, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(listing, "_ROWS", 7)
        job_id = await ran(server, 60)
        for which in ("latest", "latest-per-task"):
            page = (await server.get(f"/v1/jobs/{job_id}/results?limit=25&run={which}")).json
            rest = await lines(server, job_id, f"?cursor={page['next_cursor']}&run={which}")
            assert len(rest) == 35
            assert sorted(item["index"] for item in [*page["items"], *rest]) == list(range(60))

    async def test_inputs_of_several_lines_are_one(self, server: Api) -> None:
        body = b'{"tasks": [{"url":\n "http://example.com/"},\n\n"http://example.com/2"]}'
        job_id = (await server.submit(body)).json["id"]
        async with working(server.system):
            await ended(server, job_id)
        assert len(await lines(server, job_id)) == 2

    @pytest.mark.parametrize("error", [EngineFailed("The store is away."), RuntimeError("a secret of ours")])
    @pytest.mark.parametrize("which", ["1", "latest-per-task"])
    async def test_one_that_breaks_off_says_so(
        self, server: Api, monkeypatch: pytest.MonkeyPatch, error: Exception, which: str
    ) -> None:
        monkeypatch.setattr(listing, "_ROWS", 10)
        monkeypatch.setattr(latest, "BATCH", 10)
        job_id = await ran(server, 100)
        async with working(server.system):
            await server.post(f"/v1/jobs/{job_id}/rerun")
            await ended(server, job_id)
        tasks = server.system.tasks
        reading = "scan" if which == "1" else "page"
        page, left = getattr(tasks, reading), 3

        async def failing(*given: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise error
            return await page(*given)

        monkeypatch.setattr(tasks, reading, failing)
        *found, last = await lines(server, job_id, f"?run={which}")
        assert 0 < len(found) <= 30
        told = last["stream_error"]
        assert told["code"] == ("engine_failed" if isinstance(error, EngineFailed) else "internal_error")
        assert "secret" not in str(last)
        monkeypatch.setattr(tasks, reading, page)
        rest = await lines(server, job_id, f"?run={which}&cursor={told['next_cursor']}")
        assert sorted(item["index"] for item in found + rest) == list(range(100))
        assert "stream_error" not in rest[-1]

    async def test_one_that_can_not_begin_is_a_problem(self, server: Api, monkeypatch: pytest.MonkeyPatch) -> None:
        job_id = await ran(server, 5)

        async def failing(*_: Any) -> Any:
            raise EngineFailed("The store is away.")

        monkeypatch.setattr(server.system.tasks, "scan", failing)
        answer = await server.get(f"/v1/jobs/{job_id}/results", headers=LINES)
        assert (answer.status, answer.json["code"]) == (503, "engine_failed")

    async def test_rows_are_read_as_they_are_taken_away(self, server: Api, monkeypatch: pytest.MonkeyPatch) -> None:
        """A reader that stands still holds no more than what fits into the pipe."""
        monkeypatch.setattr(listing, "_ROWS", 10)
        pad = "x" * 10_000
        tasks = [{"url": f"http://example.com/{number}", "tag": "t", "body": pad} for number in range(3000)]
        tasks = [{**task, "method": "POST"} for task in tasks]
        job_id = (await server.submit({"tasks": tasks})).json["id"]
        if (await job_of(server, job_id)).task_shard_count > 1:
            async with working(server.system) as echo:
                echo.gate.clear()
                await until(lambda: job_of(server, job_id), lambda job: job.run.last_batch)
                await server.post(f"/v1/jobs/{job_id}/cancel")
        scan, read = server.system.tasks.scan, 0

        async def counted(*given: Any) -> Any:
            nonlocal read
            found = await scan(*given)
            read += len(found.tasks)
            return found

        monkeypatch.setattr(server.system.tasks, "scan", counted)
        reader, writer = await asyncio.open_connection(*server.address)
        head = f"GET /v1/jobs/{job_id}/results HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {server.key}\r\n"
        writer.write(f"{head}accept: application/x-ndjson\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        before = -1
        while read != before:
            before = read
            await asyncio.sleep(0.3)
        assert read < 1500, "30 MB would be all of them"
        writer.close()


@pytest.mark.usefixtures("by_task_id")
class TestBounds:
    """Only so many rows are looked at for one page."""

    @pytest.mark.parametrize("query", ["tag=é1", "http_status=404&tag=é0", "status=failed&tag=é1", "status=succeeded"])
    async def test_short_pages_lead_to_all_of_them(
        self, server: Api, monkeypatch: pytest.MonkeyPatch, query: str
    ) -> None:
        job_id = await ran(server, 100)
        path = f"/v1/jobs/{job_id}/results?{quote(query, safe='=&')}"
        expected = [item["index"] for item in await all_items(server, path)]
        monkeypatch.setattr(sqlite_tasks, "MAX_SCANNED", 7)
        found = await all_items(server, path)
        assert [item["index"] for item in found] == expected
        assert len(expected) < 100
        assert sorted(item["index"] for item in await lines(server, job_id, f"?{quote(query, safe='=&')}")) == sorted(
            expected
        )

    async def test_a_page_of_nothing_goes_on(self, server: Api, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sqlite_tasks, "MAX_SCANNED", 7)
        job_id = await ran(server, 100)
        path, pages = f"/v1/jobs/{job_id}/results?tag=none", 0
        cursor: str | None = ""
        while cursor is not None:
            page = (await server.get(path + (f"&cursor={cursor}" if cursor else ""))).json
            assert page["items"] == []
            cursor, pages = page["next_cursor"], pages + 1
        assert pages > 2
        async with AsyncClient(server.url, server.key) as client:
            assert [each async for each in (await client.job(job_id)).results(tag="none")] == []

    async def test_a_search_is_bounded_too(self, server: Api, monkeypatch: pytest.MonkeyPatch) -> None:
        # One shard reads 6 of 100 rows, four shards read 24 and then no more: fewer than the 25 tasks that match.
        monkeypatch.setattr(sqlite_tasks, "MAX_SCANNED", 6)
        monkeypatch.setattr(merge, "MAX_SCANNED", 6)
        job_id = await ran(server, 100)
        path = f"/v1/jobs/{job_id}/search?text=example&http_status=404"
        first = (await server.get(path)).json
        assert len(first["items"]) <= 4 * 6
        assert first["next_cursor"] is not None
        assert [item["index"] % 4 for item in await all_items(server, path)] == [0] * 25


class TestBodies:
    """By range, from an object, a segment, deflated in a segment, and pieces."""

    BODY = bytes(range(256)) * 20

    async def _task(self, api: Api, layout: str) -> str:
        """A job whose first task has the body, kept in this way; the address of the body."""
        job_id = await ran(api, 4)
        job = await job_of(api, job_id)
        run = RunKey(job.tenant, job.job_id, job.run.run_id, job.task_shard_count)
        blobs, digest = api.system.blobs, sha256(self.BODY).hexdigest()
        if layout == "object":
            await blobs.put("r/one", self.BODY)
            ref = BodyRef("r/one", len(self.BODY), digest)
        elif layout == "packed":
            await blobs.put("r/seg", b"before" + self.BODY + b"behind" * 1000)
            ref = BodyRef("r/seg", len(self.BODY), digest, offset=6)
        elif layout == "deflated":
            deflated = deflate(self.BODY)
            assert deflated is not None
            await blobs.put("r/deflated", b"before" + deflated.data + b"behind" * 1000)
            ref = BodyRef("r/deflated", len(self.BODY), digest, offset=6, stored=deflated.stored)
        elif layout == "log":
            _, key = await blobs.put_all([("r/t/other", b"before"), ("r/t/seg", b"a" + self.BODY + b"b")])
            ref = BodyRef(key, len(self.BODY), digest, offset=1)
        elif layout == "inline":
            ref = BodyRef("", len(self.BODY), digest, inline=self.BODY)
        else:
            for number in range(0, len(self.BODY), 1000):
                await blobs.put(piece_key("r/pieces", number // 1000), self.BODY[number : number + 1000])
            ref = BodyRef("r/pieces", len(self.BODY), digest, piece=1000)
        detail = msgspec.json.encode(ResultDetail(body=ref)).decode()
        await api.system.tasks.put(run, seeds(1, start=1000))
        await api.system.tasks.finish(run, [TaskEnd(1000, TaskStatus.SUCCEEDED, 1, 200, None, detail, 1.0)])
        return f"/v1/jobs/{job_id}/tasks/{task_id(run.run_id, 1000)}/body"

    @pytest.mark.parametrize("layout", ["object", "packed", "deflated", "log", "inline", "pieces"])
    async def test_ranges(self, server: Api, layout: str) -> None:
        path, size = await self._task(server, layout), len(self.BODY)
        whole = await server.get(path, headers={"accept-encoding": "identity"})
        assert (whole.status, whole.body, whole.headers["accept-ranges"]) == (200, self.BODY, "bytes")
        etag = whole.headers["etag"]
        assert etag == f'"{sha256(self.BODY).hexdigest()}"'
        for asked, start, stop in (
            ("bytes=0-0", 0, 1),
            ("bytes=0-", 0, size),
            ("bytes=999-1000", 999, 1001),
            ("bytes=2000-2999", 2000, 3000),
            (f"bytes={size - 1}-", size - 1, size),
            (f"bytes=100-{size * 2}", 100, size),
            ("bytes=-7", size - 7, size),
            (f"bytes=-{size * 2}", 0, size),
        ):
            part = await server.get(path, headers={"range": asked})
            assert (part.status, part.body) == (206, self.BODY[start:stop]), asked
            assert part.headers["content-range"] == f"bytes {start}-{stop - 1}/{size}"
            assert part.headers["content-length"] == str(stop - start)
            assert part.headers["etag"] == etag
            assert part.headers["content-disposition"].startswith("attachment")

    @pytest.mark.parametrize("layout", ["object", "packed", "deflated", "log", "inline", "pieces"])
    async def test_what_is_no_range_of_it(self, server: Api, layout: str) -> None:
        path, size = await self._task(server, layout), len(self.BODY)
        for asked in (f"bytes={size}-", f"bytes={size}-{size + 5}", "bytes=-0"):
            answer = await server.get(path, headers={"range": asked})
            assert (answer.status, answer.json["code"]) == (416, "range_not_satisfiable")
            assert answer.headers["content-range"] == f"bytes */{size}"
        for asked in ("bytes=5-2", "bytes=0-1,3-4", "items=0-1", "bytes=", "bytes=-", "bytes=a-b"):
            answer = await server.get(path, headers={"range": asked})
            assert (answer.status, answer.body) == (200, self.BODY), asked

    async def test_only_of_the_same_version(self, server: Api) -> None:
        path = await self._task(server, "packed")
        etag = (await server.get(path)).headers["etag"]
        same = await server.get(path, headers={"range": "bytes=0-9", "if-range": etag})
        assert (same.status, same.body) == (206, self.BODY[:10])
        for other in ('"other"', f"W/{etag}", "Sun, 15 Nov 2026 12:00:00 GMT"):
            answer = await server.get(path, headers={"range": "bytes=0-9", "if-range": other})
            assert (answer.status, answer.body) == (200, self.BODY)

    async def _sent(self, api: Api, path: str, *headers: str, method: str = "GET", key: bool = True) -> Answer:
        """The answer as it is on the wire: no client decodes it."""
        own = [f"authorization: Bearer {api.key}"] if key else []
        lines = [f"{method} {path} HTTP/1.1", "host: localhost", "connection: close", *own, *headers]
        return parsed(await raw(api.address, ("\r\n".join(lines) + "\r\n\r\n").encode()))

    async def test_a_deflated_body_is_sent_as_gzip_to_those_who_accept_it(self, server: Api) -> None:
        path = await self._task(server, "deflated")
        link = (await server.get(path.removesuffix("/body"))).json["body_url"]
        plain = f'"{sha256(self.BODY).hexdigest()}"'
        for accepted in ("gzip", "x-gzip", "br, GZIP;q=0.5", "identity;q=0.2, gzip;q=0.3", "identity;q=0, gzip"):
            for where, key in ((path, True), (link, False)):
                answer = await self._sent(server, where, f"accept-encoding: {accepted}", key=key)
                assert (answer.status, answer.headers.get("content-encoding")) == (200, "gzip"), accepted
                assert gzip.decompress(answer.body) == self.BODY
                assert len(answer.body) == int(answer.headers["content-length"]) < len(self.BODY)
                assert answer.headers["etag"] == plain[:-1] + '-gzip"'
                assert answer.headers["vary"] == "Accept-Encoding"
        for accepted in ("identity", "br", "*", "gzip;q=0", "gzip;q=0.2, identity", "gzip;q=0, *", "", "gzipped"):
            answer = await self._sent(server, path, f"accept-encoding: {accepted}")
            assert (answer.status, answer.body, answer.headers["etag"]) == (200, self.BODY, plain), accepted
            assert "content-encoding" not in answer.headers
            assert answer.headers["vary"] == "Accept-Encoding"
        for layout in ("object", "packed", "inline"):
            answer = await self._sent(server, await self._task(server, layout), "accept-encoding: gzip")
            assert (answer.body, answer.headers["etag"]) == (self.BODY, plain), layout
            assert not {"content-encoding", "vary"} & answer.headers.keys()

    async def test_a_range_is_one_of_the_version_that_the_client_has(self, server: Api) -> None:
        path = await self._task(server, "deflated")
        whole = await self._sent(server, path, "accept-encoding: gzip")
        plain, zipped = whole.headers["etag"].replace("-gzip", ""), whole.headers["etag"]
        size = len(whole.body)
        for asked, headers, stream in (
            ("bytes=5-19", ["accept-encoding: gzip"], self.BODY),
            ("bytes=5-19", ["accept-encoding: gzip", f"if-range: {plain}"], self.BODY),
            ("bytes=5-19", ["accept-encoding: gzip", f"if-range: {zipped}"], whole.body),
            (f"bytes=5-{size + 9}", ["accept-encoding: gzip", f"if-range: {zipped}"], whole.body),
            ("bytes=-9", ["accept-encoding: gzip", f"if-range: {zipped}"], whole.body),
            ("bytes=0-", ["accept-encoding: gzip;q=0.1, *;q=0"], whole.body),
        ):
            answer = await self._sent(server, path, f"range: {asked}", *headers)
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, stop = (int(first), min(int(last or size), len(stream) - 1) + 1) if first else (size - 9, size)
            assert (answer.status, answer.body) == (206, stream[start:stop]), (asked, headers)
            assert answer.headers["content-range"] == f"bytes {start}-{stop - 1}/{len(stream)}"
            assert answer.headers["content-length"] == str(stop - start)
            assert answer.headers["etag"] == (zipped if stream is whole.body else plain)
            assert answer.headers.get("content-encoding") == ("gzip" if stream is whole.body else None)
        for headers in (
            ["accept-encoding: identity", f"if-range: {zipped}"],
            ["accept-encoding: gzip", 'if-range: "x"'],
        ):
            answer = await self._sent(server, path, "range: bytes=5-19", *headers)
            assert (answer.status, answer.body, answer.headers["etag"]) == (200, self.BODY, plain)
        refused = await self._sent(
            server, path, f"range: bytes={size}-", "accept-encoding: gzip", f"if-range: {zipped}"
        )
        assert (refused.status, refused.headers["content-range"]) == (416, f"bytes */{size}")

    @pytest.mark.parametrize("layout", ["object", "packed", "deflated", "inline", "pieces"])
    async def test_head_tells_what_get_sends(self, server: Api, layout: str) -> None:
        path = await self._task(server, layout)
        link = (await server.get(path.removesuffix("/body"))).json["body_url"]
        for accepted in ("accept-encoding: gzip", "accept-encoding: identity"):
            sent = await self._sent(server, path, accepted)
            for where, key in ((path, True), (link, False)):
                answer = await self._sent(server, where, accepted, "range: bytes=0-4", method="HEAD", key=key)
                assert (answer.status, answer.body) == (200, b"")
                for name in (
                    "content-length",
                    "content-type",
                    "etag",
                    "accept-ranges",
                    "content-disposition",
                    "vary",
                    "content-encoding",
                ):
                    assert answer.headers.get(name) == sent.headers.get(name), name
        for where in (path.replace("tasks/", "tasks/0"), link.replace("signature=", "signature=0")):
            assert (await self._sent(server, where, method="HEAD")).status in {403, 404}

    async def test_the_sdk_reads_deflated_bodies_and_checks_them(self, server: Api, tmp_path: Path) -> None:
        path = await self._task(server, "deflated")
        _, _, _, job_id, _, task, _ = path.split("/")
        async with AsyncClient(server.url, key=server.key) as client:
            job = await client.job(job_id)
            assert await job.body(task) == self.BODY
            assert (await job.save(task, tmp_path / "body")).read_bytes() == self.BODY

    async def test_a_store_that_signs_links_serves_objects_itself(
        self, server: Api, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Signed anew with each reading; what is no object of its own comes from here."""
        signed = 0

        async def sign(key: str, seconds: float, content_type: str, filename: str) -> Presigned:
            nonlocal signed
            signed += 1
            assert (seconds, content_type) == (86_400.0, "application/octet-stream")
            return Presigned(f"https://store/{key}?{signed}", "GET", {})

        path = await self._task(server, "object")
        monkeypatch.setattr(server.system.blobs, "presigned_get", sign)
        task = path.removesuffix("/body")
        links = {(await server.get(task)).json["body_url"] for _ in range(3)}
        assert links == {f"https://store/r/one?{number}" for number in (1, 2, 3)}
        job = task.partition("/tasks/")[0]
        for query, headers in (("", {}), ("?run=latest-per-task", {}), ("", LINES)):
            answer: Answer = await server.get(f"{job}/results{query}", headers=headers)
            assert b"https://store/r/one?" in answer.body
        for layout in ("packed", "deflated", "log", "inline", "pieces"):
            path = await self._task(server, layout)
            link = (await server.get(path.removesuffix("/body"))).json["body_url"]
            assert link.startswith("/v1/bodies/job_"), "one that we sign"

    @pytest.mark.parametrize("layout", ["object", "packed", "deflated", "log", "inline", "pieces"])
    async def test_a_link_needs_no_key(self, server: Api, layout: str) -> None:
        path = await self._task(server, layout)
        link = (await server.get(path.removesuffix("/body"))).json["body_url"]
        whole = await server.get(link, auth=False)
        assert (whole.status, whole.body) == (200, self.BODY)
        assert whole.headers["etag"] == (await server.get(path)).headers["etag"]
        part = await server.get(link, auth=False, headers={"range": "bytes=3-9"})
        assert (part.status, part.body) == (206, self.BODY[3:10])
        job = path.partition("/tasks/")[0]
        items = await all_items(server, f"{job}/results")
        (one,) = [item for item in items if item["index"] == 1000]
        assert (await server.get(one["body_url"], auth=False)).body == self.BODY

    async def test_a_link_is_for_one_body_and_for_a_day(self, server: Api, monkeypatch: pytest.MonkeyPatch) -> None:
        path = await self._task(server, "inline")
        task = path.removesuffix("/body")
        link = (await server.get(task)).json["body_url"]
        items = await all_items(server, f"{task.partition('/tasks/')[0]}/results")
        other = next(item for item in items if item["body_url"] and item["index"] != 1000)
        changed = [
            link.replace(task.rpartition("/")[2], other["task_id"]),
            link.replace("tenant=acme", "tenant=other"),
            link.replace("expires=", "expires=9"),
            link.replace("expires=", "expires=x"),
            link.replace("signature=", "signature=0"),
            link.partition("&signature")[0],
            link.partition("?")[0],
        ]
        for forged in changed:
            answer = await server.get(forged, auth=False)
            assert (answer.status, answer.json["code"]) == (403, "signature_refused"), forged
        now = server.system.clock.now()
        for later, status in ((86_398.0, 200), (86_401.0, 403)):
            with monkeypatch.context() as patched:
                patched.setattr(server.system.clock, "now", lambda later=later: now + later)
                assert (await server.get(link, auth=False)).status == status

    async def test_a_link_to_a_deleted_job_is_not_found(self, server: Api) -> None:
        path = await self._task(server, "inline")
        link = (await server.get(path.removesuffix("/body"))).json["body_url"]
        await server.request("DELETE", path.partition("/tasks/")[0])
        assert (await server.get(link, auth=False)).status == 404
