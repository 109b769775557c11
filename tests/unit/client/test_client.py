"""The client against small real servers: what it sends, what it makes of answers, and when it tries again."""

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from conveyor import errors
from conveyor.client import AsyncClient, Client, Job
from conveyor.client.client_session import ClientSession
from conveyor.client.problem_errors import BY_CODE, error_from_problem
from tests.support.prepared_answers import Hurried, HurriedAsync, Said, Server, serving

PATIENCE = 60.0
SHOWN: dict[str, Any] = {
    "id": "job_1",
    "name": None,
    "kind": "fetch",
    "state": "running",
    "reason": None,
    "run": {"id": "run_1", "number": 1, "total": 3, "counts": {"succeeded": 1, "failed": 0, "cancelled": 0}},
}
JOB = Said(200, json.dumps(SHOWN).encode())
ACCEPTED = Said(201, JOB.body)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as told:
        yield told


@pytest.fixture
def io() -> Hurried:
    return Hurried()


@pytest.fixture
def client(server: Server, io: Hurried) -> Iterator[Client]:
    with Client(server.url, "cv_key") as made:
        made._session = ClientSession(io, server.url, "cv_key", PATIENCE)
        yield made


@pytest.fixture
def job(client: Client) -> Job:
    return Job(client._session, SHOWN)


def page(items: list[Any], cursor: str | None) -> Said:
    return Said(body=json.dumps({"items": items, "next_cursor": cursor}).encode())


def refused(status: int, code: str, wait: str | None = None) -> Said:
    document = {"code": code, "detail": f"{code}, as it is"}
    return Said(status, json.dumps(document).encode(), headers={} if wait is None else {"Retry-After": wait})


# The package


def test_the_sdk_is_there_when_it_is_asked_for() -> None:
    """And not before: a worker, and the command line's help, do without it."""
    program = """
import sys, conveyor
assert "Client" in dir(conveyor)
assert not [name for name in sys.modules if name.startswith(("pyreqwest", "conveyor.client", "asyncio"))]
from conveyor import *
assert all(globals()[name] is getattr(conveyor, name) for name in conveyor.__all__)
assert "pyreqwest" in sys.modules
try:
    conveyor.nothing
except AttributeError:
    print("fine")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "fine\n", done.stderr


def test_a_server_uses_parts_of_the_sdk_without_loading_all_of_it() -> None:
    program = """
import sys, conveyor.embedded, conveyor.cli.local_run
print(*sys.modules)
import conveyor.client
assert sorted(conveyor.client._PLACES) == sorted(conveyor.client.__all__)
assert set(conveyor.client.__all__) < set(dir(conveyor.client))
values = [getattr(conveyor.client, name) for name in conveyor.client.__all__]
from conveyor.client import *
assert values == [globals()[name] for name in conveyor.client.__all__]
assert not hasattr(conveyor.client, "nothing")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not {"conveyor.client.client", "conveyor.client.job", "zipfile", "statistics"} & set(done.stdout.split())


FORKED = """
import os, sys
from conveyor import Client
before = Client(sys.argv[1], "key")
before.health()
if os.fork() == 0:
    for client in (before, Client(sys.argv[1], "key")):
        try:
            client.health()
        except RuntimeError as error:
            print("fork" in str(error), flush=True)
    sys.exit()
os.wait()
print(before.health())
"""


def test_a_forked_process_is_told(server: Server) -> None:
    """And leaves its parent's connections alone."""
    server.answers = [Said(), Said(200, b'{"status": "ok"}')]
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED, server.url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True\nTrue\n{'status': 'ok'}\n", "")


# Requests


