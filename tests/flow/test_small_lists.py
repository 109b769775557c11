"""Small lists are small, whichever way they arrive: a stored list of a few kilobytes is read in the request, written
whole on a single partition, and answered 201."""

import gzip
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from conveyor.accept.answer import AcceptedView
from conveyor.api.schemas.job_shapes import JobShape
from conveyor.lists.small_list import EXPANSION
from conveyor.settings import Settings
from tests.support.api import Answer, Api
from tests.support.working import all_items, ended, working
from tests.support.zstd_library import zstd

COMPRESS: dict[str, Callable[[bytes], bytes]] = {"none": bytes, "gzip": gzip.compress, "zstd": zstd.compress}
LIMIT = 64 * 1024


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return Settings.load({}, data=settings.data, allow_private_targets=True, force_task_shards=True)


def urls(count: int) -> list[str]:
    return [f"http://example.com/{number}" for number in range(count)]


def text(lines: list[str]) -> bytes:
    return ("\n".join(lines) + "\n").encode()


async def submit(api: Api, data: bytes, prefer: str = "", **spec: Any) -> Answer:
    source = {"upload_id": await api.upload(data), **spec.pop("source", {})}
    headers = {"prefer": prefer} if prefer else {}
    return await api.submit({"source": source, **spec}, headers=headers)


async def check_whole(api: Api, answer: Answer, tasks: dict[int, Any]) -> dict[str, Any]:
    """It is answered 201, its tasks are there at once on one partition, and it ends."""
    assert answer.status == 201, answer.body
    msgspec.json.decode(answer.body, type=AcceptedView)
    assert (answer.json["state"], answer.json["run"]["total"]) == ("running", len(tasks))
    assert answer.json["task_shard_count"] == 1
    job_id = answer.json["id"]
    items = await all_items(api, f"/v1/jobs/{job_id}/results")
    assert {item["index"]: item["input"] for item in items} == tasks
    shown = (await api.get(f"/v1/jobs/{job_id}")).json
    msgspec.convert(shown, JobShape)
    assert (shown["state"], shown["ingest"]) == ("running", None)
    async with working(api.system):
        done = await ended(api, job_id)
    assert (done["state"], done["run"]["counts"]["succeeded"]) == ("completed", len(tasks))
    return done


@pytest.mark.parametrize("compression", COMPRESS)
async def test_three_lines(server: Api, compression: str) -> None:
    answer = await submit(server, COMPRESS[compression](text(urls(3))))
    await check_whole(server, answer, dict(enumerate(urls(3))))


@pytest.mark.parametrize(
    ("form", "data"),
    [
        ("jsonl", b'"http://example.com/0"\n{"url":"http://example.com/1"}\n'),
        ("csv", b"url,tag\nhttp://example.com/0,\nhttp://example.com/1,b\n"),
    ],
)
@pytest.mark.parametrize("named", [True, False])
async def test_other_forms(server: Api, form: str, data: bytes, named: bool) -> None:
    answer = await submit(server, data, source={"format": form} if named else {})
    assert (answer.status, answer.json["run"]["total"]) == (201, 2)


async def test_indexes_are_those_of_the_lines_and_invalid_ones_are_shown(server: Api) -> None:
    lines = ["# a comment", "http://example.com/a", "", "nonsense", "http://example.com/b"]
    answer = await submit(server, text(lines))
    done = await check_whole(server, answer, {1: lines[1], 4: lines[4]})
    assert done["invalid_lines"] == 1
    (invalid,) = await all_items(server, f"/v1/jobs/{done['id']}/invalid")
    assert (invalid["line"], invalid["text"]) == (4, "nonsense")


async def check_skipped(api: Api, answer: Answer, status: int, inputs: dict[int, str], skipped: dict[int, str]) -> None:
    """The answer counts the invalid tasks, and so does the job; its others succeed."""
    assert (answer.status, answer.json["invalid_lines"]) == (status, len(skipped)), answer.body
    msgspec.json.decode(answer.body, type=AcceptedView)
    done = await ended(api, answer.json["id"])
    assert (done["state"], done["total"], done["invalid_lines"]) == ("completed", len(inputs), len(skipped))
    path = f"/v1/jobs/{done['id']}"
    assert {item["index"]: item["input"] for item in await all_items(api, f"{path}/results")} == inputs
    invalid = await all_items(api, f"{path}/invalid")
    assert {line["line"]: line["text"] for line in invalid} == {at + 1: text for at, text in skipped.items()}


