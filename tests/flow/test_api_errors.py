"""Bad input over HTTP: each kind has its code and status, and leaves nothing behind."""

import asyncio
import json
import re
from typing import Any

import pytest
import structlog

from conveyor.api import problems
from conveyor.api import result_routes as results
from conveyor.api.router import application
from conveyor.settings import Settings
from conveyor.system import System
from tests.support.api import Answer, Api, new_key
from tests.support.clocks import JumpingClock

URL = "http://example.com/"
TABLES = (
    "jobs",
    "runs",
    "ranges",
    "uploads",
    "tasks",
    "task_runs",
    "task_events",
    "messages",
    "outbox",
    "documents",
    "idempotency",
)


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return Settings.load({}, data=settings.data, max_request_bytes=100_000, max_inline_tasks=50)


async def rows(system: System) -> int:
    """Everything that a request could have written."""
    database: Any = system.records.jobs._database  # type: ignore[attr-defined]
    counts = [await database.row(f"SELECT count(*) FROM {table}", {}) for table in TABLES]
    (ids,) = await database.row("SELECT count(*) FROM documents WHERE kind = 'task_store'", {})
    return sum(count for (count,) in counts) - int(ids)


def check_problem(answer: Answer, status: int, code: str) -> dict[str, Any]:
    assert (answer.status, answer.json["code"]) == (status, code), answer.body
    assert answer.headers["content-type"] == problems.MEDIA_TYPE
    assert answer.json["status"] == status
    assert answer.json["type"] == f"urn:conveyor:problem:{code}"
    assert answer.json["title"]
    assert answer.json["detail"]
    assert answer.headers["x-request-id"]
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    assert "server" not in answer.headers
    found: dict[str, Any] = answer.json
    return found


def spec(**fields: Any) -> bytes:
    return json.dumps({"tasks": [URL], **fields}).encode()


def lines(count: int) -> bytes:
    return json.dumps({"tasks": [URL] * count}).encode()


BAD_BODIES: list[tuple[str, bytes, int, str]] = [
    ("malformed", b'{"tasks": [', 400, "malformed_json"),
    ("empty", b"", 400, "malformed_json"),
    ("not UTF-8", b'{"tasks": ["\xff"]}', 400, "malformed_json"),
    ("NaN", b'{"tasks": ["http://example.com/"], "timeout": NaN}', 400, "malformed_json"),
    ("lone surrogate", b'{"tasks": ["http://example.com/\\ud800"]}', 400, "malformed_json"),
    ("depth bomb", b'{"tasks": [' + b"[" * 20_000 + b"]" * 20_000 + b"]}", 400, "malformed_json"),
    ("deep enough to pass the parser", b'{"tasks": [' + b"[" * 500 + b"]" * 500 + b"]}", 400, "invalid_tasks"),
    ("huge integer", b'{"tasks": ["http://example.com/"], "attempts": ' + b"9" * 5000 + b"}", 400, "invalid_field"),
    ("huge number in a task", b'{"kind": "python", "handler": "h", "tasks": [1e999]}', 400, "invalid_tasks"),
    ("not an object", b"[]", 400, "invalid_field"),
    ("unknown field", spec(concurency=1), 400, "unknown_field"),
    ("unknown field inside", spec(backoff={"bas": 1}), 400, "unknown_field"),
    ("tenant in the body", spec(tenant="other"), 400, "unknown_field"),
    ("wrong type", spec(attempts="3"), 400, "invalid_field"),
    ("out of range", spec(attempts=0), 400, "invalid_field"),
    ("unknown kind", spec(kind="shell"), 400, "invalid_field"),
    ("open with tasks", spec(mode="open"), 400, "invalid_field"),
    ("tasks and a source", spec(source={"upload_id": "x"}), 400, "invalid_field"),
    ("open with a source", spec(tasks=[], mode="open", source={"upload_id": "x"}), 400, "invalid_field"),
    ("unknown upload", spec(tasks=[], source={"upload_id": "x"}), 404, "not_found"),
    ("unknown mode", spec(mode="ajar"), 400, "invalid_field"),
    ("CR/LF in a header", spec(headers={"X-A": "a\r\nX-B: b"}), 400, "invalid_field"),
    ("header of the connection", spec(headers={"Transfer-Encoding": "chunked"}), 400, "invalid_field"),
    ("CR/LF in a task's header", spec(tasks=[{"url": URL, "headers": {"X-A": "a\r\nb"}}]), 400, "invalid_tasks"),
    ("bad gateway", spec(gateway={"url": "http://x/"}), 400, "invalid_field"),
    ("no handler", spec(kind="python"), 400, "invalid_field"),
    ("no tasks", b"{}", 400, "no_tasks"),
    ("empty tasks", spec(tasks=[]), 400, "no_tasks"),
    ("too many tasks", lines(51), 413, "too_many_tasks"),
    ("bad URLs", spec(tasks=["nonsense", "ftp://x/"]), 400, "invalid_tasks"),
    ("a bad URL where none may be", spec(tasks=[URL, "nonsense"], on_invalid="reject"), 400, "invalid_tasks"),
    ("too large", spec(name="x" * 100_000), 413, "body_too_large"),
]


