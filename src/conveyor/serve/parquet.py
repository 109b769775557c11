"""Parquet: a part of an export as a file of columns. Needs the extra `parquet`, and is imported only when it is asked
for.

A file of this format ends with a list of all that is in it, which no other process can go on with: a part that was not
finished is made anew, from its first task. It is written to a temporary file, a group of rows at a time.
"""

import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from conveyor.model import Compression, Task
from conveyor.serve.lines import csv_input, elapsed
from conveyor.serve.parts import Flushed, Packed, Step
from conveyor.serve.reading import Body, checked
from conveyor.serve.results import error_json

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
_BODY = [pa.field("body", pa.binary()), pa.field("body_omitted", pa.bool_(), nullable=False)]
_CODECS = {Compression.NONE: "none", Compression.GZIP: "gzip", Compression.ZSTD: "zstd"}

_GROUP_BYTES = 8 * 1024 * 1024
_GROUP_ROWS = 20_000
_CHUNK = 4 * 1024 * 1024
# Beside its texts, a row takes less than this in memory; and a group less than that in the list at the end.
_ROW_BYTES = 200
_GROUP_END_BYTES = 8 * 1024


class ParquetPart:
    """Rows in columns, and their bodies as bytes if they are wanted."""

    lasting = False

    def __init__(self, compression: Compression, limit: int | None, with_bodies: bool) -> None:
        self._limit = limit
        self._with_bodies = with_bodies
        schema = pa.schema([*_SCHEMA, *_BODY]) if with_bodies else _SCHEMA
        self._schema = schema
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (see close)
        self._writer = pq.ParquetWriter(self._file, schema, compression=_CODECS[compression])
        self._rows: list[tuple[Any, ...]] = []
        self._groups = 1
        self.held = 0
        self.tasks = 0

    def pack(self, tasks: Sequence[Task], bodies: Sequence[Body | None]) -> Packed:
        for position, (task, body) in enumerate(zip(tasks, bodies, strict=True)):
            row, size = self._row(task, body)
            if not self._fits(size):
                return Packed(b"", position)
            self._rows.append(row)
            self.held += size
            self.tasks += 1
            if self.held >= _GROUP_BYTES or len(self._rows) >= _GROUP_ROWS:
                self._write()
        return Packed(b"", len(tasks))

    def flush(self) -> Flushed:
        return Flushed(b"", b"")

    def kept(self) -> msgspec.Raw:
        raise RuntimeError("a part of this format can not be put down")

    def end(self, beside: int) -> Iterator[Step]:
        self._write()
        self._writer.close()
        size = self._file.tell()
        self._file.seek(0)
        for _ in range(0, size, _CHUNK):
            yield None, lambda _: self._file.read(_CHUNK)

    def close(self) -> None:
        # It would write the end of the file later on, when nobody looks.
        self._writer.close()
        self._file.close()

    def _fits(self, size: int) -> bool:
        if self._limit is None or self.tasks == 0:
            return True
        room = self._limit - _GROUP_END_BYTES * (self._groups + 1)
        if self._file.tell() + self.held + size <= room:
            return True
        self._write()
        return self._file.tell() + size + self._limit // 64 <= room

    def _row(self, task: Task, body: Body | None) -> tuple[tuple[Any, ...], int]:
        detail, ref, error = task.detail, task.detail.body, error_json(task)
        given = csv_input(task.input)
        texts = (detail.content_type, error.code if error else None, error.message if error else None, detail.final_url)
        row = (
            task.index,
            task.task_id,
            given,
            task.status.label,
            task.http_status,
            task.attempts,
            ref.length if ref else None,
            ref.sha256 if ref else None,
            *texts,
            elapsed(task),
            None if task.finished_at is None else round(task.finished_at * 1000),
        )
        size = _ROW_BYTES + 4 * (len(given) + sum(len(text or "") for text in texts))
        if not self._with_bodies:
            return row, size
        kept = None if body is None or ref is None else bytes(checked(ref, body))
        return (*row, kept, kept is None and ref is not None), size + len(kept or b"")

    def _write(self) -> None:
        if not self._rows:
            return
        by_column = zip(zip(*self._rows, strict=True), self._schema, strict=True)
        columns = [pa.array(values, field.type) for values, field in by_column]
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))
        self._groups += 1
        self._rows, self.held = [], 0
