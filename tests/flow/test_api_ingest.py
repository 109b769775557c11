"""Lists over HTTP: what answers 202, every form of a list, lines that are no task, lists that can not be read."""

import asyncio
import gzip
import io
import json
import zipfile
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from conveyor.accept.answer import AcceptedView
from conveyor.api.schemas.job_shapes import JobShape
from conveyor.api.schemas.list_shapes import InvalidLinesPage
from conveyor.model import TaskSeed, TenantId, task_id
from conveyor.read import cursors
from conveyor.settings import Settings
from tests.support.api import Answer, Api
from tests.support.clocks import JumpingClock
from tests.support.working import all_items, ended, until, working
from tests.support.zstd_library import zstd

ACME = TenantId("acme")
COMPRESS: dict[str, Callable[[bytes], bytes]] = {"none": bytes, "gzip": gzip.compress, "zstd": zstd.compress}


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Every stored list is ingested, however small."""
    return Settings.load({}, data=settings.data, allow_private_targets=True, sync_list_bytes=0)


def urls(count: int, start: int = 0) -> list[str]:
    return [f"http://example.com/{number}" for number in range(start, start + count)]


def text(lines: list[str]) -> bytes:
    return ("\n".join(lines) + "\n").encode()


async def submit_list(api: Api, data: bytes, **spec: Any) -> str:
    """Upload a list and make a job of it; the job's id."""
    source = {"upload_id": await api.upload(data), **spec.pop("source", {})}
    answer = await api.submit({"source": source, **spec})
    assert answer.status == 202, answer.body
    job_id: str = answer.json["id"]
    return job_id


async def inputs(api: Api, job_id: str) -> dict[int, Any]:
    """What each task got, by index."""
    return {item["index"]: item["input"] for item in await all_items(api, f"/v1/jobs/{job_id}/results")}


class TestWhatIsIngested:
    async def check(self, server: Api, answer: Answer, tasks: int) -> None:
        assert answer.status == 202, answer.body
        msgspec.json.decode(answer.body, type=AcceptedView)
        assert answer.headers["location"] == f"/v1/jobs/{answer.json['id']}"
        assert (answer.json["state"], answer.json["run"]["total"]) == ("ingesting", 0)
        assert answer.json["result_layout"] == "packed"
        shown = (await server.get(answer.headers["location"])).json
        msgspec.convert(shown, JobShape)
        assert shown["state"] == "ingesting"
        assert shown["ingest"]["tasks"] == 0
        for field, value in answer.json.items():
            if field != "run":
                assert shown[field] == value
        assert (await server.get(f"{answer.headers['location']}/results")).json["items"] == []
        async with working(server.system):
            done = await ended(server, answer.json["id"])
        assert (done["state"], done["run"]["total"], done["run"]["counts"]["succeeded"]) == ("completed", tasks, tasks)
        assert sorted((await inputs(server, answer.json["id"])).values()) == sorted(urls(tasks))

    async def test_more_tasks_than_are_written_at_once(self, server: Api) -> None:
        await self.check(server, await server.submit({"tasks": urls(1001)}), 1001)

    async def test_an_uploaded_list(self, server: Api) -> None:
        upload_id = await server.upload(text(urls(3)))
        await self.check(server, await server.submit({"source": {"upload_id": upload_id}}), 3)

    @pytest.mark.parametrize(
        "prefer", ["respond-async", "RESPOND-ASYNC", "wait=10, respond-async", "respond-async; x=1", " respond-async "]
    )
    async def test_a_small_job_that_asks_for_it(self, server: Api, prefer: str) -> None:
        await self.check(server, await server.submit({"tasks": urls(3)}, headers={"prefer": prefer}), 3)

    @pytest.mark.parametrize("prefer", ["respond-async-not", "wait=respond-async", "return=minimal", ""])
    async def test_other_wishes(self, server: Api, prefer: str) -> None:
        answer = await server.submit({"tasks": urls(3)}, headers={"prefer": prefer})
        assert answer.status == 201
        assert (await server.get(answer.headers["location"])).json["ingest"] is None

    async def test_the_limit_itself_is_written_at_once(self, server: Api) -> None:
        answer = await server.submit({"tasks": urls(1000)})
        assert (answer.status, answer.json["run"]["total"]) == (201, 1000)

    async def test_an_upload_may_serve_several_jobs(self, server: Api) -> None:
        upload_id = await server.upload(text(urls(3)))
        async with working(server.system):
            jobs = [(await server.submit({"source": {"upload_id": upload_id}})).json["id"] for _ in range(3)]
            assert [(await ended(server, job))["state"] for job in jobs] == ["completed"] * 3

    async def test_tasks_of_a_long_request_are_checked_in_it(self, server: Api) -> None:
        answer = await server.submit({"tasks": [*urls(1500), "nonsense"], "on_invalid": "reject"})
        assert (answer.status, answer.json["code"]) == (400, "invalid_tasks")
        assert answer.json["errors"][0]["index"] == 1500
        assert (await server.get("/v1/jobs")).json["items"] == []


