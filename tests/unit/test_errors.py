"""One tree of errors: each class has its own code, a message, a status, and a place in the drawing."""

import inspect
import re

import pytest

from conveyor import errors
from conveyor.errors import ConveyorError

CLASSES = [
    value
    for _, value in inspect.getmembers(errors, inspect.isclass)
    if issubclass(value, ConveyorError) and value.__module__ == errors.__name__
]
NAMED = re.compile(r"\b[A-Z][A-Za-z]+\b")
DRAWN = re.compile(r"\b(?P<name>[A-Z][A-Za-z]+)(?: \((?P<status>\d{3})\))?")
# Below the first paragraph.
TREE = (errors.__doc__ or "").partition("\n\n")[2].rstrip()


def test_there_are_some() -> None:
    assert len(CLASSES) > 15


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_each_has_its_own_code(kind: type[ConveyorError]) -> None:
    assert "code" in vars(kind), "the code is inherited"
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", kind.code)
    assert [other for other in CLASSES if other.code == kind.code] == [kind]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_each_has_a_status(kind: type[ConveyorError]) -> None:
    assert 400 <= kind.status <= 599


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_the_docstring_is_the_message(kind: type[ConveyorError]) -> None:
    assert "__doc__" in vars(kind)
    assert kind.__doc__
    error = kind()
    assert error.message == str(error)
    assert error.message.endswith(".")
    assert "\n" not in error.message
    assert "  " not in error.message
    assert error.details == {}


def test_a_message_and_details_of_its_own() -> None:
    error = errors.NotFound("No such job.", job="job_1")
    assert str(error) == error.message == "No such job."
    assert error.details == {"job": "job_1"}


def test_the_drawing_names_every_class_and_no_other() -> None:
    drawn = NAMED.findall(TREE)
    assert sorted(drawn) == sorted(kind.__name__ for kind in CLASSES)


def test_the_drawing_has_the_right_statuses() -> None:
    by_name = {kind.__name__: kind for kind in CLASSES}
    for match in DRAWN.finditer(TREE):
        if match["status"]:
            assert by_name[match["name"]].status == int(match["status"]), match["name"]


def test_the_drawing_hangs_each_class_where_it_belongs() -> None:
    """Indentation and the lines that join say who is whose child; a row after ── are children of its head."""
    parents: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in TREE.splitlines():
        depth = next(position for position, char in enumerate(line) if char.isalpha())
        head, _, tail = line[depth:].partition(" ── ")
        names = NAMED.findall(head)
        above = [(at, name) for at, name in above if at < depth]
        for name in names:
            parents[name] = above[-1][1] if above else ""
        parents.update(dict.fromkeys(NAMED.findall(tail), names[0]))
        above.append((depth, names[0]))
    for kind in CLASSES:
        base = kind.__mro__[1].__name__
        assert parents[kind.__name__] == ("" if kind is ConveyorError else base), kind.__name__
