"""A file that is to be sent: its measure, and then its pieces. Both read it in turn and keep none of it."""

from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

from conveyor.errors import ListUnreadable

# Gets the bytes sent so far and their total.
Sent = Callable[[int, int], None]

_PIECE = 256 * 1024


def measure(path: Path) -> tuple[int, str]:
    """Size in bytes and sha256."""
    digest = sha256()
    size = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            size += len(piece)
    return size, digest.hexdigest()


def pieces_of(path: Path, size: int, progress: Sent | None) -> Iterator[bytes]:
    """The bytes that were measured. If others stand there since, the receiver finds that by their sha256."""
    sent = 0
    try:
        with path.open("rb") as file:
            while piece := file.read(min(_PIECE, size - sent)):
                sent += len(piece)
                if progress:
                    progress(sent, size)
                yield piece
    except OSError as error:
        # As it is, it would pass for a failure of the connection.
        raise ListUnreadable(f"{path} can not be read: {error.strerror or error}") from None
    if sent < size:
        raise ListUnreadable(f"{path} has become shorter while it was sent.")
