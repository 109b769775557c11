"""Which conditions of the template hold for some parameters. The template is written by a program, so its form is
certain: a condition is an intrinsic function, whose arguments are in brackets behind it or in a list below it."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_TOP = re.compile(r"^  (\w+): (.*(?:\n  - .*|\n   .*)*)", re.MULTILINE)
_WORDS = re.compile(r"'[^']*'|[^\s,\[\]]+")


class _Line(NamedTuple):
    indent: int
    text: str


def true_conditions(section: str, parameters: Mapping[str, str]) -> frozenset[str]:
    """The names of the conditions of this section that hold."""
    sources = {name: _lines(body) for name, body in _TOP.findall(section)}
    values: dict[str, bool] = {}

    def holds(name: str) -> bool:
        if name not in values:
            values[name] = value(sources[name]) == "true"
        return values[name]

    def value(lines: Sequence[_Line]) -> str:
        """The value of the expression in these lines: a text, which is `true` or `false` for a condition."""
        function, *words = _WORDS.findall(lines[0].text)
        if not function.startswith("!"):
            return _plain(function)
        arguments = [value(item) for item in _items(lines[1:])] or _inline(words)
        match function:
            case "!Condition":
                return _text(holds(words[0]))
            case "!Ref":
                return parameters[words[0]]
            case "!Equals":
                return _text(arguments[0] == arguments[1])
            case "!Not":
                return _text(arguments == ["false"])
            case "!And":
                return _text("false" not in arguments)
            case "!Or":
                return _text("true" in arguments)
            case "!Join":
                # A list is given as one text already.
                return arguments[1]
        raise ValueError(f"The template has a condition with {function}, which is unknown here.")

    def _inline(words: Sequence[str]) -> list[str]:
        """`!Ref NAME` and plain words."""
        found: list[str] = []
        for before, word in zip(["", *words], words, strict=False):
            if word != "!Ref":
                found.append(parameters[word] if before == "!Ref" else _plain(word))
        return found

    return frozenset(name for name in sources if holds(name))


def _lines(body: str) -> list[_Line]:
    return [_Line(len(line) - len(line.lstrip()), line.strip()) for line in body.splitlines()]


def _items(lines: Sequence[_Line]) -> list[list[_Line]]:
    """The items of a list; one whose own arguments are a list has more than one line."""
    items: list[list[_Line]] = []
    for line in lines:
        if line.indent == lines[0].indent:
            items.append([_Line(line.indent, line.text.removeprefix("- "))])
        else:
            items[-1].append(line)
    return items


def _plain(word: str) -> str:
    return word.strip("'")


def _text(value: bool) -> str:
    return "true" if value else "false"
