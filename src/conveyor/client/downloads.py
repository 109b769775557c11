"""Download a file from the server, or from a link that it gives. A download resumes where it broke off, and the file
gets its name only after its sha256 was checked.
"""

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import IO, NamedTuple

from conveyor.client.http import ConnectionBroken
from conveyor.client.transport import Transport, read_pieces
from conveyor.client.upload_file import BytesProgress, measure
from conveyor.errors import ConveyorError, ServerUnreachable

# Maximum number of attempts in a row without a new byte.
_MAX_FRUITLESS = 5
_LINK_EXPIRED = 403


class DownloadSource(NamedTuple):
    """A file to download."""

    url: str
    size: int
    sha256: str


async def download(
    transport: Transport, find: Callable[[], Awaitable[DownloadSource]], to: Path, progress: BytesProgress | None = None
) -> int:
    """Download to a file and return its size. `find` returns the source, and is called again when the link may have
    expired. After a failure the bytes so far stay in `<to>.<sha256>.part`, and the next call resumes there."""
    remote = await find()
    partial = to.with_name(f"{to.name}.{remote.sha256[:12]}.part")
    fruitless = 0
    while (have := _size(partial)) < remote.size or not partial.exists():
        try:
            await _append(transport, remote, partial, have, progress)
        except ConveyorError as error:
            if error.status != _LINK_EXPIRED or fruitless + 1 == _MAX_FRUITLESS:
                raise
            remote = await find()
        fruitless = 0 if _size(partial) > have else fruitless + 1
        if fruitless == _MAX_FRUITLESS:
            raise ServerUnreachable(
                "The server keeps closing the connection before the download is complete. Try again later."
            )
        if fruitless:
            await transport.io.pause(0.2 * 2**fruitless)
    if await transport.io.run_blocking(measure, partial) != (remote.size, remote.sha256):
        partial.unlink()
        raise ConveyorError(f"The download of {to} is corrupt: its sha256 is wrong. Download it again.")
    partial.replace(to)
    return remote.size


async def _append(
    transport: Transport, remote: DownloadSource, partial: Path, have: int, progress: BytesProgress | None
) -> None:
    """Append bytes until the file is complete or the connection breaks."""
    # Ranges apply to the compressed bytes, so ask for none.
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    if have and remote.url.startswith("/"):
        # Only our server uses the sha256 as ETag; object stores do not.
        headers["If-Range"] = f'"{remote.sha256}"'
    async with transport.open(remote.url, headers) as opened:
        run_blocking = transport.io.run_blocking
        have = have if opened.status == 206 else 0
        file = await run_blocking(_open_at, partial, have)
        try:
            async for piece in read_pieces(opened):
                await run_blocking(file.write, piece)
                have += len(piece)
                if progress is not None:
                    progress(have, remote.size)
        except ConnectionBroken:
            pass
        finally:
            await run_blocking(_sync_and_close, file)


def _open_at(path: Path, start: int) -> IO[bytes]:
    file = path.open("r+b" if start else "wb")
    file.seek(start)
    file.truncate()
    return file


def _sync_and_close(file: IO[bytes]) -> None:
    with file:
        file.flush()
        os.fsync(file.fileno())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
