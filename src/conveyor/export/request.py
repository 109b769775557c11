"""The request for an export: its formats, compressions and selection, with defaults and limits, and file names."""

import importlib
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

import msgspec

from conveyor.engines.tasks import TaskFilter
from conveyor.errors import FormatUnavailable, InvalidField
from conveyor.export.archive_names import checked_names
from conveyor.read.runs import LATEST, LATEST_PER_TASK
from conveyor.states import TaskStatus

T = TypeVar("T")

STATUSES = {status.label: status for status in TaskStatus}

_SMALLEST_PART = 64 * 1024
_LARGEST_PART = 1 << 40
_PARQUET_PART = 128 * 1024 * 1024
_LARGEST_PARQUET_PART = 1024 * 1024 * 1024
# Of an export that is written elsewhere: a crash repeats one part.
_COPIED_PART = 128 * 1024 * 1024
_LARGEST_COPIED_PART = 1024 * 1024 * 1024
_LONGEST_TEXT = 200


class ExportFormat(StrEnum):
    """The format of the files."""

    ZIP = "zip"
    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"


class ExportCompression(StrEnum):
    """The compression of the files; `deflate` is for the entries of a zip."""

    NONE = "none"
    DEFLATE = "deflate"
    GZIP = "gzip"
    ZSTD = "zstd"


class ExportBodies(StrEnum):
    """Whether and how the files include bodies."""

    NONE = "none"
    FILE = "file"
    TEXT = "text"
    BASE64 = "base64"
    BINARY = "binary"


class FormatNames(NamedTuple):
    """The options of a format, each default first, and its file names. `whole`: the format compresses inside, so the
    file gets no further ending."""

    compressions: tuple[ExportCompression, ...]
    bodies: tuple[ExportBodies, ...]
    ending: str
    media_type: str
    whole: bool


_PLAIN = (ExportCompression.NONE, ExportCompression.GZIP, ExportCompression.ZSTD)
FORMS = {
    ExportFormat.ZIP: FormatNames(
        (ExportCompression.DEFLATE, ExportCompression.NONE),
        (ExportBodies.FILE, ExportBodies.NONE),
        ".zip",
        "application/zip",
        whole=True,
    ),
    ExportFormat.JSONL: FormatNames(
        _PLAIN,
        (ExportBodies.NONE, ExportBodies.TEXT, ExportBodies.BASE64),
        ".jsonl",
        "application/x-ndjson",
        whole=False,
    ),
    ExportFormat.CSV: FormatNames(_PLAIN, (ExportBodies.NONE,), ".csv", "text/csv", whole=False),
    ExportFormat.PARQUET: FormatNames(
        (ExportCompression.ZSTD, ExportCompression.GZIP, ExportCompression.NONE),
        (ExportBodies.NONE, ExportBodies.BINARY),
        ".parquet",
        "application/vnd.apache.parquet",
        whole=True,
    ),
}
# Formats that name all columns before the first row.
TABLES = frozenset({ExportFormat.CSV, ExportFormat.PARQUET})
_OUTER = {ExportCompression.GZIP: (".gz", "application/gzip"), ExportCompression.ZSTD: (".zst", "application/zstd")}