FORMS: dict[str, bytes] = {
    "text": b"\xef\xbb\xbfhttp://example.com/0\r\n# a comment\r\n\r\n  http://example.com/3  \nhttp://example.com/4",
    "jsonl": b'"http://example.com/0"\n{"url": "http://example.com/1", "id": "one"}\n\n["no input"]\n',
    "csv": b'url,id,tag\nhttp://example.com/0,"a, b",\nhttp://example.com/1,,"two\nlines"\n',
}
FORM_TASKS: dict[str, dict[int, Any]] = {
    "text": {0: "http://example.com/0", 3: "http://example.com/3", 4: "http://example.com/4"},
    "jsonl": {0: "http://example.com/0", 1: {"url": "http://example.com/1", "id": "one"}},
    "csv": {
        0: {"url": "http://example.com/0", "id": "a, b"},
        1: {"url": "http://example.com/1", "tag": "two\nlines"},
    },
}


class TestForms:
    @pytest.mark.parametrize("named", [False, True], ids=["detected", "named"])
    @pytest.mark.parametrize("compression", COMPRESS)
    @pytest.mark.parametrize("form", FORMS)
    async def test_every_form(self, server: Api, form: str, compression: str, named: bool) -> None:
        source = {"format": form, "compression": compression} if named else {}
        data = COMPRESS[compression](FORMS[form])
        async with working(server.system):
            job_id = await submit_list(server, data, source=source)
            done = await ended(server, job_id)
        assert (done["state"], done["reason"]) == ("completed", None)
        assert await inputs(server, job_id) == FORM_TASKS[form]
        ingest = done["ingest"]
        assert (ingest["tasks"], ingest["ranges"], ingest["ranges_done"]) == (len(FORM_TASKS[form]), 1, 1)
        assert ingest["bytes_read"] == ingest["bytes_total"] > 0
        assert done["invalid_lines"] == ingest["invalid"] == (1 if form == "jsonl" else 0)

    async def test_a_name_wins_over_what_is_found(self, server: Api) -> None:
        """A text list may begin as a csv would."""
        async with working(server.system):
            job_id = await submit_list(server, b"url\nhttp://example.com/1\n", source={"format": "text"})
            done = await ended(server, job_id)
        assert await inputs(server, job_id) == {1: "http://example.com/1"}
        assert done["invalid_lines"] == 1

    async def test_several_members(self, server: Api) -> None:
        data = gzip.compress(text(urls(2))) + gzip.compress(text(urls(2, 2)))
        async with working(server.system):
            job_id = await submit_list(server, data)
            assert (await ended(server, job_id))["run"]["total"] == 4

    async def test_python_tasks(self, server: Api) -> None:
        async with working(server.system):
            data = b'1\n"two"\n{"three": [3]}\nnull\n'
            job_id = await submit_list(server, data, kind="python", handler="h", source={"format": "jsonl"})
            assert (await ended(server, job_id))["state"] == "completed"
        assert await inputs(server, job_id) == {0: 1, 1: "two", 2: {"three": [3]}, 3: None}


