"""Lists: what each format takes, and which line is named when it does not."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from conveyor.errors import ListUnreadable, NoTasks
from conveyor.inputs import MAX_INPUT_BYTES
from conveyor.model import JobKind
from conveyor.stage.lists import list_pieces, read_lists

A, B, C = "http://a.example/", "http://b.example/x?y=1", "https://c.example/ü"
BOM = b"\xef\xbb\xbf"
Read = Callable[..., list[object]]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Write a list, read it, and give the inputs back as values."""

    def reader(name: str, data: bytes | str, kind: JobKind = JobKind.FETCH) -> list[object]:
        path = tmp_path / name
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        return [json.loads(line) for line in read_lists([str(path)], kind)]

    return reader


def refused(read: Read, name: str, data: bytes | str, kind: JobKind = JobKind.FETCH) -> str:
    with pytest.raises(ListUnreadable) as caught:
        read(name, data, kind)
    return str(caught.value)


class TestText:
    def test_one_url_a_line(self, read: Read) -> None:
        assert read("list.txt", f"{A}\n{B}\n{C}\n") == [A, B, C]

    def test_without_a_newline_at_the_end(self, read: Read) -> None:
        assert read("list.txt", f"{A}\n{B}") == [A, B]

    def test_windows_lines_spaces_and_empty_lines(self, read: Read) -> None:
        assert read("list.txt", f"  {A}\t\r\n\r\n   \r\n{B}\r\n\r\n") == [A, B]

    def test_comments(self, read: Read) -> None:
        assert read("list.txt", f"# my list\n{A}\n  # indented\n{B}#fragment\n#{C}\n") == [A, B + "#fragment"]

    def test_a_byte_order_mark(self, read: Read) -> None:
        assert read("list.txt", BOM + f"{A}\n{B}\n".encode()) == [A, B]
        assert read("list.txt", BOM + f"# comment\n{B}\n".encode()) == [B]

    @pytest.mark.parametrize("name", ["list", "list.urls", "list.TXT", "list.text", "list.csv.txt"])
    def test_any_other_name_is_text(self, read: Read, name: str) -> None:
        assert read(name, A) == [A]

    def test_a_line_is_a_string_for_python_tasks(self, read: Read) -> None:
        assert read("list.txt", 'one\n{"not": "parsed"}\n"quoted"\n', JobKind.PYTHON) == [
            "one",
            '{"not": "parsed"}',
            '"quoted"',
        ]

    def test_bad_lines_are_named(self, read: Read, tmp_path: Path) -> None:
        message = refused(read, "list.txt", f"# c\n{A}\nnope\n\nftp://x/\n{B}\nhttp://\n")
        for number in (3, 5, 7):
            assert f"{tmp_path / 'list.txt'}:{number}: " in message
        for number in (1, 2, 4, 6):
            assert f":{number}: " not in message
        assert "Nothing was run" in message

    def test_ten_bad_lines_are_enough(self, read: Read) -> None:
        message = refused(read, "list.txt", "nope\n" * 1000)
        assert message.count("list.txt:") == 10

    @pytest.mark.parametrize("data", [b"", b"\n\n\n", b"# only\n# comments\n", BOM, b"   "])
    def test_an_empty_list(self, read: Read, data: bytes) -> None:
        with pytest.raises(NoTasks, match=r"list\.txt"):
            read("list.txt", data)

    def test_a_line_without_end_is_refused_early(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        endless = Endless(b"http://a.example/\n")
        monkeypatch.setattr("conveyor.stage.lists._open", lambda path: endless)
        with pytest.raises(ListUnreadable, match=r"list\.txt:2: .*longer"):
            list(read_lists(["list.txt"], JobKind.FETCH))
        assert endless.given < 8 * MAX_INPUT_BYTES

    def test_the_longest_line_that_is_taken(self, read: Read) -> None:
        inside = "x" * (MAX_INPUT_BYTES - 2)
        assert read("list.txt", f"{inside}\n{inside}", JobKind.PYTHON) == [inside, inside]
        assert "list.txt:1" in refused(read, "list.txt", inside + "xx\n", JobKind.PYTHON)

    def test_bytes_that_are_not_text(self, read: Read) -> None:
        assert "list.txt" in refused(read, "list.txt", f"{A}\n".encode() + b"http://a.example/\xff\n")

    @pytest.mark.xfail(reason="lists._text_lines: a UnicodeDecodeError loses the line number")
    def test_bytes_that_are_not_text_are_named_by_line(self, read: Read) -> None:
        assert "list.txt:2" in refused(read, "list.txt", f"{A}\n".encode() + b"http://a.example/\xff\n")


class Endless(io.RawIOBase):
    """A file whose last line never ends. Reading far into it fails the test instead of filling the memory."""

    def __init__(self, head: bytes) -> None:
        super().__init__()
        self.head = head
        self.given = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        assert self.given < 64 * MAX_INPUT_BYTES, "it would read for ever"
        piece = self.head[: len(buffer)] or b"a" * len(buffer)
        self.head = self.head[len(buffer) :]
        buffer[: len(piece)] = piece
        self.given += len(piece)
        return len(piece)

    def readline(self, size: int | None = -1) -> bytes:
        assert size is not None
        assert size >= 0, "a line must be read with a bound"
        line = self.head[: self.head.find(b"\n") + 1][:size] or b"a" * size
        self.head = self.head[len(line) :]
        self.given += len(line)
        return line


class TestJsonLines:
    @pytest.mark.parametrize("name", ["list.jsonl", "list.ndjson", "LIST.JSONL"])
    def test_urls_and_objects(self, read: Read, name: str) -> None:
        task = {"url": B, "method": "POST", "body": "x\ny", "id": "7", "headers": {"A": "b"}}
        assert read(name, f'"{A}"\n{json.dumps(task)}\n') == [A, task]

    def test_windows_lines_and_empty_lines(self, read: Read) -> None:
        assert read("list.jsonl", f'"{A}"\r\n\r\n  \n {{"url": "{B}"}} \r\n') == [A, {"url": B}]

    def test_any_value_for_python_tasks(self, read: Read) -> None:
        values = [1, None, [1, {"a": "ü"}], "text", {}]
        lines = "\n".join(json.dumps(value) for value in values)
        assert read("list.jsonl", lines, JobKind.PYTHON) == values

    def test_bad_lines_are_named(self, read: Read) -> None:
        lines = ['"http://a.example/"', "{", '{"uri": "x"}', '{"url": "nope"}', "5", '"\\ud800"']
        message = refused(read, "list.jsonl", "\n".join(lines))
        for number in (2, 3, 4, 5, 6):
            assert f"list.jsonl:{number}: " in message
        assert "list.jsonl:1" not in message

    def test_bytes_that_are_not_text_are_named(self, read: Read) -> None:
        assert "list.jsonl:2" in refused(read, "list.jsonl", b'"http://a.example/"\n"\xff"\n')

    def test_a_line_without_end(self, read: Read) -> None:
        assert "list.jsonl:1" in refused(read, "list.jsonl", '"' + "x" * (2 * MAX_INPUT_BYTES), JobKind.PYTHON)

    def test_nesting_without_end(self, read: Read) -> None:
        assert "list.jsonl:1" in refused(read, "list.jsonl", "[" * 100_000 + "]" * 100_000, JobKind.PYTHON)

    def test_an_empty_list(self, read: Read) -> None:
        with pytest.raises(NoTasks):
            read("list.jsonl", "\n\n")

    @pytest.mark.xfail(reason="lists._json_lines: a byte order mark makes line 1 malformed; text and csv take it")
    def test_a_byte_order_mark(self, read: Read) -> None:
        assert read("list.jsonl", BOM + f'"{A}"\n'.encode()) == [A]


class TestCsv:
    def test_a_header_and_rows(self, read: Read) -> None:
        text = f'url,id,method,body\n{A},1,,\n{B},"2, two",POST,"line\nbreak ""q"""\n'
        assert read("list.csv", text) == [
            {"url": A, "id": "1"},
            {"url": B, "id": "2, two", "method": "POST", "body": 'line\nbreak "q"'},
        ]

    def test_windows_lines_mark_and_spaces_in_the_header(self, read: Read) -> None:
        assert read("list.CSV", BOM + f"url , tag\r\n{A},x\r\n\r\n{C},\r\n".encode()) == [
            {"url": A, "tag": "x"},
            {"url": C},
        ]

    def test_any_columns_for_python_tasks(self, read: Read) -> None:
        assert read("list.csv", "name,age\nann,7\nbob,\n", JobKind.PYTHON) == [
            {"name": "ann", "age": "7"},
            {"name": "bob"},
        ]

    def test_a_column_must_be_url_and_none_unknown(self, read: Read) -> None:
        assert "no column `url`" in refused(read, "list.csv", f"link\n{A}\n")
        assert "`color`" in refused(read, "list.csv", f"url,color\n{A},red\n")
        assert "no column `url`" in refused(read, "list.csv", "")

    def test_bad_rows_are_named(self, read: Read) -> None:
        message = refused(read, "list.csv", f"url,id\n{A},1\nnope,2\n,3\n")
        assert "list.csv:3: " in message
        assert "list.csv:4: " in message
        assert "list.csv:3: " in refused(read, "list.csv", f"url,id\n{A},1\n{B}\n")
        assert "list.csv:2: " in refused(read, "list.csv", f"url\n{A},1\n")

    def test_what_is_not_csv(self, read: Read) -> None:
        assert "list.csv" in refused(read, "list.csv", b"url\n\xff\xfe\n")
        assert "list.csv" in refused(read, "list.csv", "url\n" + "x" * 200_000 + "\n")

    def test_an_empty_list(self, read: Read) -> None:
        with pytest.raises(NoTasks):
            read("list.csv", "url,id\n")

    @pytest.mark.xfail(reason="lists._csv_rows: the reader takes a whole line before its length is looked at")
    def test_a_line_without_end_is_refused_early(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("conveyor.stage.lists._open", lambda path: io.BufferedReader(Endless(b"url\n")))
        with pytest.raises(ListUnreadable):
            list(read_lists(["list.csv"], JobKind.FETCH))


class TestSeveral:
    def test_lists_follow_each_other(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text(A)
        (tmp_path / "b.jsonl").write_text(f'"{B}"')
        paths = [str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")]
        assert [json.loads(line) for line in read_lists(paths, JobKind.FETCH)] == [A, B]

    def test_one_may_be_empty_but_not_all(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("# nothing\n")
        (tmp_path / "b.txt").write_text(B)
        assert len(list(read_lists([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], JobKind.FETCH))) == 1
        with pytest.raises(NoTasks):
            list(read_lists([str(tmp_path / "a.txt")] * 2, JobKind.FETCH))

    def test_standard_input(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stdin = io.TextIOWrapper(io.BytesIO(f"{A}\n{B}\n".encode()))
        monkeypatch.setattr("sys.stdin", stdin)
        assert [json.loads(line) for line in read_lists(["-"], JobKind.FETCH)] == [A, B]

    def test_a_bad_line_of_standard_input_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"nope\n")))
        with pytest.raises(ListUnreadable, match=r"-:1: "):
            list(read_lists(["-"], JobKind.FETCH))

    @pytest.mark.parametrize("name", ["missing.txt", "", "folder"])
    def test_what_can_not_be_opened(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "folder").mkdir()
        with pytest.raises(ListUnreadable, match="can not be read"):
            list(read_lists([str(tmp_path / name)], JobKind.FETCH))

    def test_lines_before_a_bad_one_are_handed_on_as_they_come(self, tmp_path: Path) -> None:
        """A list is read once, in flat memory: whoever stages it throws the draft away at the error."""
        path = tmp_path / "list.txt"
        path.write_text(f"{A}\nnope\n{B}\n")
        lines = read_lists([str(path)], JobKind.FETCH)
        assert json.loads(next(lines)) == A
        with pytest.raises(ListUnreadable):
            next(lines)


def test_pieces_are_whole_lines_of_some_size_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    urls = [f"http://a.example/{number}/{'p' * 90}" for number in range(10_000)]
    path.write_text("\n".join(urls))
    counts: list[int] = []
    pieces = list(list_pieces([str(path)], JobKind.FETCH, counts.append))
    assert len(pieces) == len(counts) > 2
    assert sum(counts) == 10_000
    assert all(piece.endswith(b"\n") for piece in pieces)
    assert [piece.count(b"\n") for piece in pieces] == counts
    assert max(len(piece) for piece in pieces) < 300 * 1024
    assert [json.loads(line) for line in b"".join(pieces).splitlines()] == urls
