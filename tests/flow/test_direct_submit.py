"""Submits that skip Litestar get the answers of the route behind it: the same request with a slash at the end."""

import json
from typing import Any

import pytest

from conveyor.errors import EngineFailed
from conveyor.telemetry import metrics
from tests.support.api import Answer, Api

GOOD = json.dumps({"tasks": ["http://example.com/1"], "name": "a job"}).encode()

# Headers that differ between any two answers.
OWN = {"date", "x-request-id", "location"}

CASES: dict[str, dict[str, Any]] = {
    "accepted": {"body": GOOD},
    "accepted for ingest": {"body": GOOD, "headers": {"prefer": "respond-async"}},
    "no key": {"body": GOOD, "auth": False},
    "invalid key": {"body": GOOD, "headers": {"authorization": "Bearer cv_nothing"}},
    "session of another site": {"body": GOOD, "auth": False, "headers": {"cookie": "conveyor_session=x"}},
    "no body": {},
    "not JSON": {"body": b"{"},
    "another media type": {"body": GOOD, "headers": {"content-type": "text/plain"}},
    "compressed": {"body": GOOD, "headers": {"content-encoding": "gzip"}},
    "unknown field": {"body": b'{"tasks": [1], "nope": 1}'},
    "duplicate field": {"body": b'{"tasks": ["http://example.com/"], "name": "a", "name": "b"}'},
    "invalid tasks": {"body": b'{"tasks": ["nonsense"]}'},
    "no tasks": {"body": b'{"tasks": []}'},
    "invalid idempotency key": {"body": GOOD, "headers": {"idempotency-key": "a b"}},
    "expects a response first": {"body": b"{", "headers": {"expect": "something"}},
    "too large": {"body": b" " * 20_000_000},
}


def shown(answer: Answer) -> tuple[int, dict[str, str], Any]:
    """What two answers to the same request have in common."""
    headers = {name: value for name, value in answer.headers.items() if name not in OWN}
    body = answer.json
    if answer.status < 300:
        assert answer.headers["location"] == f"/v1/jobs/{body['id']}"
        body = {name: value for name, value in body.items() if name not in ("id", "created_at", "run")}
    return answer.status, headers, body


@pytest.mark.parametrize("name", CASES)
async def test_both_ways_have_one_answer(server: Api, name: str) -> None:
    direct = await server.request("POST", "/v1/jobs", **CASES[name])
    routed = await server.request("POST", "/v1/jobs/", **CASES[name])
    assert shown(direct) == shown(routed)


async def test_a_query_takes_the_route(server: Api) -> None:
    refused = await server.request("POST", "/v1/jobs?nope=1", body=GOOD)
    assert (refused.status, refused.json["code"]) == (400, "unknown_field")


async def test_it_is_counted_as_the_route(server: Api) -> None:
    counted = metrics.REQUESTS.series
    before = counted.get(("POST", "/v1/jobs", "2xx"), 0)
    for path in ("/v1/jobs", "/v1/jobs/"):
        assert (await server.request("POST", path, body=GOOD)).status == 201
    assert counted["POST", "/v1/jobs", "2xx"] == before + 2


async def test_a_failure_of_ours_is_hidden(server: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an engine, and of a kind that nobody has thought of."""
    for error, status, code in (
        (EngineFailed("a secret"), 503, "engine_failed"),
        (KeyError("a secret"), 500, "internal_error"),
    ):

        async def fails(*_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(server.system.atomic_accept, "accept_atomically", fails)
        for path in ("/v1/jobs", "/v1/jobs/"):
            answer = await server.request("POST", path, body=GOOD)
            assert (answer.status, answer.json["code"]) == (status, code)
            assert "secret" not in answer.body.decode()
