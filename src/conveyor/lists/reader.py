"""The list reader: turns the bytes of a staged list into validated inputs, batch by batch, in constant memory.

A list is text (one URL per line), jsonl (one input per line) or csv (a header, then rows), plain or compressed with
gzip, zstd or bzip2. The index of a task is the number of its line (of its row, in csv), counted from 0, so that no task
id depends on where a reader starts or stops. Blank lines and comments have no task. The reader returns invalid lines;
it does not raise for them.

A few kilobytes of a compressed list may contain a million lines: the reader yields to the event loop after each batch
and after each piece.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

import msgspec

from conveyor.errors import ListTooSparse, ListUnreadable
from conveyor.lists.csv_columns import CsvColumns, has_url_column, read_columns
from conveyor.lists.decoders import decoder_of
from conveyor.lists.inputs import MAX_INPUT_BYTES, compact_json, task_problem
from conveyor.lists.usual_lines import UsualLines
from conveyor.model import Compression, JobKind, ListFormat, TaskSeed
from conveyor.telemetry.redact import redact_credentials

# Lines of one batch that are not empty, and about how many bytes: they bound the memory, and what a crash repeats.
BATCH = 1600
BATCH_BYTES = 1024 * 1024

# How many bytes an empty line counts in a batch.
_EMPTY_BYTES = 16
# Lines that are looked at one by one before others run.
_STRETCH = 4096

# Lines without a task that a range may have, and how many more for each task.
MAX_WITHOUT_TASK = 1_000_000
MAX_WITHOUT_PER_TASK = 10

_LONGEST_LINE = MAX_INPUT_BYTES + 1024
_SNIPPET = 200
# A stretch of blank lines.
_BLANK = re.compile(rb"(?:[ \t\r]*+\n)*+")
# A line that needs no escaping in JSON, and is not a comment: visible ASCII.
_VISIBLE = re.compile(rb"[!$-\[\]-~][!#-\[\]-~]*")
# Of a frame, and of a skippable frame, which parallel compressors write first.
_BZIP2_MAGIC = b"BZh"
# Of a joined list.
_MARK = "!invalid "
_MARKED = re.compile(rb"!invalid (?P<reason>[^\t]+)\t(?P<text>.*)")
_UNREADABLE = {
    b"PK\x03\x04": "The list is a zip archive or an Excel file. Unpack it, or save it as csv.",
    b"\xfd7zXZ": "The list is compressed with xz. Use gzip, zstd or bzip2.",
}
_ZSTD_MAGIC = re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")


class InvalidListLine(msgspec.Struct, frozen=True):
    """An invalid line. `line` counts from 1, as editors do."""

    line: int
    reason: str
    text: str


decode_invalid = msgspec.json.Decoder(InvalidListLine).decode


def encode_invalid(lines: Sequence[InvalidListLine]) -> bytes:
    """Invalid lines as they are stored."""
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


class ListBatch(msgspec.Struct, frozen=True):
    """A batch of lines. `index` and `offset` are where the next batch starts."""

    seeds: list[TaskSeed]
    invalid: list[InvalidListLine]
    index: int
    offset: int


class ListReading(msgspec.Struct, frozen=True):
    """What to read: the format of the list, and where to start and stop (in bytes of the decompressed list)."""

    kind: JobKind
    format: ListFormat
    index: int = 0
    offset: int = 0
    # None: to the end.
    end: int | None = None
    # The first line of a csv, and its column with the URLs, if that is not `url`.
    header: bytes | None = None
    url_column: str | None = None
    # Lines before `index` that have a task, and that have none.
    tasks: int = 0
    without_task: int = 0

    @property
    def first_line(self) -> int:
        """The number of the line with index 0: row 0 of a csv is line 2."""
        return 2 if self.format is ListFormat.CSV else 1


async def read(pieces: AsyncIterator[bytes], reading: ListReading) -> AsyncGenerator[ListBatch, None]:
    """Batches of a list, from pieces of its bytes that begin at `reading.offset`. The end of a batch depends on its
    start, not on the pieces, so a second reader makes the same batches. Raises ListTooSparse and ListUnreadable."""
    parse = _parser(reading)
    records = _csv_records if reading.format is ListFormat.CSV else _lines
    index, offset = reading.index, reading.offset
    tasks, without_task = reading.tasks, reading.without_task
    async for part in _batched(records(_until(pieces, reading))):
        seeds, invalid = _parse_all(part, reading, index, parse)
        index += len(part)
        offset += sum(map(len, part)) + len(part)
        tasks += len(seeds)
        without_task += len(part) - len(seeds)
        if without_task > MAX_WITHOUT_TASK + MAX_WITHOUT_PER_TASK * tasks:
            raise ListTooSparse(
                f"The list has {without_task} lines without a task (blank lines, comments, invalid lines) and {tasks} "
                f"tasks. A list may have {MAX_WITHOUT_TASK} such lines, and {MAX_WITHOUT_PER_TASK} more for each task."
            )
        yield ListBatch(seeds, invalid, index, offset)
        await let_others_run()


async def let_others_run() -> None:
    """Yield to the event loop."""
    await asyncio.sleep(0)


async def decompressed(pieces: AsyncIterator[bytes], compression: Compression, max_bytes: int) -> AsyncIterator[bytes]:
    """The decompressed bytes of the list, in pieces. Raises ListUnreadable beyond `max_bytes`."""
    total = 0
    async for piece in _plain(pieces, compression):
        total += len(piece)
        if total > max_bytes:
            raise ListUnreadable(f"The list has more than {max_bytes} bytes when decompressed, the maximum.")
        yield piece


def detect_compression(head: bytes) -> Compression:
    """Detect the compression from the first bytes of the object. Raises ListUnreadable for one that cannot be read."""
    for magic, name in _UNREADABLE.items():
        if head.startswith(magic):
            raise ListUnreadable(name)
    if head.startswith(b"\x1f\x8b"):
        return Compression.GZIP
    if head.startswith(_BZIP2_MAGIC) and head[3:4].isdigit():
        return Compression.BZIP2
    return Compression.ZSTD if _ZSTD_MAGIC.match(head) else Compression.NONE


def detect_format(head: bytes) -> ListFormat:
    """Detect the format from the first bytes of the list: JSON, a csv header with a column `url`, or else text."""
    first = head.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")[0].strip()
    if has_url_column(first.decode(errors="replace")):
        return ListFormat.CSV
    return ListFormat.JSONL if first[:1] in (b"{", b'"', b"[") else ListFormat.TEXT


async def take(pieces: AsyncIterator[bytes], count: int) -> bytes:
    """The first bytes of a stream: at least `count`, unless the stream is shorter."""
    head = b""
    async for piece in pieces:
        head += piece
        if len(head) >= count:
            break
    return head


def check_header(header: bytes, kind: JobKind, url_column: str | None = None) -> CsvColumns:
    """The columns of a csv. Raises ListUnreadable if they do not fit the inputs of this kind."""
    return read_columns(_text(header), kind, url_column)


def invalid_line(number: int, line: bytes, reason: str) -> InvalidListLine:
    """An invalid line as it is stored: the beginning of its text, without credentials."""
    return InvalidListLine(number, reason, redact_credentials(line[:_SNIPPET].decode(errors="replace")))


def marked_invalid(name: str, line: InvalidListLine) -> str:
    """An invalid line of the list `name`, as a line of jsonl that several lists are joined into: no JSON, so that it is
    no task there either, and its reason goes with it."""
    return f"{_MARK}{_one_line(f'{name}:{line.line}: {line.reason}')}\t{_one_line(line.text)}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _parse_all(
    lines: list[bytes], reading: ListReading, index: int, parse: Callable[[bytes], bytes | None]
) -> tuple[list[TaskSeed], list[InvalidListLine]]:
    seeds: list[TaskSeed] = []
    invalid: list[InvalidListLine] = []
    usual = UsualLines(reading.kind, reading.format)
    text = b"\n".join([*lines, b""])
    start = done = 0
    while done < len(lines):
        inputs, start = usual.take(text, start)
        seeds += map(TaskSeed, range(index + done, index + done + len(inputs)), inputs)
        done += len(inputs)
        if done < len(lines):
            line = lines[done]
            found = _parse_line(line, reading, index + done, parse)
            if isinstance(found, TaskSeed):
                seeds.append(found)
            elif found is not None:
                invalid.append(found)
            start += len(line) + 1
            done += 1
            after = _after_blank(text, start)
            done += text.count(b"\n", start, after)
            start = after
    return seeds, invalid


def _after_blank(text: bytes, start: int) -> int:
    """Where the first line that is not blank begins: a million blank lines are a kilobyte of a compressed list."""
    stretch = _BLANK.match(text, start)
    return start if stretch is None else stretch.end()


def _parse_line(
    line: bytes, reading: ListReading, number: int, parse: Callable[[bytes], bytes | None]
) -> TaskSeed | InvalidListLine | None:
    """None for a line without a task."""
    try:
        raw = parse(line)
    except ListUnreadable as error:
        return _invalid(reading, number, line, error.message)
    if raw is None:
        return None
    wrong = task_problem(reading.kind, raw)
    return TaskSeed(number, compact_json(raw)) if wrong is None else _invalid(reading, number, line, wrong.message)


def _invalid(reading: ListReading, index: int, line: bytes, reason: str) -> InvalidListLine:
    marked = _MARKED.fullmatch(line) if reading.format is ListFormat.JSONL else None
    if marked:
        reason, line = marked["reason"].decode(errors="replace"), marked["text"]
    return invalid_line(index + reading.first_line, line, reason)


def _parser(reading: ListReading) -> Callable[[bytes], bytes | None]:
    """A function from a line to its input as JSON, or to None for a line without a task."""
    if reading.format is ListFormat.TEXT:
        return _parse_text
    if reading.format is ListFormat.JSONL:
        return _parse_json
    columns = check_header(reading.header or b"", reading.kind, reading.url_column)
    return lambda line: columns.parse(_text(line))


def _parse_text(line: bytes) -> bytes | None:
    if _VISIBLE.fullmatch(line):
        return b'"%b"' % line
    text = line.removeprefix(b"\xef\xbb\xbf").strip()
    if not text or text.startswith(b"#"):
        return None
    return msgspec.json.encode(_text(text))


def _parse_json(line: bytes) -> bytes | None:
    text = line.removeprefix(b"\xef\xbb\xbf").strip()
    if text:
        # Checks UTF-8 now: strings are not decoded before a worker needs them.
        _text(text)
    return text or None


async def _until(pieces: AsyncIterator[bytes], reading: ListReading) -> AsyncIterator[bytes]:
    left = None if reading.end is None else reading.end - reading.offset
    async for piece in pieces:
        if left is None:
            yield piece
        else:
            yield piece[:left]
            left -= len(piece)
            if left <= 0:
                return


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[list[bytes]]:
    """The complete lines of each piece, without their newlines. The last line of the list needs no newline."""
    rest = b""
    async for piece in pieces:
        lines = (rest + piece).split(b"\n")
        rest = lines.pop()
        if len(rest) > _LONGEST_LINE:
            raise ListUnreadable(f"The list has a line of more than {_LONGEST_LINE} bytes.")
        if lines:
            yield lines
    if rest:
        yield [rest]


async def _batched(groups: AsyncIterator[list[bytes]]) -> AsyncIterator[list[bytes]]:
    """The same lines in batches: each ends with the line that makes it BATCH lines that are not empty, or BATCH_BYTES,
    for which an empty line counts as 16 bytes."""
    batch: list[bytes] = []
    count = size = 0
    async for lines in groups:
        start = 0
        while start < len(lines):
            part = lines[start : start + BATCH - count]
            added, empty = _measure(part)
            if empty or size + added >= BATCH_BYTES:
                part = _until_full(lines[start : start + _STRETCH], BATCH - count, BATCH_BYTES - size)
                added, empty = _measure(part)
                await let_others_run()
            batch += part
            count += len(part) - empty
            size += added
            start += len(part)
            if count == BATCH or size >= BATCH_BYTES:
                yield batch
                batch, count, size = [], 0, 0
    if batch:
        yield batch


def _measure(lines: list[bytes]) -> tuple[int, int]:
    """The bytes of some lines, as they count for a batch, and how many lines are empty."""
    empty = lines.count(b"")
    return sum(map(len, lines)) + empty * _EMPTY_BYTES, empty


def _until_full(lines: list[bytes], count: int, size: int) -> list[bytes]:
    """The lines up to the one that makes them `count` lines that are not empty, or `size` bytes."""
    for number, line in enumerate(lines, start=1):
        count -= bool(line)
        size -= len(line) or _EMPTY_BYTES
        if count <= 0 or size <= 0:
            return lines[:number]
    return lines


async def _csv_records(pieces: AsyncIterator[bytes]) -> AsyncIterator[list[bytes]]:
    """Rows of a csv: lines are joined while a quote is open, that is, while the number of quotes is odd."""
    open_row: list[bytes] = []
    size = 0
    async for lines in _lines(pieces):
        rows: list[bytes] = []
        for number, line in enumerate(lines, start=1):
            if number % BATCH == 0:
                await let_others_run()
            if not open_row and line.count(b'"') % 2 == 0:
                rows.append(line)
                continue
            open_row.append(line)
            size += len(line)
            if size > _LONGEST_LINE:
                raise ListUnreadable(f"The csv has a row of more than {_LONGEST_LINE} bytes; a quote may be left open.")
            if len(open_row) > 1 and line.count(b'"') % 2 == 1:
                rows.append(b"\n".join(open_row))
                open_row, size = [], 0
        if rows:
            yield rows
    if open_row:
        raise ListUnreadable("The csv ends inside a quoted field.")


async def _plain(pieces: AsyncIterator[bytes], compression: Compression) -> AsyncIterator[bytes]:
    if compression is Compression.NONE:
        async for piece in pieces:
            yield piece
        return
    inflate = decoder_of(compression)
    async for piece in pieces:
        for plain in inflate.feed(piece):
            yield plain
            await let_others_run()
    if not inflate.at_end:
        raise ListUnreadable("The compressed list ends too early: it is cut off or damaged.")


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise ListUnreadable("The line is not UTF-8.") from None
