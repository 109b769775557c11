"""Lists: what each form takes, which line is named when it does not, and that a reader may start anywhere."""

import asyncio
import bz2
import gzip
import io
import json
import struct
import tracemalloc
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.errors import ListTooSparse, ListUnreadable
from conveyor.lists import reader as lists
from conveyor.lists.inputs import MAX_INPUT_BYTES
from conveyor.lists.list_files import list_format, pieces_of
from conveyor.lists.reader import (
    InvalidListLine,
    ListBatch,
    ListReading,
    check_header,
    decompressed,
    detect_compression,
    detect_format,
)
from conveyor.lists.usual_lines import UsualLines
from conveyor.model import Compression, JobKind, ListFormat, TaskSeed, format_from_name
from tests.support.zstd_library import zstd

A, B, C = "http://a.example/", "http://b.example/x?y=1", "https://c.example/ü"
BOM = b"\xef\xbb\xbf"
MOST = 1 << 30
COMPRESS: dict[Compression, Callable[[bytes], bytes]] = {
    Compression.NONE: bytes,
    Compression.GZIP: gzip.compress,
    Compression.ZSTD: zstd.compress,
    Compression.BZIP2: bz2.compress,
}
PACKED = [Compression.GZIP, Compression.ZSTD, Compression.BZIP2]


async def cut(data: bytes, size: int = 1 << 16) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def read_all(data: bytes, reading: ListReading, size: int = 1 << 16) -> list[ListBatch]:
    return [batch async for batch in lists.read(cut(data, size), reading)]


def read(
    form: ListFormat, data: bytes | str, kind: JobKind = JobKind.FETCH, size: int = 1 << 16
) -> tuple[dict[int, Any], list[InvalidListLine]]:
    """The inputs by index, and the lines that are none."""
    raw = data.encode() if isinstance(data, str) else data
    header = None
    if form is ListFormat.CSV:
        header, _, raw = raw.partition(b"\n")
    batches = asyncio.run(read_all(raw, ListReading(kind, form, header=header), size))
    inputs = {seed.index: json.loads(seed.input) for batch in batches for seed in batch.seeds}
    return inputs, [line for batch in batches for line in batch.invalid]


def taken(form: ListFormat, data: bytes | str, kind: JobKind = JobKind.FETCH) -> dict[int, Any]:
    """The inputs of a list that has no invalid line."""
    inputs, invalid = read(form, data, kind)
    assert invalid == []
    return inputs


def refused(form: ListFormat, data: bytes | str, kind: JobKind = JobKind.FETCH) -> str:
    with pytest.raises(ListUnreadable) as caught:
        read(form, data, kind)
    return str(caught.value)


async def inflated(data: bytes, compression: Compression, most: int = MOST, size: int = 1 << 16) -> bytes:
    return b"".join([piece async for piece in decompressed(cut(data, size), compression, most)])


def inflate(data: bytes, compression: Compression, most: int = MOST, size: int = 1 << 16) -> bytes:
    return asyncio.run(inflated(data, compression, most, size))


class TestText:
    def test_the_index_is_the_number_of_the_line(self) -> None:
        assert taken(ListFormat.TEXT, f"# mine\n{A}\n\n  # more\n{B}#x\n   \n{C}\n") == {1: A, 4: B + "#x", 6: C}

    def test_without_a_newline_at_the_end(self) -> None:
        assert taken(ListFormat.TEXT, f"{A}\n{B}") == {0: A, 1: B}

    def test_windows_lines_and_spaces(self) -> None:
        assert taken(ListFormat.TEXT, f"  {A}\t\r\n\r\n{B}\r\n") == {0: A, 2: B}

    def test_a_byte_order_mark(self) -> None:
        assert taken(ListFormat.TEXT, BOM + f"{A}\n{B}\n".encode()) == {0: A, 1: B}
        assert taken(ListFormat.TEXT, BOM + f"# comment\n{B}\n".encode()) == {1: B}

    def test_a_line_is_a_string_for_python_tasks(self) -> None:
        got = taken(ListFormat.TEXT, 'one\n{"not": "parsed"}\n"quoted"\n', JobKind.PYTHON)
        assert got == {0: "one", 1: '{"not": "parsed"}', 2: '"quoted"'}

    def test_invalid_lines_are_said_and_the_others_taken(self) -> None:
        inputs, invalid = read(ListFormat.TEXT, f"# c\n{A}\nnope\n\nftp://x/\n{B}\n".encode() + b"http://\xff/\n")
        assert inputs == {1: A, 5: B}
        assert [(line.line, line.text) for line in invalid] == [(3, "nope"), (5, "ftp://x/"), (7, "http://\ufffd/")]
        assert all(line.reason and "\n" not in line.reason for line in invalid)
        assert "UTF-8" in invalid[2].reason

    def test_what_is_shown_of_a_line_is_short(self) -> None:
        _, (line,) = read(ListFormat.TEXT, "nope" * 1000)
        assert 0 < len(line.text) <= 200

    @pytest.mark.parametrize("data", [b"", b"\n\n\n", b"# only\n# comments\n", BOM, b"   "])
    def test_an_empty_list(self, data: bytes) -> None:
        assert taken(ListFormat.TEXT, data) == {}

    def test_the_longest_input_that_is_taken(self) -> None:
        inside = "x" * (MAX_INPUT_BYTES - 2)
        assert taken(ListFormat.TEXT, f"{inside}\n{inside}", JobKind.PYTHON) == {0: inside, 1: inside}
        inputs, (line,) = read(ListFormat.TEXT, f"{inside}x\n{inside}\n", JobKind.PYTHON)
        assert (list(inputs), line.line) == ([1], 1)


