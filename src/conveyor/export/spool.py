"""External sort. Gets lines in any order, spills them to temporary files, and returns them sorted."""

from collections.abc import Iterator
from heapq import merge
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Self

SPILL_BYTES = 8 * 1024 * 1024


class SortedSpool:
    """Sorts lines. Memory holds at most `SPILL_BYTES` of them; the rest goes to sorted files, which are merged on
    reading."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._lines: list[bytes] = []
        self._bytes = 0
        self._files: list[IO[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()

    def add(self, line: bytes) -> None:
        """Add a line, with its newline at the end and no other."""
        self._lines.append(line)
        self._bytes += len(line)
        if self._bytes >= SPILL_BYTES:
            self._spill()

    def __iter__(self) -> Iterator[bytes]:
        self._lines.sort()
        return merge(*self._files, self._lines)

    def _spill(self) -> None:
        self._lines.sort()
        file = TemporaryFile(dir=self._directory)  # noqa: SIM115  (closed by __exit__)
        self._files.append(file)
        file.writelines(self._lines)
        file.seek(0)
        self._lines = []
        self._bytes = 0
