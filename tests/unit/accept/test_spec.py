"""What a client may ask for: the shape, the limit of every option, and the tasks."""

import json
import math
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from conveyor.accept.option_limits import check_limits
from conveyor.accept.spec import JobSpec, decode_spec
from conveyor.accept.task_seeds import check_tasks, encode_list
from conveyor.errors import (
    BadInput,
    InvalidField,
    InvalidTasks,
    MalformedJson,
    NoTasks,
    TooManyTasks,
    UnknownField,
)
from conveyor.lists.inputs import MAX_DEPTH, MAX_INPUT_BYTES
from conveyor.lists.reader import ListReading, read
from conveyor.model import JobKind, ListFormat, OnInvalid, Options, ResultLayout, TaskSeed

URL = "http://example.com/"


def accept(body: bytes | dict[str, Any], most: int = 1000) -> list[TaskSeed]:
    """Every check that a body passes."""
    spec = decode_spec(body if isinstance(body, bytes) else json.dumps(body).encode())
    check_limits(spec)
    return check_tasks(spec.kind, spec.tasks, most, OnInvalid.REJECT).seeds


def test_defaults_are_those_of_options() -> None:
    spec = decode_spec(b'{"tasks": ["http://example.com/"]}')
    assert spec.options() == Options()
    assert (spec.kind, spec.mode, spec.result_layout) == (JobKind.FETCH, "closed", None)


def test_options_stand_beside_the_tasks() -> None:
    spec = decode_spec(
        b'{"kind":"python","handler":"h","name":"n","tasks":[1],"attempts":7,"backoff":{"base":2},"result_layout":"packed"}'
    )
    assert spec.options().attempts == 7
    assert spec.options().backoff.base == 2
    assert spec.result_layout is ResultLayout.PACKED


OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("outage.quick_tries", {"quick_tries": 0}),
    ("outage.delay", {"delay": -1}),
    ("outage.delay", {"delay": 86_401}),
    ("breaker.patience", {"patience": -1}),
    ("upstream", ""),
    ("upstream", "with a blank"),
    ("upstream", "x" * 201),
    ("retry_errors", ["Not A Code"]),
    ("retry_errors", ["timeout"] * 101),
    ("task_deadline", 0.5),
    ("deadline", 0),
    ("deadline", 366 * 86_400),
    ("stuck_after", 0.5),
    ("concurrency", 0),
    ("concurrency", 10_001),
    ("rate_per_host", 0),
    ("rate_per_host", -1),
    ("rate_per_host", 1_000_001),
    ("concurrency_per_host", 0),
    ("attempts", 0),
    ("attempts", 101),
    ("timeout", 0.05),
    ("timeout", 86_401),
    ("connect_timeout", 0),
    ("max_body_bytes", -1),
    ("max_body_bytes", 1024**3 + 1),
    ("max_redirects", -1),
    ("max_redirects", 21),
    ("priority", 1001),
    ("priority", -1001),
    ("priority", 10**30),
    ("retention_days", 0),
    ("retention_days", 365.1),
    ("chunk_size", 0),
    ("chunk_size", 1001),
    ("retry_statuses", [99]),
    ("success_statuses", [200, 600]),
    ("success_statuses", [200] * 501),
    ("backoff.base", {"base": -1}),
    ("backoff.rate", {"rate": 0.5}),
    ("backoff.cap", {"cap": 86_401}),
    ("download.max_bytes", {"max_bytes": -1}),
    ("download.min_rate", {"min_rate": -1}),
    ("download.min_rate_seconds", {"min_rate_seconds": 0}),
    ("export", {"create": {"url": "http://a.example/"}, "id": "$", "status": {"url": "http://a.example/"}}),
    ("failure_threshold", {}),
    ("failure_threshold.failed", {"failed": 0}),
    ("failure_threshold.ratio", {"ratio": 0}),
    ("failure_threshold.ratio", {"ratio": 1.5}),
    ("failure_threshold.after", {"failed": 1, "after": -1}),
    ("name", "x" * 201),
    ("name", "a\r\nb"),
    ("mode", "ajar"),
    ("on_invalid", "maybe"),
    ("idle_timeout", 0.5),
    ("idle_timeout", 30 * 86_400 + 1),
    ("handler", "h"),
    ("headers", {"X-A": "a\r\nX-B: b"}),
    ("headers", {"X-A": "a\0"}),
    ("headers", {"X A": "a"}),
    ("headers", {"": "a"}),
    ("headers", {"X-A\n": "a"}),
    ("headers", {"Host": "a"}),
    ("headers", {"connection": "close"}),
    ("headers", {"Transfer-Encoding": "chunked"}),
    ("headers", {"Content-Length": "1"}),
    ("headers", {f"X-{number}": "a" for number in range(101)}),
    ("gateway", {}),
    ("gateway", {"proxy": "http://p:1", "url": "http://g/?u={url}"}),
    ("gateway", {"proxy": "ftp://p:1"}),
    ("gateway", {"proxy": "nonsense"}),
    ("gateway", {"url": "http://g/"}),
    ("gateway", {"url": "http://{url}/"}),
    ("gateway", {"url": "http://g/{url}", "headers": {"X-A": "a\nb"}}),
    ("gateway", {"url": "http://g/{url}" + "x" * 9000}),
]