class TestRanges:
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return Settings.load({}, data=settings.data, ingest_range_bytes=2000, ingesters=3, sync_list_bytes=0)

    async def test_a_list_is_shared(self, server: Api) -> None:
        lines = urls(1000)
        lines[17] = lines[503] = lines[999] = "nonsense"
        async with working(server.system) as echo:
            job_id = await submit_list(server, text(lines))
            done = await ended(server, job_id)
        assert done["ingest"]["ranges"] == done["ingest"]["ranges_done"] > 5
        assert (done["run"]["total"], done["invalid_lines"]) == (997, 3)
        assert done["ingest"]["bytes_read"] == done["ingest"]["bytes_total"] == len(text(lines))
        assert await inputs(server, job_id) == {at: line for at, line in enumerate(lines) if line != "nonsense"}
        assert len(echo.ran) == 997
        found = await all_items(server, f"/v1/jobs/{job_id}/invalid")
        assert [item["line"] for item in found] == [18, 504, 1000]

    async def test_progress_is_shown_while_it_goes_on(self, server: Api, monkeypatch: pytest.MonkeyPatch) -> None:
        """The third batch waits until the test has looked."""
        put = server.system.tasks.put
        calls = 0
        checked = asyncio.Event()

        async def slow(run: Any, seeds: list[TaskSeed]) -> None:
            nonlocal calls
            calls += 1
            if calls > 2:
                await checked.wait()
            await put(run, seeds)

        monkeypatch.setattr(server.system.tasks, "put", slow)
        data = text(urls(1000))
        job_id = await submit_list(server, data)

        async def look() -> dict[str, Any]:
            shown: dict[str, Any] = (await server.get(f"/v1/jobs/{job_id}")).json
            return shown

        async with working(server.system):
            shown = await until(look, lambda job: job["ingest"]["tasks"] and job["run"]["counts"]["succeeded"])
            msgspec.convert(shown, JobShape)
            assert (shown["state"], shown["eta"]) == ("ingesting", None)
            ingest = shown["ingest"]
            assert 0 < ingest["tasks"] < 1000
            assert 0 < ingest["bytes_read"] < ingest["bytes_total"] == len(data)
            assert 0 < ingest["ranges_done"] < ingest["ranges"]
            assert shown["run"]["total"] == ingest["tasks"]
            checked.set()
            done = await ended(server, job_id)
        assert (done["state"], done["run"]["total"]) == ("completed", 1000)


class TestInvalidLines:
    async def test_they_are_left_out_and_shown(self, server: Api) -> None:
        lines = [*urls(2), "nonsense", "ftp://example.com/", *urls(1, 2), "http://é:x/" + "y" * 500]
        async with working(server.system):
            job_id = await submit_list(server, text(lines))
            done = await ended(server, job_id)
        assert (done["state"], done["run"]["total"], done["invalid_lines"]) == ("completed", 3, 3)
        page = (await server.get(f"/v1/jobs/{job_id}/invalid")).json
        msgspec.convert(page, InvalidLinesPage)
        assert [(item["line"], item["text"]) for item in page["items"]][:2] == [(3, lines[2]), (4, lines[3])]
        assert all(item["reason"] for item in page["items"])
        assert len(page["items"][2]["text"]) <= 200
        assert page["next_cursor"] is None

    @pytest.mark.parametrize("limit", [1, 7, 999, 1000])
    async def test_pages_and_the_whole(self, server: Api, limit: int) -> None:
        """More than fit into one object of them."""
        count = 60 if limit == 1 else 11_000
        lines = [f"bad {number}" if number % 3 else f"http://example.com/{number}" for number in range(count)]
        bad = [number + 1 for number in range(count) if number % 3]
        async with working(server.system):
            job_id = await submit_list(server, text(lines))
            done = await ended(server, job_id)
        assert done["invalid_lines"] == len(bad)
        items = await all_items(server, f"/v1/jobs/{job_id}/invalid", limit if limit != 7 else 701)
        assert [item["line"] for item in items] == bad
        assert [item["text"] for item in items] == [f"bad {line - 1}" for line in bad]
        whole = await server.get(
            f"/v1/jobs/{job_id}/invalid", headers={"accept": "text/html, application/x-ndjson;q=1"}
        )
        assert whole.headers["content-type"] == "application/x-ndjson"
        assert whole.headers["content-disposition"] == f'attachment; filename="{job_id}-invalid.jsonl"'
        assert [json.loads(line) for line in whole.body.splitlines()] == items

    async def test_a_job_without_any(self, server: Api) -> None:
        job_id = (await server.submit({"tasks": urls(1)})).json["id"]
        assert (await server.get(f"/v1/jobs/{job_id}/invalid")).json == {"items": [], "next_cursor": None}
        whole = await server.get(f"/v1/jobs/{job_id}/invalid", headers={"accept": "application/x-ndjson"})
        assert (whole.status, whole.body) == (200, b"")

    async def test_a_cursor_beyond_the_end(self, server: Api) -> None:
        job_id = (await server.submit({"tasks": urls(1)})).json["id"]
        answer = await server.get(f"/v1/jobs/{job_id}/invalid?cursor=999999-999999999999.5")
        assert answer.json == {"items": [], "next_cursor": None}

    async def test_a_list_that_is_to_be_refused(self, server: Api) -> None:
        lines = [*urls(3), *(f"bad {number}" for number in range(7))]
        async with working(server.system) as echo:
            job_id = await submit_list(server, text(lines), on_invalid="reject")
            done = await ended(server, job_id)
        assert (done["state"], done["run"]["total"]) == ("failed", 0)
        assert "7 invalid lines" in done["reason"]
        assert "line 4:" in done["reason"]
        assert "2 more" in done["reason"]
        assert echo.ran == {}
        assert (await server.get(f"/v1/jobs/{job_id}/results")).json["items"] == []

    async def test_a_list_without_a_task(self, server: Api) -> None:
        async with working(server.system):
            job_id = await submit_list(server, b"# nothing\n\nnonsense\n")
            done = await ended(server, job_id)
        assert (done["state"], done["reason"]) == ("failed", "the list has no tasks (1 invalid line)")


