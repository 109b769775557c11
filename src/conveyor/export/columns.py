"""The user's own columns in a table, of the list and of what was extracted: a csv or Parquet file names all columns
before its first row, so an export reads its tasks once before it writes them, and collects the names and types of what
is the user's own.

A column has the name that it has in the list, or in what was extracted. One that another column has already, in upper
or lower case, is `data.<name>` or `extracted.<name>`. What does not fit (too many columns, too long names, a value of
another type) is still in `input`, or in the task's `extracted`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from conveyor.model import UNCHANGED, JobKind, Task
from conveyor.read.task_labels import TaskLabels, labels_of

MAX_COLUMNS = 200
MAX_NAME = 200
# Of all names together: the columns are a part of the export's document.
_MAX_NAMES = 16 * 1024

TEXT, WHOLE, NUMBER, FLAG = "text", "int", "float", "bool"
_LARGEST = (1 << 63) - 1


# Where the values of a column come from: the list, the job's `extract`, or the outcome.
DATA, EXTRACTED, OUTCOME = "data", "extracted", "outcome"


class OwnColumn(msgspec.Struct, frozen=True, array_like=True):
    """A column of the user's own: its name in the list or in what was extracted, its name in the table, its type, and
    where its values come from."""

    name: str
    title: str
    type: str = TEXT
    part: str = DATA

    def value(self, task: Task, labels: TaskLabels, row: Mapping[str, Any] | None = None) -> Any:
        """The task's value in this column, of its type; None if it has none, or one of another type. `row` is one of
        those that were extracted."""
        if self.part == OUTCOME:
            return task.is_unchanged
        value = labels.data.get(self.name) if self.part == DATA else (row or {}).get(self.name)
        if value is None:
            return None
        if self.type == TEXT:
            return value if isinstance(value, str) else msgspec.json.encode(value).decode()
        found = type_of(value)
        if self.type == NUMBER and found in (NUMBER, WHOLE):
            return float(value)
        return value if found == self.type else None


class ColumnScan:
    """Collects the columns. `types` is all that another process needs to continue: the type of each name, in the order
    in which they were found."""

    def __init__(
        self, kind: JobKind, types: Mapping[str, str] | None = None, extracted: Mapping[str, str] | None = None
    ) -> None:
        self._kind = kind
        self.types: dict[str, str] = dict(types or {})
        self.extracted: dict[str, str] = dict(extracted or {})
        self._size = sum(map(len, (*self.types, *self.extracted)))

    def add(self, tasks: Iterable[Task]) -> None:
        """Look at the next tasks."""
        for task in tasks:
            if bytes(task.input)[:1] == b"{":
                self._add(labels_of(task.input, self._kind).data, self.types)
            for row in extracted_rows(task):
                self._add(row, self.extracted)

    def _add(self, data: Mapping[str, Any], types: dict[str, str]) -> None:
        for name, value in data.items():
            if value is None:
                continue
            known = types.get(name)
            if known == TEXT:
                continue
            if known is None and not self._has_room(name):
                continue
            if known is None:
                self._size += len(name)
            types[name] = _joined(known, type_of(value))

    def _has_room(self, name: str) -> bool:
        room = _MAX_NAMES - self._size
        return (
            len(self.types) + len(self.extracted) < MAX_COLUMNS
            and 0 < len(name) <= min(MAX_NAME, room)
            and name.isprintable()
        )

    def columns(self, taken: Sequence[str], *, with_unchanged: bool = False) -> list[OwnColumn]:
        """The columns, with titles that differ from those that are taken, whatever their case."""
        used = {name.lower() for name in taken}
        columns = []
        if with_unchanged:
            used.add(UNCHANGED)
            columns.append(OwnColumn(UNCHANGED, UNCHANGED, FLAG, OUTCOME))
        named = [(DATA, *item) for item in self.types.items()] + [(EXTRACTED, *item) for item in self.extracted.items()]
        for part, name, kind in named:
            title, number = name, 1
            while title.lower() in used:
                title = f"{part}.{name}" if number == 1 else f"{part}.{name}.{number}"
                number += 1
            used.add(title.lower())
            columns.append(OwnColumn(name, title, kind, part))
        return columns


def extracted_rows(task: Task) -> list[dict[str, Any]]:
    """What was extracted for a task that has it in it, as rows."""
    ref = task.detail.extracted
    if ref is None or ref.inline is None:
        return []
    value = msgspec.json.decode(ref.inline)
    return value if isinstance(value, list) else [value]


def type_of(value: object) -> str:
    """The type of a column for this JSON value."""
    if isinstance(value, bool):
        return FLAG
    if isinstance(value, int):
        return WHOLE if -_LARGEST <= value <= _LARGEST else TEXT
    return NUMBER if isinstance(value, float) else TEXT


def _joined(one: str | None, other: str) -> str:
    """The type that has the values of both."""
    if one is None or one == other:
        return other
    return NUMBER if {one, other} == {WHOLE, NUMBER} else TEXT
