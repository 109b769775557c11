"""A process that makes exports until none is left, unless it is killed in it.

    python export_child.py DIRECTORY ROWS

Rows are read ROWS at a time; how many it read is a line in DIRECTORY/reads for each time.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from conveyor.export.exporter import Exporter
from conveyor.export.exports import ExportState, export_of
from conveyor.model import EXPORT
from conveyor.read import walk
from conveyor.settings import Settings, export_places
from conveyor.system import open_system


async def main(directory: Path) -> None:
    settings = Settings.load({}, data=directory / "data", export_piece_bytes=128 * 1024)
    reads = os.open(directory / "reads", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    async with open_system(settings) as system:
        router: Any = system.tasks
        engine = router.engine(system.task_store)
        real = engine.walk

        async def counted(*given: Any) -> Any:
            walked = await real(*given)
            os.write(reads, b"%d\n" % walked.read)
            return walked

        engine.walk = counted
        role = Exporter(
            system.records,
            system.tasks,
            system.blobs,
            system.coordinator,
            system.clock,
            settings.export_piece_bytes,
            export_places(settings),
            f"exporter {os.getpid()}",
        )

        async def unfinished() -> bool:
            rows = await system.records.documents.due_documents(EXPORT, 1e12, 100)
            return any(export_of(row).state in {ExportState.QUEUED, ExportState.RUNNING} for row in rows)

        while await unfinished():
            if delay := await role.tick():
                await system.clock.sleep(delay)


if __name__ == "__main__":
    walk.ROWS = int(sys.argv[2])
    asyncio.run(main(Path(sys.argv[1])))