def test_a_few_tasks_go_in_the_request(server: Server, client: Client) -> None:
    server.answers = [ACCEPTED]
    made = client.submit(["https://example.com", {"url": "https://example.net"}], name="n", attempts=2, gateway=None)
    assert (made.id, made.state, made.total, made.succeeded, made.ended) == ("job_1", "running", 3, 1, False)
    [asked] = server.asked
    assert (asked.method, asked.path) == ("POST", "/v1/jobs")
    assert asked.headers["authorization"] == "Bearer cv_key"
    assert asked.headers["content-type"] == "application/json"
    assert asked.headers["user-agent"].startswith("conveyor-python/")
    assert json.loads(asked.body) == {
        "name": "n",
        "attempts": 2,
        "gateway": None,
        "tasks": ["https://example.com", {"url": "https://example.net"}],
    }


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, None),
        ({"handler": "shout"}, "python"),
        ({"export": {"id": "/id"}}, "export_download"),
        ({"kind": "download"}, "download"),
    ],
)
def test_options_say_the_kind(server: Server, client: Client, options: dict[str, Any], kind: str | None) -> None:
    server.answers = [ACCEPTED]
    client.submit([1], **options)
    assert json.loads(server.asked[0].body).get("kind") == kind


def test_every_submit_has_a_key_of_its_own(server: Server, client: Client) -> None:
    server.answers = [ACCEPTED, ACCEPTED, ACCEPTED]
    client.submit([1])
    client.submit([1])
    client.submit([1], idempotency_key="mine")
    keys = [asked.headers["idempotency-key"] for asked in server.asked]
    assert len(set(keys)) == 3
    assert keys[2] == "mine"


def test_pages_are_followed_to_their_end(server: Server, job: Job) -> None:
    rows = [{"task_id": f"{number}", "index": number, "input": "u", "status": "failed"} for number in range(3)]
    server.answers = [page(rows[:2], "a b&c"), page(rows[2:], None)]
    assert [found.index for found in job.results(2, status="failed", error_code=None)] == [0, 1, 2]
    assert [asked.path for asked in server.asked] == [
        "/v1/jobs/job_1/results?limit=2&status=failed",
        "/v1/jobs/job_1/results?limit=2&status=failed&cursor=a+b%26c",
    ]


def test_a_listing_that_is_left_asks_no_more(server: Server, client: Client) -> None:
    server.answers = [page([SHOWN, SHOWN], "more")]
    listing = client.jobs()
    assert next(listing).id == "job_1"
    listing.close()  # type: ignore[attr-defined]  # a generator
    assert len(server.asked) == 1


def test_an_id_can_not_leave_its_place_in_the_path(server: Server, client: Client) -> None:
    server.answers = [JOB]
    client.job("../keys?x=1")
    assert server.asked[0].path == "/v1/jobs/..%2Fkeys%3Fx%3D1"


def test_what_a_newer_server_says_besides_is_passed_over(server: Server, job: Job) -> None:
    row = {"task_id": "t", "index": 0, "input": "u", "status": "succeeded", "colour": "red"}
    server.answers = [page([row], None)]
    [found] = job.results()
    assert found.ok
    assert found.as_dict()["input"] == "u"


def test_what_can_be_done_with_a_job(server: Server, job: Job) -> None:
    server.answers = [page([{"line": 2, "reason": "no URL", "text": "x"}], None), *[JOB] * 8, Said(204, b"")]
    assert [line.line for line in job.invalid_lines()] == [2]
    assert job.rerun() is job
    job.rerun(failed=True, tag="x", attempts=2, idempotency_key="once")
    job.rerun(all=True)
    job.cancel()
    job.pause()
    job.resume()
    job.change(rate_per_host=None)
    job.close()
    job.delete()
    assert [json.loads(asked.body) for asked in server.asked if asked.body] == [
        {"select": "failed", "options": {}},
        {"select": {"tag": "x", "status": ["failed"]}, "options": {"attempts": 2}},
        {"select": "all", "options": {}},
        {"rate_per_host": None},
    ]
    assert server.asked[2].headers["idempotency-key"] == "once"
    assert server.asked[1].headers["idempotency-key"]
    assert server.routes == [
        ("GET", "/v1/jobs/job_1/invalid?limit=1000"),
        ("POST", "/v1/jobs/job_1/rerun"),
        ("POST", "/v1/jobs/job_1/rerun"),
        ("POST", "/v1/jobs/job_1/rerun"),
        ("POST", "/v1/jobs/job_1/cancel"),
        ("POST", "/v1/jobs/job_1/pause"),
        ("POST", "/v1/jobs/job_1/resume"),
        ("PATCH", "/v1/jobs/job_1"),
        ("POST", "/v1/jobs/job_1/close"),
        ("DELETE", "/v1/jobs/job_1"),
    ]