async def test_bad_bodies(server: Api) -> None:
    for name, body, status, code in BAD_BODIES:
        answer = await server.submit(body, headers={"idempotency-key": "k"})
        problem = check_problem(answer, status, code)
        assert len(answer.body) < 20_000, name
        if code in {"invalid_field", "unknown_field"}:
            assert "field" in problem, name
        assert await rows(server.system) == 0, name
    assert (await server.submit(spec(), headers={"idempotency-key": "k"})).status == 201


async def test_bad_urls_are_named_by_index(server: Api) -> None:
    problem = (await server.submit(spec(tasks=[URL, "nonsense", URL, "http://"], on_invalid="reject"))).json
    assert [(each["index"], each["code"]) for each in problem["errors"]] == [(1, "bad_url"), (3, "bad_url")]
    assert problem["total"] == 2
    assert "index 1" in problem["detail"]


async def test_malformed_json_says_where(server: Api) -> None:
    problem = (await server.submit(b'{"tasks": [1,]}')).json
    assert problem["position"] == 13
    assert "byte 13" in problem["detail"]


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "multipart/form-data"},
        {"content-type": "application/json; charset=utf-16"},
        {"content-type": ";;;"},
        {"content-encoding": "gzip"},
    ],
    ids=str,
)
async def test_other_media_types(server: Api, headers: dict[str, str]) -> None:
    check_problem(await server.submit(spec(), headers=headers), 415, "unsupported_media_type")
    assert await rows(server.system) == 0


@pytest.mark.parametrize(
    "kind", ["application/json; charset=UTF-8", "application/vnd.conveyor+json", "APPLICATION/JSON"]
)
async def test_media_types_of_json(server: Api, kind: str) -> None:
    assert (await server.submit(spec(), headers={"content-type": kind})).status == 201


@pytest.mark.parametrize("key", ["", "a b", "x" * 256, "é"], ids=["empty", "space", "long", "not ASCII"])
async def test_bad_idempotency_keys(server: Api, key: str) -> None:
    problem = check_problem(await server.submit(spec(), headers={"idempotency-key": key}), 400, "invalid_field")
    assert problem["field"] == "Idempotency-Key"
    assert await rows(server.system) == 0


async def test_the_longest_idempotency_key(server: Api) -> None:
    assert (await server.submit(spec(), headers={"idempotency-key": "~" * 255})).status == 201