@pytest.mark.parametrize(("field", "value"), OUT_OF_RANGE, ids=lambda value: str(value)[:40])
def test_out_of_range(field: str, value: Any) -> None:
    with pytest.raises(InvalidField) as caught:
        accept({"tasks": [URL], field.partition(".")[0]: value})
    assert caught.value.details["field"] == field
    assert field.partition(".")[0] in caught.value.message


def test_nan_is_out_of_every_range() -> None:
    for field in ("rate_per_host", "timeout", "retention_days"):
        with pytest.raises(InvalidField):
            check_limits(msgspec.structs.replace(JobSpec(), **{field: math.nan}))


@pytest.mark.parametrize("handler", [None, "", "a b", "x" * 201, "a\nb"])
def test_python_needs_a_handler(handler: str | None) -> None:
    with pytest.raises(InvalidField) as caught:
        accept({"kind": "python", "handler": handler, "tasks": [1]})
    assert caught.value.details["field"] == "handler"


# From 3.14 on a decoder goes as deep as the stack allows, and the task is refused for its depth.
_TOO_DEEP = InvalidTasks if sys.version_info >= (3, 14) else MalformedJson

MALFORMED: list[tuple[bytes, type[BadInput], dict[str, Any]]] = [
    (b"", MalformedJson, {}),
    (b"  \n ", MalformedJson, {}),
    (b"{", MalformedJson, {}),
    (b'{"tasks": [1,]}', MalformedJson, {"position": 13}),
    (b'{"tasks": [NaN]}', MalformedJson, {"position": 11}),
    (b'{"timeout": NaN}', MalformedJson, {"position": 12}),
    (b'{"timeout": Infinity}', MalformedJson, {"position": 12}),
    (b"{} {}", MalformedJson, {}),
    (b'\xef\xbb\xbf{"tasks": []}', MalformedJson, {"position": 0}),
    (b'{"name": "\xff"}', MalformedJson, {"position": 10}),
    (b'{"tasks": ["\xff"]}', MalformedJson, {"position": 12}),
    (b'{"tasks": ["\xed\xa0\x80"]}', MalformedJson, {"position": 12}),
    (b'{"name": "\\ud800"}', MalformedJson, {}),
    (b'{"tasks": ["\\ud800"]}', MalformedJson, {}),
    (b'{"tasks": ["\\ud800\\u0041"]}', MalformedJson, {}),
    ('{"tasks": []}'.encode("utf-16"), MalformedJson, {"position": 0}),
    (b'{"tasks": [' + b"[" * 100_000 + b"]" * 100_000 + b"]}", _TOO_DEEP, {}),
    (b'{"tasks": [' + b'{"a":' * 100_000, MalformedJson, {}),
    (b"[" * 100_000, InvalidField, {"field": ""}),
    (b"[]", InvalidField, {"field": ""}),
    (b'"tasks"', InvalidField, {"field": ""}),
    (b"null", InvalidField, {"field": ""}),
    (b'{"tasks": {}}', InvalidField, {"field": "tasks"}),
    (b'{"tasks": null}', InvalidField, {"field": "tasks"}),
    (b'{"kind": "nothing"}', InvalidField, {"field": "kind"}),
    (b'{"concurrency": "3"}', InvalidField, {"field": "concurrency"}),
    (b'{"concurrency": 1.5}', InvalidField, {"field": "concurrency"}),
    (b'{"concurrency": true}', InvalidField, {"field": "concurrency"}),
    (b'{"timeout": 1e999}', InvalidField, {"field": "timeout"}),
    (b'{"attempts": ' + b"9" * 5000 + b"}", InvalidField, {"field": "attempts"}),
    (b'{"headers": {"a": 1}}', InvalidField, {"field": "headers[...]"}),
    (b'{"source": {"url": 1}}', InvalidField, {"field": "source.url"}),
    (b'{"source": {"upload_id": "x", "format": "xml"}}', InvalidField, {"field": "source.format"}),
    (b'{"source": {"upload_id": "x", "compression": "rar"}}', InvalidField, {"field": "source.compression"}),
    (b'{"source": {"upload_id": "x", "key": "y"}}', UnknownField, {"field": "source.key"}),
    (b'{"retry_statuses": [1, "x"]}', InvalidField, {"field": "retry_statuses[1]"}),
    (b'{"result_layout": "heap"}', InvalidField, {"field": "result_layout"}),
    (b'{"concurency": 1}', UnknownField, {"field": "concurency"}),
    (b'{"tenant": "other"}', UnknownField, {"field": "tenant"}),
    (b'{"backoff": {"bas": 1}}', UnknownField, {"field": "backoff.bas"}),
    (b'{"a` - at `$.b": 1}', UnknownField, {}),
    (b'{"' + b"x" * 10_000 + b'": 1}', UnknownField, {"field": "x" * 100}),
]


