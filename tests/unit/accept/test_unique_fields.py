"""A field twice in one object."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.accept import spec, unique_fields
from conveyor.accept.spec import decode_spec
from conveyor.accept.unique_fields import check_unique_fields
from conveyor.errors import BodyTooLarge, DuplicateField


class Pairs(list[Any]):
    """An object that may have a name twice."""


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.lists(st.tuples(st.text(max_size=2), inner), max_size=4).map(Pairs),
    max_leaves=12,
)


def text_of(value: Any, escaped: bool) -> str:
    if isinstance(value, Pairs):
        inner = ", ".join(
            f"{json.dumps(name, ensure_ascii=escaped)} : {text_of(each, escaped)}" for name, each in value
        )
        return "{" + inner + "}"
    if isinstance(value, list):
        return "[" + ",".join(text_of(each, escaped) for each in value) + "]"
    return json.dumps(value, ensure_ascii=escaped)


def has_double(value: Any) -> bool:
    if isinstance(value, Pairs):
        names = [name for name, _ in value]
        return len(set(names)) < len(names) or any(has_double(each) for _, each in value)
    return isinstance(value, list) and any(has_double(each) for each in value)


@given(JSON, st.booleans())
def test_exactly_the_doubled_are_refused(value: Any, escaped: bool) -> None:
    text = text_of(value, escaped).encode(errors="surrogatepass")
    if has_double(value):
        with pytest.raises(DuplicateField):
            check_unique_fields(text)
    else:
        check_unique_fields(text)


def a_field_is_not_taken_twice() -> None:
    for body in (
        b'{"tasks": ["http://a.example/"], "tasks": ["http://b.example/"]}',
        b'{"tasks": [{"url": "http://a.example/", "url": "http://b.example/"}]}',
        b'{"tasks": [], "t\\u0061sks": []}',
        b'{"tasks": ["http://a.example/"], "headers": {"a": "1", "a": "2"}}',
    ):
        try:
            decode_spec(body)
        except DuplicateField as error:
            assert error.details["field"] in {"tasks", "url", "a"}
        else:
            raise AssertionError(body)


def test_a_field_is_not_taken_twice() -> None:
    a_field_is_not_taken_twice()


def test_names_in_strings_do_not_count() -> None:
    decode_spec(b'{"name": "{\\"a\\": 1, \\"a\\": 2}", "tasks": ["http://a.example/{x}", "\\\\"]}')


def test_objects_without_number_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unique_fields, "MAX_OBJECTS", 10)
    check_unique_fields(b"[" + b"{}," * 9 + b"{}]")
    with pytest.raises(BodyTooLarge):
        spec.decode_spec(b'{"tasks": [' + b"{}," * 10 + b"{}]}")
