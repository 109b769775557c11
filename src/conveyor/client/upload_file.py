"""A file that is to be sent: its measure, and then its pieces. Both read it in turn and keep none of it."""

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from conveyor.errors import ListUnreadable

# Gets the bytes so far and how many there are, if that is known.
Moved = Callable[[int, int | None], None]

_PIECE = 256 * 1024


@dataclass(frozen=True)
class FileBody:
    """The first `size` bytes of a file. If others stand there since, the receiver finds that by their sha256."""

    path: Path
    size: int
    progress: Moved | None = None


def measure(path: Path) -> tuple[int, str]:
    """Size in bytes and sha256."""
    digest = sha256()
    size = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            size += len(piece)
    return size, digest.hexdigest()


def open_list(path: Path) -> BinaryIO:
    """The file, to be read. As an OSError its absence would pass for a failure of the connection."""
    try:
        return path.open("rb")
    except OSError as error:
        raise _unreadable(path, error) from None


def read_list(file: BinaryIO, body: FileBody, sent: int) -> bytes:
    """The next piece, never empty."""
    try:
        piece = file.read(min(_PIECE, body.size - sent))
    except OSError as error:
        raise _unreadable(body.path, error) from None
    if not piece:
        raise ListUnreadable(f"{body.path} has become shorter while it was sent.")
    return piece


def _unreadable(path: Path, error: OSError) -> ListUnreadable:
    return ListUnreadable(f"{path} can not be read: {error.strerror or error}")
