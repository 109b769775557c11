"""Ranges of lists, and their checkpoints, on DynamoDB.

The fixed part of a range is in the run's plan, many ranges to an item, so that one transaction splits a list of any
size. The checkpoint of a range is an item of its own. The sums over all ranges are one more item, updated with each
checkpoint; older runs have none, and their ranges are added up.
"""

import asyncio
from collections.abc import Sequence

import msgspec
from aiodynamo.expressions import Condition, F, HashKey, RangeKey, UpdateExpression
from aiodynamo.operations import ConditionCheck, Operation, Update

from conveyor.clock import Clock
from conveyor.engines.dynamodb.access import read_request, request_keys
from conveyor.engines.dynamodb.items import FORM, JobRow, job_item, ranges_partition
from conveyor.engines.dynamodb.job_heads import JobHead, read_head
from conveyor.engines.dynamodb.lifetimes import while_in_use
from conveyor.engines.dynamodb.table import Item, Key, ReadItem, Table, WritePlan
from conveyor.engines.ingest_sums import IngestSums, change_of, sums_of
from conveyor.engines.records import IdempotencyClaim
from conveyor.model import Compression, Ingested, JobId, ListFormat, Range, RunId, Source

replace = msgspec.structs.replace

_plan = msgspec.json.Decoder(list[Range])
# Well below the 400 KB of an item.
_PLAN_BYTES = 250_000


class DynamoIngests:
    """IngestRecords."""

    def __init__(self, table: Table, clock: Clock) -> None:
        self._table = table
        self._clock = clock

    async def split(self, job_id: JobId, run_id: RunId, ranges: Sequence[Range]) -> bool:
        async def plan() -> WritePlan[bool]:
            head = await read_head(self._table, job_id)
            row = head.row
            if row is None or not _takes_more(row, run_id):
                return WritePlan(False)
            run = replace(row.latest.run, sealed=True)
            changed = row.with_run(replace(row.latest, run=run, ranges=len(ranges)))
            sums = self._table.save(ReadItem(_sums_key(run_id), None), _sums_item(row, sums_of(*ranges)))
            return WritePlan(True, [self._table.save(head.job, job_item(changed)), *self._plans(row, ranges), sums])

        return await self._table.change(plan)

    async def append_range(
        self,
        job_id: JobId,
        run_id: RunId,
        source: Source,
        lines: int,
        answer: IdempotencyClaim | None,
        seal: bool,
    ) -> Range | IdempotencyClaim | None:
        async def plan() -> WritePlan[Range | IdempotencyClaim | None]:
            head, stored, (sums,) = await asyncio.gather(
                read_head(self._table, job_id),
                self._table.read(*request_keys(answer)),
                self._table.read(_sums_key(run_id)),
            )
            request = read_request(stored, answer)
            row = head.row
            if row is None or not _takes_more(row, run_id):
                # Another process may have taken over the claim of this very request and sealed the run.
                return WritePlan(request.answered)
            if request.standing is not None:
                return WritePlan(request.standing)
            latest = row.latest
            span = Range(
                number=latest.ranges,
                source=source,
                format=ListFormat.JSONL,
                compression=Compression.NONE,
                start=0,
                end=None,
                first_index=latest.next_index,
                index=latest.next_index,
            )
            run = replace(latest.run, touched_at=self._clock.now(), sealed=seal)
            changed = row.with_run(
                replace(latest, run=run, next_index=latest.next_index + lines, ranges=latest.ranges + 1)
            )
            writes = [
                self._table.save(head.job, job_item(changed)),
                *self._plans(row, [span]),
                *request.writes(self._table),
            ]
            if not latest.ranges:
                writes.append(self._table.save(sums, _sums_item(row, sums_of(span))))
            else:
                writes += self._add(sums, sums_of(span))
            return WritePlan(span, writes)

        return await self._table.change(plan)

    async def ranges(self, run_id: RunId) -> list[Range]:
        items = await self._table.under(ranges_partition(run_id))
        reached = {item["number"]: item for item in items if item["sk"].startswith("range#")}
        planned = [span for item in items if item["sk"].startswith("plan#") for span in _plan.decode(item["ranges"])]
        return [_shown(span, reached.get(span.number)) for span in planned]

    async def range(self, run_id: RunId, number: int) -> Range | None:
        stored, (_, planned) = await asyncio.gather(
            self._table.get(_range_key(run_id, number)), self._planned(run_id, number)
        )
        return None if planned is None else _shown(planned, stored)

    async def ingested(self, run_id: RunId) -> Ingested:
        item = await self._table.get(_sums_key(run_id))
        if item is None:
            return sums_of(*await self.ranges(run_id)).ingested
        return msgspec.convert(item, IngestSums).ingested

    async def checkpoint(self, run_id: RunId, range: Range, fence: int) -> bool:
        async def plan() -> WritePlan[bool]:
            stored, sums = await self._table.read(_range_key(run_id, range.number), _sums_key(run_id))
            item = stored.item
            if item is None:
                item, planned = await self._planned(run_id, range.number)
                if item is None or planned is None:
                    return WritePlan(False)
            elif item["fence"] > fence:
                return WritePlan(False)
            head = await read_head(self._table, item["job_id"], item["tenant"])
            row = head.row
            if row is None or row.latest.run.run_id != run_id or row.latest.run.ended_at is not None:
                return WritePlan(False)
            more = change_of(_shown(_unread(range), stored.item), range)
            reached = {**_about(row), **_progress(range), "fence": fence}
            shown = self._show(head, row, more.range_tasks, more.range_invalid)
            return WritePlan(True, [self._table.save(stored, reached), shown, *self._add(sums, more)])

        return await self._table.change(plan)

    async def seal(
        self,
        job_id: JobId,
        run_id: RunId,
        reason: str | None,
        *,
        touched_at: float | None = None,
        code: str | None = None,
    ) -> bool:
        async def plan() -> WritePlan[bool]:
            head = await read_head(self._table, job_id)
            row = head.row
            if row is None or not _takes_more(row, run_id):
                return WritePlan(False)
            if touched_at is not None and row.latest.run.touched_at != touched_at:
                return WritePlan(False)
            run = replace(row.latest.run, sealed=True, reason_code=code or row.latest.run.reason_code)
            changed = row.with_run(replace(row.latest, run=run), reason=reason or row.job.reason)
            return WritePlan(True, [self._table.save(head.job, job_item(changed))])

        return await self._table.change(plan)

    def _show(self, head: JobHead, row: JobRow, tasks: int, invalid: int) -> Operation:
        """Add to the totals of the run until it is latched. They are added to, not set, so that concurrent checkpoints
        of several ranges do not conflict."""
        run = row.latest.run
        goes_on: Condition = F("run", "run_id").equals(run.run_id) & F("run", "ended_at").does_not_exist()
        condition = goes_on & F("run", "last_batch").equals(run.last_batch)
        key = head.job.key._asdict()
        if run.last_batch or not (tasks or invalid):
            return ConditionCheck(self._table.name, key, condition)
        added = F("run", "total").change(tasks) & F("run", "invalid").change(invalid)
        expression: UpdateExpression = added & F("rev").add(1)
        return Update(self._table.name, key, expression, condition)

    def _add(self, sums: ReadItem, more: IngestSums) -> list[Operation]:
        """Add to the sums, if the run has them."""
        changed = {name: value for name, value in msgspec.structs.asdict(more).items() if value}
        if sums.item is None or not changed:
            return []
        expression: UpdateExpression = F("rev").add(1)
        for name, value in changed.items():
            expression &= F(name).add(value)
        return [Update(self._table.name, sums.key._asdict(), expression, F("pk").exists())]

    def _plans(self, row: JobRow, ranges: Sequence[Range]) -> list[Operation]:
        run_id = row.latest.run.run_id
        return [
            self._table.save(
                ReadItem(Key(ranges_partition(run_id), f"plan#{part[0].number:08d}"), None),
                _plan_item(row, part),
            )
            for part in _parts(ranges)
        ]

    async def _planned(self, run_id: RunId, number: int) -> tuple[Item | None, Range | None]:
        """The item of the plan that contains a range, and the range."""
        where = HashKey("pk", ranges_partition(run_id)) & RangeKey("sk").between("plan#", f"plan#{number:08d}")
        for item in await self._table.query(where, limit=1, forward=False):
            for span in _plan.decode(item["ranges"]):
                if span.number == number:
                    return item, span
        return None, None


