"""Lists as users have them: what is gathered of each, and that memory stays flat."""

import asyncio
import io
import json
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conveyor.client.io import AsyncIo, BlockingIo, drive
from conveyor.client.lists import MAX_INLINE_BYTES, MAX_INLINE_TASKS, InlineTasks, ListFile, collect_tasks, json_lines
from conveyor.errors import BadInput, InvalidField, ListUnreadable, NoTasks


class Found:
    """What was gathered, read while it was there."""

    def __init__(self, found: InlineTasks | ListFile) -> None:
        self.few = isinstance(found, InlineTasks)
        if isinstance(found, InlineTasks):
            self.tasks = [msgspec.json.decode(task) for task in found.tasks]
            self.data, self.path, self.format = b"", Path(), None
        else:
            self.path, self.format = found.path, found.format
            self.data = found.path.read_bytes()
            assert (found.size, found.sha256) == (len(self.data), sha256(self.data).hexdigest())
            self.tasks = []

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.data.splitlines()]


async def gather_on(way: AsyncIo | BlockingIo, tasks: Any, **how: bool) -> Found:
    async with collect_tasks(way, tasks, **how) as found:
        return Found(found)


def gather(tasks: Any, **how: bool) -> Found:
    return drive(gather_on(BlockingIo(), tasks, **how))


@pytest.mark.parametrize("tasks", [["a", "b"], ("a", "b"), iter(["a", "b"]), dict.fromkeys("ab").keys()])
def test_a_few_stay_in_memory(tasks: Any) -> None:
    found = gather(tasks)
    assert found.few
    assert found.tasks == ["a", "b"]


def test_as_many_as_fit_into_a_request() -> None:
    assert gather(range(MAX_INLINE_TASKS)).few
    found = gather(range(MAX_INLINE_TASKS + 1))
    assert not found.few
    assert (found.format, found.lines) == ("jsonl", list(range(MAX_INLINE_TASKS + 1)))
    assert not found.path.exists(), "it was a temporary one"


def test_as_large_as_fit_into_a_request() -> None:
    text = "x" * (MAX_INLINE_BYTES // 10)
    assert gather([text] * 9).few
    assert gather([text] * 11).lines == [text] * 11


def test_a_file_however_few() -> None:
    assert gather(["a"], as_file=True).lines == ["a"]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_list() -> None:
    """A hundred thousand tasks of 1 KB: a hundred MB pass through."""

    def tasks() -> Iterator[str]:
        for number in range(100_000):
            yield f"{number:01000}"

    async def measured() -> int:
        async with collect_tasks(BlockingIo(), tasks()) as found:
            assert isinstance(found, ListFile)
            return found.size

    tracemalloc.start()
    try:
        size = drive(measured())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size > 100_000_000
    assert peak < 8 * MAX_INLINE_BYTES


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("urls.txt", "text"),
        ("urls.jsonl", "jsonl"),
        ("urls.ndjson.gz", "jsonl"),
        ("urls.CSV", "csv"),
        ("urls.csv.zst", "csv"),
        ("urls", None),
        ("urls.list", None),
    ],
)
@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_goes_as_it_is(tmp_path: Path, name: str, form: str | None, kind: type) -> None:
    path = tmp_path / name
    path.write_bytes(b"\x00anything\n" * 10)
    found = gather(kind(path))
    assert (found.path, found.format, found.data) == (path, form, path.read_bytes())
    assert path.exists()


def test_an_open_file_is_read_from_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "urls.txt"
    path.write_text("http://example.com/ä\n" * 30_000)
    with path.open("rb") as binary:
        first = binary.readline()
        assert gather(binary).data == path.read_bytes().removeprefix(first)
    with path.open() as text:
        found = gather(text)
    assert found.data == path.read_bytes()
    assert found.format is None
    assert gather(io.BytesIO(b"u\n")).data == b"u\n"
    assert gather(io.StringIO("ü\n")).data == "ü\n".encode()


@pytest.mark.parametrize("nothing", [[], iter(()), io.BytesIO(b""), io.StringIO()])
def test_nothing(nothing: Any) -> None:
    with pytest.raises(NoTasks):
        gather(nothing)


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "urls.txt").touch()
    with pytest.raises(NoTasks):
        gather(tmp_path / "urls.txt")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ListUnreadable, match=r"none\.txt"):
        gather(str(tmp_path / "none.txt"))


@pytest.mark.parametrize("wrong", [{"url": "u"}, b"bytes", 7, None])
def test_what_is_no_list(wrong: Any) -> None:
    with pytest.raises(BadInput, match="iterable"):
        gather(wrong)


def test_one_url_is_no_path() -> None:
    with pytest.raises(BadInput, match="pass a list"):
        gather("https://example.com/")


@pytest.mark.parametrize("task", [b"bytes", object(), {1, object()}])
def test_a_task_that_is_no_json(task: Any) -> None:
    with pytest.raises(InvalidField, match="Task 1 ") as caught:
        gather(["a", task])
    assert caught.value.details["index"] == 1


def test_what_is_nearly_json() -> None:
    class Url(str):
        pass

    class Number:
        """As those of numpy."""

        def item(self) -> int:
            return 7

    tasks = [Url("http://example.com"), {"n": Number()}, msgspec.Raw(b'{"a":\r\n 1}'), None, 1.5, "two\nlines"]
    assert gather(tasks).tasks == ["http://example.com", {"n": 7}, {"a": 1}, None, 1.5, "two\nlines"]
    assert gather(tasks, as_file=True).lines == gather(tasks).tasks


def test_an_iterable_that_fails_leaves_nothing_behind() -> None:
    async def fails() -> None:
        def tasks() -> Iterator[int]:
            yield from range(5000)
            raise RuntimeError("the database went away")

        async with collect_tasks(BlockingIo(), tasks()):
            raise AssertionError("never")

    with pytest.raises(RuntimeError, match="database"):
        drive(fails())


async def test_an_async_iterable() -> None:
    async def tasks() -> AsyncIterator[int]:
        for number in range(3000):
            if number % 1000 == 0:
                await asyncio.sleep(0)
            yield number

    assert (await gather_on(AsyncIo(), tasks())).lines == list(range(3000))
    with pytest.raises(BadInput, match="AsyncClient"):
        gather(tasks())


async def test_others_get_their_turn_on_the_loop() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    async with aclosing(json_lines(AsyncIo(), range(5000))) as lines:
        async for _ in lines:
            pass
    task.cancel()
    assert turns >= 9