class TestJsonLines:
    def test_urls_and_objects(self) -> None:
        task = {"url": B, "method": "POST", "body": "x\ny", "id": "7", "headers": {"A": "b"}}
        assert taken(ListFormat.JSONL, f'"{A}"\n{json.dumps(task)}\n') == {0: A, 1: task}

    def test_windows_lines_blank_lines_and_a_mark(self) -> None:
        data = BOM + f'"{A}"\r\n\r\n  \n {{"url": "{B}"}} \r\n"{C}"'.encode()
        assert taken(ListFormat.JSONL, data) == {0: A, 3: {"url": B}, 4: C}

    def test_any_value_for_python_tasks(self) -> None:
        values = [1, None, [1, {"a": "ü"}], "text", {}]
        got = taken(ListFormat.JSONL, "\n".join(json.dumps(value) for value in values), JobKind.PYTHON)
        assert list(got.values()) == values

    def test_invalid_lines(self) -> None:
        lines = [f'"{A}"', "{", '{"uri": "x"}', '{"url": "nope"}', "5", '"\\ud800"', "# no comment here"]
        inputs, invalid = read(ListFormat.JSONL, "\n".join(lines).encode() + b'\n"\xff"\n')
        assert inputs == {0: A}
        assert [line.line for line in invalid] == [2, 3, 4, 5, 6, 7, 8]
        assert [line.text for line in invalid[:5]] == lines[1:6]

    def test_nesting_without_end(self) -> None:
        _, (line,) = read(ListFormat.JSONL, "[" * 10_000 + "]" * 10_000, JobKind.PYTHON)
        assert line.line == 1