def test_all_is_no_choice_among_others(job: Job) -> None:
    with pytest.raises(errors.BadInput):
        job.rerun(all=True, failed=True)


def test_tasks_are_added_in_batches(server: Server, job: Job) -> None:
    server.answers = [Said(202, b'{"count": %d, "invalid_lines": 0}' % count) for count in (1000, 998, 500)]
    assert job.add(range(2500), last=True) == 2498, "what the server added, not what it was sent"
    sent = [json.loads(asked.body) for asked in server.asked]
    assert [len(batch["tasks"]) for batch in sent] == [1000, 1000, 500]
    assert [batch["last_batch"] for batch in sent] == [False, False, True]
    assert len({asked.headers["idempotency-key"] for asked in server.asked}) == 3


def test_letters_are_redriven_in_parts(server: Server, client: Client) -> None:
    busy = Said(409, b'{"code": "run_not_ended", "detail": "busy"}')
    server.answers = [
        Said(200, b'{"redriven": 990, "skipped": 10, "runs": [{"job_id": "a", "run_id": "b"}]}'),
        Said(200, b'{"redriven": 1, "skipped": 999}'),
        busy,
    ]
    done = client.redrive([str(number) for number in range(2002)])
    runs = [{"job_id": "a", "run_id": "b"}]
    assert done == {"redriven": 991, "requeued": 0, "skipped": 1011, "blocked": 2, "runs": runs}
    assert [len(json.loads(asked.body)["ids"]) for asked in server.asked] == [1000, 1000, 2]
    server.answers = [busy]
    with pytest.raises(errors.RunNotEnded):
        client.redrive(["1"])


def test_letters_are_redriven_by_error_job_and_all(server: Server, client: Client) -> None:
    answer = Said(200, b'{"redriven": 2, "skipped": 0, "runs": []}')
    server.answers = [answer, answer, answer]
    assert client.redrive(all=True)["redriven"] == 2
    client.redrive(error_code="http_503")
    client.redrive(job_id="job_1", error_code="timeout")
    assert [json.loads(asked.body) for asked in server.asked] == [
        {"all": True},
        {"error_code": "http_503"},
        {"job_id": "job_1", "error_code": "timeout"},
    ]
    for wrong in ({}, {"ids": ["1"], "all": True}):
        with pytest.raises(errors.BadInput):
            client.redrive(**wrong)  # type: ignore[arg-type]


def test_any_route(server: Server, client: Client) -> None:
    server.answers = [Said(201, b'{"id": "webhook_1"}'), page([{"id": "webhook_1"}], None), Said(204, b"")]
    assert client.request("POST", "/v1/webhooks", body={"url": "u"}, idempotency_key="k") == {"id": "webhook_1"}
    assert list(client.pages("/v1/webhooks")) == [{"id": "webhook_1"}]
    assert client.request("DELETE", "/v1/webhooks/webhook_1") is None


# Errors


@pytest.mark.parametrize("kind", BY_CODE.values(), ids=lambda kind: kind.__name__)
def test_every_error_comes_back_as_its_class(kind: type[errors.ConveyorError]) -> None:
    document = {"type": "t", "title": "T", "status": kind.status, "code": kind.code, "detail": "what", "field": "f"}
    error = error_from_problem(kind.status, json.dumps(document).encode())
    assert type(error) is kind
    assert error.message == "what"
    assert error.details == {"field": "f"}


def test_the_tree_is_whole() -> None:
    declared = {
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.ConveyorError)
    }
    assert set(BY_CODE.values()) == declared


