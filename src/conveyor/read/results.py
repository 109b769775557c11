"""Results. Gets a run and a cursor, reads tasks and bodies through the seams, and returns pages, the public form of a
task, and its body, checked against the stored sha256.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from hashlib import sha256
from typing import Any

import msgspec
from isal import isal_zlib

from conveyor.auth.body_links import BODY_SECONDS
from conveyor.clock import iso_text
from conveyor.engines.blobs import Blobs
from conveyor.engines.records import Records
from conveyor.engines.tasks import TaskFilter, Tasks
from conveyor.errors import NoBody, NotFound
from conveyor.jobs.block_sums import CHECKED_WHOLE, crc_of
from conveyor.jobs.body_coding import (
    GZIP_HEADER,
    LARGE,
    check_deflated,
    damaged_body,
    gzip_trailer,
    inflate,
    missing_body,
    stored_as,
)
from conveyor.jobs.secrets import shown_input
from conveyor.model import (
    PROGRESS,
    BlockSums,
    BodyRef,
    Page,
    RunKey,
    Task,
    TaskError,
    TaskProgress,
    piece_key,
    progress_id,
)
from conveyor.read import cursors
from conveyor.read.body_names import body_name
from conveyor.read.merge import merged_page
from conveyor.read.transfers import progress_json
from conveyor.states import TaskStatus
from conveyor.telemetry import metrics

# A body that is read as a whole, and checked before any of it is sent. No deflated one is longer.
_SMALL = LARGE


class TaskPage(Page[Task], frozen=True):
    """A page of tasks, and the number of rows that were read for it."""

    read: int = 0


async def result_page(tasks: Tasks, run: RunKey, where: TaskFilter, limit: int, cursor: str | None) -> TaskPage:
    """Up to `limit` matching tasks, in order of task_id. A page reads a bounded number of rows: where few match, it may
    have fewer tasks, or none, and still not be the last. Raises BadCursor."""
    positions = cursors.decode(cursor, run.shard_count)
    if run.shard_count > 1:
        merged = await merged_page(tasks, run, where, limit, positions)
        count_rows(merged.rows_read, len(merged.items))
        following = None if merged.positions is None else cursors.encode(merged.positions)
        return TaskPage(merged.items, following, merged.rows_read)
    # One row more than the limit tells whether there is a next page, so that no last page is empty.
    scanned = await tasks.scan(run, 0, positions[0], limit + 1, where)
    items = scanned.tasks[:limit]
    count_rows(scanned.rows_read, len(items))
    last = items[-1].task_id if len(scanned.tasks) > limit else scanned.last
    return TaskPage(items, None if last is None else cursors.encode([last]), scanned.rows_read)


def count_rows(read: int, returned: int) -> None:
    """Count the rows of a page in the metrics."""
    metrics.ROWS_READ.add(read)
    metrics.ROWS_RETURNED.add(returned)


def task_json(task: Task, body_url: str | None) -> dict[str, Any]:
    """A task as the API shows it, but for what was extracted. `headers` are [name, value] pairs as received: names
    repeat (Set-Cookie) and order matters. `body_url` is shown only if the task has a body."""
    detail = task.detail
    body = detail.body
    return {
        "task_id": task.task_id,
        "index": task.index,
        "input": shown_input(task.input),
        "status": task.status.label,
        "unchanged": task.is_unchanged,
        "attempts": task.attempts,
        "http_status": task.http_status,
        "error": error_json(task),
        "dead_lettered": detail.dead_lettered,
        "content_type": detail.content_type,
        "size": body.length if body else None,
        "sha256": body.sha256 if body else None,
        "final_url": detail.final_url,
        "headers": detail.headers,
        "elapsed": detail.elapsed if task.finished_at is not None else None,
        "finished_at": iso_time(task.finished_at),
        "body_url": body_url if body else None,
    }


async def task_progress(records: Records, run: RunKey, task: Task) -> dict[str, Any] | None:
    """The progress of a long task, as the API shows it; None if the task is finished or reports no progress."""
    if task.status is not TaskStatus.PENDING:
        return None
    row = await records.documents.document(PROGRESS, run.tenant, progress_id(run.run_id, task.index))
    if row is None:
        return None
    return progress_json(msgspec.json.decode(row.body, type=TaskProgress))


async def body_link(blobs: Blobs, task: Task, path: str | None) -> str | None:
    """The URL of the body, valid for a day: a link that the store signs, if the body is one object; else `path`, which
    Conveyor has signed."""
    body = task.detail.body
    if body is None or body.offset >= 0 or body.piece or body.inline is not None:
        return path
    name = body_name(task).rpartition("/")[2]
    signed = await blobs.presigned_get(body.key, BODY_SECONDS, "application/octet-stream", name)
    return path if signed is None else signed.url


def error_json(task: Task) -> TaskError | None:
    """Why the task failed. The row has the code even if the detail was dropped."""
    if task.detail.error is None and task.error_code is not None and not task.is_unchanged:
        return TaskError(task.error_code, "")
    return task.detail.error


def iso_time(at: float | None) -> str | None:
    """A time in ISO 8601, or None."""
    return None if at is None else iso_text(at)


def body_ref(task: Task) -> BodyRef:
    """The reference to the task's body. Raises NoBody."""
    if task.detail.body is None:
        raise NoBody
    return task.detail.body


def extracted_ref(task: Task) -> BodyRef:
    """The reference to what was extracted. Raises NoBody."""
    if task.detail.extracted is None:
        raise NoBody("Nothing was extracted for the task.")
    return task.detail.extracted


