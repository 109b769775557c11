"""Prepare lists for upload as one file. A single file is sent as it is; several files, or a pipe, are joined into a
temporary file first, in constant memory."""

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from conveyor.cli import EXIT_INTERRUPTED
from conveyor.cli.guard import complain
from conveyor.cli.run_directory import is_plain_file
from conveyor.errors import ListTooSparse, ListUnreadable, NoTasks


@contextmanager
def single_file(
    lists: Sequence[str],
    max_bytes: int,
    progress: Callable[[int], None],
    kind: str | None = None,
    url_column: str | None = None,
) -> Iterator[Path]:
    """Yield the file. A temporary one is removed after the block. `progress` gets the number of bytes joined so far."""
    if len(lists) == 1 and is_plain_file(lists[0]):
        yield _check_not_empty(Path(lists[0]))
        return
    with tempfile.NamedTemporaryFile(prefix="conveyor-") as file:
        _join(lists, max_bytes, file, progress, kind, url_column)
        yield _check_not_empty(Path(file.name))


def format_of(lists: Sequence[str]) -> Any:
    """The format that the names of the lists imply; None if they imply none."""
    from conveyor.lists.list_files import list_format

    implied = list_format(lists)
    return None if implied is None else implied.value


def refuse_unreadable(path: str, kind: str | None, url_column: str | None) -> None:
    """Refuse an archive, an Excel file and a csv without the column for URLs here, not in the ingest of the job. Raises
    ListUnreadable."""
    from conveyor.cli.loop import run_async
    from conveyor.lists.list_files import check_readable
    from conveyor.model import JobKind

    run_async(check_readable(path, JobKind(kind or JobKind.FETCH), url_column))


def refuse_without_tasks(
    path: Path, form: str | None, kind: str | None, url_column: str | None, max_bytes: int
) -> None:
    """Refuse a list in which no line is a task: who only gets the id of the job would not see it fail. Raises
    NoTasks and ListTooSparse."""
    from conveyor.cli.loop import run_async
    from conveyor.cli.output import print_error_lines
    from conveyor.lists.list_files import check_some_task
    from conveyor.model import JobKind, ListFormat

    reading = ListFormat(form) if form else None, JobKind(kind or JobKind.FETCH), url_column
    try:
        run_async(check_some_task(str(path), *reading, max_bytes))
    except NoTasks as error:
        print_error_lines(error)
        raise
    except ListTooSparse:
        raise
    except ListUnreadable:
        # The server runs what can be read of it, and reports the rest.
        return


def _join(
    lists: Sequence[str],
    max_bytes: int,
    file: IO[bytes],
    progress: Callable[[int], None],
    kind: str | None,
    url_column: str | None,
) -> None:
    from conveyor.cli.loop import Stopped, leave, run_async
    from conveyor.lists.list_files import pieces_of
    from conveyor.model import JobKind

    async def join() -> None:
        size = 0
        try:
            async for piece in pieces_of(lists, max_bytes, JobKind(kind or JobKind.FETCH), url_column):
                file.write(piece)
                size += len(piece)
                progress(size)
        except asyncio.CancelledError:
            raise Stopped from None
        file.flush()

    try:
        run_async(join())
    except Stopped:
        # A normal exit would wait for the thread that reads the pipe.
        file.close()
        complain("Interrupted. [interrupted]")
        leave(EXIT_INTERRUPTED)


def _check_not_empty(path: Path) -> Path:
    if path.stat().st_size == 0:
        raise NoTasks("The list is empty.")
    return path