def _takes_more(row: JobRow, run_id: RunId) -> bool:
    run = row.latest.run
    return run.run_id == run_id and not run.sealed and run.ended_at is None


def _parts(ranges: Sequence[Range]) -> list[list[Range]]:
    """Group ranges so that each group fits into an item."""
    parts: list[list[Range]] = []
    size = 0
    for span in ranges:
        size += len(msgspec.json.encode(span)) + 1
        if not parts or size > _PLAN_BYTES:
            parts.append([])
            size = len(msgspec.json.encode(span)) + 1
        parts[-1].append(span)
    return parts


def _plan_item(row: JobRow, ranges: Sequence[Range]) -> Item:
    return {**_about(row), "ranges": msgspec.json.encode(ranges).decode()}


def _range_key(run_id: RunId, number: int) -> Key:
    return Key(ranges_partition(run_id), f"range#{number:08d}")


def _sums_key(run_id: RunId) -> Key:
    return Key(ranges_partition(run_id), "sums")


def _sums_item(row: JobRow, sums: IngestSums) -> Item:
    return {**_about(row), **msgspec.structs.asdict(sums)}


def _about(row: JobRow) -> Item:
    """What every item of a run's ranges has."""
    job = row.job
    return {"v": FORM, "tenant": job.tenant, "job_id": job.job_id, "ttl": while_in_use(row.latest.run.created_at)}


def _unread(span: Range) -> Range:
    """The range as it was planned."""
    return replace(span, index=span.first_index, offset=span.start, tasks=0, invalid=0, done=False)


def _progress(span: Range) -> Item:
    return {
        "number": span.number,
        "index": span.index,
        "offset": span.offset,
        "tasks": span.tasks,
        "invalid": span.invalid,
        "done": span.done,
    }


def _shown(span: Range, reached: Item | None) -> Range:
    if reached is None:
        return span
    return replace(
        span,
        index=reached["index"],
        offset=reached["offset"],
        tasks=reached["tasks"],
        invalid=reached["invalid"],
        done=reached["done"],
    )
