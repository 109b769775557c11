"""The OpenAPI document is exact: whatever a client sends, the response is one that the document names for the route."""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import NamedTuple

import pytest

from conveyor.errors import ConveyorError
from tests.fuzz import fuzz
from tests.support.api import Answer, Api, new_server, parsed, raw
from tests.support.owned import UNKNOWN, Owned, make_owned
from tests.support.route_table import REQUIRED, VALUES, Route, document, queries, routes

PROBLEM = "application/problem+json"
MAX_BODY = 4096
BAD_IDS = ("x", "0", "%00", "%ff", "..%2f..", "job_" + "0" * 25, "a" * 300)
BAD_VALUES = ("", "null", "-1", "0", "1.5", "9" * 30, "%00", "%ff", "a" * 2000, "sh:AAAA", "run:0:", "task:AAAA")
BAD_BODIES = (b"", b"{", b"[]", b"null", b"\xff", b'{"unknown": 1}', b"[" * 2000, b'"' + b"a" * 2 * MAX_BODY + b'"')
BAD_HEADERS = (
    {"content-type": "text/plain"},
    {"content-type": "application/json; charset=latin-1"},
    {"content-encoding": "gzip"},
    {"idempotency-key": "a" * 256},
    {"idempotency-key": "\u00e9"},
    {"range": "bytes=900-"},
    {"last-event-id": "a" * 300},
    {"authorization": "Bearer x"},
    {"accept": "application/x-ndjson"},
)


class Sent(NamedTuple):
    """One request to a route."""

    path: str
    body: bytes | None = None
    headers: dict[str, str] | None = None
    auth: bool = True


def codes(of: type[ConveyorError] = ConveyorError) -> set[str]:
    return {of.code}.union(*map(codes, of.__subclasses__()))


CODES = codes()


def malformed(route: Route, own: Owned) -> Iterator[Sent]:
    """Requests of which most are wrong in one place."""
    required = "".join(f"?{name}={VALUES[name]}" for name in route.query if name in REQUIRED)
    path = own.path(route.path).replace("{key_id}", "0" * 26)
    body = b"{}" if route.method in {"POST", "PATCH", "PUT"} else None
    yield Sent(path + required, body, auth=False)
    yield Sent(f"{path}?unknown=1", body)
    for query in queries(route, asdict(own)):
        yield Sent(path + own.path(query), body)
    for name in route.query:
        yield Sent(f"{path}?{name}={VALUES.get(name, '1')}&{name}={VALUES.get(name, '1')}")
        for value in BAD_VALUES:
            yield Sent(f"{path}{required}{'&' if required else '?'}{name}={value}", body)
    for name in re.findall(r"{(\w+)}", route.path):
        for value in BAD_IDS:
            yield Sent(own.path(route.path.replace(f"{{{name}}}", value)).replace("{key_id}", "x") + required, body)
    for headers in BAD_HEADERS:
        yield Sent(path + required, body, headers)
    if body is not None:
        for wrong in BAD_BODIES:
            yield Sent(path + required, wrong)


def check(route: Route, sent: Sent, answer: Answer, found: set[str]) -> None:
    """The response is in the document."""
    operations = document()["paths"].get(route.path)
    if operations is None:
        assert route.path == "/v1/openapi.json"
        return
    shown = (route.name, sent, answer)
    # HEAD is GET without a body.
    documented = operations["get" if route.method == "HEAD" else route.method.lower()]["responses"]
    status = str(answer.status)
    # `..` in a path leads to another route, and so does an id with a slash; one that is no number, to none.
    if answer.status == 404 and route.method != "HEAD" and answer.json["code"] == "route_not_found":
        return
    assert status in documented, shown
    assert answer.status != 500, shown
    content = documented[status].get("content")
    if content is None:
        assert not answer.body, shown
        return
    media_type = answer.headers["content-type"].partition(";")[0]
    assert media_type in content, shown
    if answer.status >= 400:
        assert media_type == PROBLEM, shown
        if route.method != "HEAD":
            check_problem(answer)
            found.add(answer.json["code"])


def check_problem(answer: Answer) -> None:
    problem = answer.json
    assert problem["code"] in CODES
    assert problem["status"] == answer.status
    assert problem["type"] == f"urn:conveyor:problem:{problem['code']}"
    assert {type(problem[name]) for name in ("title", "detail")} == {str}


async def send(api: Api, route: Route, sent: Sent) -> Answer:
    return await api.request(route.method, sent.path, body=sent.body, headers=sent.headers, auth=sent.auth)