@pytest.mark.parametrize(
    ("status", "family"), [(400, errors.BadInput), (404, errors.NotFound), (418, errors.ConveyorError)]
)
def test_an_unknown_code_keeps_code_and_status(status: int, family: type[errors.ConveyorError]) -> None:
    error = error_from_problem(status, b'{"code": "teapot", "detail": "short and stout", "spout": 1}')
    assert type(error) is family
    assert (error.code, error.status, error.message) == ("teapot", status, "short and stout")
    assert family.code != "teapot"
    again = pickle.loads(pickle.dumps(error))
    assert (again.code, again.status, again.message, again.details) == ("teapot", status, error.message, {"spout": 1})


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b""])
def test_an_answer_of_another_kind_of_server(body: bytes) -> None:
    error = error_from_problem(502, body)
    assert error.status == 502
    assert "CONVEYOR_URL" in error.message


def test_html_with_200_is_no_conveyor(server: Server, client: Client) -> None:
    server.answers = [Said(200, b"<html>hello</html>")]
    with pytest.raises(errors.ConveyorError, match="CONVEYOR_URL"):
        client.job("job_1")


def test_a_redirect_is_not_followed(server: Server, client: Client) -> None:
    server.answers = [Said(302)]
    with pytest.raises(errors.ConveyorError, match="302"):
        client.job("job_1")
    assert len(server.asked) == 1


