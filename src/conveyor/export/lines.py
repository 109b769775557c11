"""Lines of exports. Gets a task, and its body if the line includes it, and returns one line of a manifest, of jsonl or
of csv.
"""

import base64
import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from conveyor.export.columns import OwnColumn, extracted_rows
from conveyor.jobs.secrets import shown_input
from conveyor.model import JobKind, Task, TaskError, TaskId
from conveyor.read.results import error_json, iso_time
from conveyor.read.task_labels import NO_LABELS, TaskLabels, labels_of

CSV_COLUMNS = (
    "index",
    "task_id",
    "input",
    "status",
    "http_status",
    "attempts",
    "size",
    "sha256",
    "content_type",
    "error_code",
    "error_message",
    "final_url",
    "elapsed",
    "finished_at",
)
# After these, before the list's own columns. Files of earlier versions end before them.
LABEL_COLUMNS = ("url", "id", "tag")
# A spreadsheet takes a cell that starts with one of these for a formula. Some cells come from strangers.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


class ManifestLine(msgspec.Struct, frozen=True):
    """A line of manifest.jsonl. Scripts rely on these names."""

    index: int
    task_id: TaskId
    input: msgspec.Raw
    status: str
    http_status: int | None
    attempts: int
    file: str | None
    size: int | None
    sha256: str | None
    content_type: str | None
    error: TaskError | None
    final_url: str | None
    # Of the list; lines that an earlier version began have none.
    id: str | None = None
    tag: str | None = None
    data: Any = None
    # What the job's `extract` returned.
    extracted: Any = None
    unchanged: bool = False


class ResultLine(msgspec.Struct, frozen=True):
    """A line of jsonl without a body. Scripts rely on these names."""

    index: int
    task_id: TaskId
    input: msgspec.Raw
    status: str
    http_status: int | None
    attempts: int
    size: int | None
    sha256: str | None
    content_type: str | None
    error: TaskError | None
    final_url: str | None
    headers: list[tuple[str, str]] | None
    elapsed: float | None
    finished_at: str | None
    id: str | None
    tag: str | None
    data: Any
    extracted: Any
    unchanged: bool


class ResultLineWithBody(ResultLine, frozen=True):
    """A line of jsonl with a body: as text, or as base64 if that was requested or the body is not UTF-8."""

    body: str | None = None
    body_base64: str | None = None
    # The task has a body that is too large for a line.
    body_omitted: bool = False


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ManifestLine).decode

_Fields = tuple[
    int,
    TaskId,
    msgspec.Raw,
    str,
    int | None,
    int,
    int | None,
    str | None,
    str | None,
    TaskError | None,
    str | None,
    list[tuple[str, str]] | None,
    float | None,
    str | None,
    str | None,
    str | None,
    Any,
    Any,
    bool,
]


def manifest_line(task: Task, name: str | None) -> bytes:
    """The task's line of the manifest; `name` is the name of its body in the archive."""
    detail = task.detail
    body = detail.body
    return _one_line(
        ManifestLine(
            task.index,
            task.task_id,
            shown_input(task.input),
            task.status.label,
            task.http_status,
            task.attempts,
            name,
            None if body is None else body.length,
            None if body is None else body.sha256,
            detail.content_type,
            detail.error if task.error_code is None else error_json(task),
            detail.final_url,
            *_labels(task),
        )
    )


def damaged_line(line: bytes, damage: TaskError) -> bytes:
    """A line of the manifest for a body that turned out to be damaged."""
    return _one_line(msgspec.structs.replace(_decode(line), error=damage))


def result_line(task: Task) -> bytes:
    """The task's line of jsonl."""
    return _one_line(ResultLine(*_result(task)))


def result_line_with_body(task: Task, body: bytes | memoryview | None, as_text: bool) -> bytes:
    """The line with the body. `body` is None although the task has one: it is too large."""
    text, encoded = (None, None) if body is None else _text_of(body, as_text)
    omitted = body is None and task.detail.body is not None
    return _one_line(ResultLineWithBody(*_result(task), text, encoded, omitted))


