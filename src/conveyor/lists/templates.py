"""Templates for calls to export APIs, and paths to values in their answers. Accept validates them; the executor fills
them. Nothing is evaluated.

A template has the placeholders {input}, {input.name}, {id} and {task_id}; {{ and }} are literal braces. In a URL every
value is fully escaped, so that it cannot change the path or the host. A path is a JSON Pointer (/data/0/id) or dotted
($.data[0].id, data.id).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
from pyreqwest.http import Url

from conveyor.egress.target_guard import check_url
from conveyor.lists.inputs import METHODS, headers_problem
from conveyor.model import ExportApi, ExportCall

MAX_TEXT = 8192
MAX_BODY_BYTES = 256 * 1024
MAX_STATES = 100
MAX_STEPS = 32
# Sent with every creation of an export; its value is made of the task's id.
IDEMPOTENCY_KEY = "Idempotency-Key"

_PLACE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_NAME = re.compile(r"(input(?:\.[^.{}\s]+)*|id|task_id)")
_DOTTED_STEP = re.compile(r"([^.\[\]]+)((?:\[\d{1,9}\])*)")
_INDEX = re.compile(r"\d{1,9}")

Values = Mapping[str, Any]


class Unfillable(Exception):
    """A value for a template, or a value in an answer, is missing or is not a text or number."""


class TemplateProblem(NamedTuple):
    """What is wrong with a template or path, and in which field."""

    field: str
    message: str


def fill_url(template: str, values: Values) -> str:
    """Fill a URL, with every value escaped. Raises Unfillable, also if a value would be a step . or .. of the path."""
    url = _filled(template, values, _escaped)
    if _climbs(url):
        raise Unfillable("a value makes a step of the path . or ..")
    return url


def fill_text(template: str, values: Values) -> str:
    """Fill plain text, such as a header. Raises Unfillable."""
    return _filled(template, values, lambda text: text)


def fill_json(template: Any, values: Values) -> Any:
    """Fill the texts in a JSON value. A text that is only a placeholder becomes the value itself. Raises Unfillable."""
    if isinstance(template, str):
        whole = _PLACE.fullmatch(template)
        return _value(whole[1], values) if whole and whole[1] is not None else fill_text(template, values)
    if isinstance(template, Mapping):
        return {name: fill_json(value, values) for name, value in template.items()}
    if isinstance(template, Sequence):
        return [fill_json(value, values) for value in template]
    return template


def look_up(answer: Any, path: str) -> Any:
    """The value at this path of an answer. Raises Unfillable."""
    steps = _steps(path)
    assert steps is not None
    for step in steps:
        if isinstance(answer, Mapping) and step in answer:
            answer = answer[step]
        elif isinstance(answer, list) and _INDEX.fullmatch(step) and int(step) < len(answer):
            answer = answer[int(step)]
        else:
            raise Unfillable(f"there is nothing at {path}")
    return answer


def scalar(value: Any, what: str) -> str:
    """A text or number as text. Raises Unfillable."""
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, Mapping | list):
        raise Unfillable(f"{what} is not a text or a number")
    return msgspec.json.encode(value).decode()


def is_call(download: str | ExportCall) -> ExportCall | None:
    """`download` as a call, if it is a call or a URL; None for a path."""
    if isinstance(download, ExportCall):
        return download
    return ExportCall(download) if re.match(r"https?://", download, re.IGNORECASE) else None


def export_problem(export: ExportApi) -> TemplateProblem | None:
    """What is wrong with the description of an export API, or None."""
    try:
        return (
            _call_problem("create", export.create, with_id=False)
            or _path_problem("id", export.id)
            or _call_problem("status", export.status)
            or _path_problem("state", export.state)
            or _states_problem(export)
            or _download_problem(export.download)
        )
    except RecursionError:
        return TemplateProblem("create.body", "it is nested too deeply")


def _download_problem(download: str | ExportCall) -> TemplateProblem | None:
    call = is_call(download)
    if call is None:
        assert isinstance(download, str)
        return _path_problem("download", download)
    if call.method not in {None, "GET"} or call.body is not None:
        return TemplateProblem("download", "a file is downloaded by GET, without a body")
    return _call_problem("download", call)


def _call_problem(name: str, call: ExportCall, *, with_id: bool = True) -> TemplateProblem | None:
    if call.method is not None and call.method.upper() not in METHODS:
        return TemplateProblem(f"{name}.method", f"it must be one of {', '.join(sorted(METHODS))}")
    for text in (call.url, *call.headers.values(), *_texts(call.body)):
        wrong = _template_problem(text, with_id)
        if wrong is not None:
            return TemplateProblem(name, wrong)
    if len(msgspec.json.encode(call.body)) > MAX_BODY_BYTES:
        return TemplateProblem(f"{name}.body", f"it may have at most {MAX_BODY_BYTES} bytes")
    wrong = _url_problem(call.url)
    if wrong is not None:
        return TemplateProblem(f"{name}.url", wrong)
    wrong = headers_problem(call.headers)
    return None if wrong is None else TemplateProblem(f"{name}.headers", wrong)


def _url_problem(template: str) -> str | None:
    """Values may change the path and the query of a request, never its server."""
    first, second = (_PLACE.sub(partial(_stand_in, text), template) for text in "ab")
    wrong = check_url(first) or check_url(second)
    if wrong is not None:
        return wrong
    if Url(first).origin_ascii != Url(second).origin_ascii:
        return "a value may be in the path or the query, not in the host"
    return "its path has a step . or .." if _climbs(first) else None


def _stand_in(text: str, match: re.Match[str]) -> str:
    return match[0][0] if match[1] is None else text


def _climbs(url: str) -> bool:
    """Whether the path has a step . or .., escaped or not, which a server would resolve."""
    path = re.split(r"[?#]", url, maxsplit=1)[0]
    return any(step.lower().replace("%2e", ".") in {".", ".."} for step in re.split(r"[/\\]", path))


def _escaped(text: str) -> str:
    if not text:
        raise Unfillable("a value for a URL is empty")
    return quote(text, safe="")


def _template_problem(text: str, with_id: bool) -> str | None:
    if len(text) > MAX_TEXT:
        return f"a text may have at most {MAX_TEXT} characters"
    for match in _PLACE.finditer(text):
        if match[0] in {"{{", "}}"}:
            continue
        if match[1] is None:
            return "unmatched brace; write {{ or }} for a literal one"
        if not _NAME.fullmatch(match[1]):
            return f"{{{match[1][:40]}}} is unknown; use {{input}}, {{input.name}}, {{id}} or {{task_id}}"
        if match[1] == "id" and not with_id:
            return "{id} is unknown before the export is created"
    return None


def _path_problem(field: str, path: str) -> TemplateProblem | None:
    steps = _steps(path) if len(path) <= MAX_TEXT else None
    if steps is None or len(steps) > MAX_STEPS:
        return TemplateProblem(field, "it must be a JSON Pointer (/data/id) or a dotted path ($.data.id)")
    return None


def _states_problem(export: ExportApi) -> TemplateProblem | None:
    if not export.ready:
        return TemplateProblem("ready", "name at least one state in which the file is ready")
    for field, states in (("ready", export.ready), ("failed", export.failed)):
        if len(states) > MAX_STATES or any(len(state) > MAX_TEXT for state in states):
            return TemplateProblem(field, f"at most {MAX_STATES} states, each of at most {MAX_TEXT} characters")
    both = set(export.ready) & set(export.failed)
    return TemplateProblem("failed", f"{min(both)!r} means both ready and failed") if both else None


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for inner in value.values() for text in _texts(inner)]
    return [text for inner in value for text in _texts(inner)] if isinstance(value, list | tuple) else []


def _steps(path: str) -> list[str] | None:
    """The steps of a path; None if it is invalid."""
    if path.startswith("/"):
        return [step.replace("~1", "/").replace("~0", "~") for step in path[1:].split("/")]
    if path == "$":
        return []
    steps: list[str] = []
    for part in path.removeprefix("$.").split("."):
        match = _DOTTED_STEP.fullmatch(part)
        if match is None or match[1].startswith("$"):
            return None
        steps += [match[1], *re.findall(r"\d+", match[2])]
    return steps


def _filled(template: str, values: Values, escape: Callable[[str], str]) -> str:
    return _PLACE.sub(lambda match: _put(match, values, escape), template)


def _put(match: re.Match[str], values: Values, escape: Callable[[str], str]) -> str:
    if match[1] is None:
        return match[0][0]
    return escape(scalar(_value(match[1], values), f"{{{match[1]}}}"))


def _value(name: str, values: Values) -> Any:
    value: Any = values
    for step in name.split("."):
        if not isinstance(value, Mapping) or step not in value:
            raise Unfillable(f"the input has no value for {{{name}}}")
        value = value[step]
    return value