@pytest.mark.parametrize("url", ["localhost:8080", "ftp://x", "http://", "nonsense"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(errors.InvalidSetting, match="CONVEYOR_URL"):
        Client(url, "key")


def test_a_key_that_can_not_be_a_header(server: Server) -> None:
    with Client(server.url, "with\nnewline") as client, pytest.raises(errors.InvalidSetting):
        client.job("job_1")


# Another try


def test_an_error_is_not_tried_again(server: Server, client: Client) -> None:
    server.answers = [refused(404, "not_found"), JOB]
    with pytest.raises(errors.NotFound):
        client.job("job_1")
    assert len(server.asked) == 1


def test_a_cut_get_is_tried_again(server: Server, client: Client) -> None:
    server.answers = [Said(None), Said(None), JOB]
    assert client.job("job_1").id == "job_1"


def test_a_cut_submit_is_tried_again_under_the_same_key(server: Server, client: Client) -> None:
    server.answers = [Said(None), ACCEPTED]
    client.submit([1, 2])
    first, second = server.asked
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]
    assert first.body == second.body


def test_a_cut_post_without_an_idempotency_key_is_not(server: Server, client: Client) -> None:
    server.answers = [Said(None), Said(201)]
    with pytest.raises(errors.ServerUnreachable):
        client.create_key("acme")
    assert len(server.asked) == 1


@pytest.mark.parametrize("first", [Said(None), Said(504, b"")], ids=["cut", "504"])
def test_a_delete_whose_answer_was_lost_is_done(server: Server, client: Client, first: Said) -> None:
    server.answers = [JOB, first, refused(404, "not_found")]
    client.job("job_1").delete()
    assert [asked.method for asked in server.asked] == ["GET", "DELETE", "DELETE"]


@pytest.mark.parametrize("first", [[], [refused(429, "quota_exceeded", "1")]], ids=["asked once", "refused before"])
def test_a_delete_of_what_is_not_there_is_an_error(server: Server, client: Client, first: list[Said]) -> None:
    server.answers = [JOB, *first, refused(404, "not_found")]
    with pytest.raises(errors.NotFound):
        client.job("job_1").delete()


def test_a_submit_that_is_still_carried_out_is_asked_again(server: Server, client: Client) -> None:
    server.answers = [Said(None), refused(409, "idempotency_key_in_flight"), ACCEPTED]
    assert client.submit([1]).id == "job_1"


@pytest.mark.parametrize(("status", "code"), [(429, "quota_exceeded"), (503, "overloaded"), (503, "no_workers")])
def test_what_is_refused_for_now_is_sent_again_when_it_was_said(
    server: Server, client: Client, io: Hurried, status: int, code: str
) -> None:
    server.answers = [refused(status, code, "7"), refused(status, code, "8"), ACCEPTED]
    assert client.submit([1]).id == "job_1"
    assert io.pauses == [7, 8]
    assert len({asked.headers["idempotency-key"] for asked in server.asked}) == 1


def test_not_for_ever(server: Server, client: Client, io: Hurried) -> None:
    server.answers = [refused(429, "quota_exceeded", "25")] * 3
    with pytest.raises(errors.QuotaExceeded) as caught:
        client.submit([1])
    assert io.pauses == [25, 25]
    assert caught.value.details["retry_after"] == 25


def test_a_failure_that_may_have_been_carried_out_is_not_repeated(server: Server, client: Client) -> None:
    server.answers = [refused(503, "engine_failed")]
    with pytest.raises(errors.EngineFailed):
        client.create_key("acme")
    assert len(server.asked) == 1


def test_a_gateway_in_front_of_a_server_that_starts(server: Server, client: Client) -> None:
    server.answers = [Said(502, b"<html>"), Said(504, b""), JOB]
    assert client.job("job_1").id == "job_1"


def test_nobody_listens(io: Hurried) -> None:
    client = Client("http://127.0.0.1:9", "key")
    client._session = ClientSession(io, "http://127.0.0.1:9", "key", PATIENCE)
    with client, pytest.raises(errors.ServerUnreachable, match="conveyor up"):
        client.health()
    assert io.pauses == pytest.approx([0.1, 0.3, 0.9])


def test_a_server_that_was_there_is_waited_for(server: Server, client: Client, io: Hurried) -> None:
    server.answers = [JOB, *[Said(None)] * 8, JOB]
    client.job("job_1")
    assert client.job("job_1").id == "job_1"
    assert len(io.pauses) == 8
    assert max(io.pauses) == 5


def test_for_as_long_as_was_said(server: Server, client: Client, io: Hurried) -> None:
    server.answers = [JOB, *[Said(None)] * 50]
    client.job("job_1")
    with pytest.raises(errors.ServerUnreachable):
        client.job("job_1")
    assert PATIENCE - 5 < sum(io.pauses) <= PATIENCE


# Uploads


def promise(server: Server, path: str = "there") -> dict[str, Any]:
    headers = {"X-Content-Sha256": "as announced"}
    return {
        "upload_id": "upload_1",
        "url": f"{server.url}/{path}?signature=s",
        "method": "PUT",
        "headers": headers,
    }


def promised(server: Server) -> Said:
    return Said(201, json.dumps(promise(server)).encode())


@pytest.fixture
def urls(tmp_path: Path) -> Path:
    path = tmp_path / "urls.txt"
    path.write_bytes(b"https://example.com/\n" * 50_000)
    return path


def test_a_file_is_staged(server: Server, client: Client, urls: Path) -> None:
    server.answers = [promised(server), Said(204, b""), ACCEPTED]
    seen: list[tuple[int, int | None]] = []
    client.submit(urls, compression="none", progress=lambda sent, total: seen.append((sent, total)))
    asked, put, made = server.asked
    data = urls.read_bytes()
    assert (asked.method, asked.path) == ("POST", "/v1/uploads")
    assert json.loads(asked.body) == {"size": len(data), "sha256": sha256(data).hexdigest()}
    assert (put.method, put.path) == ("PUT", "/there?signature=s")
    assert put.body == data
    assert put.headers["content-length"] == str(len(data))
    assert put.headers["x-content-sha256"] == "as announced"
    assert "authorization" not in put.headers, "the link may lead to another server"
    assert json.loads(made.body) == {"source": {"upload_id": "upload_1", "format": "text", "compression": "none"}}
    assert made.headers["idempotency-key"] == asked.headers["idempotency-key"]
    assert seen == sorted(seen)
    assert seen[-1] == (len(data), len(data))


def test_a_long_iterable_is_staged(server: Server, client: Client) -> None:
    server.answers = [promised(server), Said(204, b""), ACCEPTED]
    client.submit({"n": number} for number in range(5000))
    announced, put, made = server.asked
    assert [json.loads(line)["n"] for line in put.body.splitlines()] == list(range(5000))
    assert json.loads(announced.body) == {"size": len(put.body), "sha256": sha256(put.body).hexdigest()}
    assert json.loads(made.body) == {"source": {"upload_id": "upload_1", "format": "jsonl"}}


def test_an_upload_makes_several_jobs(server: Server, client: Client) -> None:
    server.answers = [promised(server), Said(204, b""), ACCEPTED, ACCEPTED]
    upload = client.upload(["https://example.com/"])
    assert server.asked[1].body == b'"https://example.com/"\n'
    for _ in range(2):
        client.submit(upload, name="again")
        assert json.loads(server.asked[-1].body)["source"] == {"upload_id": "upload_1", "format": "jsonl"}


def test_a_cut_upload_is_sent_again_from_its_start(server: Server, client: Client, urls: Path) -> None:
    server.answers = [promised(server), Said(None), Said(204, b"")]
    client.upload(urls)
    assert server.asked[2].body == urls.read_bytes()


@pytest.mark.parametrize("conflict", [refused(409, "upload_conflict"), Said(412, b"<Error/>")])
@pytest.mark.parametrize("stored", [True, False])
def test_an_upload_that_was_stored_already(
    server: Server, client: Client, urls: Path, stored: bool, conflict: Said
) -> None:
    state = Said(200, json.dumps({"stored": stored}).encode())
    server.answers = [promised(server), Said(None), conflict, state]
    if stored:
        assert client.upload(urls).upload_id == "upload_1"
    else:
        with pytest.raises(errors.ConveyorError):
            client.upload(urls)
    assert server.routes[-1] == ("GET", "/v1/uploads/upload_1")


def test_a_link_that_lapsed_is_asked_for_anew(server: Server, client: Client, urls: Path) -> None:
    state = Said(200, json.dumps({**promise(server, "anew"), "stored": False}).encode())
    server.answers = [promised(server), Said(403, b"<Error/>"), state, Said(200, b"")]
    assert client.upload(urls).upload_id == "upload_1"
    assert server.routes[-1] == ("PUT", "/anew?signature=s")
    assert server.asked[-1].body == urls.read_bytes()


def test_a_link_that_is_refused(server: Server, client: Client, urls: Path) -> None:
    server.answers = [promised(server), Said(403, b"<Error/>"), Said(200, b'{"stored": false}')]
    with pytest.raises(errors.ConveyorError, match="403"):
        client.upload(urls)


def test_a_file_that_shrinks_while_it_is_sent(server: Server, client: Client, urls: Path) -> None:
    server.answers = [promised(server)]

    def shrink(sent: int, total: int | None) -> None:
        urls.write_bytes(b"gone")

    with pytest.raises(errors.ListUnreadable, match="shorter"):
        client.upload(urls, progress=shrink)


def test_a_progress_callback_can_not_call_back(server: Server, client: Client, urls: Path) -> None:
    server.answers = [promised(server)]
    with pytest.raises(RuntimeError, match="progress callback"):
        client.upload(urls, progress=lambda sent, total: client.job("job_1"))


# Downloads

# Longer than what a client reads ahead.
DATA = bytes(range(256)) * 2000


def export_shown(state: str, parts: list[dict[str, Any]]) -> Said:
    error = {"code": "engine_failed", "message": "A stored body is missing."}
    progress = {"tasks": 0, "total": 3, "bytes": 0}
    shown = {"id": "export_1", "job_id": "job_1", "state": state, "error": error, "parts": parts, "progress": progress}
    return Said(body=json.dumps(shown).encode())


def ready(url: str = "/v1/exports/export_1/parts/1", *files: bytes) -> Said:
    parts = [
        {"number": number, "size": len(data), "sha256": sha256(data).hexdigest(), "url": url}
        for number, data in enumerate(files or (DATA,), start=1)
    ]
    return export_shown("ready", parts)


def waiting(state: str = "running") -> Said:
    return export_shown(state, [])


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("out.zip", {"format": "zip"}),
        ("out.JSONL", {"format": "jsonl"}),
        ("out.csv.gz", {"format": "csv", "compression": "gzip"}),
        ("my.list.jsonl.zst", {"format": "jsonl", "compression": "zstd"}),
        ("out.parquet", {"format": "parquet"}),
    ],
)
def test_an_export_is_asked_for_awaited_and_downloaded(
    server: Server, job: Job, tmp_path: Path, name: str, form: dict[str, str]
) -> None:
    server.answers = [waiting("queued"), waiting(), ready(), ready(), Said(200, DATA)]
    assert job.export(tmp_path / name, status="failed", run=2, bodies="none") == [tmp_path / name]
    assert (tmp_path / name).read_bytes() == DATA
    asked = server.asked[0]
    assert (asked.method, asked.path) == ("POST", "/v1/jobs/job_1/exports")
    assert json.loads(asked.body) == {**form, "bodies": "none", "select": {"status": "failed", "run": "2"}}
    assert asked.headers["idempotency-key"]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_name_that_says_no_form(job: Job, tmp_path: Path) -> None:
    with pytest.raises(errors.BadInput, match=r"results\.dat"):
        job.export(tmp_path / "results.dat")