@pytest.mark.parametrize(("body", "error", "details"), MALFORMED, ids=lambda value: str(value)[:40])
def test_wrong_shapes(body: bytes, error: type[BadInput], details: dict[str, Any]) -> None:
    with pytest.raises(error) as caught:
        accept(body)
    assert type(caught.value) is error
    assert details.items() <= caught.value.details.items()
    assert len(caught.value.message) < 500


def test_no_tasks_and_too_many() -> None:
    for body in ({}, {"tasks": []}):
        with pytest.raises(NoTasks):
            accept(body)
    assert len(accept({"tasks": [URL] * 3}, most=3)) == 3
    with pytest.raises(TooManyTasks) as caught:
        accept({"tasks": [URL] * 4}, most=3)
    assert caught.value.details == {"limit": 3, "total": 4}


def test_each_wrong_task_is_named_up_to_a_hundred() -> None:
    with pytest.raises(InvalidTasks) as caught:
        accept({"tasks": [URL, "ftp://x", URL, {"url": URL, "headers": {"A": "b\nc"}}, 7, {"url": URL, "nope": 1}]})
    errors = caught.value.details["errors"]
    assert [(each["index"], each["code"]) for each in errors] == [
        (1, "bad_url"),
        (3, "invalid_field"),
        (4, "invalid_field"),
        (5, "invalid_field"),
    ]
    assert caught.value.details["total"] == 4
    with pytest.raises(InvalidTasks) as caught:
        accept({"tasks": [""] * 250})
    assert len(caught.value.details["errors"]) == 100
    assert caught.value.details["total"] == 250


MIXED = [b'{"url": "http://example.com/a",\r\n"tag": "a"}', b'"ftp://x"', b"[1,\n2]", b'"http://example.com/b"']


def test_invalid_tasks_are_skipped_and_named_by_their_place() -> None:
    tasks = [msgspec.Raw(task) for task in MIXED]
    checked = check_tasks(JobKind.FETCH, tasks, 10)
    assert [(seed.index, seed.input) for seed in checked.seeds] == [
        (0, '{"url":"http://example.com/a","tag":"a"}'),
        (3, '"http://example.com/b"'),
    ]
    assert [(line.line, line.text) for line in checked.invalid] == [(2, '"ftp://x"'), (3, "[1,\n2]")]
    assert checked.lines == 4
    for refused in (tasks[1:3], [tasks[1]]):
        with pytest.raises(InvalidTasks, match="No task is valid, the first at index 0"):
            check_tasks(JobKind.FETCH, refused, 10)
        assert check_tasks(JobKind.FETCH, refused, 10, is_batch=True).seeds == []
    with pytest.raises(InvalidTasks, match="2 tasks are not valid, and the job has `on_invalid: reject`, the first"):
        check_tasks(JobKind.FETCH, tasks, 10, OnInvalid.REJECT, is_batch=True)


async def test_a_staged_list_of_tasks_is_read_as_they_were_checked() -> None:
    """Also what is too large for a line of a list."""
    too_large = b'"http://example.com/%b"' % ("\u00e9".encode() * MAX_INPUT_BYTES)
    for kind, raws in {
        JobKind.FETCH: [*MIXED, too_large, b'"http://example.com/c"', b'"x%b"' % (b" " * 2 * MAX_INPUT_BYTES)],
        JobKind.PYTHON: [b"9" * 2 * MAX_INPUT_BYTES, b"1", b"1e999", b'{"a":\n 1}'],
    }.items():
        tasks = [msgspec.Raw(raw) for raw in raws]
        checked = check_tasks(kind, tasks, 10)
        data = encode_list(tasks, checked)

        async def pieces(data: bytes = data) -> AsyncIterator[bytes]:
            yield data

        batches = [batch async for batch in read(pieces(), ListReading(kind, ListFormat.JSONL))]
        assert [seed for batch in batches for seed in batch.seeds] == checked.seeds
        found = [(line.line, line.text[:100].replace("\n", " ")) for batch in batches for line in batch.invalid]
        assert found == [(line.line, line.text[:100].replace("\n", " ")) for line in checked.invalid]
        assert sum(batch.index for batch in batches) == checked.lines


