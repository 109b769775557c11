"""Lists on this machine as one file to be sent. One file goes as it is; several, or a pipe, are joined into a temporary
file first, in constant memory."""

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from conveyor.cli import EXIT_INTERRUPTED
from conveyor.cli.guard import complain
from conveyor.cli.run_directory import is_plain_file
from conveyor.errors import NoTasks


@contextmanager
def one_file(lists: Sequence[str], most: int, progress: Callable[[int], None]) -> Iterator[Path]:
    """The file; a temporary one is there as long as the block runs. `progress` gets the bytes joined so far."""
    if len(lists) == 1 and is_plain_file(lists[0]):
        yield _not_empty(Path(lists[0]))
        return
    with tempfile.NamedTemporaryFile(prefix="conveyor-") as file:
        _join(lists, most, file, progress)
        yield _not_empty(Path(file.name))


def form_of(lists: Sequence[str]) -> Any:
    """The form of the file, where the names say it."""
    from conveyor.lists.list_files import list_format

    form = list_format(lists)
    return None if form is None else form.value


def _join(lists: Sequence[str], most: int, file: IO[bytes], progress: Callable[[int], None]) -> None:
    from conveyor.cli.loop import Stopped, leave, run_async
    from conveyor.lists.list_files import pieces_of

    async def join() -> None:
        size = 0
        try:
            async for piece in pieces_of(lists, most):
                file.write(piece)
                size += len(piece)
                progress(size)
        except asyncio.CancelledError:
            raise Stopped from None
        file.flush()

    try:
        run_async(join())
    except Stopped:
        # The thread that waits for a pipe would be waited for.
        file.close()
        complain("Interrupted. [interrupted]")
        leave(EXIT_INTERRUPTED)


def _not_empty(path: Path) -> Path:
    if path.stat().st_size == 0:
        raise NoTasks("The list is empty.")
    return path