class TestCsv:
    def test_a_header_and_rows(self) -> None:
        text = f'url,id,method,body\n{A},1,,\n{B},"2, two",POST,"line\nbreak ""q"""\n{C},,,\n'
        assert taken(ListFormat.CSV, text) == {
            0: {"url": A, "id": "1"},
            1: {"url": B, "id": "2, two", "method": "POST", "body": 'line\nbreak "q"'},
            2: {"url": C},
        }

    def test_a_quote_over_many_lines_and_pieces(self) -> None:
        body = "\n".join(["one", "", "  three  ", "# four", 'five "5"'])
        quoted = body.replace('"', '""')
        text = f'url,body\n{A},"{quoted}"\n{B},x\n'
        for size in (1, 2, 3, 7, 1000):
            inputs, invalid = read(ListFormat.CSV, text, size=size)
            assert (inputs, invalid) == ({0: {"url": A, "body": body}, 1: {"url": B, "body": "x"}}, [])

    def test_windows_lines_a_mark_and_spaces_in_the_header(self) -> None:
        data = f"url , tag\r\n{A},x\r\n\r\n{C},\r\n".encode()
        assert taken(ListFormat.CSV, data) == {0: {"url": A, "tag": "x"}, 2: {"url": C}}

    def test_a_byte_order_mark(self) -> None:
        assert taken(ListFormat.CSV, BOM + f"url,tag\n{A},x\n".encode()) == {0: {"url": A, "tag": "x"}}

    def test_any_columns_for_python_tasks(self) -> None:
        got = taken(ListFormat.CSV, "name,age\nann,7\nbob,\n", JobKind.PYTHON)
        assert got == {0: {"name": "ann", "age": "7"}, 1: {"name": "bob"}}

    def test_ragged_rows_are_invalid(self) -> None:
        inputs, invalid = read(ListFormat.CSV, f"url,id\n{A},1\n{B}\n{B},2,3\n{C},4\n")
        assert sorted(inputs) == [0, 3]
        assert [line.line for line in invalid] == [3, 4]
        assert ["fields" in line.reason for line in invalid] == [True, True]

    def test_other_invalid_rows(self) -> None:
        data = f"url,id\n{A},1\nnope,2\n,3\n".encode() + b"\xff,4\n" + f'{B},"a"b\n'.encode()
        inputs, invalid = read(ListFormat.CSV, data)
        assert sorted(inputs) == [0]
        assert [line.line for line in invalid] == [3, 4, 5, 6]

    def test_invalid_headers(self) -> None:
        assert "no column `url`" in refused(ListFormat.CSV, f"link\n{A}\n")
        assert "duplicate" in refused(ListFormat.CSV, f"url,url\n{A},{A}\n")
        assert "name" in refused(ListFormat.CSV, "a,\n1,2\n", JobKind.PYTHON)
        assert "duplicate" in refused(ListFormat.CSV, f"url,Name,name\n{A},1,2\n")
        assert "`link`, `sku`" in refused(ListFormat.CSV, f"link,sku\n{A},7\n")

    def test_columns_of_the_user_are_data(self) -> None:
        rows = f"Url,Price,ID,color\n{A},1.50,7,\n{B},,8,red\n"
        assert taken(ListFormat.CSV, rows) == {
            0: {"url": A, "id": "7", "data": {"Price": "1.50"}},
            1: {"url": B, "id": "8", "data": {"color": "red"}},
        }
        assert taken(ListFormat.CSV, f"url,method\n{A},x\n", JobKind.DOWNLOAD) == {
            0: {"url": A, "data": {"method": "x"}}
        }

    @pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
    def test_other_separators(self, delimiter: str) -> None:
        row = delimiter.join([A, '"a;b,c|d\te"', "x"])
        header = delimiter.join(["url", "note", "tag"])
        assert taken(ListFormat.CSV, BOM + f"{header}\r\n{row}\r\n".encode()) == {
            0: {"url": A, "tag": "x", "data": {"note": "a;b,c|d\te"}}
        }
        assert detect_format(f"{header}\n{row}\n".encode()) is ListFormat.CSV
        values = taken(ListFormat.CSV, f"{delimiter.join('ab')}\n{delimiter.join('12')}\n", JobKind.PYTHON)
        assert values == {0: {"a": "1", "b": "2"}}

    def test_another_column_has_the_urls(self) -> None:
        header = b"url;Link;n"
        reading = ListReading(JobKind.FETCH, ListFormat.CSV, header=header, url_column="link")
        (batch,) = asyncio.run(read_all(f"about;{A};1\n".encode(), reading, 100))
        assert json.loads(batch.seeds[0].input) == {"url": A, "data": {"url": "about", "n": "1"}}
        with pytest.raises(ListUnreadable, match="no column `site`"):
            check_header(header, JobKind.FETCH, "site")

    def test_a_row_without_a_url_names_the_column(self) -> None:
        reading = ListReading(JobKind.FETCH, ListFormat.CSV, header=b"sku;Link", url_column="link")
        (batch,) = asyncio.run(read_all(f"7;{A}\n8;\n".encode(), reading, 100))
        assert [(each.line, each.reason) for each in batch.invalid] == [(3, "The column `Link` is empty.")]
        # A function takes a row with any of its columns.
        assert taken(ListFormat.CSV, "url,n\n,2\n", JobKind.PYTHON) == {0: {"n": "2"}}

    def test_a_quote_that_is_never_closed(self) -> None:
        assert "quoted" in refused(ListFormat.CSV, f'url,id\n{A},"1\n{B},2\n')
        many = f"{B},2\n" * 50_000
        assert "quote" in refused(ListFormat.CSV, f'url,id\n{A},"1\n{many}')


class Turns:
    """Counts the turns of the event loop while the block runs."""

    def __init__(self) -> None:
        self.count = 0

    async def __aenter__(self) -> "Turns":
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)


async def zeros_behind_and_between_are_ignored(
    compression: Compression = Compression.GZIP, size: int = 1 << 16
) -> None:
    """Tapes and blocked writers fill their last block with them, and files of theirs are joined."""
    one, two = (COMPRESS[compression](data) for data in (b"one\n" * 1000, b"two\n"))
    assert await inflated(one + bytes(10_240 - len(one)), compression, size=size) == b"one\n" * 1000
    assert await inflated(one + bytes(512) + two + bytes(3), compression, size=size) == b"one\n" * 1000 + b"two\n"


