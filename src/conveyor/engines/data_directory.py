"""The data directory: what Conveyor makes in it is for its owner alone. What existed before may be open to others."""

import itertools
from contextlib import suppress
from pathlib import Path

import structlog

from conveyor.disk import sync_directory, write_error

log = structlog.get_logger()

_OTHERS = 0o077


def make_data_directory(directory: Path) -> None:
    """Create the directory and what is missing above it, durably: a sync of all files in a directory does not keep the
    directory itself."""
    missing = itertools.takewhile(lambda each: not each.exists(), (directory, *directory.parents))
    # One that exists may be left by a process that died before the sync.
    named = {directory.parent, *(each.parent for each in list(missing))}
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for parent in sorted(named):
            # Who may enter a directory need not be allowed to read it.
            with suppress(PermissionError):
                sync_directory(parent)
    except OSError as error:
        if (problem := write_error(error, directory)) is not None:
            raise problem from error
        raise


def open_to_others(directory: Path) -> list[Path]:
    """The directory and those of its files that other users can read. None if the directory itself keeps them out."""
    if not _mode(directory) & _OTHERS:
        return []
    return [directory, *(each for each in sorted(directory.iterdir()) if _mode(each) & _OTHERS)]


def warn_if_open(directory: Path) -> None:
    """Log a warning if other users can read a directory that existed before, or files in it."""
    if found := open_to_others(directory):
        log.warning(
            "other users can read the data directory; run chmod -R go= on it",
            directory=str(directory),
            files=[each.name for each in found[1:]],
        )


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode & 0o777
    except FileNotFoundError:
        # Files come and go while a server runs.
        return 0