async def letters(api: Api) -> list[dict[str, Any]]:
    return await all_items(api, "/v1/dead-letters")


class TestLists:
    """Lists that can not be read: the job says why, a letter is kept, and rerun goes on once it is mended."""

    async def blob_of(self, server: Api, job_id: str) -> str:
        job = await server.system.records.jobs.job(ACME, job_id)  # type: ignore[arg-type]
        assert job is not None
        assert job.source is not None
        return job.source.key

    async def failed(self, server: Api, job_id: str, reason: str) -> None:
        done = await ended(server, job_id)
        assert done["state"] == "failed"
        assert reason in done["reason"]
        assert done["reason"].startswith("ingest failed: ")
        last = (await letters(server))[-1]
        assert (last["job_id"], last["queue"], last["reason"]) == (job_id, "control", done["reason"])

    async def test_a_list_that_is_missing(self, server: Api) -> None:
        data = text(urls(5))
        job_id = await submit_list(server, data)
        key = await self.blob_of(server, job_id)
        await server.system.blobs.delete([key])
        async with working(server.system):
            await self.failed(server, job_id, "no longer exists")
            await server.system.blobs.put(key, data)
            again = await server.post(f"/v1/jobs/{job_id}/rerun")
            assert again.status == 202, again.body
            msgspec.convert(again.json, AcceptedView)
            assert (again.json["state"], again.json["reason"]) == ("ingesting", None)
            done = await ended(server, job_id)
        assert (done["state"], done["run"]["total"], done["run"]["ended_at"] is None) == ("completed", 5, False)
        events = [item["event"] for item in await all_items(server, f"/v1/jobs/{job_id}/events")]
        assert events == ["job.accepted", "run.failed", "run.resumed", "job.ingested", "run.completed"]

    @pytest.mark.parametrize("change", ["another", "shorter", "longer"])
    async def test_a_list_that_was_changed(self, server: Api, change: str) -> None:
        data = text(urls(5))
        changed = {"another": data[:-2] + b"X\n", "shorter": data[:-1], "longer": data + b"\n"}[change]
        job_id = await submit_list(server, data)
        key = await self.blob_of(server, job_id)
        await server.system.blobs.put(key, changed)
        async with working(server.system) as echo:
            await self.failed(server, job_id, "has changed since it was accepted")
            assert echo.ran == {}
            await server.system.blobs.put(key, data)
            assert (await server.post(f"/v1/jobs/{job_id}/rerun", {})).status == 202
            assert (await ended(server, job_id))["state"] == "completed"

    @pytest.mark.parametrize(
        ("data", "reason"),
        [
            (gzip.compress(text(urls(500)))[:-9], "ends too early"),
            (gzip.compress(text(urls(500)))[:40] + b"\0" * 60, "not valid gzip"),
            (zstd.compress(text(urls(500)))[:-9], "ends too early"),
            (b"\x28\xb5\x2f\xfd" + b"\xff" * 60, "not valid zstd"),
            (b"\x1f\x8b", "ends too early"),
            (b"url,url\n1,2\n", "a duplicate name"),
            (b"PK\x03\x04" + b"x" * 100, "Excel"),
            (b"url,id", "a header and no rows"),
            (b'url,id\nhttp://example.com/,"open\n', "quoted"),
            (b"x" * 400_000, "line of more than"),
        ],
        ids=[
            "cut gzip",
            "bad gzip",
            "cut zstd",
            "bad zstd",
            "no gzip",
            "header",
            "excel",
            "rows",
            "quote",
            "line",
        ],
    )
    async def test_a_list_that_is_damaged(self, server: Api, data: bytes, reason: str) -> None:
        async with working(server.system):
            job_id = await submit_list(server, data)
            await self.failed(server, job_id, reason)
            assert (await server.post(f"/v1/jobs/{job_id}/rerun")).status == 202
            await until(lambda: letters(server), lambda found: len(found) == 2)
            await self.failed(server, job_id, reason)

    async def test_a_list_that_is_named_wrongly(self, server: Api) -> None:
        async with working(server.system):
            job_id = await submit_list(server, text(urls(5)), source={"compression": "gzip"})
            await self.failed(server, job_id, "not valid gzip")

    async def test_a_list_of_nothing(self, server: Api) -> None:
        async with working(server.system):
            for data in (b"\n" * 20_000, b"# a comment", b"url,id\n"):
                done = await ended(server, await submit_list(server, data))
                assert (done["state"], done["reason"]) == ("failed", "there were no tasks")
        assert await letters(server) == []

    async def test_a_list_that_goes_while_it_is_read(self, server: Api, clock: JumpingClock) -> None:
        """A crash of the store is tried again, five times, and then given up; rerun goes on where it stopped."""
        data = text(urls(5))
        job_id = await submit_list(server, data)
        put, failing = server.system.tasks.put, True

        async def fails(run: Any, seeds: list[TaskSeed]) -> None:
            if failing:
                raise RuntimeError("the store is down")
            await put(run, seeds)

        server.system.tasks.put = fails  # type: ignore[method-assign]

        async def look() -> dict[str, Any]:
            clock.advance(10)
            shown: dict[str, Any] = (await server.get(f"/v1/jobs/{job_id}")).json
            return shown

        async with working(server.system):
            seen = await until(look, lambda job: job["state"] == "failed")
            assert "the store is down" in seen["reason"]
            assert "5 attempts" in seen["reason"]
            failing = False
            assert (await server.post(f"/v1/jobs/{job_id}/rerun")).status == 202
            assert (await ended(server, job_id))["run"]["counts"]["succeeded"] == 5


