"""The options of a job and their bounds, from the code itself: a new option is in the matrix by itself.

Numbers have their bounds in `accept/option_limits.py`, flags and enums in their types. What is neither (texts, lists,
headers, calls) has its least and its largest here, made of the limits that the code has for it.
"""

import math
import types
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

from conveyor.accept import option_limits as limits
from conveyor.lists import templates
from conveyor.lists.gateways import MAX_GATEWAY_URL, MAX_POOL, MAX_WEIGHT
from conveyor.lists.inputs import MAX_HEADER_BYTES, MAX_HEADERS
from conveyor.model import PACED_KINDS, JobKind, Options

# Stands for the address of the site that is fetched from.
SITE = "{site}"
# A number that is far beyond every bound, and that no 64 bits hold.
FAR = 10**30
# What is taken for the least value above zero, where zero itself is not allowed: one that a test can wait for.
_JUST_ABOVE = 0.001


class Leaf(NamedTuple):
    """An option, or a part of one: values that it may have, and values that it may not."""

    path: str
    allowed: tuple[Any, ...]
    beyond: tuple[Any, ...] = ()

    @property
    def option(self) -> str:
        return self.path.partition(".")[0]


class Undeclared(AssertionError):
    """An option without bounds."""


def _text(character: str, most: int) -> Leaf:
    return Leaf("", (character, character * most), ("", character * (most + 1), "a b"))


_STATUSES = Leaf("", ([], list(range(100, 600))), ([99], [600], [200] * 501))
_HEADERS = Leaf(
    "",
    ({"X": ""}, {f"X-{number}": "v" for number in range(MAX_HEADERS)}, {"X": "v" * (MAX_HEADER_BYTES - 1)}),
    (
        {f"X-{number}": "v" for number in range(MAX_HEADERS + 1)},
        {"X": "v" * MAX_HEADER_BYTES},
        {"Host": "x"},
        {"": "x"},
    ),
)
_CALL = {"url": f"{SITE}/exports"}
_LARGE_CALL = {**_CALL, "method": "PUT", "headers": {"X": "{task_id}"}, "body": {"a": "{input}"}}
_FILE = f"{SITE}/files/{{id}}?link=0"
_STATES = [f"s{number}" for number in range(templates.MAX_STATES)]
_DEEP = "/".join(["", "data", *["0"] * (templates.MAX_STEPS - 1)])

# What has no number for a bound.
OTHERS: dict[str, Leaf] = {
    "retry_statuses": _STATUSES,
    "success_statuses": _STATUSES,
    "retry_errors": Leaf("", ([], [f"code_{number}" for number in range(limits.MAX_CODES)]), (["x"] * 101, ["A b"])),
    "upstream": _text("u", limits.MAX_UPSTREAM),
    "headers": _HEADERS,
    "gateway.proxy": Leaf("", (SITE,), ("ftp://127.0.0.1/", "", "http://" + "h" * MAX_GATEWAY_URL)),
    "gateway.url": Leaf(
        "", (f"{SITE}/gateway?url={{url}}",), ("http://h/", f"http://h/{{url}}{'x' * MAX_GATEWAY_URL}")
    ),
    "gateway.headers": Leaf("", ({}, {"X-Key": "k"}), ({"Host": "x"},)),
    "gateway.pool": Leaf(
        "",
        ([{"proxy": SITE}], [{"url": f"{SITE}/gateway?url={{url}}", "weight": MAX_WEIGHT}] * MAX_POOL),
        ([{}], [{"proxy": SITE, "weight": 0}], [{"proxy": SITE, "weight": MAX_WEIGHT + 1}], [{"proxy": SITE}] * 51),
    ),
    "gateway.sticky": Leaf("", ("host",), ("path", 1)),
    "handler": _text("h", limits.MAX_HANDLER),
    "extract": _text("x", limits.MAX_HANDLER),
    "changed_from": Leaf("", (f"job_{'0' * 26}",), ("", "job_1", f"job_{'0' * 27}", f"run_{'0' * 26}")),
    "export.create": Leaf("", (_CALL, _LARGE_CALL), ({"url": "nowhere"}, {**_CALL, "method": "GO"})),
    "export.status": Leaf("", ({"url": f"{SITE}/exports/{{id}}"},), ({"url": "{id}"},)),
    "export.id": Leaf("", ("/data/id", "$.data.id"), ("", "x" * (templates.MAX_TEXT + 1), f"{_DEEP}/1")),
    "export.state": Leaf("", ("/export/status",), ("..",)),
    "export.ready": Leaf("", (["done"], ["done", *_STATES[1:]]), ([], ["s"] * (templates.MAX_STATES + 1))),
    "export.failed": Leaf(
        "", ([], [f"not {state}" for state in _STATES]), (["done"], ["s"] * (templates.MAX_STATES + 1))
    ),
    "export.download": Leaf(
        "", ("/export/files/0/href", _FILE, {"url": _FILE}), ("..", {"url": SITE, "method": "POST"})
    ),
}