BAD_QUERIES = [
    ("/v1/jobs?limit=0", "invalid_field", "limit"),
    ("/v1/jobs?limit=1001", "invalid_field", "limit"),
    ("/v1/jobs?limit=ten", "invalid_field", "limit"),
    ("/v1/jobs?limit=", "invalid_field", "limit"),
    ("/v1/jobs?limit=99999999999999999999999999", "invalid_field", "limit"),
    ("/v1/jobs?cursor=nonsense", "bad_cursor", None),
    ("/v1/jobs?cursor=", "bad_cursor", None),
    ("/v1/jobs?tenant=other", "unknown_field", "tenant"),
    ("/v1/jobs?system=x", "unknown_field", "system"),
    ("/v1/jobs/{job}?runs=latest", "unknown_field", "runs"),
    ("/v1/jobs/{job}/results?status=running", "invalid_field", "status"),
    ("/v1/jobs/{job}/results?status=", "invalid_field", "status"),
    ("/v1/jobs/{job}/results?stat=failed", "unknown_field", "stat"),
    ("/v1/jobs/{job}/results?http_status=99", "invalid_field", "http_status"),
    ("/v1/jobs/{job}/results?http_status=x", "invalid_field", "http_status"),
    ("/v1/jobs/{job}/results?error_code=" + "x" * 300, "invalid_field", "error_code"),
    ("/v1/jobs/{job}/results?limit=-1", "invalid_field", "limit"),
    ("/v1/jobs/{job}/results?cursor=nonsense", "bad_cursor", None),
    ("/v1/jobs/{job}/results?cursor=sh:W10", "bad_cursor", None),
    ("/v1/jobs/{job}/events?cursor=-1", "bad_cursor", None),
    ("/v1/jobs/{job}/events?cursor=" + "9" * 40, "bad_cursor", None),
    ("/v1/jobs/{job}/export?partial=maybe", "invalid_field", "partial"),
    ("/v1/jobs/{job}/invalid?cursor=nonsense", "bad_cursor", None),
    ("/v1/jobs/{job}/invalid?cursor=", "bad_cursor", None),
    ("/v1/jobs/{job}/invalid?cursor=000000-000000000001", "bad_cursor", None),
    ("/v1/jobs/{job}/invalid?cursor=../000000-000000000001.1", "bad_cursor", None),
    ("/v1/jobs/{job}/invalid?cursor=%D9%A0%D9%A0%D9%A0%D9%A0%D9%A0%D9%A0-000000000001.1", "bad_cursor", None),
    ("/v1/jobs/{job}/invalid?limit=0", "invalid_field", "limit"),
    ("/v1/jobs/{job}/invalid?line=1", "unknown_field", "line"),
    ("/v1/dead-letters?cursor=x", "bad_cursor", None),
    ("/v1/dead-letters?limit=1001", "invalid_field", "limit"),
    ("/v1/dead-letters?tenant=other", "unknown_field", "tenant"),
]


async def test_bad_queries(server: Api) -> None:
    job = (await server.submit(spec())).json["id"]
    for path, code, field in BAD_QUERIES:
        problem = check_problem(await server.get(path.replace("{job}", job)), 400, code)
        assert problem.get("field") == field, path


