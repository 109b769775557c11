"""Small files of the data directory that must survive a power cut: keys, and the mark of a local run."""

import os
from pathlib import Path

from conveyor.disk import sync, sync_directory


def write_durably(path: Path, text: str) -> None:
    """Replace the file atomically, readable by its owner only from the first byte. After a power cut it is the old one
    or the new one, never an empty one."""
    staged = path.with_name(f"{path.name}.new")
    staged.unlink(missing_ok=True)
    fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(f"{text}\n")
        file.flush()
        sync(file.fileno())
    staged.replace(path)
    sync_directory(path.parent)