@pytest.mark.slow
async def test_every_response_is_in_the_document() -> None:
    found: set[str] = set()
    tried = 0
    async with new_server(max_request_bytes=MAX_BODY, failed_keys_per_minute=1_000_000) as api:
        owner = await api.as_tenant("acme", admin=True)
        own = await make_owned(owner, "acme")
        other = await api.as_tenant("other")
        for route in routes():
            if route.is_endless:
                continue
            for sent in malformed(route, own):
                answer = await send(owner, route, sent)
                check(route, sent, answer, found)
                tried += 1
            foreign = Sent(own.path(route.path).replace("{key_id}", "0" * 26), None if route.method == "GET" else b"{}")
            check(route, foreign, await send(other, route, foreign), found)
    print(f"{tried} requests to {sum(not route.is_endless for route in routes())} routes")
    assert tried > 1500
    # What the requests were made for has happened.
    assert found >= {
        "bad_cursor",
        "body_too_large",
        "forbidden",
        "invalid_field",
        "invalid_key",
        "malformed_json",
        "missing_key",
        "not_found",
        "range_not_satisfiable",
        "unknown_field",
        "unsupported_media_type",
    }


@pytest.mark.slow
async def test_requests_made_from_the_document() -> None:
    """A few for each route, by Schemathesis with all its checks; `make fuzz` sends many."""
    fuzzed = await fuzz(examples=1, seed=1, phases="fuzzing")
    assert not fuzzed.found, fuzzed.output
    cases = re.search(r"([0-9]+) generated, ([0-9]+) passed", fuzzed.output)
    assert cases is not None and int(cases[1]) == int(cases[2]) > 100, fuzzed.output
    print(f"{cases[1]} requests")


async def test_the_form_of_ids_and_cursors() -> None:
    """What the server made fits the patterns of the document."""
    async with new_server() as api:
        own = await make_owned(api, "acme")
    forms = {
        parameter["name"]: parameter["schema"]
        for operations in document()["paths"].values()
        for operation in operations.values()
        for parameter in operation.get("parameters", ())
        if parameter["in"] == "path"
    }
    assert set(forms) == {*asdict(own), "key_id"}
    for ids in (own, UNKNOWN):
        for name, value in asdict(ids).items():
            assert name == "number" or re.fullmatch(forms[name]["pattern"], value), name
    assert re.fullmatch(forms["key_id"]["pattern"], api.key.split("_")[1])


async def every_method_is_allowed() -> None:
    """`Allow` has the methods of the path, whether they are asked for or one that it has not was sent."""
    async with new_server() as api:
        for path in {route.path for route in routes()}:
            methods = {route.method for route in routes() if route.path == path}
            options = await api.request("OPTIONS", UNKNOWN.path(path))
            # The routes of administrators tell others nothing.
            refused = (
                {403} if path.startswith(("/v1/keys", "/v1/tenants")) else {401, 403} if path == "/metrics" else set()
            )
            assert options.status in refused or allowed(options) == {*methods, "OPTIONS"}, path
            missing = next(method for method in ("PUT", "POST") if method not in methods)
            answer = await api.request(missing, UNKNOWN.path(path))
            assert (answer.status, answer.json["code"]) == (405, "method_not_allowed")
            assert allowed(answer) == {*methods, "OPTIONS"}, path


def allowed(answer: Answer) -> set[str]:
    return set(answer.headers["allow"].split(", "))


async def test_every_method_is_allowed() -> None:
    await every_method_is_allowed()


async def refused(path: str, field: str) -> None:
    """The request is 400, for the sake of this field."""
    async with new_server() as api:
        own = await make_owned(api, "acme")
        answer = await api.get(own.path(path))
        assert (answer.status, answer.headers["content-type"]) == (400, PROBLEM), answer
        assert (answer.json["code"], answer.json["field"]) == ("invalid_field", field)


async def a_filter_is_a_number_or_absent() -> None:
    await refused("/v1/jobs/{job_id}/results?http_status=null", "http_status")


async def a_run_has_a_name() -> None:
    await refused("/v1/jobs/{job_id}/statistics?run=", "run")


async def a_parameter_is_sent_once() -> None:
    await refused("/v1/jobs/{job_id}/results?status=failed&status=succeeded", "status")


async def test_a_filter_that_would_be_ignored_is_refused() -> None:
    await a_filter_is_a_number_or_absent()
    await a_run_has_a_name()
    await a_parameter_is_sent_once()


async def test_what_is_refused_before_the_routes_is_in_the_document() -> None:
    """Another host, and a head that is too large: any route responds so."""
    async with new_server() as api:
        for line, status, code in (
            ("host: evil.example", 421, "host_refused"),
            (f"host: localhost\r\nx-long: {'a' * 70_000}", 431, "head_too_large"),
        ):
            for path, operations in document()["paths"].items():
                missing = [method for method, shown in operations.items() if str(status) not in shown["responses"]]
                assert not missing or path in {"/healthz", "/readyz"}
            answer = parsed(await raw(api.address, f"GET /v1/jobs HTTP/1.1\r\n{line}\r\n\r\n".encode()))
            assert (answer.status, answer.headers["content-type"]) == (status, PROBLEM)
            assert json.loads(answer.body)["code"] == code
            check_problem(answer)