async def read_body(blobs: Blobs, task: Task) -> bytes:
    """The task's whole body, for bodies that fit into memory, checked. Raises NoBody and BodyDamaged."""
    return b"".join([piece async for piece in stream_body(blobs, body_ref(task))])


async def stream_body(blobs: Blobs, ref: BodyRef) -> AsyncIterator[bytes]:
    """A body in pieces, in constant memory. A small one is checked before its only piece. The last piece of a long one
    comes after the check, so that nobody gets all of a damaged body: its stream ends early, by BodyDamaged."""
    if ref.length <= _SMALL:
        if body := await _checked(blobs, ref):
            yield body
        return
    digest = sha256()
    got, last = 0, b""
    try:
        async for piece in _pieces(blobs, ref):
            own = piece if ref.offset < 0 else piece[: ref.length - got]
            digest.update(own)
            got += len(own)
            if own:
                if last:
                    yield last
                last = own
            if ref.offset >= 0 and got == ref.length:
                break
    except NotFound:
        raise missing_body(ref) from None
    check_body(ref, got, digest.hexdigest())
    yield last


async def stream_range(blobs: Blobs, ref: BodyRef, start: int, end: int) -> AsyncIterator[bytes]:
    """The bytes of a body from `start` up to `end`, checked before they are sent: with all of the body, or block by
    block if it is long. A long one of an earlier version has no checksums of blocks: a client that reads parts of it
    checks what it puts together. Raises BodyDamaged."""
    if ref.length <= _SMALL:
        yield (await _checked(blobs, ref))[start:end]
        return
    if ref.sums is not None:
        for number in range(start // ref.sums.size, -(-end // ref.sums.size)):
            first, last = await _check_block(blobs, ref, ref.sums, number)
            async for piece in _span(blobs, ref, max(start, first), min(end, last)):
                yield piece
        return
    if ref.length <= CHECKED_WHOLE:
        async for _ in stream_body(blobs, ref):
            pass
    async for piece in _span(blobs, ref, start, end):
        yield piece


async def _check_block(blobs: Blobs, ref: BodyRef, sums: BlockSums, number: int) -> tuple[int, int]:
    """Read and check a block, in constant memory. Returns where it starts and ends. Raises BodyDamaged."""
    first, last = number * sums.size, min(ref.length, (number + 1) * sums.size)
    crc = 0
    async for piece in _span(blobs, ref, first, last):
        crc = isal_zlib.crc32(piece, crc)
    if crc != crc_of(sums, number):
        raise damaged_body(ref, f"its bytes from {first} to {last} are not those that were written")
    return first, last


async def _span(blobs: Blobs, ref: BodyRef, start: int, end: int) -> AsyncIterator[bytes]:
    """The bytes of a body that is not encoded from `start` up to `end`, as they are stored. Raises BodyDamaged."""
    left = end - start
    try:
        async with aclosing(_pieces(blobs, ref, start)) as pieces:
            async for piece in pieces:
                own = piece[:left]
                left -= len(own)
                yield own
                if left == 0:
                    return
    except NotFound:
        raise missing_body(ref) from None
    raise damaged_body(ref, "it is shorter than when it was written")


async def stream_gzip(blobs: Blobs, ref: BodyRef, start: int, end: int) -> AsyncIterator[bytes]:
    """The bytes from `start` up to `end` of the gzip stream that holds a deflated body, made of its stored bytes. They
    are checked first."""
    data = await _stored(blobs, ref)
    stored = check_deflated(ref, data)
    yield b"".join((GZIP_HEADER, data, gzip_trailer(stored.crc, ref.length)))[start:end]


async def _checked(blobs: Blobs, ref: BodyRef) -> bytes:
    """A small body as a whole."""
    if stored_as(ref) is not None:
        body = inflate(ref, await _stored(blobs, ref))
    elif ref.inline is not None:
        body = ref.inline
    elif ref.piece:
        try:
            body = b"".join([part async for part in _pieces(blobs, ref)])
        except NotFound:
            raise missing_body(ref) from None
    else:
        # One byte more detects an object that is too long.
        start, length = (0, ref.length + 1) if ref.offset < 0 else (ref.offset, ref.length)
        data = await blobs.get(ref.key, start, length)
        if data is None:
            raise missing_body(ref)
        body = data
    check_body(ref, len(body), sha256(body).hexdigest())
    return body


async def _stored(blobs: Blobs, ref: BodyRef) -> bytes:
    """The stored bytes of a deflated body, which fit into memory: no body in a segment is large."""
    data = await blobs.get(ref.key, max(ref.offset, 0), ref.stored_length)
    if data is None:
        raise missing_body(ref)
    return data


async def _pieces(blobs: Blobs, ref: BodyRef, start: int = 0) -> AsyncGenerator[bytes, None]:
    """The bytes from `start` of a body on, including those after it in its segment. Raises NotFound."""
    if ref.inline is not None:
        yield ref.inline[start:]
        return
    if not ref.piece:
        async for part in blobs.stream(ref.key, max(ref.offset, 0) + start):
            yield part
        return
    first, inside = divmod(start, ref.piece)
    for number in range(first, -(-ref.length // ref.piece)):
        async for part in blobs.stream(piece_key(ref.key, number), inside):
            yield part
        inside = 0


def check_body(ref: BodyRef, length: int, digest: str) -> None:
    """Raise BodyDamaged unless length and digest are those of the stored body."""
    if length != ref.length or digest != ref.sha256:
        raise damaged_body(
            ref,
            f"{length} bytes with sha256 {digest[:16]}…, where {ref.length} bytes with {ref.sha256[:16]}… were written",
        )
