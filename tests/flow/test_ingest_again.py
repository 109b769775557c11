"""What is done again in an ingest changes nothing, and what was accepted is never left out."""

import json
from typing import Any

from conveyor.errors import EngineFailed
from conveyor.model import Job
from conveyor.serve.invalid import invalid_lines, invalid_page
from tests.flow.belt import Belt, open_belt

LINES = 8000


class Failing:
    """Records whose n-th checkpoint fails before it is written, for some n."""

    def __init__(self, records: Any, *fails: int) -> None:
        self._records = records
        self._fails = fails
        self.checkpoints = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._records, name)

    async def checkpoint(self, *given: Any) -> bool:
        self.checkpoints += 1
        if self.checkpoints in self._fails:
            raise EngineFailed
        written: bool = await self._records.checkpoint(*given)
        return written


async def all_invalid(belt: Belt, job: Job) -> list[int]:
    found, cursor = [], None
    while True:
        page = await invalid_page(belt.blobs, job, 77, cursor)
        found += [line.line for line in page.items]
        cursor = page.next_cursor
        if cursor is None:
            return found


async def test_invalid_lines_are_listed_once_after_checkpoints_that_failed() -> None:
    """The batches of the second try begin at the last checkpoint, in the middle of what was a piece of the list."""
    async with open_belt() as belt:
        good, bad = json.dumps("x" * 100), "{" + "x" * 100
        data = "".join(f"{bad if number % 10 == 0 else good}\n" for number in range(LINES)).encode()
        job = await belt.stage_bytes(data)
        ingester = belt.ingester()
        failing = Failing(belt.system.records, 2, 4)
        object.__setattr__(ingester._ingest, "records", failing)
        belt.start(ingester)

        async def latched() -> bool:
            return (await belt.job(job.job_id)).run.last_batch

        await belt.until(latched)
        assert failing.checkpoints > 4
        run = (await belt.job(job.job_id)).run
        assert (run.total, run.invalid) == (LINES * 9 // 10, LINES // 10)
        wrong = [number + 1 for number in range(0, LINES, 10)]
        assert await all_invalid(belt, job) == wrong
        kept = b"".join([part async for part in invalid_lines(belt.blobs, job)])
        assert [json.loads(line)["line"] for line in kept.splitlines()] == wrong