class TestBombs:
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return Settings.load({}, data=settings.data, max_list_bytes=1_000_000, sync_list_bytes=0)

    @pytest.mark.parametrize("compression", ["gzip", "zstd"])
    async def test_a_list_is_not_inflated_without_end(self, server: Api, compression: str) -> None:
        line = b"http://example.com/" + b"x" * 81 + b"\n"
        bomb = COMPRESS[compression](line * 500_000)
        assert len(bomb) < 1_000_000
        async with working(server.system):
            job_id = await submit_list(server, bomb, on_invalid="reject")
            done = await ended(server, job_id)
        assert done["state"] == "failed"
        assert "more than 1000000 bytes when decompressed" in done["reason"]


class TestShards:
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        environ = {"CONVEYOR_FORCE_TASK_SHARDS": "1", "CONVEYOR_TASK_SHARD_COUNT": "16"}
        return Settings.load(environ, data=settings.data, ingest_range_bytes=20_000, sync_list_bytes=0)

    @pytest.mark.usefixtures("by_task_id")
    async def test_a_sharded_job_is_listed_as_any_other(self, server: Api) -> None:
        count = 3000
        async with working(server.system):
            job_id = (await server.submit({"tasks": urls(count)})).json["id"]
            done = await ended(server, job_id)
        assert (done["task_shard_count"], done["run"]["counts"]["succeeded"]) == (16, count)
        run_id = done["run"]["id"]
        order = sorted((task_id(run_id, index), index) for index in range(count))
        for limit in (97, 1000):
            items = await all_items(server, f"/v1/jobs/{job_id}/results", limit)
            assert [(item["task_id"], item["index"]) for item in items] == order
        page = (await server.get(f"/v1/jobs/{job_id}/results?limit=10")).json
        assert page["next_cursor"].startswith("sh:")
        assert len(cursors.decode(page["next_cursor"], 16)) == 16
        one = (await server.get(f"/v1/jobs/{job_id}/tasks/{order[7][0]}")).json
        assert one["input"] == f"http://example.com/{order[7][1]}"
        assert (await server.get(one["body_url"])).body == json.dumps(one["input"]).encode()
        only = await all_items(server, f"/v1/jobs/{job_id}/results?status=failed")
        assert only == []

    async def test_all_shards_are_listed_in_list_order(self, server: Api) -> None:
        async with working(server.system):
            job_id = await submit_list(server, text(urls(300)))
            done = await ended(server, job_id)
        assert done["task_shard_count"] == 16
        order = [(task_id(done["run"]["id"], index), index) for index in range(300)]
        for limit in (7, 1000):
            items = await all_items(server, f"/v1/jobs/{job_id}/results", limit)
            assert [(item["task_id"], item["index"]) for item in items] == order

    @pytest.mark.usefixtures("by_task_id")
    async def test_a_cursor_of_another_layout_is_refused(self, server: Api) -> None:
        async with working(server.system):
            small = (await server.submit({"tasks": urls(30)})).json["id"]
            large = await submit_list(server, text(urls(30)))
            for job_id in (small, large):
                await ended(server, job_id)
        plain = (await server.get(f"/v1/jobs/{small}/results?limit=10")).json["next_cursor"]
        composite = (await server.get(f"/v1/jobs/{large}/results?limit=10")).json["next_cursor"]
        assert (len(plain), composite[:3]) == (64, "sh:")
        for job_id, cursor in ((small, composite), (large, composite[:-4])):
            answer = await server.get(f"/v1/jobs/{job_id}/results?cursor={cursor}")
            assert (answer.status, answer.json["code"]) == (400, "bad_cursor")

    async def test_a_listing_from_before_the_shards_goes_on(self, server: Api) -> None:
        async with working(server.system):
            job_id = await submit_list(server, text(urls(30)))
            await ended(server, job_id)
        path = f"/v1/jobs/{job_id}/results"
        # It began in the order of task_id, and keeps that, whatever the order of new listings.
        ids = sorted(item["task_id"] for item in (await server.get(path)).json["items"])
        assert len(ids) == 30
        rest = (await server.get(f"{path}?cursor={ids[11]}")).json["items"]
        assert [item["task_id"] for item in rest] == ids[12:]
        first = (await server.get(f"{path}?cursor={ids[11]}&limit=5")).json
        assert first["next_cursor"].startswith("sh:")
        second = (await server.get(f"{path}?cursor={first['next_cursor']}")).json
        assert [item["task_id"] for item in first["items"] + second["items"]] == ids[12:]

    async def test_small_and_open_jobs(self, server: Api) -> None:
        small, opened = await server.submit({"tasks": urls(3)}), await server.submit({"mode": "open"})
        assert (small.json["task_shard_count"], opened.json["task_shard_count"]) == (1, 16)

    async def test_an_archive_of_all_shards(self, server: Api) -> None:
        async with working(server.system):
            job_id = await submit_list(server, text(urls(200)))
            await ended(server, job_id)
        whole = await server.get(f"/v1/jobs/{job_id}/export")
        with zipfile.ZipFile(io.BytesIO(whole.body)) as archive:
            lines = [json.loads(line) for line in archive.read("manifest.jsonl").splitlines()]
            assert [(line["index"], line["input"]) for line in lines] == list(enumerate(urls(200)))
            assert archive.read(lines[7]["file"]) == json.dumps(urls(200)[7]).encode()
