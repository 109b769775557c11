"""The columns of a csv: which character separates them, which one has the URLs, and what a row is as a task.

A list of URLs may have any columns. Those that a task has (`url`, `id`, `tag`, …) are found in upper or lower case; the
others are the user's own, and travel with the task as its `data`. For Python functions a row is an object with the
names of the header.
"""

import csv
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from conveyor.errors import ListUnreadable
from conveyor.model import JobKind

_FIELDS: Mapping[JobKind, tuple[str, ...]] = {
    JobKind.FETCH: ("url", "method", "body", "id", "tag"),
    JobKind.DOWNLOAD: ("url", "sha256", "id", "tag"),
}
_URL = "url"
_DELIMITERS = (",", ";", "\t", "|")
_BOM = "\ufeff"
_SHOWN = 10
_LONGEST_NAME = 100


class CsvColumns(msgspec.Struct, frozen=True):
    """The field of a task that each column fills. A column of the user's own fills none, and has its name in `data`."""

    delimiter: str
    names: tuple[str, ...]
    fields: tuple[str | None, ...]
    # The column that every task needs; empty for functions, which need none.
    url: str = ""

    def parse(self, row: str) -> bytes | None:
        """A row as the JSON of a task; None for an empty one. Raises ListUnreadable."""
        if not row.strip():
            return None
        try:
            values = next(csv.reader([row], delimiter=self.delimiter, strict=True))
        except csv.Error as error:
            raise ListUnreadable(f"The row is not csv: {error}.") from None
        if len(values) != len(self.names):
            raise ListUnreadable(f"The row has {len(values)} fields, the header {len(self.names)}.")
        task: dict[str, Any] = {}
        data: dict[str, str] = {}
        for name, field, value in zip(self.names, self.fields, values, strict=True):
            if value == "":
                continue
            if field is None:
                data[name] = value
            else:
                task[field] = value
        if self.url and _URL not in task:
            raise ListUnreadable(f"The column `{self.url[:_LONGEST_NAME]}` is empty.")
        return msgspec.json.encode({**task, "data": data} if data else task)


def read_columns(header: str, kind: JobKind, url_column: str | None = None) -> CsvColumns:
    """The columns of a header. Raises ListUnreadable if no column has the URLs of a list of URLs."""
    fields = _FIELDS.get(kind)
    line = header.removeprefix(_BOM).rstrip("\r\n")
    if fields is None:
        delimiter, names = max(_splits(line), key=lambda split: len(split[1]))
        return CsvColumns(delimiter, _checked(names, names), names)
    found = [(delimiter, names, _place(names, url_column)) for delimiter, names in _splits(line)]
    # Of several separators the one with the most columns: a name may contain another.
    usable = [each for each in found if each[2] is not None]
    if not usable:
        raise ListUnreadable(_without_url(max(_splits(line), key=lambda split: len(split[1]))[1], url_column))
    delimiter, names, at = max(usable, key=lambda each: len(each[1]))
    lower = [name.lower() for name in names]
    of_task = [name if name in fields and name != _URL else None for name in lower]
    of_task[at or 0] = _URL
    return CsvColumns(delimiter, _checked(names, lower), tuple(of_task), names[at or 0])


def has_url_column(header: str) -> bool:
    """Whether the first line of a list is the header of a csv with a column `url`. A URL may contain commas; a header
    contains no URL, and a quoted word alone is JSON."""
    line = header.removeprefix(_BOM).strip()
    if "://" in line or line == '"url"':
        return False
    return any(_place(names, None) is not None for _, names in _splits(line))


def _splits(line: str) -> list[tuple[str, tuple[str, ...]]]:
    """The names under each separator."""
    return [
        (delimiter, tuple(name.strip() for name in next(csv.reader([line], delimiter=delimiter), [])))
        for delimiter in _DELIMITERS
    ]


def _place(names: Sequence[str], url_column: str | None) -> int | None:
    """Where the column of the URLs is: the one with this very name, or with the name in another case."""
    wanted = _URL if url_column is None else url_column.strip()
    if wanted in names:
        return names.index(wanted)
    lower = [name.lower() for name in names]
    return lower.index(wanted.lower()) if wanted.lower() in lower else None


def _checked(names: tuple[str, ...], unique: Sequence[str]) -> tuple[str, ...]:
    if len(set(unique)) < len(unique) or "" in names:
        raise ListUnreadable("The header of the csv has a column without a name, or a duplicate name.")
    return names


def _without_url(names: Sequence[str], url_column: str | None) -> str:
    wanted = _URL if url_column is None else url_column[:_LONGEST_NAME]
    shown = ", ".join(f"`{name[:_LONGEST_NAME]}`" for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (
        f"The csv has no column `{wanted}`. Its columns are {shown}{more}. Name the one with the URLs: `url_column`, "
        "--url-column."
    )