def test_an_export_that_failed(server: Server, job: Job, tmp_path: Path) -> None:
    server.answers = [waiting("queued"), waiting("failed")]
    with pytest.raises(errors.ExportFailed, match="A stored body is missing"):
        job.export(tmp_path / "out.zip")
    assert not list(tmp_path.iterdir())


def test_an_export_in_parts(server: Server, client: Client, tmp_path: Path) -> None:
    parts = (b"one" * 10, b"two" * 10)
    shown = ready("/v1/exports/export_1/parts/x", *parts)
    (tmp_path / "out-0001.csv.gz").write_bytes(parts[0])
    server.answers = [shown, shown, Said(200, parts[1]), Said(200, b'{"export_id": "export_1"}')]
    files = client.export("export_1").download(tmp_path / "out.csv.gz")
    assert [path.name for path in files] == ["out-0001.csv.gz", "out-0002.csv.gz"]
    assert [path.read_bytes() for path in files] == list(parts), "the first was there already"
    assert json.loads((tmp_path / "out.csv.gz.manifest.json").read_text()) == {"export_id": "export_1"}


def test_a_download_goes_on_where_it_broke(server: Server, client: Client, tmp_path: Path) -> None:
    out = tmp_path / "out.zip"
    server.answers = [
        ready(),
        ready(),
        Said(200, DATA[:200_000], length=len(DATA)),
        Said(206, DATA[200_000:400_000], length=len(DATA) - 200_000),
        Said(206, DATA[400_000:]),
    ]
    seen: list[int] = []
    client.export("export_1").download(out, lambda size, total: seen.append(size))
    assert out.read_bytes() == DATA
    assert [asked.headers.get("range") for asked in server.asked[2:]] == [None, "bytes=200000-", "bytes=400000-"]
    assert server.asked[2].headers["accept-encoding"] == "identity"
    assert server.asked[3].headers["if-range"] == f'"{sha256(DATA).hexdigest()}"'
    assert seen[-1] == len(DATA)