@pytest.mark.parametrize(
    "url",
    [
        "",
        "x",
        "//x",
        "ftp://x/",
        "file:///etc/passwd",
        "http://",
        "http:///x",
        "http://x:0/",
        "http://x:99999/",
        "http://a b/",
    ],
)
def test_urls_that_can_not_be_fetched(url: str) -> None:
    with pytest.raises(InvalidTasks) as caught:
        accept({"tasks": [url]})
    assert caught.value.details["errors"][0]["code"] == "bad_url"


PYTHON = {"kind": "python", "handler": "h"}


@pytest.mark.parametrize("value", [None, True, 0, -1.5, 10**300, "", "\0", [], {}, {"a": [{"b": None}]}, "x" * 1000])
def test_python_tasks_are_any_value(value: Any) -> None:
    [seed] = accept({**PYTHON, "tasks": [value]})
    assert json.loads(seed.input) == value


@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 5000])
def test_numbers_that_python_can_not_hold(number: str) -> None:
    with pytest.raises(InvalidTasks):
        accept(b'{"kind": "python", "handler": "h", "tasks": [{"n": [%s]}]}' % number.encode())


def test_the_size_of_a_task_is_limited() -> None:
    fits = "x" * (MAX_INPUT_BYTES - 2)
    assert len(accept({**PYTHON, "tasks": [fits]})) == 1
    with pytest.raises(InvalidTasks) as caught:
        accept({**PYTHON, "tasks": [fits + "x"]})
    assert caught.value.details["errors"][0]["code"] == "too_large"


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"[": ', "}")])
def test_the_depth_of_a_task_is_limited(opening: str, closing: str) -> None:
    def nested(depth: int) -> bytes:
        task = opening * depth + "1" + closing * depth
        return b'{"kind": "python", "handler": "h", "tasks": [%s]}' % task.encode()

    accept(nested(MAX_DEPTH))
    with pytest.raises(InvalidTasks) as caught:
        accept(nested(MAX_DEPTH + 1))
    assert caught.value.details["errors"][0]["code"] == "too_deep"


def test_wide_is_not_deep() -> None:
    accept({**PYTHON, "tasks": [[[] for _ in range(1000)], ["[" * 1000, '"[\\' * 100]]})


def test_an_input_is_one_line() -> None:
    [seed] = accept(b'{"tasks": [{\n  "url": "http://example.com/",\r\n  "tag": "a\\nb"\n}]}')
    assert seed.input == '{"url":"http://example.com/","tag":"a\\nb"}'


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
field_names = st.sampled_from([*JobSpec.__struct_fields__, "proxy", "url", "nope"])


def check_only_bad_input(body: bytes) -> None:
    try:
        accept(body)
    except BadInput as error:
        assert error.status in {400, 413, 415}
        assert error.message


@settings(max_examples=400, deadline=None)
@given(anything)
@example({"tasks": ["\ud800"]})
@example({"tasks": [math.nan]})
def test_any_json_is_accepted_or_bad_input(value: Any) -> None:
    check_only_bad_input(json.dumps(value).encode())


@pytest.mark.slow
@settings(max_examples=800, deadline=None)
@given(
    st.dictionaries(field_names, anything, max_size=4),
    st.lists(anything | st.text().map(lambda text: "http://" + text), max_size=3),
    st.sampled_from([{}, PYTHON]),
)
def test_any_value_of_a_known_field_is_accepted_or_bad_input(
    fields: dict[str, Any], tasks: list[Any], kind: dict[str, str]
) -> None:
    check_only_bad_input(
        json.dumps({"tasks": tasks, **kind, **fields}, ensure_ascii=False).encode("utf-8", "surrogatepass")
    )


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 100))
def test_any_bytes_are_bad_input(noise: bytes, at: int) -> None:
    body = b'{"name": "a", "tasks": ["http://example.com/", {"url": "http://example.com/b"}], "attempts": 3}'
    check_only_bad_input(noise)
    check_only_bad_input(body[:at] + noise + body[at:])
    check_only_bad_input(body[:at] + noise + body[at + len(noise) :])
