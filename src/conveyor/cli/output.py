"""Standard output of the commands: JSON for programs, aligned columns for people. Both stream."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from conveyor.errors import ConveyorError
from conveyor.telemetry.redact import printable


def print_json(value: Any) -> None:
    """Print one JSON document. The report of a local run may contain structs of the model."""
    print(json.dumps(value, ensure_ascii=False, indent=2, default=msgspec.to_builtins))


def print_json_array(items: Iterable[Any]) -> None:
    """Print one JSON array, one item per line, as the items arrive."""
    lead = "[\n"
    for item in items:
        sys.stdout.write(lead + json.dumps(item, ensure_ascii=False))
        lead = ",\n"
    print("\n]" if lead != "[\n" else "[]")


def print_lines(columns: Sequence[tuple[str, int]], rows: Iterable[Sequence[object]], empty: str) -> None:
    """Print rows under a heading. A column has its minimum width; 0 is for the last one."""
    is_empty = True
    for row in rows:
        if is_empty:
            print(_line(columns, [name for name, _ in columns]))
            is_empty = False
        print(_line(columns, ["" if cell is None else str(cell) for cell in row]))
    if is_empty:
        print(empty, file=sys.stderr)


def _line(columns: Sequence[tuple[str, int]], cells: Sequence[str]) -> str:
    padded = (printable(cell).ljust(width) for (_, width), cell in zip(columns, cells, strict=True))
    return "  ".join(padded).rstrip()


def print_error_lines(error: ConveyorError) -> None:
    """Print the invalid lines that an error of a list has, on standard error."""
    for line in error.details.get("lines", []):
        print(f"  line {line.line}: {printable(line.reason)}  {printable(line.text)}", file=sys.stderr)


def count_invalid_lines(number: int) -> str:
    """As text: 1 invalid line, 12 invalid lines."""
    return f"{number:,} invalid line{'' if number == 1 else 's'}"
