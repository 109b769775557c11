"""Lists as users have them: an iterable of any length, async or not, a file, a path. Gathers one in flat memory into
what can be sent: a few tasks for the request itself, or a file on this disk with its size and sha256.
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
from conveyor.client.upload_file import measure
from conveyor.errors import BadInput, InvalidField, ListUnreadable, NoTasks
from conveyor.model import format_from_name

# Of the tasks themselves, or a file of them; a string is the path of one.
Tasks: TypeAlias = Iterable[Any] | AsyncIterable[Any] | str | os.PathLike[str] | IO[bytes] | IO[str]

# As many as a server writes in the request itself.
MOST_INLINE = 1000
MOST_INLINE_BYTES = 1024 * 1024

_PIECE = 256 * 1024
# Others on the caller's loop get a turn between.
_AT_ONCE = 500


@dataclass(frozen=True)
class Few:
    """Tasks that fit into a request, as JSON."""

    tasks: list[msgspec.Raw]


@dataclass(frozen=True)
class ListFile:
    """A list on this disk."""

    path: Path
    size: int
    sha256: str
    # None: to be found from its first bytes.
    format: str | None


@asynccontextmanager
async def gathered(io: Io, tasks: Tasks, whole: bool = False) -> AsyncIterator[Few | ListFile]:
    """The list, as long as the block runs; a temporary file is gone afterwards. `whole`: a file however few they are.
    Raises BadInput."""
    if isinstance(tasks, str | os.PathLike):
        yield await io.aside(_measured, tasks)
        return
    spool = _Spool(0 if whole or is_file(tasks) else MOST_INLINE)
    try:
        if is_file(tasks):
            while piece := await io.aside(_read, tasks):
                spool.add(piece)
                await io.aside(spool.flush)
            yield spool.file(None)
        else:
            async for line in json_lines(io, tasks):
                spool.add(line)
                if spool.full:
                    await io.aside(spool.flush)
            await io.aside(spool.flush)
            yield spool.few() or spool.file("jsonl")
    finally:
        await io.aside(spool.close)


async def json_lines(io: Io, tasks: Any) -> AsyncGenerator[bytes, None]:
    """Every task of an iterable as JSON, with the end of its line. Raises BadInput."""
    index = 0
    if isinstance(tasks, AsyncIterable):
        if not io.awaits:
            raise BadInput("An async iterable of tasks is for AsyncClient.")
        async for task in tasks:
            yield _line(task, index)
            index += 1
        return
    if isinstance(tasks, Mapping | bytes | bytearray) or not isinstance(tasks, Iterable):
        raise BadInput(f"Tasks are a list or another iterable, a file or a path; not {type(tasks).__name__}.")
    for task in tasks:
        yield _line(task, index)
        index += 1
        if index % _AT_ONCE == 0:
            await io.pause(0)


def is_file(tasks: Any) -> bool:
    """Whether it is an open file, or something like it."""
    return callable(getattr(tasks, "read", None))


class _Spool:
    """Keeps lines in memory up to a limit, and everything from there on in a temporary file."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._held = bytearray()
        self._digest = sha256()
        self._size = 0
        self._file: IO[bytes] | None = None

    def add(self, line: bytes) -> None:
        self._count += 1
        self._held += line

    @property
    def full(self) -> bool:
        """Whether it is time to write what is held."""
        if self._file is not None:
            return len(self._held) >= _PIECE
        return self._count > self._most or len(self._held) > MOST_INLINE_BYTES

    def flush(self) -> None:
        """Write what is held, if it does not fit into a request."""
        if self._file is None:
            if not self.full:
                return
            self._file = tempfile.NamedTemporaryFile(prefix="conveyor-")  # noqa: SIM115  (closed by `close`)
        self._file.write(self._held)
        self._file.flush()
        self._digest.update(self._held)
        self._size += len(self._held)
        self._held.clear()

    def few(self) -> Few | None:
        """The tasks, if they all stayed in memory."""
        if self._file is not None:
            return None
        if not self._count:
            raise NoTasks
        return Few([msgspec.Raw(line) for line in bytes(self._held).splitlines()])

    def file(self, form: str | None) -> ListFile:
        """All of it, on the disk."""
        if self._file is None:
            raise NoTasks("The list is empty.")
        return ListFile(Path(self._file.name), self._size, self._digest.hexdigest(), form)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _line(task: Any, index: int) -> bytes:
    if isinstance(task, bytes | bytearray | memoryview):
        raise InvalidField(f"Task {index} is bytes; a task is text, or what JSON can hold.", field="tasks", index=index)
    try:
        text = msgspec.json.encode(task, enc_hook=plain_value)
    except (TypeError, ValueError, NotImplementedError, RecursionError) as error:
        raise InvalidField(f"Task {index} can not be written as JSON: {error}", field="tasks", index=index) from None
    # Only what was JSON already has line breaks, and none within a string.
    return (text.replace(b"\n", b" ").replace(b"\r", b" ") if b"\n" in text or b"\r" in text else text) + b"\n"


def plain_value(value: Any) -> Any:
    """What JSON has no word for as something that it has: subclasses of str, and numbers of numpy."""
    if isinstance(value, str):
        return str.__str__(value)
    item = getattr(value, "item", None)
    if callable(item):
        return item()
    raise NotImplementedError(f"JSON has no word for a {type(value).__name__}.")


def _measured(path: str | os.PathLike[str]) -> ListFile:
    place = Path(path)
    if isinstance(path, str) and path.lower().startswith(("http://", "https://")):
        raise BadInput(f"A string is the path of a list; for one URL give a list of one: [{path!r}].")
    try:
        size, digest = measure(place)
    except OSError as error:
        raise ListUnreadable(f"{place} can not be read: {error.strerror or error}") from None
    if not size:
        raise NoTasks("The list is empty.")
    return ListFile(place, size, digest, format_from_name(place.name))


def _read(file: Any) -> bytes:
    try:
        piece = file.read(_PIECE)
    except (OSError, ValueError) as error:
        raise ListUnreadable(f"The file of tasks can not be read: {error}") from None
    return piece.encode() if isinstance(piece, str) else bytes(piece)