async def others_run_between_two_batches(form: ListFormat = ListFormat.TEXT) -> None:
    """All bytes are at hand: nothing but the reader itself gives way."""
    line = b'"https://example.com/a"\n'
    reading = ListReading(JobKind.PYTHON, form, header=b"url" if form is ListFormat.CSV else None)
    async with Turns() as turns:
        before, lines = turns.count, 0
        async for batch in lists.read(cut(line * 20 * lists.BATCH, 1 << 30), reading):
            assert len(batch.seeds) <= lists.BATCH
            lines += len(batch.seeds)
            assert turns.count > before or lines == len(batch.seeds), "two batches in one turn of the loop"
            before = turns.count
    assert lines == 20 * lists.BATCH
    assert form is not ListFormat.CSV or turns.count >= 40, "rows are put together in turns, too"


async def others_run_between_two_pieces(compression: Compression = Compression.GZIP) -> None:
    packed = COMPRESS[compression](bytes(16 << 20))
    async with Turns() as turns:
        before, size = turns.count, 0
        async for piece in decompressed(cut(packed, 1 << 30), compression, MOST):
            assert len(piece) <= 1 << 18
            size += len(piece)
            assert turns.count > before or size == len(piece), "two pieces in one turn of the loop"
            before = turns.count
    assert size == 16 << 20


class Endless:
    """Pieces of a line that never ends. Going far into it fails the test instead of filling the memory."""

    def __init__(self, head: bytes, piece: bytes = b"a" * 65_536) -> None:
        self.head = head
        self.piece = piece
        self.given = 0

    async def pieces(self) -> AsyncIterator[bytes]:
        yield self.head
        while True:
            assert self.given < 64 * MAX_INPUT_BYTES, "it would read for ever"
            self.given += len(self.piece)
            yield self.piece


class TestBounds:
    @pytest.mark.parametrize("form", ListFormat)
    async def test_a_line_without_end_is_refused_early(self, form: ListFormat) -> None:
        endless = Endless(f'"{A}"\n"'.encode() if form is ListFormat.JSONL else f"{A}\n".encode())
        reading = ListReading(JobKind.FETCH, form, header=b"url" if form is ListFormat.CSV else None)
        with pytest.raises(ListUnreadable, match="more than"):
            [batch async for batch in lists.read(endless.pieces(), reading)]
        assert endless.given < 4 * MAX_INPUT_BYTES

    async def test_a_quoted_field_without_end_too(self) -> None:
        endless = Endless(f'{A},"\n'.encode(), b"some\nlines\n" * 5000)
        reading = ListReading(JobKind.FETCH, ListFormat.CSV, header=b"url,id")
        with pytest.raises(ListUnreadable, match="more than"):
            [batch async for batch in lists.read(endless.pieces(), reading)]
        assert endless.given < 4 * MAX_INPUT_BYTES

    @pytest.mark.parametrize("compression", PACKED)
    def test_a_bomb_is_refused_in_little_memory(self, compression: Compression) -> None:
        packed = COMPRESS[compression](bytes(64 << 20))
        assert len(packed) < 1 << 20
        tracemalloc.start()
        try:
            with pytest.raises(ListUnreadable, match="more than 33554432 bytes"):
                asyncio.run(self._consume(packed, compression, 32 << 20))
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
        finally:
            tracemalloc.stop()

    async def _consume(self, packed: bytes, compression: Compression, most: int) -> None:
        async for piece in decompressed(cut(packed), compression, most):
            assert len(piece) <= 1 << 20

    @pytest.mark.parametrize("compression", Compression)
    def test_the_cap_itself_is_taken(self, compression: Compression) -> None:
        packed = COMPRESS[compression](b"x" * 1000)
        assert inflate(packed, compression, 1000) == b"x" * 1000
        with pytest.raises(ListUnreadable):
            inflate(packed, compression, 999)

    async def test_batches_are_bounded(self) -> None:
        batches = await read_all(
            b"1\n" * (2 * lists.BATCH + 345), ListReading(JobKind.PYTHON, ListFormat.JSONL), 1 << 20
        )
        sizes = [len(batch.seeds) for batch in batches]
        assert sum(sizes) == 2 * lists.BATCH + 345
        assert sizes == [lists.BATCH, lists.BATCH, 345], "no more than there must be"

    async def test_large_lines_make_short_batches(self) -> None:
        line = b'"%b"\n' % (b"x" * 99_998)
        batches = await read_all(line * 25, ListReading(JobKind.PYTHON, ListFormat.JSONL), 1 << 16)
        assert [len(batch.seeds) for batch in batches] == [11, 11, 3]

    @pytest.mark.parametrize("piece", [1000, 4096, 100_000, 1 << 22])
    async def test_who_reads_again_from_a_batch_makes_the_same_ones(self, piece: int) -> None:
        data = b"".join(b'"%b"\n' % (b"x" * (number * 7919 % 1999)) for number in range(4000))
        first = await read_all(data, ListReading(JobKind.PYTHON, ListFormat.JSONL), 1 << 20)
        ends = [(batch.index, batch.offset) for batch in first]
        assert len(ends) > 3
        for number, (index, offset) in enumerate(ends[:-1]):
            again = ListReading(JobKind.PYTHON, ListFormat.JSONL, index, offset)
            batches = await read_all(data[offset:], again, piece)
            assert [(batch.index, batch.offset) for batch in batches] == ends[number + 1 :]

    @pytest.mark.parametrize("form", ListFormat)
    async def test_others_run_between_two_batches(self, form: ListFormat) -> None:
        await others_run_between_two_batches(form)

    @pytest.mark.parametrize("compression", PACKED)
    async def test_others_run_between_two_pieces(self, compression: Compression) -> None:
        await others_run_between_two_pieces(compression)


