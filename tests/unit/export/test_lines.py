"""The parts of an export that do no I/O on a seam: names, the manifest's lines, sorting, and which bytes are read."""

import re
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.export import spool
from conveyor.export.lines import manifest_line
from conveyor.export.spool import SortedSpool
from conveyor.export.zip_writer import _checked
from conveyor.model import BodyRef, ResultDetail, RunId, Task, task_id
from conveyor.read import body_reader as reading
from conveyor.read.body_names import body_name
from conveyor.states import TaskStatus

SAFE = re.compile(r"bodies/[0-9]{7,13}(_[A-Za-z0-9]([A-Za-z0-9.-]{0,38}[A-Za-z0-9])?)?\.[a-z0-9]{1,5}")


def task(given_input: object, content_type: str | None = "text/html", index: int = 7) -> Task:
    return Task(
        task_id=task_id(RunId("run_1"), index),
        index=index,
        input=msgspec.Raw(msgspec.json.encode(given_input)),
        status=TaskStatus.SUCCEEDED,
        detail=ResultDetail(content_type=content_type),
    )


@pytest.mark.parametrize(
    ("given_input", "content_type", "name"),
    [
        ("https://example.com/a/b", "text/html; charset=utf-8", "bodies/0000007_example.com-a-b.html"),
        ("https://example.com/", "text/html", "bodies/0000007_example.com.html"),
        ("https://example.com/page.html", "text/html", "bodies/0000007_example.com-page.html"),
        ("https://example.com/photo.JPG", "IMAGE/JPEG", "bodies/0000007_example.com-photo.jpg"),
        ("https://user:secret@example.com/a?key=secret#x", "application/json", "bodies/0000007_example.com-a.json"),
        ({"url": "http://10.0.0.1:8080/x", "method": "POST"}, None, "bodies/0000007_10.0.0.1-8080-x.bin"),
        ("http://[::1]/x", "application/problem+json", "bodies/0000007_1-x.json"),
        ("https://example.com/../../etc/passwd", "application/rss+xml", "bodies/0000007_example.com-etc-passwd.xml"),
        ("https://example.com/..\\..\\x\0\n", "text/plain", "bodies/0000007_example.com-x.txt"),
        ("https://例え.jp/漢字", "text/html", "bodies/0000007_jp.html"),
        ("https://example.com/" + "a" * 500, "text/html", "bodies/0000007_example.com-" + "a" * 28 + ".html"),
        ("no url", "application/json", "bodies/0000007.json"),
        ({"n": 1}, "application/json", "bodies/0000007.json"),
        (12, "x/" + "y" * 99, "bodies/0000007.bin"),
        (None, "", "bodies/0000007.bin"),
    ],
)
def test_names(given_input: object, content_type: str | None, name: str) -> None:
    assert body_name(task(given_input, content_type)) == name
    assert SAFE.fullmatch(name)


def test_a_large_index_has_its_own_name() -> None:
    assert body_name(task("", None, 12_345_678)) == "bodies/12345678.bin"


urls = st.text(max_size=80) | st.text(max_size=80).map(lambda text: f"https://{text}")


@settings(max_examples=500, deadline=None)
@given(urls | urls.map(lambda url: {"url": url}), st.none() | st.text(max_size=30), st.integers(0, 1 << 39))
def test_a_name_is_safe_whatever_the_input(given_input: object, content_type: str | None, index: int) -> None:
    name = body_name(task(given_input, content_type, index))
    assert SAFE.fullmatch(name)
    assert _checked(name), "the archive takes it"
    assert name.startswith(f"bodies/{index:07d}"), "no two tasks have the same"


def test_a_pretty_printed_input_stays_on_one_line() -> None:
    pretty = msgspec.structs.replace(task(""), input=msgspec.Raw(b'{\n  "url": "https://a\\n",\r\n "x": [\n]}'))
    line = manifest_line(pretty, None)
    assert line.count(b"\n") == 1
    assert msgspec.json.decode(line)["input"] == {"url": "https://a\n", "x": []}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=12).map(lambda raw: raw.replace(b"\n", b"") + b"\n"), max_size=200))
def test_a_spool_sorts(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    with pytest.MonkeyPatch.context() as patch, SortedSpool(tmp_path_factory.getbasetemp()) as spooled:
        patch.setattr(spool, "SPILL_BYTES", 100)
        for line in lines:
            spooled.add(line)
        assert list(spooled) == sorted(lines)


def test_a_spool_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "SPILL_BYTES", 10)
    with SortedSpool(tmp_path) as spooled:
        for number in range(100):
            spooled.add(b"%03d\n" % (number * 7 % 100))
        assert list(spooled) == [b"%03d\n" % number for number in range(100)]
    assert list(tmp_path.iterdir()) == []


KIB = 1024
lengths = st.one_of(
    st.just(0), st.integers(1, 5 * KIB), st.integers(0, 3 * KIB * KIB), st.integers(8 * KIB * KIB - 1, 9 * KIB * KIB)
)


@st.composite
def tasks_with_bodies(draw: st.DrawFn) -> list[Task]:
    """Bodies in objects of their own, and in segments with some of their bodies missing, in any order."""
    refs: list[BodyRef] = []
    for number, alone in enumerate(draw(st.lists(st.booleans(), max_size=6))):
        offset = 0
        for _ in range(1 if alone else draw(st.integers(1, 12))):
            length = draw(lengths)
            if alone or draw(st.booleans()):
                refs.append(BodyRef(f"results/{number}", length, sha256(b"").hexdigest(), -1 if alone else offset))
            offset += length
    shuffled = draw(st.permutations(refs))
    return [
        msgspec.structs.replace(task("", index=index), detail=ResultDetail(body=ref))
        for index, ref in enumerate(shuffled)
    ]


@settings(max_examples=300, deadline=None)
@given(tasks_with_bodies())
def test_every_body_is_read_once_in_bounded_windows(tasks: list[Task]) -> None:
    windows = list(reading._split(tasks))
    assert [each for window in windows for each in window] == tasks
    for window in windows:
        bodies = [each.detail.body for each in window if each.detail.body is not None]
        assert sum(ref.length for ref in bodies) <= reading._WINDOW_BYTES or len(window) == 1
        if any(ref.length > reading.LARGE for ref in bodies):
            assert len(window) == 1, "a large one is streamed alone"
            assert list(reading._ranges(window)) == []
            continue
        ranges = list(reading._ranges(window))
        read = [place for each in ranges for place in each.places]
        assert sorted(read) == list(range(len(window)))
        order = [(bodies[place].key, bodies[place].offset) for place in read]
        assert order == sorted(order), "front to back"
        for each in ranges:
            refs = [bodies[place] for place in each.places]
            for ref in refs:
                assert ref.key == each.key
                assert ref.offset == each.start or each.start <= ref.offset
                assert ref.offset + ref.length <= max(each.start, 0) + each.length
            assert each.length <= max(reading._RANGE_BYTES, *(ref.length for ref in refs))
