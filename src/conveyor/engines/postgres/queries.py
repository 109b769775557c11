"""Named queries: the statements of the .sql files in this folder, with named parameters."""

import re
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import Any, NamedTuple

# Excludes the two colons of a cast.
_PARAMETER = re.compile(r"(?<!:):([a-z]\w*)")


class Query(NamedTuple):
    """A statement with positional parameters, and their names in order."""

    text: str
    names: tuple[str, ...]

    def arguments(self, values: Mapping[str, Any]) -> list[Any]:
        return [_storable(values[name]) for name in self.names]


def parse(text: str) -> Query:
    """Parse a statement with parameters like :name."""
    names: list[str] = []

    def number(match: re.Match[str]) -> str:
        if match[1] not in names:
            names.append(match[1])
        return f"${names.index(match[1]) + 1}"

    return Query(_PARAMETER.sub(number, text), tuple(names))


def named_queries(file: str) -> dict[str, Query]:
    """The statements of a .sql file, by the name in the `-- name:` line above each."""
    return {name: parse(text) for name, text in named_texts(file).items()}


def named_texts(file: str) -> dict[str, str]:
    """The statements as templates: {own} stands for the suffix of a large run's own tables."""
    texts: dict[str, str] = {}
    for part in resources.files(__package__).joinpath(file).read_text().split("-- name:")[1:]:
        title, _, text = part.partition("\n")
        texts[title.strip()] = text.strip().rstrip(";")
    return texts


@lru_cache(maxsize=1024)
def made_for(text: str, own: str) -> Query:
    """A statement on the shared tables (`own` is empty), or on the tables of one run."""
    return parse(text.replace("{own}", own))


def _storable(value: Any) -> Any:
    """Postgres text cannot contain NUL. No id of Conveyor contains one, so a value with NUL matches nothing."""
    return value.replace("\0", "\ufffd") if isinstance(value, str) and "\0" in value else value