@pytest.mark.parametrize("noise", ["%ff", "%ed%a0%80", "%00", "a%0d%0ab", "%f0%9f%98%80", "'--", "%25%7b%7d"])
async def test_odd_text_anywhere_is_never_our_failure(server: Api, noise: str) -> None:
    job = (await server.submit(spec())).json["id"]
    paths = [
        f"/v1/jobs/{noise}",
        f"/v1/jobs/{job}/tasks/{noise}",
        f"/v1/jobs/{job}/tasks/{noise}/body",
        f"/v1/jobs/{noise}/export",
        f"/v1/{noise}",
        f"/v1/jobs?cursor={noise}",
        f"/v1/jobs?{noise}={noise}",
        f"/v1/jobs/{job}/results?error_code={noise}",
        f"/v1/jobs/{job}/results?cursor={noise}",
        f"/v1/jobs/{job}/events?task={noise}",
        f"/v1/jobs/{job}/events?cursor={noise}",
        f"/v1/jobs/{noise}/invalid",
        f"/v1/jobs/{job}/invalid?cursor={noise}",
        f"/v1/uploads/{noise}",
        f"/v1/dead-letters?cursor={noise}",
    ]
    for path in paths:
        answer = await server.get(path)
        assert answer.status in {200, 400, 404}, (path, answer)
    for method, path in (
        ("POST", f"/v1/jobs/{noise}/tasks"),
        ("POST", f"/v1/jobs/{noise}/close"),
        ("POST", f"/v1/jobs/{noise}/rerun"),
        ("DELETE", f"/v1/jobs/{noise}"),
        ("PUT", f"/v1/uploads/{noise}/content?signature={noise}"),
    ):
        answer = await server.request(method, path, body=b"{}")
        assert answer.status in {403, 404}, (path, answer)
    admin = await server.as_tenant("local", admin=True)
    for method, path in (("DELETE", f"/v1/keys/{noise}"), ("GET", f"/v1/keys?tenant={noise}&cursor={noise}")):
        answer = await admin.request(method, path)
        assert answer.status in {400, 404}, (path, answer)


async def test_unknown_ids(server: Api) -> None:
    job = (await server.submit(spec())).json["id"]
    for path in (
        "/v1/jobs/nonsense",
        f"/v1/jobs/{job[:-1]}0",
        f"/v1/jobs/{job}/tasks/nonsense",
        f"/v1/jobs/{job}/tasks/{'0' * 64}",
        f"/v1/jobs/{job}/tasks/{'0' * 64}/body",
        f"/v1/jobs/{job.upper()}",
        "/v1/jobs/nonsense/invalid",
        "/v1/uploads/nonsense",
        f"/v1/uploads/upload_{'0' * 26}",
    ):
        check_problem(await server.get(path), 404, "not_found")


async def test_unknown_routes_and_methods(server: Api) -> None:
    for path in (
        "/v1",
        "/v1/",
        "/v1/nothing",
        "/nothing",
        "/v1/jobs/a/b/c/d",
        "/v1/openapi.json/x",
        "/schema",
        "/docs",
    ):
        check_problem(await server.get(path), 404, "route_not_found")
    for method, path in (("DELETE", "/v1/jobs"), ("PUT", "/v1/jobs/x"), ("POST", "/healthz"), ("HEAD", "/v1/jobs")):
        answer = await server.request(method, path)
        assert answer.status == 405
        assert "GET" in answer.headers["allow"]


def broken(key: str) -> list[str | None]:
    return [
        None,
        "",
        "nonsense",
        "Bearer",
        "Bearer nonsense",
        f"Basic {key}",
        f"Bearer {key[:-1]}",
        f"Bearer {key}0",
        f"Bearer {key.upper()}",
        f"Bearer cv_{'0' * 26}_{'0' * 64}",
    ]


async def test_missing_and_wrong_keys(server: Api) -> None:
    for header in broken(server.key):
        headers = {} if header is None else {"authorization": header}
        for answer in (
            await server.get("/v1/jobs", auth=False, headers=headers),
            await server.request("POST", "/v1/jobs", body=spec(), auth=False, headers=headers),
        ):
            assert answer.json["code"] in {"missing_key", "invalid_key"}
            check_problem(answer, 401, answer.json["code"])
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert server.key.encode() not in answer.body
    assert await rows(server.system) == 0


async def test_a_revoked_key_ends_within_two_seconds(server: Api, clock: JumpingClock) -> None:
    assert (await server.get("/v1/jobs")).status == 200
    assert await server.system.records.access.revoke_key(server.key.split("_")[1], clock.now())
    clock.advance(2)
    check_problem(await server.get("/v1/jobs"), 401, "invalid_key")
    check_problem(await server.submit(spec()), 401, "invalid_key")