def csv_header(own: Sequence[OwnColumn] | None) -> bytes:
    """The names of the columns. None: the file was begun by a version without columns of the list."""
    if own is None:
        return _csv(CSV_COLUMNS)
    return _csv((*CSV_COLUMNS, *LABEL_COLUMNS, *(_cell(column.title) for column in own)))


def csv_row(task: Task, kind: JobKind, own: Sequence[OwnColumn] | None) -> bytes:
    """The task's row, without its body; several, if several were extracted."""
    detail, body, error = task.detail, task.detail.body, error_json(task)
    cells = (
        task.index,
        task.task_id,
        _cell(csv_input(shown_input(task.input))),
        task.status.label,
        task.http_status,
        task.attempts,
        body.length if body else None,
        body.sha256 if body else None,
        _cell(detail.content_type),
        _cell(error.code if error else None),
        _cell(error.message if error else None),
        _cell(detail.final_url),
        elapsed(task),
        iso_time(task.finished_at),
    )
    if own is None:
        return _csv(cells)
    labels = labels_of(shown_input(task.input), kind)
    rows: Sequence[Mapping[str, Any] | None] = [*extracted_rows(task)] or [None]
    return b"".join([_csv((*cells, *_own_cells(task, labels, own, row))) for row in rows])


def _own_cells(task: Task, labels: TaskLabels, own: Sequence[OwnColumn], row: Mapping[str, Any] | None) -> list[Any]:
    cells = [labels.url, labels.id, labels.tag, *(column.value(task, labels, row) for column in own)]
    return [_cell(cell) if isinstance(cell, str) else _json_flag(cell) for cell in cells]


def _json_flag(cell: Any) -> Any:
    return cell if not isinstance(cell, bool) else "true" if cell else "false"


def _labels(task: Task) -> tuple[str | None, str | None, Any, Any, bool]:
    """`id`, `tag` and `data` of the input, what was extracted, and whether the task is unchanged."""
    # Nearly every input is a URL alone.
    labels = labels_of(task.input, JobKind.FETCH) if bytes(task.input)[:1] == b"{" else NO_LABELS
    ref = task.detail.extracted
    extracted = None if ref is None or ref.inline is None else msgspec.Raw(ref.inline)
    return labels.id, labels.tag, labels.data or None, extracted, task.is_unchanged


def _result(task: Task) -> _Fields:
    detail, body = task.detail, task.detail.body
    return (
        task.index,
        task.task_id,
        shown_input(task.input),
        task.status.label,
        task.http_status,
        task.attempts,
        body.length if body else None,
        body.sha256 if body else None,
        detail.content_type,
        error_json(task),
        detail.final_url,
        detail.headers,
        elapsed(task),
        iso_time(task.finished_at),
        *_labels(task),
    )


def _one_line(line: msgspec.Struct) -> bytes:
    text = _encode(line)
    # The input is included as submitted. A newline in it is whitespace: inside a JSON string it would be escaped.
    if b"\n" in text:
        text = text.replace(b"\n", b" ")
    return text + b"\n"


def _text_of(body: bytes | memoryview, as_text: bool) -> tuple[str | None, str | None]:
    if as_text:
        try:
            return str(body, "utf-8"), None
        except UnicodeDecodeError:
            pass
    return None, base64.b64encode(body).decode()


def elapsed(task: Task) -> float | None:
    """Duration of the last attempt in seconds; None until the task is finished."""
    return task.detail.elapsed if task.finished_at is not None else None


def csv_input(value: msgspec.Raw) -> str:
    """A string without quotes; anything else as JSON."""
    raw = bytes(value)
    if raw.startswith(b'"'):
        try:
            return msgspec.json.decode(raw, type=str)
        except msgspec.MsgspecError:
            pass
    return raw.decode(errors="replace")


def _cell(text: str | None) -> str | None:
    """Put an apostrophe before what a spreadsheet would take for a formula, so that it takes it for text."""
    return f"'{text}" if text and text.startswith(_FORMULA) else text


def _csv(cells: tuple[Any, ...]) -> bytes:
    row = io.StringIO()
    csv.writer(row, lineterminator="\r\n").writerow(cells)
    return row.getvalue().encode()