# What a part of an option needs beside it, to be whole.
_WHOLE: dict[str, dict[str, Any]] = {
    "failure_threshold": {"ratio": 0.5},
    "gateway": {"proxy": SITE},
    "export": {
        "create": _CALL,
        "id": "/data/id",
        "status": {"url": f"{SITE}/exports/{{id}}"},
        "state": "/export/status",
        "ready": ["done"],
        "download": "/export/files/0/href",
    },
}
# Of parts that can not stand together, those that give way; and what a part needs beside it.
_INSTEAD = {"gateway.url": ("proxy",), "gateway.pool": ("proxy", "url", "headers")}
_BESIDE = {"gateway.sticky": ("pool", [{"proxy": SITE}])}
_KINDS: dict[str, frozenset[JobKind]] = {
    "robots": PACED_KINDS,
    "insecure": frozenset(JobKind) - {JobKind.PYTHON},
    "http2": frozenset(JobKind) - {JobKind.PYTHON},
    "handler": frozenset({JobKind.PYTHON}),
    "extract": frozenset(JobKind) - {JobKind.PYTHON},
    "keep_bodies": frozenset({JobKind.FETCH}),
    "changed_from": frozenset({JobKind.FETCH}),
    "export": frozenset({JobKind.EXPORT_DOWNLOAD}),
}


def leaves(shape: type[msgspec.Struct] = Options, prefix: str = "") -> Iterator[Leaf]:
    """Every option that can be given a value of its own. Raises Undeclared."""
    for name, hint in get_type_hints(shape).items():
        path = f"{prefix}{name}"
        union = _union(hint)
        kinds = [each for each in union if each is not type(None)]
        if path in OTHERS:
            yield OTHERS[path]._replace(path=path)
        elif len(kinds) == 1 and isinstance(kinds[0], type) and issubclass(kinds[0], msgspec.Struct):
            yield from leaves(kinds[0], f"{path}.")
        else:
            leaf = _plain_leaf(path, kinds)
            yield leaf if type(None) in union else leaf._replace(beyond=(*leaf.beyond, None))


def _plain_leaf(path: str, kinds: list[Any]) -> Leaf:
    if kinds == [bool]:
        return Leaf(path, (False, True), (2, "yes"))
    if len(kinds) == 1 and isinstance(kinds[0], type) and issubclass(kinds[0], Enum):
        return Leaf(path, tuple(member.value for member in kinds[0]), ("neither",))
    if kinds not in ([int], [float]) or path not in limits.RANGES:
        raise Undeclared(
            f"the option `{path}` has no bounds: give it some in accept/option_limits.py, or in {__name__}"
        )
    least, most = limits.RANGES[path]
    if kinds == [int]:
        assert (int(least), int(most)) == (least, most), path
        return Leaf(path, (int(least), int(most)), (int(least) - 1, int(most) + 1, -FAR, FAR, "1"))
    first = _JUST_ABOVE if path in limits.ABOVE else least
    below = least if path in limits.ABOVE else math.nextafter(least, -math.inf)
    return Leaf(path, (first, most), (below, math.nextafter(most, math.inf), -1.0, 1e308, FAR, "1"))


def _union(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def allowed_in(kind: JobKind, option: str) -> bool:
    return kind in _KINDS.get(option, frozenset(JobKind))


def options_of(chosen: Mapping[str, Any], site: str = "http://127.0.0.1:9") -> dict[str, Any]:
    """The options of a request, from values by path; what they need to be whole stands beside them."""
    built: dict[str, Any] = {}
    for path, value in chosen.items():
        *parents, name = path.split(".")
        place = built
        for depth, parent in enumerate(parents):
            place = place.setdefault(parent, dict(_WHOLE.get(".".join(parents[: depth + 1]), {})))
        place[name] = value
    for path, (beside, value) in _BESIDE.items():
        option, _, name = path.partition(".")
        if name in built.get(option, {}):
            built[option].setdefault(beside, value)
    for path, others in _INSTEAD.items():
        option, _, name = path.partition(".")
        if name in built.get(option, {}):
            for other in others:
                built[option].pop(other, None)
    filled: dict[str, Any] = _at_site(built, site)
    return filled


def _at_site(value: Any, site: str) -> Any:
    if isinstance(value, str):
        return value.replace(SITE, site)
    if isinstance(value, dict):
        return {name: _at_site(inner, site) for name, inner in value.items()}
    return [_at_site(inner, site) for inner in value] if isinstance(value, list) else value


def needed(kind: JobKind, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """What a job of a kind can not be without, by path."""
    if kind is JobKind.PYTHON and "handler" not in chosen:
        return {"handler": "anything"}
    if kind is JobKind.EXPORT_DOWNLOAD and not any(path.startswith("export.") for path in chosen):
        return {"export.id": "/data/id"}
    if chosen.get("keep_bodies") is False and "extract" not in chosen:
        return {"extract": "anything"}
    return {}