async def test_invalid_tasks_of_a_request_are_skipped_like_those_of_a_list(server: Api) -> None:
    tasks = ["nonsense", "http://example.com/a", {"url": "ftp://x"}, "http://example.com/b"]
    kept = {1: "http://example.com/a", 3: "http://example.com/b"}
    skipped = {0: '"nonsense"', 2: '{"url": "ftp://x"}'}
    headers = {"idempotency-key": "k"}
    answer = await server.submit({"tasks": tasks}, headers=headers)
    async with working(server.system):
        await check_skipped(server, answer, 201, kept, skipped)
        replayed = await server.submit({"tasks": tasks}, headers=headers)
        assert (replayed.body, replayed.headers["idempotency-replayed"]) == (answer.body, "true")
        later = await server.submit({"tasks": tasks}, headers={"prefer": "respond-async"})
        await check_skipped(server, later, 202, kept, skipped)
        longer = await server.submit({"tasks": [*urls(1000), "nonsense"]})
        await check_skipped(server, longer, 202, dict(enumerate(urls(1000))), {1000: '"nonsense"'})
        # What was skipped leaves a gap, and no task is lost behind it.
        again = await server.post(f"/v1/jobs/{answer.json['id']}/duplicate", {})
        await check_skipped(server, again, 201, dict(enumerate(kept.values())), {})
        rerun = await server.post(f"/v1/jobs/{answer.json['id']}/rerun", {"select": "all"})
        assert (rerun.json["invalid_lines"], rerun.json["run"]["number"]) == (2, 2)
        done = await ended(server, answer.json["id"])
    assert (done["run"]["counts"]["succeeded"], done["invalid_lines"]) == (2, 2)


async def test_the_bounds(server: Api) -> None:
    """64 KiB as stored, and as many tasks as a request writes."""
    line = b"http://example.com/" + b"x" * 980 + b"\n"
    count = LIMIT // len(line)
    data = line * count + b"#" * (LIMIT - len(line) * count)
    assert (await submit(server, data)).status == 201
    larger = await submit(server, data + b"#")
    assert (larger.status, larger.json["task_shard_count"]) == (202, 8)
    assert (await submit(server, text(urls(1000)))).status == 201
    assert (await submit(server, text(urls(1001)))).status == 202


async def test_the_bound_of_a_decompressed_list(server: Api) -> None:
    line = b"http://example.com/" + b"x" * 4076 + b"\n"
    assert len(line) == 4096
    count = EXPANSION * LIMIT // len(line)
    assert (await submit(server, gzip.compress(line * count))).status == 201
    assert (await submit(server, gzip.compress(line * count + b"\n"))).status == 202


async def test_who_asks_for_it_gets_202_and_still_one_partition(server: Api) -> None:
    listed = await submit(server, text(urls(3)), prefer="respond-async")
    inline = await server.submit({"tasks": urls(3)}, headers={"prefer": "respond-async"})
    for answer in (listed, inline):
        assert (answer.status, answer.json["state"], answer.json["task_shard_count"]) == (202, "ingesting", 1)
    async with working(server.system):
        for answer in (listed, inline):
            assert (await ended(server, answer.json["id"]))["run"]["counts"]["succeeded"] == 3


@pytest.mark.parametrize(
    ("data", "spec", "code"),
    [
        (b"nonsense\nhttp://example.com/\n", {"on_invalid": "reject"}, "list_rejected"),
        (b"nonsense\n", {}, "no_tasks"),
        (b"\n\n# nothing\n", {}, "no_tasks"),
        (gzip.compress(text(urls(9)))[:-9], {}, "list_unreadable"),
        (b"name,tag\na,b\n", {"source": {"format": "csv"}}, "list_unreadable"),
        (b"url\n", {"source": {"format": "csv"}}, "no_tasks"),
    ],
    ids=["rejected", "invalid", "empty", "cut", "columns", "header"],
)
async def test_what_is_wrong_with_a_list_is_for_ingest_to_say(
    server: Api, data: bytes, spec: dict[str, Any], code: str
) -> None:
    answer = await submit(server, data, **spec)
    assert answer.status == 202
    async with working(server.system):
        done = await ended(server, answer.json["id"])
    assert (done["state"], done["reason_code"]) == ("failed", code)


async def test_a_list_that_was_changed(server: Api) -> None:
    upload_id = await server.upload(text(urls(3)))
    upload = await server.system.records.access.upload(upload_id)
    assert upload is not None
    await server.system.blobs.put(upload.key, text(urls(4)[1:]))
    answer = await server.submit({"source": {"upload_id": upload_id}})
    assert answer.status == 202
    async with working(server.system):
        assert (await ended(server, answer.json["id"]))["reason_code"] == "list_changed"


async def test_a_rerun_and_a_replay(server: Api) -> None:
    upload_id = await server.upload(text(urls(3)))
    key = {"idempotency-key": "k"}
    answers = [await server.submit({"source": {"upload_id": upload_id}}, headers=key) for _ in range(2)]
    assert answers[0].body == answers[1].body
    await check_whole(server, answers[0], dict(enumerate(urls(3))))
    job_id = answers[0].json["id"]
    assert (await server.post(f"/v1/jobs/{job_id}/rerun", {"select": "all"})).status == 202
    async with working(server.system):
        assert (await ended(server, job_id))["run"]["counts"]["succeeded"] == 3


class TestNever:
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return Settings.load({}, data=settings.data, sync_list_bytes=0)

    async def test_zero_ingests_every_list(self, server: Api) -> None:
        assert (await submit(server, text(urls(1)))).status == 202
