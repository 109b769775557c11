"""Labels of a task: its URL, and what is the user's own in its input: `id`, `tag`, and the other columns of the list
(`data`). Gets an input as it is stored, and never fails: an input of a handler may be any JSON."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from conveyor.model import JobKind

_OF_URLS = frozenset({JobKind.FETCH, JobKind.DOWNLOAD})
_LABELS = frozenset({"id", "tag"})

_decode = msgspec.json.Decoder().decode
_text = msgspec.json.Decoder(str).decode


class TaskLabels(NamedTuple):
    """`data` has the list's own columns by name."""

    url: str | None = None
    id: str | None = None
    tag: str | None = None
    data: Mapping[str, Any] = {}


NO_LABELS = TaskLabels()


def labels_of(task_input: msgspec.Raw, kind: JobKind) -> TaskLabels:
    """The labels of an input. For tasks without a URL the columns are the names of an input that is an object."""
    raw = bytes(task_input)
    of_urls = kind in _OF_URLS
    if raw[:1] == b'"':
        return TaskLabels(_string(raw)) if of_urls else NO_LABELS
    value = _object(raw)
    if value is None:
        return NO_LABELS
    data = value.get("data") if of_urls else {name: each for name, each in value.items() if name not in _LABELS}
    url = value.get("url") if of_urls else None
    return TaskLabels(
        url if isinstance(url, str) else None,
        _label(value.get("id")),
        _label(value.get("tag")),
        data if isinstance(data, dict) else {},
    )


def id_of(task_input: msgspec.Raw) -> str | None:
    """The user's `id` of a task."""
    raw = bytes(task_input)
    if b'"id"' not in raw:
        return None
    value = _object(raw)
    return None if value is None else _label(value.get("id"))


def _object(raw: bytes) -> dict[str, Any] | None:
    if raw[:1] != b"{":
        return None
    try:
        value = _decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _string(raw: bytes) -> str | None:
    try:
        return _text(raw)
    except msgspec.MsgspecError:
        return None


def _label(value: object) -> str | None:
    if isinstance(value, str):
        return value
    # Handlers get JSON of any shape: their ids are often numbers.
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else None
