"""The form of an export's files, and the part for it: what a recorded export (`writer`) and a direct one (`direct`)
share."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import msgspec

from conveyor.export import zip_writer as archive
from conveyor.export.archive_names import ArchiveNames
from conveyor.export.columns import OwnColumn
from conveyor.export.formats import LinesPart, Part, ZipPart
from conveyor.export.lines import CSV_COLUMNS, LABEL_COLUMNS, csv_header, csv_row, result_line, result_line_with_body
from conveyor.export.request import TABLES, ExportBodies, ExportCompression, ExportFormat, load_parquet
from conveyor.model import Compression, Job, JobKind, ListFormat, Task
from conveyor.read.body_reader import Body

# Of csv and Parquet, with and without bodies; the list's own columns get other titles.
TAKEN_COLUMNS = (*CSV_COLUMNS, *LABEL_COLUMNS, "headers", "body", "body_omitted")


class PartForm(msgspec.Struct, frozen=True):
    """What all files of an export share. `columns` are the list's own; None: a version without them began the file."""

    format: ExportFormat
    compression: ExportCompression
    bodies: ExportBodies
    created_at: float
    kind: JobKind
    columns: Sequence[OwnColumn] | None = ()


def new_part(form: PartForm, limit: int | None, names: ArchiveNames, stored: msgspec.Raw | None = None) -> Part:
    """A file of at most `limit` bytes, begun or resumed from its checkpoint."""
    if form.format is ExportFormat.ZIP:
        level = archive.LEVEL if form.compression is ExportCompression.DEFLATE else 0
        return ZipPart(datetime.fromtimestamp(form.created_at, UTC), level, limit, names, stored)
    compression = Compression(form.compression.value)
    own = form.columns
    if form.format is ExportFormat.PARQUET:
        with_bodies = form.bodies is ExportBodies.BINARY
        part: Part = load_parquet().ParquetPart(compression, limit, with_bodies, form.kind, own, stored)
        return part
    if form.format is ExportFormat.CSV:
        return LinesPart(
            lambda task, _: csv_row(task, form.kind, own), compression, limit, csv_header(own), stored=stored
        )
    return LinesPart(_json_line(form.bodies), compression, limit, stored=stored)


def has_own_columns(job: Job, kind: ExportFormat) -> bool:
    """Whether a file of this format has columns that only the job's tasks tell. A list of lines of text has none."""
    if kind not in TABLES:
        return False
    return job.options.extract is not None or job.source is None or job.source.format is not ListFormat.TEXT


def _json_line(bodies: ExportBodies) -> Callable[[Task, Body | None], bytes]:
    if bodies is ExportBodies.NONE:
        return lambda task, _: result_line(task)
    as_text = bodies is ExportBodies.TEXT
    return lambda task, body: result_line_with_body(task, body, as_text)
