"""Measure and read a file for upload, in constant memory."""

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from conveyor.errors import ListUnreadable

# Called with the bytes so far and the total, which is None if unknown.
BytesProgress = Callable[[int, int | None], None]

_PIECE = 256 * 1024


@dataclass(frozen=True)
class FileBody:
    """`size` bytes of a file, from `offset` on. The receiver detects later changes by the sha256."""

    path: Path
    size: int
    progress: BytesProgress | None = None
    offset: int = 0


def measure(path: Path) -> tuple[int, str]:
    """Return the size in bytes and the sha256."""
    digest = sha256()
    size = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            size += len(piece)
    return size, digest.hexdigest()


def open_list(body: FileBody) -> BinaryIO:
    """Open the file. An OSError would look like a failure of the connection, so it becomes ListUnreadable."""
    try:
        file = body.path.open("rb")
        file.seek(body.offset)
    except OSError as error:
        raise _unreadable(body.path, error) from None
    return file


def read_list(file: BinaryIO, body: FileBody, sent: int) -> bytes:
    """Read the next piece, which is never empty. Raises ListUnreadable."""
    try:
        piece = file.read(min(_PIECE, body.size - sent))
    except OSError as error:
        raise _unreadable(body.path, error) from None
    if not piece:
        raise ListUnreadable(f"{body.path} became shorter during the upload. Submit it again.")
    return piece


def _unreadable(path: Path, error: OSError) -> ListUnreadable:
    return ListUnreadable(f"Cannot read {path}: {error.strerror or error}")
