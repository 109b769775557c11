"""Collect a list from an iterable, sync or async, an open file, or a path, in constant memory. The result is either a
few tasks for the request itself, or a file to upload with its size and sha256.
"""

import os
import tempfile
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, TypeAlias

import msgspec

from conveyor.client.io import Io
from conveyor.client.list_objects import ListObject, is_object, open_object
from conveyor.client.upload_file import measure
from conveyor.errors import BadInput, InvalidField, ListUnreadable, NoTasks
from conveyor.model import format_from_name

# An iterable of tasks, or a file with tasks. A string is the path of a file, or s3://BUCKET/KEY (gs://, az://).
Tasks: TypeAlias = Iterable[Any] | AsyncIterable[Any] | str | os.PathLike[str] | IO[bytes] | IO[str]

# Limits of the server for tasks in the request itself.
MAX_INLINE_TASKS = 1000
MAX_INLINE_BYTES = 1024 * 1024

_PIECE = 256 * 1024
# Tasks to read before other coroutines on the caller's loop get a turn.
_TASKS_PER_TURN = 500
_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".txt": "text"}
_COMPRESSED = {".gz", ".zst", ".zstd"}


@dataclass(frozen=True)
class InlineTasks:
    """Tasks that fit into the request, as JSON."""

    tasks: list[msgspec.Raw]


@dataclass(frozen=True)
class ListFile:
    """A list as a file on this machine."""

    path: Path
    size: int
    sha256: str
    # None: the server detects it from the first bytes.
    format: str | None


@asynccontextmanager
async def collect_tasks(
    io: Io, tasks: Tasks | ListObject, as_file: bool = False
) -> AsyncIterator[InlineTasks | ListFile]:
    """Yield the collected list. A temporary file is removed after the block. `as_file`: make a file even of a few
    tasks. Raises BadInput."""
    form = None
    if isinstance(tasks, str) and is_object(tasks):
        tasks = await io.run_blocking(open_object, tasks)
    if isinstance(tasks, ListObject):
        form = format_from_name(tasks.url)
    if isinstance(tasks, str | os.PathLike):
        yield await io.run_blocking(_measure_file, tasks)
        return
    spool = _Spool(0 if as_file or is_file(tasks) else MAX_INLINE_TASKS)
    try:
        if is_file(tasks):
            while piece := await io.run_blocking(_read, tasks):
                spool.add(piece)
                await io.run_blocking(spool.flush)
            yield spool.file(form)
        else:
            async for line in json_lines(io, tasks):
                spool.add(line)
                if spool.is_full:
                    await io.run_blocking(spool.flush)
            await io.run_blocking(spool.flush)
            yield spool.inline() or spool.file("jsonl")
    finally:
        await io.run_blocking(spool.close)
        if isinstance(tasks, ListObject):
            await io.run_blocking(tasks.close)


async def json_lines(io: Io, tasks: Any) -> AsyncGenerator[bytes, None]:
    """Yield each task of an iterable as a line of JSON. Raises BadInput."""
    index = 0
    if isinstance(tasks, AsyncIterable):
        if not io.is_async:
            raise BadInput("Client cannot read an async iterable of tasks. Use AsyncClient.")
        async for task in tasks:
            yield _line(task, index)
            index += 1
        return
    if isinstance(tasks, Mapping | bytes | bytearray) or not isinstance(tasks, Iterable):
        raise BadInput(f"Invalid type {type(tasks).__name__} for tasks. Pass an iterable, an open file or a path.")
    for task in tasks:
        yield _line(task, index)
        index += 1
        if index % _TASKS_PER_TURN == 0:
            await io.pause(0)


def is_file(tasks: Any) -> bool:
    """Whether it is an open file or a similar object."""
    return callable(getattr(tasks, "read", None))


class _Spool:
    """Buffers lines in memory up to a limit, and beyond it in a temporary file."""

    def __init__(self, max_inline: int) -> None:
        self._max_inline = max_inline
        self._count = 0
        self._buffer = bytearray()
        self._digest = sha256()
        self._size = 0
        self._file: IO[bytes] | None = None

    def add(self, line: bytes) -> None:
        self._count += 1
        self._buffer += line

    @property
    def is_full(self) -> bool:
        """Whether the buffer must be written to the file."""
        if self._file is not None:
            return len(self._buffer) >= _PIECE
        return self._count > self._max_inline or len(self._buffer) > MAX_INLINE_BYTES

    def flush(self) -> None:
        """Write the buffer to the file, unless it still fits into the request."""
        if self._file is None:
            if not self.is_full:
                return
            self._file = tempfile.NamedTemporaryFile(prefix="conveyor-")  # noqa: SIM115  (closed by `close`)
        self._file.write(self._buffer)
        self._file.flush()
        self._digest.update(self._buffer)
        self._size += len(self._buffer)
        self._buffer.clear()

    def inline(self) -> InlineTasks | None:
        """The tasks, if all of them are in memory. Raises NoTasks."""
        if self._file is not None:
            return None
        if not self._count:
            raise NoTasks
        return InlineTasks([msgspec.Raw(line) for line in bytes(self._buffer).splitlines()])

    def file(self, form: str | None) -> ListFile:
        """The file with all lines. Raises NoTasks."""
        if self._file is None:
            raise NoTasks("The list is empty.")
        return ListFile(Path(self._file.name), self._size, self._digest.hexdigest(), form)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _line(task: Any, index: int) -> bytes:
    if isinstance(task, bytes | bytearray | memoryview):
        raise InvalidField(
            f"Task {index} is bytes. Use text, or any value that JSON supports.", field="tasks", index=index
        )
    try:
        text = msgspec.json.encode(task, enc_hook=plain_value)
    except (TypeError, ValueError, NotImplementedError, RecursionError) as error:
        raise InvalidField(f"Task {index} cannot be encoded as JSON: {error}", field="tasks", index=index) from None
    # Only raw JSON can contain line breaks, and never within a string.
    return (text.replace(b"\n", b" ").replace(b"\r", b" ") if b"\n" in text or b"\r" in text else text) + b"\n"


def plain_value(value: Any) -> Any:
    """Convert a value that JSON does not support: a subclass of str, or a numpy number."""
    if isinstance(value, str):
        return str.__str__(value)
    item = getattr(value, "item", None)
    if callable(item):
        return item()
    raise NotImplementedError(f"JSON does not support the type {type(value).__name__}.")


def _measure_file(path: str | os.PathLike[str]) -> ListFile:
    place = Path(path)
    if isinstance(path, str) and path.lower().startswith(("http://", "https://")):
        raise BadInput(
            f"A string is the path of a list. To submit one URL, pass a list: [{path!r}]; to have the "
            "server read a list from it, pass a RemoteList."
        )
    try:
        size, digest = measure(place)
    except OSError as error:
        raise ListUnreadable(f"Cannot read {place}: {error.strerror or error}") from None
    if not size:
        raise NoTasks("The list is empty.")
    return ListFile(place, size, digest, format_from_name(place.name))


def _read(file: Any) -> bytes:
    try:
        piece = file.read(_PIECE)
    except (OSError, ValueError) as error:
        raise ListUnreadable(f"Cannot read the file of tasks: {error}") from None
    return piece.encode() if isinstance(piece, str) else bytes(piece)