async def test_a_failure_of_ours_says_nothing(server: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any) -> None:
        raise RuntimeError("canary: /secret/path")

    monkeypatch.setattr(server.system.records.jobs, "jobs", fail)
    problem = check_problem(await server.get("/v1/jobs"), 500, "internal_error")
    assert "canary" not in json.dumps(problem)
    monkeypatch.setattr(server.system.records.access, "key", fail)
    ready = await server.get("/readyz", auth=False)
    problem = check_problem(ready, 503, "unavailable")
    assert "canary" not in json.dumps(problem)
    assert ready.headers["retry-after"] == "1"


async def test_a_stream_that_breaks_is_cut_not_ended(server: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def breaks(*_: Any, **__: Any) -> Any:
        yield b"x" * 100_000
        raise RuntimeError("canary")

    monkeypatch.setattr(results, "export_zip", breaks)
    job = (await server.submit(spec())).json["id"]
    with pytest.raises(Exception, match=r"(?i)body|decod|incomplete|closed|chunk"):
        await server.get(f"/v1/jobs/{job}/export?partial=true")
    assert (await server.get("/healthz")).status == 200


async def test_a_client_that_leaves_ends_its_stream(server: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = asyncio.Event()

    async def endless(*_: Any, **__: Any) -> Any:
        try:
            while True:
                yield b"x" * 100_000
                await asyncio.sleep(0)
        finally:
            closed.set()

    monkeypatch.setattr(results, "export_zip", endless)
    job = (await server.submit(spec())).json["id"]
    reader, writer = await asyncio.open_connection(*server.address)
    request = (
        f"GET /v1/jobs/{job}/export?partial=true HTTP/1.1\r\nhost: [::1]\r\nauthorization: Bearer {server.key}\r\n\r\n"
    )
    writer.write(request.encode())
    assert b"200 OK" in await reader.read(1000)
    writer.close()
    await asyncio.wait_for(closed.wait(), 10)


async def test_the_access_line_has_no_secrets(server: Api) -> None:
    with structlog.testing.capture_logs() as logged:
        await server.get("/v1/jobs?cursor=canary-query", headers={"x-request-id": "mine-1"})
        await server.get("/v1/canary%0Apath")
    text = json.dumps(logged, default=str)
    assert server.key not in text
    assert server.key.split("_")[2] not in text
    assert "canary-query" not in text
    [first, second] = [line for line in logged if line["event"] == "request"]
    assert (first["method"], first["path"], first["status"], first["tenant"]) == ("GET", "/v1/jobs", 400, "acme")
    assert first["request_id"] == "mine-1"
    assert second["path"] == "/v1/canary%0Apath"


@pytest.mark.parametrize("given", ["a b", "x" * 101, "a;b", "<script>"])
async def test_a_harmful_request_id_is_replaced(server: Api, given: str) -> None:
    answer = await server.get("/healthz", headers={"x-request-id": given})
    assert answer.headers["x-request-id"].startswith("req_")


async def test_every_route_under_v1_needs_a_key(server: Api, clock: JumpingClock) -> None:
    assert await new_key(server.system, "acme")
    routes = [route for route in application().routes if route.path_format.startswith("/v1")]
    # The one page that is for everyone, the one route whose right is in its link, and the way into a session, which is
    # for pages of ours.
    apart = {"/v1/openapi.json": 200, "/v1/uploads/{upload_id}/content": 403, "/v1/sign-in": 403}
    apart["/v1/bodies/{job_id}/{task_id}"] = 403
    apart["/v1/extracted/{job_id}/{task_id}"] = 403
    for route in routes:
        for method in set(route.methods) - {"OPTIONS"}:
            path = re.sub(r"{\w+}", "1", route.path_format)
            answer = await server.request(method, path, auth=False)
            assert answer.status == apart.get(route.path_format, 401), path


async def test_a_key_is_for_an_administrator_only(server: Api) -> None:
    for method, path in (("GET", "/v1/keys"), ("POST", "/v1/keys"), ("DELETE", "/v1/keys/x")):
        check_problem(await server.request(method, path, body=b"not even json"), 403, "forbidden")