async def blank_lines_are_skipped_together() -> None:
    """Each takes a byte, or less in a compressed list: one by one they would take the time of as many tasks."""
    parsed: list[bytes] = []

    def parse(line: bytes, *rest: Any) -> Any:
        parsed.append(line)
        return parse_line(line, *rest)

    with pytest.MonkeyPatch.context() as patch:
        parse_line = lists._parse_line
        patch.setattr(lists, "_parse_line", parse)
        await read_all(b'"x"\n' + b"\n \r\n" * 5000, ListReading(JobKind.PYTHON, ListFormat.JSONL), 1 << 18)
    assert len(parsed) < 50


async def a_list_of_blank_lines_has_a_bound() -> None:
    reading = ListReading(JobKind.FETCH, ListFormat.TEXT, without_task=999_990)
    await read_all(b"\n" * 10, reading)
    with pytest.raises(ListTooSparse, match="1000001 lines without a task"):
        await read_all(b"\n" * 11, reading)


class TestLinesWithoutATask:
    async def test_a_list_of_blank_lines_has_a_bound(self) -> None:
        await a_list_of_blank_lines_has_a_bound()

    async def test_they_are_skipped_together(self) -> None:
        await blank_lines_are_skipped_together()

    async def test_a_million_blank_lines_are_a_few_batches(self) -> None:
        data = b"\n" * 999_999 + b'"x"\n'
        batches = await read_all(data, ListReading(JobKind.PYTHON, ListFormat.JSONL), 1 << 18)
        assert len(batches) < 20
        assert [seed.index for batch in batches for seed in batch.seeds] == [999_999]
        assert (batches[-1].index, batches[-1].offset) == (1_000_000, len(data))

    async def test_too_many_are_refused_wherever_the_reader_starts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lists, "MAX_WITHOUT_TASK", 100)
        data = b"\n" * 60
        for tasks, without_task, fits in ((0, 40, True), (0, 41, False), (2, 60, True), (2, 61, False)):
            reading = ListReading(JobKind.FETCH, ListFormat.TEXT, tasks=tasks, without_task=without_task)
            if fits:
                await read_all(data, reading)
            else:
                with pytest.raises(ListTooSparse, match=f"{without_task + 60} lines without a task"):
                    await read_all(data, reading)


FORMS: dict[ListFormat, bytes] = {
    ListFormat.TEXT: f"{A}\r\n# c\n\n{B}\nnope\n{C}".encode(),
    ListFormat.JSONL: f'"{A}"\n\n{{"url": "{B}"}}\nnope\n"{C}"'.encode(),
    ListFormat.CSV: f'url,id\n{A},"1\n2"\n\n{B},\nnope\n{C},3'.encode(),
}


