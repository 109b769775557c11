"""Descriptions of export APIs: what is wrong with one is said at submit, and filling one never leaves its place."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyreqwest.http import Url

from conveyor.accept.option_limits import check_limits
from conveyor.accept.spec import decode_spec
from conveyor.errors import InvalidField, UnknownField
from conveyor.lists.templates import (
    Unfillable,
    export_problem,
    fill_json,
    fill_text,
    fill_url,
    is_call,
    look_up,
    scalar,
)
from conveyor.model import ExportApi, ExportCall

GOOD: dict[str, Any] = {
    "create": {"url": "https://api.example/exports?q={input.q}", "body": {"from": "{input.from}"}},
    "id": "$.data.id",
    "status": {"url": "https://api.example/exports/{id}"},
    "state": "/data/state",
    "ready": ["done"],
    "failed": ["error"],
    "download": "$.data.url",
}


def changed(path: str, value: Any) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(GOOD))
    *steps, last = path.split(".")
    inner = made
    for step in steps:
        inner = inner[step]
    inner[last] = value
    return made


def submitted(export: Any, **more: Any) -> None:
    body = {"kind": "export_download", "tasks": [{"q": 1}], "export": export, **more}
    check_limits(decode_spec(json.dumps({name: value for name, value in body.items() if value is not None}).encode()))


def test_a_good_one() -> None:
    submitted(GOOD)
    submitted(changed("download", "https://files.example/{id}/{task_id}.zip"))
    submitted(changed("download", {"url": "https://files.example/{id}", "headers": {"X-Key": "{input.key}"}}))
    submitted(changed("create.body", "plain {input.q} {{text}}"))
    submitted({**GOOD, "poll": {"first": 1, "cap": 3600}, "retry": {"retries": 0, "base": 1}})


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("create.url", "ftp://api.example/", "export.create.url"),
        ("create.url", "https://{input.host}/", "export.create.url"),
        ("create.url", "https://api.example:{input.port}/", "export.create.url"),
        ("create.url", "https://{input.q}@api.example/", "export.create.url"),
        ("create.url", "https://api.example/../{input.q}", "export.create.url"),
        ("create.url", "https://api.example/{id}", "export.create"),
        ("create.url", "https://api.example/{output}", "export.create"),
        ("create.url", "https://api.example/{input.}", "export.create"),
        ("create.url", "https://api.example/{", "export.create"),
        ("create.url", "https://api.example/}", "export.create"),
        ("create.url", "https://api.example/" + "x" * 9000, "export.create"),
        ("create.method", "TRACE", "export.create.method"),
        ("create.headers", {"Host": "x"}, "export.create.headers"),
        ("create.headers", {"X-A": "{nope}"}, "export.create"),
        ("create.body", {"deep": [{"text": "{nope}"}]}, "export.create"),
        ("create.body", {"text": ["x" * 8000] * 40}, "export.create.body"),
        ("id", "", "export.id"),
        ("id", "$.", "export.id"),
        ("id", "a..b", "export.id"),
        ("id", "$" + ".a" * 40, "export.id"),
        ("state", "a[x]", "export.state"),
        ("status.url", "nonsense", "export.status.url"),
        ("ready", [], "export.ready"),
        ("ready", ["x"] * 101, "export.ready"),
        ("failed", ["done"], "export.failed"),
        ("download", "a b..", "export.download"),
        ("download", {"url": "https://files.example/", "method": "POST"}, "export.download"),
        ("download", {"url": "https://files.example/", "body": {}}, "export.download"),
        ("download", "https://{id}.example/", "export.download.url"),
    ],
)
def test_what_is_wrong_is_named(path: str, value: Any, field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        submitted(changed(path, value))
    assert caught.value.details["field"] == field
    assert caught.value.message.startswith(f"`{field}`: ")


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("poll.first", {"poll": {"first": 0}}),
        ("poll.rate", {"poll": {"rate": 0.5}}),
        ("poll.cap", {"poll": {"cap": 3601}}),
        ("poll.timeout", {"poll": {"timeout": 0}}),
        ("retry.retries", {"retry": {"retries": -1}}),
        ("retry.cap", {"retry": {"cap": 4000}}),
    ],
)
def test_numbers_have_their_limits(field: str, more: dict[str, Any]) -> None:
    with pytest.raises(InvalidField) as caught:
        submitted({**GOOD, **more})
    assert caught.value.details["field"] == f"export.{field}"


def test_it_belongs_to_its_kind() -> None:
    with pytest.raises(InvalidField, match="needs `export`"):
        submitted(None)
    with pytest.raises(InvalidField, match="only for kind"):
        submitted(GOOD, kind="download")
    with pytest.raises(UnknownField):
        submitted({**GOOD, "eval": "1"})
    with pytest.raises(InvalidField):
        submitted({name: value for name, value in GOOD.items() if name != "state"})


def test_a_body_can_not_be_too_deep() -> None:
    deep: Any = "x"
    for _ in range(900):
        deep = [deep]
    export = msgspec.structs.replace(
        msgspec.convert(GOOD, ExportApi), create=ExportCall("https://a.example/", body=deep)
    )
    wrong = export_problem(export)
    assert wrong is None or wrong.field == "create.body"


VALUES = {"input": {"q": "a b/c?d#e&f", "n": 5, "deep": {"x": [1]}, "yes": True, "no": None}, "id": "7"}


def test_values_in_their_places() -> None:
    assert fill_url("https://a.example/{input.q}?n={input.n}&y={input.yes}", VALUES) == (
        "https://a.example/a%20b%2Fc%3Fd%23e%26f?n=5&y=true"
    )
    assert fill_text("{{{input.n}}} of {id}", VALUES) == "{5} of 7"
    assert fill_json({"a": "{input.deep}", "b": ["{input.n}", "n={input.n}", 1, None]}, VALUES) == {
        "a": {"x": [1]},
        "b": [5, "n=5", 1, None],
    }
    assert fill_json("{input}", {"input": "whole"}) == "whole"


@pytest.mark.parametrize("template", ["{input.missing}", "{input.deep}", "{input.no}", "{input.n.x}", "{task_id}"])
def test_what_is_not_there_can_not_be_filled(template: str) -> None:
    with pytest.raises(Unfillable):
        fill_text(template, VALUES)


@given(st.text(min_size=1).filter(lambda text: not any("\ud800" <= char <= "\udfff" for char in text)))
def test_a_value_never_leaves_its_place(value: str) -> None:
    """Whatever it is, the URL has the same origin, the same steps around it, and no other query."""
    try:
        filled = fill_url("https://api.example/before/{input}/after?x={input}&y=1", {"input": value})
    except Unfillable:
        assert set(value) == {"."}
        return
    url = Url(filled)
    assert url.origin_ascii == "https://api.example"
    before, inside, after = url.path.removeprefix("/").split("/")
    assert (before, after) == ("before", "after")
    assert inside
    assert url.query_string is not None
    assert url.query_string.count("&") == 1


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("$.a.b[1].c", 3),
        ("a.b[1].c", 3),
        ("/a/b/1/c", 3),
        ("/x~1y/z~0", "slash"),
        ("$", "all"),
        ("/", "empty"),
    ],
)
def test_paths(path: str, found: Any) -> None:
    answer = {"a": {"b": [0, {"c": 3}]}, "x/y": {"z~": "slash"}, "": "empty"}
    assert look_up(answer, path) == (answer if found == "all" else found)


@pytest.mark.parametrize("path", ["$.a.x", "a.b[2]", "/a/b/-1", "/a/b/1/c/d", "$.a.b.c"])
def test_paths_that_lead_nowhere(path: str) -> None:
    with pytest.raises(Unfillable):
        look_up({"a": {"b": [0, {"c": 3}]}}, path)


def test_what_a_state_is() -> None:
    assert [scalar(value, "x") for value in ("a", 1, 1.5, True)] == ["a", "1", "1.5", "true"]
    for value in (None, {}, []):
        with pytest.raises(Unfillable):
            scalar(value, "x")
    assert is_call("HTTPS://a.example/") == ExportCall("HTTPS://a.example/")
    assert is_call("/a/b") is None