def test_another_process_goes_on_with_it_too(server: Server, client: Client, tmp_path: Path) -> None:
    out = tmp_path / "out.zip"
    (tmp_path / f"out.zip.{sha256(DATA).hexdigest()[:12]}.part").write_bytes(DATA[:7000])
    (tmp_path / "out.zip.0123456789ab.part").write_bytes(b"of another export")
    server.answers = [ready(), ready(), Said(206, DATA[7000:])]
    client.export("export_1").download(out)
    assert out.read_bytes() == DATA
    assert server.asked[-1].headers["range"] == "bytes=7000-"


def test_a_server_without_ranges_is_asked_for_all(server: Server, client: Client, tmp_path: Path) -> None:
    out = tmp_path / "out.zip"
    server.answers = [ready(), ready(), Said(200, DATA[:200_000], length=len(DATA)), Said(200, DATA)]
    client.export("export_1").download(out)
    assert out.read_bytes() == DATA


def test_a_download_that_is_something_else(server: Server, client: Client, tmp_path: Path) -> None:
    out = tmp_path / "out.zip"
    out.write_bytes(b"of yesterday")
    server.answers = [ready(), ready(), Said(200, DATA[:-1] + b"!")]
    with pytest.raises(errors.ConveyorError, match="sha256"):
        client.export("export_1").download(out)
    assert out.read_bytes() == b"of yesterday"
    assert [path.name for path in tmp_path.iterdir()] == ["out.zip"]


