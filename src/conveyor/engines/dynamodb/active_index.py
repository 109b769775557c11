"""The active jobs, read from an index of small entries.

An entry of the index has the key of a job and its revision, nothing else. A job is read whole when its revision is new
to this process; a look at jobs that have not changed reads their entries alone. The index is spread over partitions by
the bucket of the job, and its sort key begins with the bucket, so that the jobs of some buckets are read without the
others.
"""

import asyncio
from collections.abc import Collection
from typing import NamedTuple

from aiodynamo.expressions import HashKey, KeyCondition, RangeKey

from conveyor.clock import Clock
from conveyor.engines.dynamodb.items import active_partition, active_prefix, job_row, readable
from conveyor.engines.dynamodb.schema import ACTIVE, ACTIVE_PARTITIONS, DUE
from conveyor.engines.dynamodb.spread import spread
from conveyor.engines.dynamodb.table import Item, Key, Table
from conveyor.engines.job_records import JOB_BUCKETS, bucket_of
from conveyor.model import Job, JobId
from conveyor.states import ENDED

# Seconds until the entries of the version before are looked for again, once there were none.
_OLD_ENTRIES_EVERY = 30.0


class _SeenJob(NamedTuple):
    """A job as this process read it last; None for one that a newer version wrote."""

    revision: int
    job: Job | None


class ActiveIndex:
    """Reads active jobs, and remembers them by revision."""

    def __init__(self, table: Table, clock: Clock) -> None:
        self._table = table
        self._clock = clock
        self._seen: dict[JobId, _SeenJob] = {}
        self._look_for_old_at = 0.0

    async def jobs(self, buckets: Collection[int] | None) -> list[Job]:
        """The active jobs of all or some buckets, in order of job_id."""
        wanted = range(JOB_BUCKETS) if buckets is None else frozenset(buckets)
        entries, old = await asyncio.gather(self._entries(wanted), self._old())
        listed = {JobId(entry["as"].partition("#")[2]): entry for entry in entries}
        await self._read(listed)
        for job_id in [each for each in self._seen if each not in listed and bucket_of(each) in wanted]:
            del self._seen[job_id]
        found = {job.job_id: job for job in old if bucket_of(job.job_id) in wanted}
        found |= {job_id: job for job_id in listed if (job := self._job(job_id)) is not None}
        return [found[job_id] for job_id in sorted(found) if found[job_id].state not in ENDED]

    async def _entries(self, buckets: Collection[int]) -> list[Item]:
        conditions: list[KeyCondition] = []
        for number in range(ACTIVE_PARTITIONS):
            inside = range(number, JOB_BUCKETS, ACTIVE_PARTITIONS)
            own = [bucket for bucket in inside if bucket in buckets]
            where = HashKey("ap", active_partition(number))
            if len(own) == len(inside):
                conditions.append(where)
            else:
                conditions += [where & RangeKey("as").begins_with(active_prefix(bucket)) for bucket in own]
        parts = await asyncio.gather(*(self._table.query(each, index=ACTIVE) for each in conditions))
        return [entry for part in parts for entry in part]

    async def _read(self, listed: dict[JobId, Item]) -> None:
        """Read the jobs whose revision is new. The index lags, so that it may also show an older one."""
        changed = [
            Key(entry["pk"], entry["sk"])
            for job_id, entry in listed.items()
            if job_id not in self._seen or self._seen[job_id].revision < entry.get("rev", 0)
        ]
        for stored in await self._table.read(*changed):
            if stored.item is not None:
                job = next((row.job for row in readable([stored.item], job_row)), None)
                # A job of the first release has no revision until it changes: it is read each time.
                self._seen[JobId(stored.item["job_id"])] = _SeenJob(stored.item.get("rev", -1), job)

    def _job(self, job_id: JobId) -> Job | None:
        seen = self._seen.get(job_id)
        return None if seen is None else seen.job

    async def _old(self) -> list[Job]:
        """Jobs that the version before wrote are in another index until they change."""
        now = self._clock.monotonic()
        if now < self._look_for_old_at:
            return []
        items = await spread(self._table, "dp", "Active", index=DUE)
        self._look_for_old_at = 0.0 if items else now + _OLD_ENTRIES_EVERY
        return [row.job for row in readable(items, job_row)]
