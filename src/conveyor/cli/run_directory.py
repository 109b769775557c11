"""The data directory of a local run, its archive, and the mark of an unfinished run.

Without --data and CONVEYOR_DATA, a run keeps its data in `<OUT>.conveyor` beside the archive, and removes the directory
once the archive is written. `run.json` in the directory marks an unfinished run.
"""

import glob
import os
import shutil
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import msgspec

from conveyor.auth.durable_file import write_durably
from conveyor.client.list_objects import is_object
from conveyor.disk import sync_directory
from conveyor.errors import BadInput, ListUnreadable
from conveyor.settings import Settings

STDIN = "-"
_PIECE = 1 << 20


class RunMark(msgspec.Struct, frozen=True):
    """An unfinished run: its lists and, once the job is accepted, the job."""

    lists: list[str]
    # None if one of the lists is a pipe.
    sha256: str | None
    out: str
    job_id: str | None = None
    # Earlier jobs, newest last, whose lists were unreadable; and whether their results were copied to this job.
    before: list[str] = []
    taken_over: bool = True


def check_out(out: Path, overwrite: bool = True) -> None:
    """Check before the run, not after an hour, that the file can be written. Raises BadInput."""
    if not overwrite and out.exists():
        raise BadInput(f"{out} exists already. Choose another name with -o, or pass --overwrite to replace it.")
    parent = out.absolute().parent
    if not parent.is_dir():
        raise BadInput(f"The directory {parent} does not exist. Create it, or choose another with -o.")
    if not os.access(parent, os.W_OK):
        raise BadInput(f"The directory {parent} is not writable. Choose another with -o.")


def check_data(data: Path) -> None:
    """Check that the data directory is a directory, or does not exist yet. Raises BadInput."""
    if data.exists() and not data.is_dir():
        raise BadInput(f"{data} is not a directory. Choose a data directory with --data.")


def expand_lists(lists: Sequence[str]) -> list[str]:
    """Replace each pattern (`pages-*.csv`) that a shell has left alone by the files that match it, in order. Raises
    ListUnreadable."""
    expanded: list[str] = []
    for name in lists:
        if name == STDIN or is_object(name) or is_url(name) or not glob.has_magic(name) or Path(name).exists():
            expanded.append(name)
            continue
        found = sorted(path for path in glob.glob(name) if not Path(path).is_dir())  # noqa: PTH207  (absolute too)
        if not found:
            raise ListUnreadable(f"No file matches {name}.")
        expanded += found
    return expanded


def is_url(name: str) -> bool:
    """Whether the list is behind a URL."""
    return name.lower().startswith(("http://", "https://"))


def check_lists(lists: Sequence[str]) -> None:
    """Check that each list is a file, an object in a bucket, a URL, or standard input at most once. Raises
    ListUnreadable."""
    for name in lists:
        if name == STDIN or is_object(name) or is_url(name):
            continue
        if not Path(name).exists():
            raise ListUnreadable(f"List {name} not found.")
        if Path(name).is_dir():
            raise ListUnreadable(f"{name} is a directory. Pass a file.")
    if lists.count(STDIN) > 1:
        raise ListUnreadable("Standard input (-) can be read only once. Pass it once.")


def is_plain_file(name: str) -> bool:
    """Whether the list can be read twice. Standard input, other pipes and objects in a bucket cannot."""
    return name != STDIN and Path(name).is_file()


def size_of(lists: Sequence[str]) -> int | None:
    """The number of bytes to stage. None if unknown: for a pipe, and for several lists, which are joined."""
    return Path(lists[0]).stat().st_size if len(lists) == 1 and is_plain_file(lists[0]) else None


def default_data(out: Path) -> Path:
    """The data directory beside the archive."""
    return out.with_name(out.name + ".conveyor")


def has_unfinished_run(out: Path, data: Path | None) -> bool:
    """Whether a run with this output was stopped."""
    return read_mark(default_data(out) if data is None else data) is not None


def is_default(settings: Settings) -> bool:
    """Whether CONVEYOR_DATA is unset, or names the default directory: the two look the same."""
    return settings.data == Settings().data


def fingerprint(lists: Sequence[str]) -> str | None:
    """A hash over all lists in their order; None if one of them can be read only once."""
    if not all(map(is_plain_file, lists)):
        return None
    digest = sha256()
    for name in lists:
        with Path(name).open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
        digest.update(b"\0")
    return digest.hexdigest()


def _mark_file(data: Path) -> Path:
    return data / "run.json"


def read_mark(data: Path) -> RunMark | None:
    """Read the mark of the unfinished run in a data directory; None if there is none."""
    try:
        return msgspec.json.decode(_mark_file(data).read_bytes(), type=RunMark)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except msgspec.DecodeError:
        raise BadInput(f"{_mark_file(data)} is invalid. Remove {data} to start over.") from None


def write_mark(data: Path, mark: RunMark) -> None:
    """Write the mark so that a power cut leaves it whole: without it, no run is resumed."""
    write_durably(_mark_file(data), msgspec.json.encode(mark).decode())


def remove_mark(data: Path) -> None:
    _mark_file(data).unlink(missing_ok=True)
    if data.exists():
        sync_directory(data)


def remove_data(data: Path) -> None:
    """Remove a data directory, durably. It is renamed first, so that no one finds half of it under its name, after a
    power cut either."""
    removed = data.with_name(data.name + ".removed")
    shutil.rmtree(removed, ignore_errors=True)
    data.rename(removed)
    sync_directory(data.parent)
    shutil.rmtree(removed, ignore_errors=True)
    sync_directory(data.parent)