def test_a_download_that_never_gets_on(server: Server, client: Client, tmp_path: Path) -> None:
    server.answers = [ready(), ready(), *[Said(206, b"", length=100)] * 30]
    with pytest.raises(errors.ServerUnreachable):
        client.export("export_1").download(tmp_path / "out.zip")
    assert len(server.asked) < 30


def test_a_link_to_elsewhere_gets_no_key(server: Server, client: Client, tmp_path: Path) -> None:
    """And is asked for anew when it has lapsed."""
    old, new = ready(f"{server.url}/store/old"), ready(f"{server.url}/store/new")
    lapsed = Said(403, b"<Error><Code>AccessDenied</Code></Error>")
    server.answers = [old, old, Said(200, DATA[:200_000], length=len(DATA)), lapsed, new, Said(206, DATA[200_000:])]
    client.export("export_1").download(tmp_path / "out.zip")
    for asked in server.asked:
        assert ("authorization" in asked.headers) is asked.path.startswith("/v1")
    assert server.asked[-1].path == "/store/new"
    assert "if-range" not in server.asked[-1].headers


def test_an_empty_part(server: Server, client: Client, tmp_path: Path) -> None:
    shown = ready("/v1/exports/export_1/parts/1", b"")
    server.answers = [shown, shown, Said(200, b"")]
    client.export("export_1").download(tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_a_body_in_memory(server: Server, job: Job) -> None:
    etag = f'"{sha256(b"page").hexdigest()}"'
    server.answers = [Said(200, b"page", headers={"ETag": etag}), Said(200, b"pag!", headers={"ETag": etag})]
    assert job.body("task_1") == b"page"
    assert server.asked[0].path == "/v1/jobs/job_1/tasks/task_1/body"
    with pytest.raises(errors.ConveyorError, match="sha256"):
        job.body("task_1")


def test_a_body_to_a_file(server: Server, job: Job, tmp_path: Path) -> None:
    row = {"task_id": "task_1", "index": 0, "input": "u", "status": "succeeded"}
    body = {"size": len(DATA), "sha256": sha256(DATA).hexdigest()}
    server.answers = [
        Said(body=json.dumps({**row, **body}).encode()),
        Said(200, DATA[:100_000], length=len(DATA)),
        Said(206, DATA[100_000:]),
        Said(body=json.dumps(row).encode()),
    ]
    assert job.save("task_1", tmp_path / "page").read_bytes() == DATA
    with pytest.raises(errors.NoBody):
        job.save("task_1", tmp_path / "none")


# The same, awaited


async def test_the_async_client(server: Server, urls: Path, tmp_path: Path) -> None:
    async with AsyncClient(server.url, "cv_key") as client:
        client._session = ClientSession(HurriedAsync(), server.url, "cv_key", PATIENCE)

        async def tasks() -> Any:
            for number in range(1500):
                yield {"n": number}

        server.answers = [Said(None), promised(server), refused(503, "overloaded", "3"), Said(204, b""), ACCEPTED]
        job = await client.submit(tasks(), handler="shout")
        assert len(server.asked[3].body.splitlines()) == 1500
        assert json.loads(server.asked[-1].body)["kind"] == "python"

        server.answers = [*[ready()] * 3, Said(200, DATA[:99_000], length=len(DATA)), Said(206, DATA[99_000:])]
        assert await job.export(tmp_path / "out.zip") == [tmp_path / "out.zip"]
        assert (tmp_path / "out.zip").read_bytes() == DATA

        server.answers = [page([SHOWN], "more"), Said(None), page([SHOWN], None)]
        assert [found.id async for found in client.jobs()] == ["job_1", "job_1"]

        server.answers = [refused(404, "not_found")]
        with pytest.raises(errors.NotFound):
            await client.job("job_2")