class ExportSelect(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which tasks, by the filters of results: by their latest outcome over all runs (`latest-per-task`), or of one run:
    its id or number, or `latest`. `changed`: those of the latest run, or of the one that is named, that succeeded and
    are not unchanged."""

    status: str | None = None
    error_code: str | None = None
    http_status: int | None = None
    tag: str | None = None
    run: str = LATEST_PER_TASK
    changed: bool = False

    @property
    def where(self) -> TaskFilter:
        status = None if self.status is None else STATUSES[self.status]
        return TaskFilter(status, self.error_code, self.http_status, self.tag)


class ExportSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The request. `part_bytes` splits the export into files of at most that many bytes; `partial` exports the current
    results of an unfinished job. `names` is a template for the names of bodies in a zip. `to` is where the server
    writes the files, below a place that its operator lists."""

    format: ExportFormat = ExportFormat.ZIP
    compression: ExportCompression | None = None
    bodies: ExportBodies | None = None
    select: ExportSelect = ExportSelect()
    part_bytes: int | None = None
    partial: bool = False
    names: str | None = None
    to: str | None = None


def ending_of(kind: ExportFormat, compression: ExportCompression) -> str:
    """The ending of a file name."""
    return FORMS[kind].ending + ("" if FORMS[kind].whole else _OUTER.get(compression, ("", ""))[0])


def media_type_of(kind: ExportFormat, compression: ExportCompression) -> str:
    """The media type of a file."""
    own = FORMS[kind].media_type
    return own if FORMS[kind].whole else _OUTER.get(compression, ("", own))[1]


def load_parquet() -> Any:
    """The module that writes Parquet. Raises FormatUnavailable."""
    try:
        return importlib.import_module("conveyor.export.parquet")
    except ImportError:
        raise FormatUnavailable(
            "The server cannot write Parquet. Install the extra `parquet` (conveyor-jobs[parquet])."
        ) from None


def checked_compression(spec: ExportSpec) -> ExportCompression:
    """The requested compression, or the default of the format. Raises InvalidField."""
    return _one_of("compression", spec.format, spec.compression, FORMS[spec.format].compressions)


def checked_bodies(spec: ExportSpec) -> ExportBodies:
    """The requested form of bodies, or the default of the format. Raises InvalidField."""
    return _one_of("bodies", spec.format, spec.bodies, FORMS[spec.format].bodies)


def checked_template(spec: ExportSpec) -> str | None:
    """The template for names of bodies, validated. Raises InvalidField."""
    if spec.names is not None and spec.format is not ExportFormat.ZIP:
        raise InvalidField("`names` is for the format `zip`, which has a file for each body.", field="names")
    return checked_names(spec.names)


def checked_select(select: ExportSelect) -> ExportSelect:
    """The selection, validated. Raises InvalidField."""
    if select.status is not None and select.status not in STATUSES:
        raise InvalidField(f"`select.status` must be one of {', '.join(STATUSES)}.", field="select.status")
    if select.http_status is not None and not 100 <= select.http_status <= 599:
        raise InvalidField("`select.http_status` must be between 100 and 599.", field="select.http_status")
    for field, text in (("error_code", select.error_code), ("tag", select.tag)):
        if text is not None and len(text) > _LONGEST_TEXT:
            raise InvalidField(f"`select.{field}` has at most {_LONGEST_TEXT} characters.", field=f"select.{field}")
    return _changed(select) if select.changed else select


def _changed(select: ExportSelect) -> ExportSelect:
    """The selection of changed tasks with what it implies."""
    if select.error_code is not None or select.status not in {None, TaskStatus.SUCCEEDED.label}:
        raise InvalidField("`select.changed` selects tasks that succeeded. Drop it or the others.", field="select")
    run = LATEST if select.run == LATEST_PER_TASK else select.run
    return msgspec.structs.replace(select, status=TaskStatus.SUCCEEDED.label, run=run)


def checked_part_bytes(spec: ExportSpec) -> int | None:
    """The maximum size of a file in bytes; None for one file of any size. Raises InvalidField."""
    maximum: int = _LARGEST_PART
    default: int | None = None
    if spec.to is not None:
        maximum, default = _LARGEST_COPIED_PART, _COPIED_PART
    if spec.format is ExportFormat.PARQUET:
        load_parquet()
        maximum, default = _LARGEST_PARQUET_PART, _PARQUET_PART
    if spec.part_bytes is None:
        return default
    if not _SMALLEST_PART <= spec.part_bytes <= maximum:
        raise InvalidField(
            f"`part_bytes` of the format `{spec.format}` must be between {_SMALLEST_PART} and {maximum}.",
            field="part_bytes",
        )
    return spec.part_bytes


def _one_of(field: str, kind: ExportFormat, value: T | None, allowed: tuple[T, ...]) -> T:
    if value is None:
        return allowed[0]
    if value not in allowed:
        names = ", ".join(f"`{name}`" for name in allowed)
        raise InvalidField(f"`{field}` of the format `{kind}` must be one of {names}.", field=field)
    return value
