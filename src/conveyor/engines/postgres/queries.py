"""Named queries: the statements of the .sql files beside this one, with parameters by name."""

import re
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import Any, NamedTuple

# Not the two colons of a cast.
_PARAMETER = re.compile(r"(?<!:):([a-z]\w*)")


class Query(NamedTuple):
    """A statement as the server takes it, and the names of its parameters in order."""

    text: str
    names: tuple[str, ...]

    def arguments(self, values: Mapping[str, Any]) -> list[Any]:
        return [_storable(values[name]) for name in self.names]


def parse(text: str) -> Query:
    """A statement with parameters like :name."""
    names: list[str] = []

    def number(found: re.Match[str]) -> str:
        if found[1] not in names:
            names.append(found[1])
        return f"${names.index(found[1]) + 1}"

    return Query(_PARAMETER.sub(number, text), tuple(names))


def named_queries(file: str) -> dict[str, Query]:
    """The statements of a .sql file, by the name in the `-- name:` line above each."""
    return {name: parse(text) for name, text in named_texts(file).items()}


def named_texts(file: str) -> dict[str, str]:
    """The same as text, for those that are made for one run: {own} stands for the tables of a large one."""
    texts: dict[str, str] = {}
    for part in resources.files(__package__).joinpath(file).read_text().split("-- name:")[1:]:
        title, _, text = part.partition("\n")
        texts[title.strip()] = text.strip().rstrip(";")
    return texts


@lru_cache(maxsize=1024)
def made_for(text: str, own: str) -> Query:
    """A statement on the shared tables (own is empty), or on those of one run."""
    return parse(text.replace("{own}", own))


def _storable(value: Any) -> Any:
    """Text in Postgres holds no NUL. None of our ids does, so that what has one is not found."""
    return value.replace("\0", "\ufffd") if isinstance(value, str) and "\0" in value else value
