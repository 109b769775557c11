"""Lists: files of tasks, read line by line. Text has one URL a line, jsonl one input a line, csv a header and rows.

Every line is checked as it is read; what is handed on is one input a line, as JSON. Lines that are not valid stop the
reading, after enough of them were found to be worth a message.
"""

import csv
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from conveyor.errors import BadInput, ListUnreadable, NoTasks
from conveyor.inputs import MAX_INPUT_BYTES, checked_input
from conveyor.model import InputJson, JobKind

STDIN = "-"

_SHOWN_PROBLEMS = 10
_PIECE = 256 * 1024
_FETCH_COLUMNS = ("url", "method", "body", "id", "tag")

Line = tuple[str, int, bytes]


def read_lists(paths: Sequence[str], kind: JobKind) -> Iterator[InputJson]:
    """The inputs of several lists, in order. Raises ListUnreadable, which names the lines that are wrong."""
    problems: list[str] = []
    seen = False
    for name, number, raw in _all_lines(paths, kind):
        seen = True
        try:
            given = checked_input(kind, raw)
        except BadInput as error:
            problems.append(f"{name}:{number}: {error}")
            if len(problems) == _SHOWN_PROBLEMS:
                break
            continue
        if not problems:
            yield given
    if problems:
        raise ListUnreadable("The list has lines that are not valid. Nothing was run.\n  " + "\n  ".join(problems))
    if not seen:
        raise NoTasks(f"The list is empty: {', '.join(paths)}")


def list_pieces(paths: Sequence[str], kind: JobKind, count: Callable[[int], None]) -> Iterator[bytes]:
    """The inputs as they are staged: one a line, in pieces of some size; `count` is told how many each holds."""
    lines: list[str] = []
    size = 0
    for line in read_lists(paths, kind):
        lines.append(line)
        size += len(line)
        if size >= _PIECE:
            yield _joined(lines)
            count(len(lines))
            lines, size = [], 0
    if lines:
        yield _joined(lines)
        count(len(lines))


def _joined(lines: list[str]) -> bytes:
    return ("\n".join(lines) + "\n").encode()


def _all_lines(paths: Sequence[str], kind: JobKind) -> Iterator[Line]:
    for path in paths:
        try:
            with _open(path) as file:
                yield from _reader(path)(path, file, kind)
        except OSError as error:
            raise ListUnreadable(f"{path} can not be read: {error.strerror or error}") from None
        except (UnicodeDecodeError, csv.Error) as error:
            raise ListUnreadable(f"{path} is not a list: {error}") from None


def _open(path: str) -> BinaryIO:
    return sys.stdin.buffer if path == STDIN else Path(path).open("rb")


def _reader(path: str) -> Callable[[str, BinaryIO, JobKind], Iterator[Line]]:
    suffix = Path(path).suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        return _json_lines
    return _csv_rows if suffix == ".csv" else _text_lines


def _text_lines(name: str, file: BinaryIO, _: JobKind) -> Iterator[Line]:
    for number, line in _bounded(name, file):
        text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        if text and not text.startswith("#"):
            yield name, number, msgspec.json.encode(text)


def _json_lines(name: str, file: BinaryIO, _: JobKind) -> Iterator[Line]:
    for number, line in _bounded(name, file):
        text = line.strip()
        if text:
            yield name, number, text


def _csv_rows(name: str, file: BinaryIO, kind: JobKind) -> Iterator[Line]:
    with io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        rows = csv.DictReader(text)
        columns = [column.strip() for column in rows.fieldnames or []]
        if kind is JobKind.FETCH:
            _check_columns(name, columns)
        rows.fieldnames = columns
        for row in rows:
            if None in row or None in row.values():
                raise ListUnreadable(f"{name}:{rows.line_num}: the row has not as many fields as the header")
            given = {column: value for column, value in row.items() if value != ""}
            yield name, rows.line_num, msgspec.json.encode(given)


def _check_columns(name: str, columns: Sequence[str]) -> None:
    if "url" not in columns:
        raise ListUnreadable(f"{name}: the header has no column `url`")
    unknown = [column for column in columns if column not in _FETCH_COLUMNS]
    if unknown:
        known = ", ".join(_FETCH_COLUMNS)
        raise ListUnreadable(f"{name}: unknown column `{unknown[0]}`; a list of URLs may have {known}")


def _bounded(name: str, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers; one without end is an error, not all the memory."""
    number = 0
    while line := file.readline(MAX_INPUT_BYTES + 2):
        number += 1
        if len(line) > MAX_INPUT_BYTES and not line.endswith(b"\n"):
            raise ListUnreadable(f"{name}:{number}: the line is longer than {MAX_INPUT_BYTES} bytes")
        yield number, line
