"""Blobs in a directory with an address of its own, file:///DIR, which all processes of an installation share: on one
machine, or on a file system that several machines mount."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

from conveyor.disk import disk_problem
from conveyor.engines.local_blobs import LocalBlobs
from conveyor.errors import EngineFailed


class DirectoryEngine:
    """Use `open` to create it."""

    def __init__(self, root: Path) -> None:
        self.blobs = LocalBlobs(root)
        self._root = root

    @classmethod
    @asynccontextmanager
    async def open(cls, root: Path) -> AsyncIterator[Self]:
        """Create the directory if it is missing. Raises EngineFailed if that fails."""
        try:
            engine = cls(root)
        except OSError as error:
            raise EngineFailed(f"The directory {root} cannot be used: {error.strerror or error}.") from error
        yield engine

    async def checks(self) -> list[tuple[str, str | None]]:
        """The checks of `conveyor doctor`: the name of each, and what to fix, or None."""
        problem = await asyncio.to_thread(disk_problem, self._root)
        return [("the directory can be written", None if problem is None else problem.message)]
