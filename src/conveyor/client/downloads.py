"""A file from the server, or from where its link leads, to this disk: it goes on where it broke off, and is there under
its name only when its sha256 is right.
"""

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import IO, NamedTuple

from conveyor.client.http import Broken
from conveyor.client.transport import Transport, pieces_of
from conveyor.client.upload_file import Moved, measure
from conveyor.errors import ConveyorError, ServerUnreachable

# Tries in a row that bring nothing.
_MOST_FRUITLESS = 5
_LAPSED = 403


class Remote(NamedTuple):
    """A file that is there to be had."""

    url: str
    size: int
    sha256: str


async def download(
    transport: Transport, find: Callable[[], Awaitable[Remote]], to: Path, progress: Moved | None = None
) -> int:
    """Write it to a file; returns its size. `find` says what it is and where, and is asked again when a link may have
    lapsed. What came before a failure stays in `<to>.<sha256>.part`, and the next call goes on with it."""
    remote = await find()
    partial = to.with_name(f"{to.name}.{remote.sha256[:12]}.part")
    fruitless = 0
    while (have := _size(partial)) < remote.size or not partial.exists():
        try:
            await _more(transport, remote, partial, have, progress)
        except ConveyorError as error:
            if error.status != _LAPSED or fruitless + 1 == _MOST_FRUITLESS:
                raise
            remote = await find()
        fruitless = 0 if _size(partial) > have else fruitless + 1
        if fruitless == _MOST_FRUITLESS:
            raise ServerUnreachable("The server ends the download before it is whole.")
        if fruitless:
            await transport.io.pause(0.2 * 2**fruitless)
    if await transport.io.aside(measure, partial) != (remote.size, remote.sha256):
        partial.unlink()
        raise ConveyorError(f"What was downloaded to {to} is not what the server has: its sha256 is another.")
    partial.replace(to)
    return remote.size


async def _more(transport: Transport, remote: Remote, partial: Path, have: int, progress: Moved | None) -> None:
    """As much as comes, until the connection breaks."""
    # What is compressed on its way has no ranges of what it is.
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    if have and remote.url.startswith("/"):
        # Another store has a name of its own for what it holds.
        headers["If-Range"] = f'"{remote.sha256}"'
    async with transport.open(remote.url, headers) as opened:
        aside = transport.io.aside
        have = have if opened.status == 206 else 0
        file = await aside(_open_at, partial, have)
        try:
            async for piece in pieces_of(opened):
                await aside(file.write, piece)
                have += len(piece)
                if progress is not None:
                    progress(have, remote.size)
        except Broken:
            pass
        finally:
            await aside(_settle, file)


def _open_at(path: Path, start: int) -> IO[bytes]:
    file = path.open("r+b" if start else "wb")
    file.seek(start)
    file.truncate()
    return file


def _settle(file: IO[bytes]) -> None:
    with file:
        file.flush()
        os.fsync(file.fileno())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
