"""Where tests keep their data."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MEMORY = Path("/dev/shm")


@contextmanager
def quick_place() -> Iterator[Path]:
    """A directory that is gone afterwards, in memory where the system has such a place: an fsync costs nothing there.
    Tests of durability take tmp_path."""
    base = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="conveyor-test-", dir=base) as name:
        yield Path(name)