class TestCompression:
    @pytest.mark.parametrize("compression", Compression)
    @pytest.mark.parametrize("form", ListFormat)
    @pytest.mark.parametrize("size", [1, 7, 1 << 16])
    def test_every_form_in_every_compression(self, form: ListFormat, compression: Compression, size: int) -> None:
        packed = COMPRESS[compression](FORMS[form])
        assert detect_compression(packed[:100]) is compression
        plain = inflate(packed, compression, size=size)
        assert plain == FORMS[form]
        assert detect_format(plain) is form
        inputs, invalid = read(form, plain, size=size)
        assert [each["url"] if isinstance(each, dict) else each for each in inputs.values()] == [A, B, C]
        assert [line.text for line in invalid] == ["nope"]

    @pytest.mark.parametrize("compression", PACKED)
    @pytest.mark.parametrize("size", [1, 10, 1 << 16])
    def test_several_members_or_frames(self, compression: Compression, size: int) -> None:
        parts = [b"one\n" * 1000, b"", b"two\n", b"three"]
        packed = b"".join(map(COMPRESS[compression], parts))
        assert inflate(packed, compression, size=size) == b"".join(parts)

    @pytest.mark.parametrize("compression", PACKED)
    @pytest.mark.parametrize("size", [1, 512, 1 << 16])
    async def test_zeros_behind_and_between(self, compression: Compression, size: int) -> None:
        await zeros_behind_and_between_are_ignored(compression, size)

    @pytest.mark.parametrize("compression", PACKED)
    def test_zeros_before_or_within_are_damage(self, compression: Compression) -> None:
        packed = COMPRESS[compression](bytes(range(256)) * 100)
        for broken in (bytes(512) + packed, packed[:-9] + bytes(512), packed + bytes(512) + b"rubbish"):
            with pytest.raises(ListUnreadable):
                inflate(broken, compression)

    @pytest.mark.parametrize("size", [1, 7, 1 << 16])
    def test_skippable_frames_of_zstd(self, size: int) -> None:
        """Parallel writers put one before each frame, and others hide notes in them."""
        skipped = [struct.pack("<II", 0x184D2A50 + number, 4) + b"note" for number in range(16)]
        packed = b"".join(each + zstd.compress(b"%d\n" % number) for number, each in enumerate(skipped)) + skipped[0]
        assert all(detect_compression(each) is Compression.ZSTD for each in skipped)
        assert inflate(packed, Compression.ZSTD, size=size) == b"".join(b"%d\n" % number for number in range(16))
        with pytest.raises(ListUnreadable, match="ends too early"):
            inflate(packed[:-1], Compression.ZSTD, size=size)

    @pytest.mark.parametrize("compression", PACKED)
    def test_every_truncation_is_seen(self, compression: Compression) -> None:
        packed = COMPRESS[compression](b"some text, and some more\n" * 20)
        for length in range(1, len(packed)):
            with pytest.raises(ListUnreadable):
                inflate(packed[:length], compression)

    @pytest.mark.parametrize("compression", PACKED)
    def test_rubbish(self, compression: Compression) -> None:
        packed = COMPRESS[compression](bytes(range(256)) * 100)
        for broken in (b"not compressed at all", packed + b"rubbish behind it", packed[:4] + b"\xff" * 60):
            with pytest.raises(ListUnreadable):
                inflate(broken, compression)

    def test_a_gzip_whose_sum_is_wrong(self) -> None:
        packed = bytearray(gzip.compress(b"some text\n" * 100))
        packed[-6] ^= 1
        with pytest.raises(ListUnreadable, match="gzip"):
            inflate(bytes(packed), Compression.GZIP)

    @pytest.mark.parametrize("compression", Compression)
    def test_nothing_at_all(self, compression: Compression) -> None:
        assert inflate(b"", compression) == b""


class TestDetection:
    @pytest.mark.parametrize(
        ("head", "form"),
        [
            (b"", ListFormat.TEXT),
            (b"http://a.example/\n", ListFormat.TEXT),
            (b"# url\n", ListFormat.TEXT),
            (b'{"url": "x"}\n', ListFormat.JSONL),
            (b'"http://a.example/"\n', ListFormat.JSONL),
            (BOM + b'\n  {"url": 1}', ListFormat.JSONL),
            (b"[1]\n", ListFormat.JSONL),
            (b"url\nhttp://a.example/\n", ListFormat.CSV),
            (b"url\r\nhttp://a.example/\r\n", ListFormat.CSV),
            (b"id, url ,tag\n", ListFormat.CSV),
            (BOM + b"id,url\n", ListFormat.CSV),
        ],
    )
    def test_of_the_form(self, head: bytes, form: ListFormat) -> None:
        assert detect_format(head) is form

    @pytest.mark.parametrize(
        "head", [b'http://a.example/,url,"b"\n', pytest.param(b'"url","id"\nhttp://a.example/,1\n', id="quoted header")]
    )
    def test_of_doubtful_forms(self, head: bytes) -> None:
        assert detect_format(head) is (ListFormat.CSV if head.startswith(b'"') else ListFormat.TEXT)

    @pytest.mark.parametrize("head", [b"", b"\x1f", b"http", b"BZhello", b"PK"])
    def test_of_no_compression(self, head: bytes) -> None:
        assert detect_compression(head) is Compression.NONE

    @pytest.mark.parametrize(("head", "said"), [(b"PK\x03\x04", "Excel"), (b"\xfd7zXZ\0", "xz")])
    def test_of_one_that_cannot_be_read(self, head: bytes, said: str) -> None:
        with pytest.raises(ListUnreadable, match=said):
            detect_compression(head)

    @pytest.mark.parametrize(
        ("name", "form"),
        [
            ("a.txt", ListFormat.TEXT),
            ("a.TXT.gz", ListFormat.TEXT),
            ("a.jsonl", ListFormat.JSONL),
            ("dir.csv/a.ndjson.zst", ListFormat.JSONL),
            ("a.csv.zstd", ListFormat.CSV),
            ("a.csv.txt", ListFormat.TEXT),
            ("a", None),
            ("a.urls", None),
            ("a.gz", None),
            ("-", None),
        ],
    )
    def test_of_names(self, name: str, form: ListFormat | None) -> None:
        assert format_from_name(name) is form
        assert list_format([name]) is form
        assert list_format([name, name]) is ListFormat.JSONL


