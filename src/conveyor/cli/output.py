"""What commands write on standard output: JSON for programs, aligned lines for people. Both stream."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from conveyor.telemetry.redact import printable


def print_json(value: Any) -> None:
    """One JSON document. What a run in this process shows may hold values of the model."""
    print(json.dumps(value, ensure_ascii=False, indent=2, default=msgspec.to_builtins))


def print_json_array(items: Iterable[Any]) -> None:
    """One JSON array, an item a line, written as the items come."""
    lead = "[\n"
    for item in items:
        sys.stdout.write(lead + json.dumps(item, ensure_ascii=False))
        lead = ",\n"
    print("\n]" if lead != "[\n" else "[]")


def print_lines(columns: Sequence[tuple[str, int]], rows: Iterable[Sequence[object]], empty: str) -> None:
    """Rows under a heading, in columns of given widths (0: as wide as it is; for the last one)."""
    found = False
    for row in rows:
        if not found:
            print(_line(columns, [name for name, _ in columns]))
            found = True
        print(_line(columns, ["" if cell is None else str(cell) for cell in row]))
    if not found:
        print(empty, file=sys.stderr)


def _line(columns: Sequence[tuple[str, int]], cells: Sequence[str]) -> str:
    padded = (printable(cell).ljust(width) for (_, width), cell in zip(columns, cells, strict=True))
    return "  ".join(padded).rstrip()


def number_of_lines(number: int) -> str:
    """The beginning of a sentence about lines that went wrong."""
    return "1 line was" if number == 1 else f"{number:,} lines were"
