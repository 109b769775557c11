"""Secrets that a user hands in are used and not shown: in results, exports, search, schedules and webhooks."""

import io
import zipfile
from typing import Any

import msgspec
import pytest

from conveyor.engines.tasks import TaskFilter
from conveyor.export.columns import OwnColumn
from conveyor.export.lines import csv_row, manifest_line, result_line, result_line_with_body
from conveyor.jobs.secrets import HIDDEN, shown_input, shown_job, shown_options, shown_url
from conveyor.model import Job, JobId, JobKind, Task, TenantId
from conveyor.telemetry.redact import is_secret_name
from tests.support.api import Api

HEADERS = {
    "Authorization": "Bearer canary",
    "cookie": "session=canary",
    "X-Api-Key": "canary",
    "X-Auth": "canary",
    "Accept": "text/html",
}
TASK = {"url": "http://example.com/page?id=7", "headers": HEADERS, "id": "seven"}
SHOWN = {**TASK, "headers": {**dict.fromkeys(HEADERS, HIDDEN), "Accept": "text/html"}}


async def job_of(server: Api, **spec: Any) -> tuple[str, Job]:
    answer = await server.submit({"tasks": [TASK], **spec})
    assert answer.status == 201, answer.body
    path = answer.headers["location"]
    job = await server.system.records.jobs.job(TenantId("acme"), JobId(path.rpartition("/")[2]))
    assert job is not None
    return path, job


async def only_task(server: Api, job: Job) -> Task:
    [task] = await server.system.tasks.page(job.key, 0, None, 10, TaskFilter())
    return task


async def headers_of_tasks_are_not_shown(server: Api) -> None:
    path, job = await job_of(server)
    stored = await only_task(server, job)
    assert msgspec.json.decode(stored.input) == TASK
    results = await server.get(f"{path}/results")
    assert results.json["items"][0]["input"] == SHOWN
    lines = await server.get(f"{path}/results", headers={"accept": "application/x-ndjson"})
    task = await server.get(f"{path}/tasks/{stored.task_id}")
    archive = await server.get(f"{path}/export?partial=true")
    search = await server.get(f"{path}/search?text=example.com")
    events = await server.get(f"{path}/events?task={stored.task_id}")
    with zipfile.ZipFile(io.BytesIO(archive.body)) as opened:
        files = b"".join(opened.read(name) for name in opened.namelist())
    for shown in (lines.body, task.body, files, search.body):
        assert b"seven" in shown
        assert b"canary" not in shown
    assert b"canary" not in events.body
    assert (await server.get(f"{path}/search?text=canary")).json["items"] == []


async def test_headers_of_tasks_are_not_shown(server: Api) -> None:
    await headers_of_tasks_are_not_shown(server)


async def test_no_form_of_an_export_shows_them(server: Api) -> None:
    _, job = await job_of(server)
    task = await only_task(server, job)
    for line in (
        manifest_line(task, None),
        result_line(task),
        result_line_with_body(task, None, True),
        csv_row(task, JobKind.FETCH, []),
        csv_row(task, JobKind.PYTHON, [OwnColumn("url", "url"), OwnColumn("headers", "data.headers")]),
    ):
        assert b"seven" in line
        assert b"canary" not in line


def test_what_of_an_input_is_hidden() -> None:
    def shown(value: Any) -> Any:
        return msgspec.json.decode(shown_input(msgspec.Raw(msgspec.json.encode(value))))

    assert shown(TASK) == SHOWN
    for kept in (
        "http://example.com/?token=1",
        {"headers": {"Authorization": "mine"}},
        [TASK],
        {"url": 1, "headers": 2},
    ):
        assert shown(kept) == kept


@pytest.mark.parametrize(
    "name", ["Proxy-Authorization", "Set-Cookie", "x-goog-api-key", "X-Auth-Token", "X-Functions-Key"]
)
def test_names_that_mark_a_secret(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["Accept", "User-Agent", "X-Keyword", "X-Author", "If-None-Match", "Referer"])
def test_names_that_mark_none(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://example.com/hook", "https://example.com/hook"),
        ("https://example.com/hook?", "https://example.com/hook?"),
        ("https://example.com/?token=a&x=b=c", f"https://example.com/?token={HIDDEN}&x={HIDDEN}"),
        ("https://u:p@example.com/?canary", f"https://{HIDDEN}@example.com/?{HIDDEN}"),
        ("https://example.com/{id}?k={key}#f", f"https://example.com/{{id}}?k={HIDDEN}"),
    ],
)
def test_what_of_a_url_is_hidden(url: str, shown: str) -> None:
    assert shown_url(url) == shown


def test_what_of_an_export_api_and_a_schedule_is_hidden() -> None:
    export = {"create": {"url": "https://api.example/x?key=canary", "headers": {"X": "canary"}, "body": "canary"}}
    assert shown_options({"export": export})["export"]["create"] == {
        "url": f"https://api.example/x?key={HIDDEN}",
        "headers": {"X": HIDDEN},
        "body": HIDDEN,
    }
    spec = {
        "source": {"url": "https://example.com/list?sig=canary", "headers": {"X": "canary"}},
        "notify": [{"type": "webhook", "url": "https://example.com/?t=canary"}],
        "tasks": [TASK, "http://example.com/"],
        "export": export,
    }
    assert "canary" not in str(shown_job(spec))
    assert shown_job(spec)["tasks"] == [SHOWN, "http://example.com/"]


async def test_the_query_of_a_webhook_is_used_and_not_shown(server: Api) -> None:
    url = "https://example.com/hook?token=canary"
    made = await server.post("/v1/webhooks", {"url": url})
    assert made.status == 201
    path = f"/v1/webhooks/{made.json['id']}"
    for answer in (made, await server.get(path), await server.get("/v1/webhooks")):
        assert b"canary" not in answer.body
    assert made.json["url"] == f"https://example.com/hook?token={HIDDEN}"
    [row] = (await server.system.records.documents.documents("webhook", TenantId("acme"), None, 10)).items
    assert url.encode() in row.body
    back = await server.request("PATCH", path, body=msgspec.json.encode({"url": made.json["url"]}))
    assert (back.status, back.json["code"]) == (400, "invalid_field")


async def test_the_query_of_a_schedules_list_is_not_shown(server: Api) -> None:
    job = {"source": {"url": "https://example.com/list.txt?sig=canary"}, "notify": []}
    made = await server.post("/v1/schedules", {"cron": "0 3 * * *", "job": job})
    assert made.status == 201, made.body
    for answer in (made, await server.get("/v1/schedules")):
        assert b"canary" not in answer.body
    assert made.json["job"]["source"]["url"] == f"https://example.com/list.txt?sig={HIDDEN}"


async def test_invalid_lines_do_not_show_them(server: Api) -> None:
    line = '{"url": "nope", "headers": {"Authorization": "Bearer canary"}}\n"http://me:canary@other.example:x/"\n'
    upload = await server.upload((line + '"http://example.com/"\n').encode())
    made = await server.submit({"source": {"upload_id": upload}})
    shown = await server.get(f"{made.headers['location']}/invalid")
    assert b"nope" in shown.body
    assert b"***@other.example:x/" in shown.body
    assert b"canary" not in shown.body
