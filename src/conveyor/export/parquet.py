"""Parquet: a part of an export as a file of columns. Needs the extra `parquet`, and is imported only for an export of
this format.

A Parquet file is groups of rows, then a footer with the place of each group. Each group is written as a separate file,
at the offset that it has in the part: its bytes are the next bytes of the part, and its footer goes into a sidecar. The
footer of the part is made of these footers, so that any process can resume after the last group.
"""

import io
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from conveyor.export.columns import FLAG, NUMBER, TEXT, WHOLE, OwnColumn, extracted_rows
from conveyor.export.formats import FlushedPart, PackedTasks, Step
from conveyor.export.lines import csv_input, elapsed
from conveyor.jobs.secrets import shown_input
from conveyor.model import Compression, JobKind, Task
from conveyor.read.body_reader import Body
from conveyor.read.results import error_json
from conveyor.read.task_labels import labels_of

_SCHEMA = pa.schema(
    [
        pa.field("index", pa.int64(), nullable=False),
        pa.field("task_id", pa.string(), nullable=False),
        pa.field("input", pa.string(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        ("http_status", pa.int32()),
        pa.field("attempts", pa.int32(), nullable=False),
        ("size", pa.int64()),
        ("sha256", pa.string()),
        ("content_type", pa.string()),
        ("error_code", pa.string()),
        ("error_message", pa.string()),
        ("final_url", pa.string()),
        ("elapsed", pa.float64()),
        ("finished_at", pa.timestamp("ms", tz="UTC")),
    ]
)
_LABELS = [
    ("headers", pa.list_(pa.struct([pa.field("name", pa.string()), pa.field("value", pa.string())]))),
    ("url", pa.string()),
    ("id", pa.string()),
    ("tag", pa.string()),
]
_TYPES = {TEXT: pa.string(), WHOLE: pa.int64(), NUMBER: pa.float64(), FLAG: pa.bool_()}
_BODY = [pa.field("body", pa.binary()), pa.field("body_omitted", pa.bool_(), nullable=False)]
_CODECS = {Compression.NONE: "none", Compression.GZIP: "gzip", Compression.ZSTD: "zstd"}

_MAGIC = b"PAR1"
_GROUP_BYTES = 8 * 1024 * 1024
_GROUP_ROWS = 20_000
# Upper bounds: memory of a row besides its texts, and bytes of a group in the footer.
_ROW_BYTES = 200
_GROUP_END_BYTES = 8 * 1024
_COLUMN_END_BYTES = 1024


class _ParquetPartState(msgspec.Struct, frozen=True):
    tasks: int
    sent: int
    groups: int


class _Group(NamedTuple):
    """The bytes of some rows, and a file without rows whose footer locates them."""

    data: bytes
    footer: bytes


class ParquetPart:
    """Rows in columns, with their bodies as bytes if `with_bodies`."""

    def __init__(
        self,
        compression: Compression,
        limit: int | None,
        with_bodies: bool,
        kind: JobKind,
        own: Sequence[OwnColumn] | None,
        stored: msgspec.Raw | None = None,
    ) -> None:
        """`own` are the list's own columns; None: the file was begun by a version without labels."""
        state = msgspec.json.decode(stored, type=_ParquetPartState) if stored else _ParquetPartState(0, 0, 0)
        self._limit = limit
        self._with_bodies = with_bodies
        self._kind = kind
        self._own = own
        labels = [] if own is None else [*_LABELS, *((column.title, _TYPES[column.type]) for column in own)]
        self._schema = pa.schema([*_SCHEMA, *labels, *(_BODY if with_bodies else [])])
        self._group_end = _GROUP_END_BYTES + _COLUMN_END_BYTES * len(labels)
        self._codec = _CODECS[compression]
        self._rows: list[tuple[Any, ...]] = []
        self._footers: list[bytes] = []
        self._sent, self._groups, self.tasks = state.sent, state.groups, state.tasks
        self.buffered = 0

    def pack(self, tasks: Sequence[Task], bodies: Sequence[Body | None]) -> PackedTasks:
        emitted: list[bytes] = []
        for position, (task, body) in enumerate(zip(tasks, bodies, strict=True)):
            rows, size = self._rows_of(task, body)
            if not self._fits(size, emitted):
                return PackedTasks(b"".join(emitted), position)
            self._rows += rows
            self.buffered += size
            self.tasks += 1
            if self.buffered >= _GROUP_BYTES or len(self._rows) >= _GROUP_ROWS:
                emitted.append(self._write())
        return PackedTasks(b"".join(emitted), len(tasks))

    def flush(self) -> FlushedPart:
        data = self._write()
        sidecar = msgspec.msgpack.encode(self._footers) if self._footers else b""
        self._footers = []
        return FlushedPart(data, sidecar)

    def checkpoint(self) -> msgspec.Raw:
        return msgspec.Raw(msgspec.json.encode(_ParquetPartState(self.tasks, self._sent, self._groups)))

    def end(self, sidecars: int) -> Iterator[Step]:
        begin = b"" if self._sent else _MAGIC
        # One step: half a footer cannot be checkpointed.
        yield range(sidecars), lambda stored: begin + self._footer(stored)

    def close(self) -> None:
        """It holds nothing outside of memory."""

    def _fits(self, size: int, emitted: list[bytes]) -> bool:
        if self._limit is None or self.tasks == 0:
            return True
        room = self._limit - self._group_end * (self._groups + 2)
        if self._sent + self.buffered + size <= room:
            return True
        emitted.append(self._write())
        return self._sent + size + self._limit // 64 <= room

    def _rows_of(self, task: Task, body: Body | None) -> tuple[list[tuple[Any, ...]], int]:
        """The rows of a task, several if several were extracted, and the memory that they take. The first of them has
        the body."""
        extracted: Sequence[Mapping[str, Any] | None] = [None]
        if self._own is not None:
            extracted = extracted_rows(task) or extracted
        first, size = self._row(task, body, extracted[0])
        others = [self._row(task, None, row) for row in extracted[1:]]
        return [first, *(row for row, _ in others)], size + sum(more for _, more in others)

    def _row(self, task: Task, body: Body | None, extracted: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], int]:
        detail, ref, error = task.detail, task.detail.body, error_json(task)
        text_input = csv_input(shown_input(task.input))
        texts = (detail.content_type, error.code if error else None, error.message if error else None, detail.final_url)
        row = (
            task.index,
            task.task_id,
            text_input,
            task.status.label,
            task.http_status,
            task.attempts,
            ref.length if ref else None,
            ref.sha256 if ref else None,
            *texts,
            elapsed(task),
            None if task.finished_at is None else round(task.finished_at * 1000),
        )
        size = _ROW_BYTES + 4 * (len(text_input) + sum(len(text or "") for text in texts))
        if self._own is not None:
            labels, more = self._labels(task, self._own, extracted)
            row, size = (*row, *labels), size + more
        if not self._with_bodies:
            return row, size
        included = None if body is None or ref is None else bytes(body)
        return (*row, included, included is None and ref is not None), size + len(included or b"")

    def _labels(
        self, task: Task, own: Sequence[OwnColumn], extracted: Mapping[str, Any] | None
    ) -> tuple[tuple[Any, ...], int]:
        """The response's headers, and what is the user's own; and how much memory they take."""
        headers = task.detail.headers
        labels = labels_of(shown_input(task.input), self._kind)
        values = (labels.url, labels.id, labels.tag, *(column.value(task, labels, extracted) for column in own))
        size = sum(len(value) if isinstance(value, str) else 8 for value in values if value is not None)
        pairs = None if headers is None else [{"name": name, "value": value} for name, value in headers]
        return (pairs, *values), 4 * (size + sum(len(name) + len(value) for name, value in headers or ()))

    def _write(self) -> bytes:
        """The buffered rows as the next group."""
        if not self._rows:
            return b""
        begin = b"" if self._sent else _MAGIC
        by_column = zip(zip(*self._rows, strict=True), self._schema, strict=True)
        columns = [pa.array(values, field.type) for values, field in by_column]
        group = self._group(pa.record_batch(columns, schema=self._schema), self._sent + len(begin))
        self._footers.append(group.footer)
        self._groups += 1
        self._sent += len(begin) + len(group.data)
        self._rows, self.buffered = [], 0
        return begin + group.data

    def _group(self, rows: pa.RecordBatch, place: int) -> _Group:
        """Write the group to a temporary file, behind a hole of `place` bytes, so that its footer has these offsets."""
        with tempfile.NamedTemporaryFile() as file:
            with pa.OSFile(file.name, "wb") as sink, self._writer(sink) as writer:
                # The writer starts at 0 and takes its offsets from the file; so the seek comes after it has opened.
                os.lseek(sink.fileno(), place, os.SEEK_SET)
                writer.write_batch(rows)
            file.seek(place)
            data = file.read()
        size = int.from_bytes(data[-8:-4], "little") + 8
        return _Group(data[:-size], _MAGIC + data[-size:])

    def _footer(self, sidecars: Sequence[bytes]) -> bytes:
        """The end of the file: the places of all groups."""
        with io.BytesIO() as empty:
            self._writer(empty).close()
            whole = pq.read_metadata(io.BytesIO(empty.getvalue()))
        for footers in sidecars:
            for footer in msgspec.msgpack.decode(footers, type=list[bytes]):
                whole.append_row_groups(pq.read_metadata(io.BytesIO(footer)))
        with io.BytesIO() as file:
            whole.write_metadata_file(file)
            return file.getvalue()[len(_MAGIC) :]

    def _writer(self, sink: Any) -> pq.ParquetWriter:
        # Without statistics of the list's own columns, whose footers would have no bound.
        return pq.ParquetWriter(sink, self._schema, compression=self._codec, write_statistics=_SCHEMA.names)