LINES = st.lists(
    st.one_of(
        st.sampled_from(["", "  ", "# c", A, f'"{A}"', "nope", "5", "\r", f"{B}\r", '"ü"']),
        st.text(st.characters(exclude_characters='\n"', codec="utf-8"), max_size=12),
    ),
    max_size=40,
)
ROWS = st.lists(
    st.sampled_from(
        ["", f"{A},1", f'{A},"two\nlines"', f'{B},"x ""q"" y"', "nope,2", "ragged", f'"{C}","\n\n"', "a,b,c"]
    ),
    max_size=40,
)


class TestAnywhere:
    """Where a reader starts, stops and how its pieces fall changes nothing."""

    @settings(max_examples=150, deadline=None)
    @given(st.data(), st.sampled_from(ListFormat), st.integers(1, 60), st.integers(1, 7), st.booleans())
    def test_the_rest_from_any_batch_is_the_same(
        self, data: st.DataObject, form: ListFormat, size: int, batch: int, newline: bool
    ) -> None:
        lines = data.draw(ROWS if form is ListFormat.CSV else LINES)
        raw = ("\n".join(lines) + ("\n" if newline and lines else "")).encode()
        header = b"url,id" if form is ListFormat.CSV else None
        before, lists.BATCH = lists.BATCH, batch
        try:
            whole = asyncio.run(read_all(raw, ListReading(JobKind.FETCH, form, header=header), size))
            every = _flat(asyncio.run(read_all(raw, ListReading(JobKind.FETCH, form, header=header), 1 << 20)))
            assert _flat(whole) == every
            for number, reached in enumerate(whole):
                reading = ListReading(JobKind.FETCH, form, reached.index, reached.offset, header=header)
                rest = asyncio.run(read_all(raw[reached.offset :], reading, size))
                assert _flat(rest) == _flat(whole[number + 1 :])
                start = ListReading(JobKind.FETCH, form, end=reached.offset, header=header)
                head = asyncio.run(read_all(raw, start, size))
                assert _flat(head) == _flat(whole[: number + 1])
        finally:
            lists.BATCH = before

    @settings(max_examples=100, deadline=None)
    @given(LINES, st.integers(1, 60))
    def test_the_index_is_the_number_of_the_line(self, lines: list[str], size: int) -> None:
        inputs, invalid = read(ListFormat.TEXT, "\n".join(lines), JobKind.PYTHON, size)
        want = {number: line.encode().removeprefix(BOM).strip().decode() for number, line in enumerate(lines)}
        want = {number: line for number, line in want.items() if line and not line.startswith("#")}
        assert (inputs, invalid) == (want, [])


def _flat(batches: Sequence[ListBatch]) -> tuple[list[Any], list[InvalidListLine]]:
    return [seed for batch in batches for seed in batch.seeds], [line for batch in batches for line in batch.invalid]


async def joined(paths: Sequence[Path | str], most: int = MOST) -> bytes:
    return b"".join([piece async for piece in pieces_of([str(path) for path in paths], most)])


