"""Every way to read a stored body: what each of them gives."""

import base64
import gzip
import io
import json
import zipfile
from collections.abc import AsyncGenerator
from datetime import UTC, datetime

from conveyor.engines.blobs import Blobs
from conveyor.export.archive_names import ArchiveNames
from conveyor.export.formats import LinesPart, ZipPart
from conveyor.export.lines import result_line_with_body
from conveyor.jobs.body_coding import gzip_length
from conveyor.model import Compression, JobKind, Task
from conveyor.read.body_reader import windows
from conveyor.read.results import body_ref, read_body, stream_body, stream_gzip, stream_range
from conveyor.read.walk import Position, TaskBatch


async def all_readings(blobs: Blobs, tasks: list[Task]) -> dict[str, list[bytes]]:
    """The bodies of these tasks, as each reader gives them."""
    readings: dict[str, list[bytes]] = {"whole": [], "streamed": [], "in ranges": [], "gzip": []}
    for task in tasks:
        ref = body_ref(task)
        readings["whole"].append(await read_body(blobs, task))
        readings["streamed"].append(b"".join([piece async for piece in stream_body(blobs, ref)]))
        parts, step = [], ref.length // 3 + 1
        for start in range(0, ref.length, step):
            end = min(start + step, ref.length)
            parts += [piece async for piece in stream_range(blobs, ref, start, end)]
        readings["in ranges"].append(b"".join(parts))
        if ref.stored is None:
            readings["gzip"].append(readings["whole"][-1])
        else:
            size = gzip_length(ref.stored)
            first = b"".join([piece async for piece in stream_gzip(blobs, ref, 0, 7)])
            rest = b"".join([piece async for piece in stream_gzip(blobs, ref, 7, size)])
            assert len(first + rest) == size
            readings["gzip"].append(gzip.decompress(first + rest))
    readings["zip, deflated"] = await _zipped(blobs, tasks, 2)
    readings["zip, stored"] = await _zipped(blobs, tasks, 0)
    readings["lines"] = await _lines(blobs, tasks)
    return readings


async def _batches(tasks: list[Task]) -> AsyncGenerator[TaskBatch, None]:
    yield TaskBatch(tasks, Position(), tasks[-1].index, len(tasks))


async def _zipped(blobs: Blobs, tasks: list[Task], level: int) -> list[bytes]:
    part, data = ZipPart(datetime(2026, 1, 1, tzinfo=UTC), level, None, ArchiveNames(JobKind.FETCH)), b""
    async for window in windows(blobs, _batches(tasks), True, deflated=part.copies):
        data += part.pack(window.tasks, window.bodies).data
    sidecar = part.flush().sidecar
    data += b"".join([make([sidecar] * len(needed)) for needed, make in part.end(1)])
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        methods = {entry.compress_type for entry in archive.infolist()[:-1]}
        assert level or methods <= {zipfile.ZIP_STORED}
        return [archive.read(entry) for entry in archive.infolist()[:-1]]


async def _lines(blobs: Blobs, tasks: list[Task]) -> list[bytes]:
    part = LinesPart(lambda task, body: result_line_with_body(task, body, as_text=False), Compression.NONE, None)
    data = b""
    async for window in windows(blobs, _batches(tasks), True):
        data += part.pack(window.tasks, window.bodies).data
    return [base64.b64decode(json.loads(line)["body_base64"]) for line in data.splitlines()]
