"""External sort. Gets lines in any order, spills them to temporary files, and returns them sorted."""

from collections.abc import Iterable, Iterator
from heapq import merge
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Self

SPILL_BYTES = 8 * 1024 * 1024
# Files that are merged into one.
FAN_IN = 16


class SortedSpool:
    """Sorts lines. Memory holds at most `SPILL_BYTES` of them; the rest goes to sorted files. `FAN_IN` files of a level
    become one of the next, so that few are open, whatever the number of lines; those are merged on reading."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._lines: list[bytes] = []
        self._bytes = 0
        self._levels: list[list[IO[bytes]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for files in self._levels:
            for file in files:
                file.close()

    def add(self, line: bytes) -> None:
        """Add a line, with its newline at the end and no other."""
        self._lines.append(line)
        self._bytes += len(line)
        if self._bytes >= SPILL_BYTES:
            self._spill()

    def __iter__(self) -> Iterator[bytes]:
        self._lines.sort()
        return merge(*(file for files in self._levels for file in files), self._lines)

    def _spill(self) -> None:
        self._lines.sort()
        self._write(0, self._lines)
        self._lines = []
        self._bytes = 0

    def _write(self, level: int, lines: Iterable[bytes]) -> None:
        if level == len(self._levels):
            self._levels.append([])
        file = TemporaryFile(dir=self._directory)  # noqa: SIM115  (closed by __exit__)
        self._levels[level].append(file)
        file.writelines(lines)
        file.seek(0)
        if len(self._levels[level]) == FAN_IN:
            self._write(level + 1, merge(*self._levels[level]))
            for merged in self._levels[level]:
                merged.close()
            self._levels[level] = []
