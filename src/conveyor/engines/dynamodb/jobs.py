"""Jobs and runs on DynamoDB."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec
from aiodynamo.expressions import Condition, F, HashKey, KeyCondition, RangeKey
from aiodynamo.operations import Operation

from conveyor.clock import Clock
from conveyor.engines.dynamodb.access import read_request, release_upload, request_keys
from conveyor.engines.dynamodb.active_index import ActiveIndex
from conveyor.engines.dynamodb.documents import row_writes
from conveyor.engines.dynamodb.items import (
    JobRow,
    RunRow,
    job_item,
    job_key,
    job_partition,
    job_row,
    notices_key,
    ranges_partition,
    readable,
    row_key,
    run_item,
    run_key,
    run_row,
    upload_use_key,
)
from conveyor.engines.dynamodb.job_heads import JobHead, read_head
from conveyor.engines.dynamodb.lifetimes import while_in_use
from conveyor.engines.dynamodb.outbox import notice_writes
from conveyor.engines.dynamodb.schema import BUCKETS, DUE, EXPIRING, LISTED
from conveyor.engines.dynamodb.spread import spread
from conveyor.engines.dynamodb.table import Item, Key, ReadItem, Table, WritePlan, plain, query_payload
from conveyor.engines.records import Document, IdempotencyClaim, upload_of
from conveyor.engines.tasks import MAX_SCANNED
from conveyor.model import Job, JobId, Options, OutboxEvent, Page, Run, RunId, TenantId, expiry_of
from conveyor.states import ENDED, RunState

replace = msgspec.structs.replace

# Longer than any id: a client may send any cursor.
_LONGEST_CURSOR = 100
# A partition of the index of expiring jobs, and the key that was read last there.
_finished_cursor = msgspec.json.Decoder(tuple[int, dict[str, Any] | None])


class DynamoJobs:
    """JobRecords: every change is one transaction."""

    def __init__(self, table: Table, clock: Clock) -> None:
        self._table = table
        self._clock = clock
        self._active = ActiveIndex(table, clock)

    async def create_job(
        self, job: Job, notice: OutboxEvent, answer: IdempotencyClaim | None, rows: Sequence[Document] = ()
    ) -> IdempotencyClaim | None:
        keys = [
            job_key(job.tenant, job.job_id),
            notices_key(notice.tenant, notice.job_id),
            *request_keys(answer),
            *(row_key(row.kind, row.tenant, row.id) for row in rows),
        ]

        async def plan() -> WritePlan[IdempotencyClaim | None]:
            there, notices, *rest = await self._table.read(*keys)
            request = read_request(rest, answer)
            if request.standing is not None or there.item is not None:
                return WritePlan(request.standing)
            run = replace(job.run, touched_at=job.run.created_at)
            row = JobRow(replace(job, run=run), RunRow(run))
            writes = [
                self._table.save(there, job_item(row)),
                *notice_writes(self._table, notices, notice),
                *request.writes(self._table),
                *self._upload_use(job),
                *row_writes(self._table, rest[len(request_keys(answer)) :], rows, self._clock.now()),
            ]
            return WritePlan(None, writes)

        return await self._table.change(plan)

    async def add_run(self, job: Job, notice: OutboxEvent, answer: IdempotencyClaim | None) -> bool | IdempotencyClaim:
        async def plan() -> WritePlan[bool | IdempotencyClaim]:
            head, listed = await asyncio.gather(
                self._head(job.job_id, job.tenant), self._table.read(*request_keys(answer))
            )
            # Answer the claim first: this very request may have added the run that blocks it.
            request = read_request(listed, answer)
            if request.standing is not None:
                return WritePlan(request.standing)
            row = head.row
            if row is None or not self._visible(row) or not _follows(row.latest.run, job.run):
                return WritePlan(False)
            if row.job.task_store not in ("", job.task_store):
                return WritePlan(False)
            run = replace(job.run, touched_at=job.run.created_at)
            version = row.job.version + 1
            changed = row.with_run(
                RunRow(run),
                state=job.state,
                reason=job.reason,
                options=job.options,
                version=version,
                expires_at=None,
            )
            before = run_key(job.tenant, job.job_id, row.latest.run.number)
            writes = [
                self._table.save(head.job, job_item(changed)),
                self._table.save(ReadItem(before, None), run_item(job.tenant, job.job_id, row.latest)),
                *notice_writes(self._table, head.notices, notice),
                *request.writes(self._table),
            ]
            return WritePlan(True, writes)

        return await self._table.change(plan)

    async def runs(self, job_id: JobId) -> list[Run]:
        row = (await self._head(job_id)).row
        if row is None:
            return []
        earlier = [run_row(item).run for item in await self._earlier_runs(row.job.tenant, job_id)]
        return [*earlier, row.latest.run]

    async def change_options(self, job_id: JobId, version: int, options: Options, notice: OutboxEvent) -> bool:
        async def plan() -> WritePlan[bool]:
            head = await self._head(job_id)
            row = head.row
            if row is None or not self._visible(row) or row.job.version != version:
                return WritePlan(False)
            expires_at = expiry_of(options, row.latest.run.ended_at)
            job = replace(row.job, options=options, version=version + 1, expires_at=expires_at)
            changed = replace(row, job=job)
            writes = [
                self._table.save(head.job, job_item(changed)),
                *notice_writes(self._table, head.notices, notice),
            ]
            return WritePlan(True, writes)

        return await self._table.change(plan)

    async def keep_job(self, tenant: TenantId, job_id: JobId, until: float) -> bool:
        async def plan() -> WritePlan[bool]:
            head = await self._head(job_id, tenant)
            row = head.row
            if row is None or not self._visible(row):
                return WritePlan(False)
            if row.job.expires_at is None or row.job.expires_at >= until:
                return WritePlan(True)
            kept = replace(row, job=replace(row.job, expires_at=until))
            return WritePlan(True, [self._table.save(head.job, job_item(kept))])

        return await self._table.change(plan)

    async def job(self, tenant: TenantId, job_id: JobId) -> Job | None:
        item = await self._table.get(job_key(tenant, job_id))
        row = None if item is None else job_row(item)
        return row.job if row is not None and self._visible(row) else None

    async def jobs_of(self, keys: Sequence[tuple[TenantId, JobId]]) -> list[Job]:
        wanted = [job_key(tenant, job_id) for tenant, job_id in dict.fromkeys(keys)]
        found = [read.item for read in await self._table.read(*wanted) if read.item is not None]
        rows = readable(found, job_row)
        return [row.job for row in rows if self._visible(row)]

    async def jobs(self, tenant: TenantId, cursor: str | None, limit: int) -> Page[Job]:
        where: KeyCondition = HashKey("lp", f"Jobs#{tenant}")
        if cursor:
            where = HashKey("lp", f"Jobs#{tenant}") & RangeKey("ls").lt(cursor[:_LONGEST_CURSOR])
        listed, last = await self._table.query_some(
            where, rows=MAX_SCANNED, limit=limit + 1, index=LISTED, keep=self._unexpired(), forward=False
        )
        if len(listed) > limit:
            last = listed[limit - 1]
        items = [row.job for row in readable(listed[:limit], job_row)]
        return Page(items, None if last is None else last["ls"])

    async def active_jobs(self, buckets: Collection[int] | None = None) -> list[Job]:
        return await self._active.jobs(buckets)

    async def run(self, job_id: JobId, run_id: RunId) -> Run | None:
        row = (await self._head(job_id)).row
        if row is None or row.latest.run.run_id == run_id:
            return None if row is None else row.latest.run
        listed = await self._earlier_run(row.job.tenant, job_id, run_id)
        return None if listed is None else run_row(listed).run

    async def set_total(self, job_id: JobId, run_id: RunId, total: int, invalid: int) -> None:
        def change(row: RunRow) -> RunRow:
            return row if row.run.last_batch else replace(row, run=replace(row.run, total=total, invalid=invalid))

        await self._change_run(job_id, run_id, change)

    async def latch(self, job_id: JobId, run_id: RunId) -> Run | None:
        def change(row: RunRow) -> RunRow:
            if row.run.last_batch:
                return row
            state = RunState.RUNNING if row.run.state is RunState.INGESTING else row.run.state
            return replace(row, run=replace(row.run, last_batch=True, state=state))

        return await self._change_run(job_id, run_id, change)

    async def move_run(
        self,
        job_id: JobId,
        run_id: RunId,
        sources: Collection[RunState],
        target: RunState,
        reason: str | None,
        notice: OutboxEvent | None,
        keep: bool = False,
        code: str | None = None,
    ) -> bool:
        async def plan() -> WritePlan[bool]:
            head = await self._head(job_id)
            row = head.row
            # Only the latest run of a job moves: earlier runs have finished.
            if row is None or row.latest.run.run_id != run_id or not _may_move(row.latest.run, sources, target):
                return WritePlan(False)
            # A job that has expired or was deleted may be half purged.
            if not self._visible(row):
                return WritePlan(False)
            ended_at = self._clock.now() if target in ENDED else None
            shown = row.job.reason if reason is None and target is RunState.COMPLETED else reason
            kept = row.latest.run.reason_code if code is None and target is RunState.COMPLETED else code
            run = replace(row.latest.run, state=target, ended_at=ended_at, reason_code=kept)
            expires_at = expiry_of(row.job.options, ended_at)
            changed = row.with_run(replace(row.latest, run=run, swept=keep), reason=shown, expires_at=expires_at)
            writes = [
                self._table.save(head.job, job_item(changed)),
                *notice_writes(self._table, head.notices, notice),
            ]
            return WritePlan(True, writes)

        return await self._table.change(plan)

    async def unswept_jobs(self, limit: int) -> list[Job]:
        listed = await spread(self._table, "dp", "Unswept", index=DUE, limit=limit)
        earlier = {Key(item["pk"], item["sk"]): item for item in listed if "state" not in item}
        heads = await self._table.read(*(job_key(item["tenant"], item["job_id"]) for item in earlier.values()))
        jobs = {key: head.item for key, head in zip(earlier, heads, strict=True)}

        def shown(item: Item) -> Job | None:
            head = jobs.get(Key(item["pk"], item["sk"]), item)
            return None if head is None else replace(job_row(head).job, run=run_row(item).run)

        return [job for job in readable(listed, shown) if job is not None]

    async def finished_jobs(self, outside: str, cursor: str | None, limit: int) -> Page[Job]:
        # Every job is in the index of expiring ones: read its partitions one after the other.
        number, start = _finished_cursor.decode(cursor) if cursor else (0, None)
        where = HashKey("ep", f"Jobs#{number}")
        payload = query_payload(self._table.name, where, index=EXPIRING, limit=limit, start=start)
        answer = await self._table.wire.call("Query", payload)
        rows = readable(map(plain, answer["Items"]), job_row)
        jobs = [row.job for row in rows if row.job.task_store != outside and await self._is_at_rest(row)]
        start = answer.get("LastEvaluatedKey")
        place = (number, start) if start else (number + 1, None)
        return Page(jobs, msgspec.json.encode(place).decode() if place[0] < BUCKETS else None)

    async def _is_at_rest(self, row: JobRow) -> bool:
        """Whether all runs of the job are finished and swept."""
        if not self._visible(row) or row.latest.run.ended_at is None or not row.latest.swept:
            return False
        earlier = [] if row.latest.run.number == 1 else await self._earlier_runs(row.job.tenant, row.job.job_id)
        return all(run_row(item).swept for item in earlier)

    async def record_task_store(self, job_id: JobId, store: str) -> None:
        async def plan() -> WritePlan[None]:
            head = await self._head(job_id)
            row = head.row
            if row is None or row.job.task_store:
                return WritePlan(None)
            recorded = replace(row, job=replace(row.job, task_store=store))
            return WritePlan(None, [self._table.save(head.job, job_item(recorded))])

        await self._table.change(plan)

    async def switch_task_store(self, job_id: JobId, run_id: RunId, source: str, target: str) -> bool:
        async def plan() -> WritePlan[bool]:
            head = await self._head(job_id)
            row = head.row
            if row is None or row.latest.run.run_id != run_id or not await self._is_at_rest(row):
                return WritePlan(False)
            if row.job.task_store != source:
                return WritePlan(False)
            switched = replace(row, job=replace(row.job, task_store=target))
            return WritePlan(True, [self._table.save(head.job, job_item(switched))])

        return await self._table.change(plan)

    async def mark_swept(self, job_id: JobId, run_id: RunId) -> None:
        def change(row: RunRow) -> RunRow:
            return row if row.run.ended_at is None else replace(row, swept=True)

        await self._change_run(job_id, run_id, change)

    async def mark_deleted(self, tenant: TenantId, job_id: JobId) -> bool:
        async def plan() -> WritePlan[bool]:
            head = await self._head(job_id, tenant)
            row = head.row
            if row is None or not self._visible(row):
                return WritePlan(False)
            now = self._clock.now()
            latest = row.latest
            if latest.run.ended_at is None:
                latest = replace(latest, run=replace(latest.run, state=RunState.CANCELLED, ended_at=now), swept=True)
            hidden = replace(row.with_run(latest, expires_at=now), deleted=True)
            return WritePlan(True, [self._table.save(head.job, job_item(hidden))])

        return await self._table.change(plan)

    async def purgeable_jobs(self, before: float, limit: int) -> list[Job]:
        within = RangeKey("es").lte(before)
        listed = await spread(self._table, "ep", "Jobs", within, index=EXPIRING, keep=~_is_active(), limit=limit)
        return [row.job for row in readable(listed, job_row)]

    async def purge_job(self, job_id: JobId) -> None:
        row = (await self._head(job_id)).row
        if row is None or not _has_expired(row.job, self._clock.now()):
            return
        own = await self._table.under(job_partition(job_id), only=F("pk") & F("sk"))
        of_ranges = [
            item
            for run in await self.runs(job_id)
            for item in await self._table.under(ranges_partition(run.run_id), only=F("pk") & F("sk"))
        ]
        where = HashKey("lp", f"JobRows#{job_id}")
        of_rows = await self._table.query(where, index=LISTED, only=F("pk") & F("sk"))
        kept = job_key(row.job.tenant, job_id)
        await self._table.delete(
            [key for item in (*of_ranges, *of_rows, *own) if (key := Key(item["pk"], item["sk"])) != kept]
        )
        await self._release_upload(row.job)
        # Last: as long as the job exists, a retry finds the rest.
        await self._table.delete([kept])

    async def _release_upload(self, job: Job) -> None:
        upload_id = _upload_of(job)
        if upload_id is not None:
            await self._table.delete([upload_use_key(upload_id, job.job_id)])
            await release_upload(self._table, upload_id, self._clock.now())

    def _upload_use(self, job: Job) -> list[Operation]:
        upload_id = _upload_of(job)
        if upload_id is None:
            return []
        use = {"job_id": job.job_id, "ttl": while_in_use(job.created_at)}
        return [self._table.save(ReadItem(upload_use_key(upload_id, job.job_id), None), use)]

    async def _change_run(self, job_id: JobId, run_id: RunId, change: Callable[[RunRow], RunRow]) -> Run | None:
        """Change the latest or an earlier run of a job. Returns the changed run."""

        async def plan() -> WritePlan[Run | None]:
            head = await self._head(job_id)
            row = head.row
            if row is None:
                return WritePlan(None)
            if row.latest.run.run_id == run_id:
                changed = change(row.latest)
                save = self._table.save(head.job, job_item(row.with_run(changed)))
                return WritePlan(changed.run, [] if changed == row.latest else [save])
            item = await self._earlier_run(row.job.tenant, job_id, run_id)
            if item is None:
                return WritePlan(None)
            before = run_row(item)
            changed = change(before)
            listed = ReadItem(run_key(row.job.tenant, job_id, before.run.number), item)
            save = self._table.save(listed, run_item(row.job.tenant, job_id, changed))
            return WritePlan(changed.run, [] if changed == before else [save])

        return await self._table.change(plan)

    async def _head(self, job_id: JobId, tenant: TenantId | None = None) -> JobHead:
        return await read_head(self._table, job_id, tenant)

    async def _earlier_runs(self, tenant: TenantId, job_id: JobId) -> list[Item]:
        where = HashKey("pk", job_partition(job_id)) & RangeKey("sk").begins_with(f"{tenant}#run#")
        return await self._table.query(where)

    async def _earlier_run(self, tenant: TenantId, job_id: JobId, run_id: RunId) -> Item | None:
        runs = await self._earlier_runs(tenant, job_id)
        return next((item for item in runs if item["run"]["run_id"] == run_id), None)

    def _visible(self, row: JobRow) -> bool:
        return not row.deleted and not _has_expired(row.job, self._clock.now())

    def _unexpired(self) -> Condition:
        return F("expires_at").does_not_exist() | F("expires_at").gt(self._clock.now()) | _is_active()


def _has_expired(job: Job, now: float) -> bool:
    return job.expires_at is not None and job.expires_at <= now


def _is_active() -> Condition:
    """An unfinished job does not expire; one that an earlier version wrote has a time all the same."""
    return F("state").is_in([state.value for state in RunState if state not in ENDED])


def _follows(latest: Run, run: Run) -> bool:
    return latest.ended_at is not None and run.number == latest.number + 1


def _may_move(run: Run, sources: Collection[RunState], target: RunState) -> bool:
    if run.state not in sources:
        return False
    if target is RunState.COMPLETED:
        return run.last_batch
    return target is not RunState.INGESTING or not run.last_batch


def _upload_of(job: Job) -> str | None:
    return None if job.source is None else upload_of(job.source.key)