class TestFiles:
    @pytest.fixture
    def stdin(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
        return lambda data: monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))

    async def test_one_goes_as_it_is(self, tmp_path: Path) -> None:
        data = gzip.compress(b"whatever\n\xff" * 1000)
        (tmp_path / "list.bin").write_bytes(data)
        assert await joined([tmp_path / "list.bin"]) == data

    async def test_several_are_joined_whatever_their_form(self, tmp_path: Path, stdin: Callable[[bytes], None]) -> None:
        files = {
            "a.txt": f"# c\n{A}".encode(),
            "b.jsonl.gz": gzip.compress(f'{{"url": "{B}"}}\n\n"{A}"'.encode()),
            "c.csv.zst": zstd.compress(f'url,id\n{C},"1\n2"\n'.encode()),
            "d": f"url\n{B}\n".encode(),
            "e.txt": b"",
        }
        for name, data in files.items():
            (tmp_path / name).write_bytes(data)
        stdin(f"{C}\n".encode())
        got = await joined([*(tmp_path / name for name in files), "-"])
        assert got.endswith(b"\n")
        inputs = [json.loads(line) for line in got.splitlines()]
        assert inputs == [A, {"url": B}, A, {"url": C, "id": "1\n2"}, {"url": B}, C]

    async def test_a_first_member_that_is_empty(self, tmp_path: Path) -> None:
        (tmp_path / "list.gz").write_bytes(gzip.compress(b"") + gzip.compress(b'{"url": "http://x/"}\n'))
        (tmp_path / "none.txt").write_bytes(b"")
        assert await joined([tmp_path / "list.gz", tmp_path / "none.txt"]) == b'{"url": "http://x/"}\n'

    async def test_standard_input_alone(self, stdin: Callable[[bytes], None]) -> None:
        stdin(b"one\ntwo")
        assert await joined(["-"]) == b"one\ntwo"

    async def test_a_bad_line_is_named_with_its_file(self, tmp_path: Path) -> None:
        """In order, whatever is wrong with it; the reader of the joined list shows its own reason and text."""
        (tmp_path / "a.txt").write_text(f"{A}\nnonsense\t!\n")
        (tmp_path / "b.csv").write_text(f"url;id\n{A};1\n{B}\na.example/;3\n{B};4\n")
        data = await joined([tmp_path / "a.txt", tmp_path / "b.csv"])

        async def pieces() -> AsyncIterator[bytes]:
            yield data

        for kind in (JobKind.FETCH, JobKind.PYTHON):
            [batch] = [batch async for batch in lists.read(pieces(), ListReading(kind, ListFormat.JSONL))]
            assert [seed.index for seed in batch.seeds] == [0, 2, 5]
            assert [(line.line, line.reason.removeprefix(f"{tmp_path}/"), line.text) for line in batch.invalid] == [
                (2, "a.txt:2: the URL has a control character", "nonsense !"),
                (4, "b.csv:3: The row has 1 fields, the header 2.", B),
                (5, "b.csv:4: not a URL: https:// is missing", "a.example/;3"),
            ]

    async def test_the_cap_holds_for_each(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"x\n" * 1000))
        with pytest.raises(ListUnreadable, match="more than 100 bytes"):
            await joined([tmp_path / "a.txt.gz"] * 2, 100)

    @pytest.mark.parametrize("name", ["missing.txt", "", "folder"])
    async def test_what_can_not_be_opened(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "folder").mkdir()
        with pytest.raises(ListUnreadable, match="cannot be read"):
            await joined([tmp_path / name])

    async def test_pieces_are_bounded(self, tmp_path: Path) -> None:
        path = tmp_path / "list.txt"
        path.write_text("".join(f"http://a.example/{number}/{'p' * 90}\n" for number in range(30_000)))
        pieces = [piece async for piece in pieces_of([str(path)] * 2, MOST)]
        assert max(map(len, pieces)) < 2 << 20
        assert b"".join(pieces).count(b"\n") == 60_000


USUAL = "https://www.example.com/item?id=1"
ODD = [
    "",
    "# a comment",
    " https://a.example/ ",
    "https://ü.example/",
    "no url",
    '"quoted"',
    "HTTP://A.example/",
    "[1",
    "{}",
]


@given(
    st.lists(
        st.one_of(
            st.sampled_from([USUAL, *ODD]), st.from_regex(r"https?://[a-z.-]{1,9}[/?#][!-~]{0,9}", fullmatch=True)
        )
    ),
    st.sampled_from([ListFormat.TEXT, ListFormat.JSONL]),
    st.sampled_from([JobKind.FETCH, JobKind.DOWNLOAD]),
)
def test_a_stretch_of_usual_lines_is_read_as_each_of_them_alone(
    texts: list[str], form: ListFormat, kind: JobKind
) -> None:
    reading = ListReading(kind, form)
    given_lines = [
        (json.dumps(text) if form is ListFormat.JSONL and index % 3 else text).encode()
        for index, text in enumerate(texts)
    ]
    parse = lists._parser(reading)
    alone = [lists._parse_line(line, reading, index, parse) for index, line in enumerate(given_lines, start=7)]
    seeds, invalid = lists._parse_all(given_lines, reading, 7, parse)
    assert [*seeds, *invalid] == [
        each for kind in (TaskSeed, InvalidListLine) for each in alone if isinstance(each, kind)
    ]


def test_a_long_list_of_usual_lines_is_checked_in_stretches() -> None:
    text = b"".join(b"https://www.example.com/%d\n" % index for index in range(1000))
    inputs, end = UsualLines(JobKind.FETCH, ListFormat.TEXT).take(text + b"# a comment\n", 0)
    assert (len(inputs), inputs[-1], end) == (1000, '"https://www.example.com/999"', len(text))
    assert UsualLines(JobKind.PYTHON, ListFormat.TEXT).take(text, 0) == ([], 0)
