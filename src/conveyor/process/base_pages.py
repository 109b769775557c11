"""Base pages: of a job that compares with an earlier job, what that job has of the same requests.

Gets references, reads the rows of the earlier job at the same indexes, in one batch for each of its runs, and takes
those whose request is the same. A list may have changed in between: for the others it looks up where the earlier job
has their requests, in an index of all of them that is built once for a run. The index has eight bytes for each task,
and none is built for a job with more tasks than `MAX_INDEXED`: those are compared at their indexes alone.
"""

import asyncio
from array import array
from bisect import bisect_left
from collections.abc import AsyncGenerator, Mapping, Sequence
from hashlib import blake2b

from conveyor.egress.lru import Lru
from conveyor.engines.records import Records
from conveyor.engines.tasks import TaskFilter, Tasks, by_index
from conveyor.jobs.latest_outcomes import latest_outcomes
from conveyor.lists.inputs import request_text
from conveyor.model import Job, JobId, Run, RunId, RunKey, Task, TaskRef
from conveyor.process.changed_pages import EarlierPage, earlier_page

MAX_INDEXED = 1_000_000
# Runs whose earlier jobs are known, each with an index of up to 8 MB.
_MAX_RUNS = 4
_ROWS = 2000
# Bits of an index; the other forty are of the hash.
_INDEX_BITS = 24


# No function has this name: what was extracted is of several.
_MIXED = ""


class BaseJob:
    """An earlier job. Its runs are oldest first; `extract` is what all of them have."""

    def __init__(self, job: Job, runs: Sequence[Run]) -> None:
        is_mixed = any(run.lineage is not None and "extract" in run.lineage.overrides for run in runs)
        self.extract = _MIXED if is_mixed else job.options.extract
        self.runs = [job.key_of(run) for run in runs]
        self.total = runs[0].total
        self.index: RequestIndex | None = None
        self.indexing = asyncio.Lock()


class RequestIndex:
    """Where a job has a request: sorted numbers, each a hash and an index. Several requests may have one hash."""

    def __init__(self, entries: "array[int]") -> None:
        self._entries = array("Q", sorted(entries))

    def find(self, request: str) -> list[int]:
        """The indexes of tasks that may have this request, in order; a few."""
        low = _hash(request) << _INDEX_BITS
        place = bisect_left(self._entries, low)
        found = []
        while place < len(self._entries) and self._entries[place] >> _INDEX_BITS == low >> _INDEX_BITS:
            found.append(self._entries[place] & ((1 << _INDEX_BITS) - 1))
            place += 1
        return found[:1]


class BasePages:
    """One for each worker."""

    def __init__(self, records: Records, tasks: Tasks) -> None:
        self._records = records
        self._tasks = tasks
        self._bases: Lru[RunId, BaseJob | None] = Lru(_MAX_RUNS)

    async def find(self, job: Job, refs: Sequence[TaskRef]) -> dict[int, EarlierPage]:
        """The pages of the same requests in the earlier job, by the indexes of the references; none if it is gone."""
        base = await self._base(job)
        if base is None:
            return {}
        extracts_again = base.extract != job.options.extract
        try:
            found = await self._find(base, {ref.index: request_text(ref.input) for ref in refs})
        except Exception:
            # Its rows may have moved: look for it again.
            self._bases.put(job.run.run_id, None)
            raise
        pages = {
            index: earlier_page(job, task, extracts_again=extracts_again, is_copied=True)
            for index, task in found.items()
        }
        return {index: page for index, page in pages.items() if page is not None}

    async def _find(self, base: BaseJob, requests: Mapping[int, str]) -> dict[int, Task]:
        found = await self._at(base, {index: index for index in requests}, requests)
        missing = [index for index in requests if index not in found]
        if missing and base.total <= MAX_INDEXED:
            places = {}
            index_of = await self._index(base)
            for index in missing:
                for place in index_of.find(requests[index]):
                    places[index] = place
            found |= await self._at(base, places, requests)
        return found

    async def _at(self, base: BaseJob, places: Mapping[int, int], requests: Mapping[int, str]) -> dict[int, Task]:
        """The outcomes at these places whose requests are those of the tasks that look there."""
        if not places:
            return {}
        first = await self._tasks.at(base.runs[0], sorted(set(places.values())))
        latest = {task.index: task for task in await latest_outcomes(self._tasks, base.runs, first)}
        known = {place: request_text(bytes(task.input).decode()) for place, task in latest.items()}
        return {index: latest[place] for index, place in places.items() if known.get(place) == requests[index]}

    async def _index(self, base: BaseJob) -> RequestIndex:
        async with base.indexing:
            if base.index is None:
                entries: array[int] = array("Q")
                async for page in self._pages(base.runs[0]):
                    entries.extend(
                        (_hash(request_text(bytes(task.input).decode())) << _INDEX_BITS) | task.index
                        for task in page
                        if task.index >> _INDEX_BITS == 0
                    )
                base.index = await asyncio.to_thread(RequestIndex, entries)
            return base.index

    async def _pages(self, run: RunKey) -> AsyncGenerator[list[Task], None]:
        engine = by_index(self._tasks, run)
        if engine is None:
            for shard in range(max(1, run.shard_count)):
                after = None
                while page := await self._tasks.page(run, shard, after, _ROWS, TaskFilter()):
                    after = page[-1].task_id
                    yield page
            return
        last: int | None = -1
        while last is not None:
            walked = await engine.walk(run, last, _ROWS, TaskFilter())
            last = walked.last
            yield walked.tasks

    async def _base(self, job: Job) -> BaseJob | None:
        run_id = job.run.run_id
        known = self._bases.get(run_id)
        if known is None and job.options.changed_from is not None:
            base = await self._records.jobs.job(job.tenant, JobId(job.options.changed_from))
            if base is not None:
                known = self._bases.put(run_id, BaseJob(base, await self._records.jobs.runs(base.job_id)))
        return known


def _hash(request: str) -> int:
    return int.from_bytes(blake2b(request.encode(), digest_size=5).digest())
