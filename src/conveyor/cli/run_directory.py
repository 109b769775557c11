"""Where a run keeps its data and puts its archive, and the mark that it leaves until the archive is whole.

Without --data and CONVEYOR_DATA, a run keeps its data in `<OUT>.conveyor` beside the archive, and removes it once the
archive is written. `run.json` in there marks a run that is not finished.
"""

import os
import shutil
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import msgspec

from conveyor.errors import BadInput, ListUnreadable
from conveyor.settings import Settings

STDIN = "-"
_PIECE = 1 << 20


class RunMark(msgspec.Struct, frozen=True):
    """An unfinished run: of which list, and, once it is accepted, as which job."""

    lists: list[str]
    # None where a pipe was part of the list.
    sha256: str | None
    out: str
    job_id: str | None = None
    # Jobs of lists that could not be read to their end, the newest last; and whether their results are in this one.
    before: list[str] = []
    taken_over: bool = True


def check_out(out: Path) -> None:
    """Say now, not after an hour, that the archive can not be written there."""
    if out.is_dir():
        raise BadInput(f"{out} is a directory; -o names the archive to write.")
    parent = out.absolute().parent
    if not parent.is_dir():
        raise BadInput(f"There is no directory {parent} for the archive.")
    if not os.access(parent, os.W_OK):
        raise BadInput(f"The directory {parent} can not be written to.")


def check_data(data: Path) -> None:
    """A data directory is a directory, or is not there yet."""
    if data.exists() and not data.is_dir():
        raise BadInput(f"{data} is not a directory; --data names the one to keep data in.")


def check_lists(lists: Sequence[str]) -> None:
    """Each list is a file, or is standard input, once."""
    for name in lists:
        if name == STDIN:
            continue
        if not Path(name).exists():
            raise ListUnreadable(f"There is no file {name}.")
        if Path(name).is_dir():
            raise ListUnreadable(f"{name} is a directory, not a list.")
    if lists.count(STDIN) > 1:
        raise ListUnreadable("Standard input (-) can be read only once.")


def is_plain_file(name: str) -> bool:
    """Whether it can be read twice; standard input and other pipes can not."""
    return name != STDIN and Path(name).is_file()


def size_of(lists: Sequence[str]) -> int | None:
    """The bytes that will be staged; None if that is not known: of pipes, and of several lists, which are joined."""
    return Path(lists[0]).stat().st_size if len(lists) == 1 and is_plain_file(lists[0]) else None


def default_data(out: Path) -> Path:
    """The directory beside the archive."""
    return out.with_name(out.name + ".conveyor")


def is_default(settings: Settings) -> bool:
    """Whether CONVEYOR_DATA did not choose another directory. (That it names the default can not be told.)"""
    return settings.data == Settings().data


def fingerprint(lists: Sequence[str]) -> str | None:
    """The same for the same lists in the same order; None if one of them can be read only once."""
    if not all(map(is_plain_file, lists)):
        return None
    whole = sha256()
    for name in lists:
        with Path(name).open("rb") as file:
            while piece := file.read(_PIECE):
                whole.update(piece)
        whole.update(b"\0")
    return whole.hexdigest()


def _mark_file(data: Path) -> Path:
    return data / "run.json"


def read_mark(data: Path) -> RunMark | None:
    """The unfinished run of a data directory."""
    try:
        return msgspec.json.decode(_mark_file(data).read_bytes(), type=RunMark)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except msgspec.DecodeError:
        raise BadInput(f"{_mark_file(data)} is not readable as the mark of a run.") from None


def write_mark(data: Path, mark: RunMark) -> None:
    """Whole or not at all."""
    part = _mark_file(data).with_suffix(".part")
    part.write_bytes(msgspec.json.encode(mark))
    part.replace(_mark_file(data))


def remove_mark(data: Path) -> None:
    _mark_file(data).unlink(missing_ok=True)


def remove_data(data: Path) -> None:
    """Out of the way in one step first: half a data directory is never found under its name."""
    gone = data.with_name(data.name + ".removed")
    shutil.rmtree(gone, ignore_errors=True)
    data.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
