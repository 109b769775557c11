"""What only the DynamoDB engine has: where its items are, items of earlier forms, its tables and its checks."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conveyor.clock import SystemClock
from conveyor.engines.dynamodb import DynamoEngine, counters, trail
from conveyor.engines.dynamodb import documents as dynamodb_documents
from conveyor.engines.dynamodb import jobs as dynamodb_jobs
from conveyor.engines.dynamodb import tasks as dynamodb_tasks
from conveyor.engines.dynamodb.address import DynamoAddress, WarmThroughput, parse_address
from conveyor.engines.dynamodb.layout import partition
from conveyor.engines.dynamodb.schema import ACTIVE_PARTITIONS, bucket
from conveyor.engines.dynamodb.table import Key
from conveyor.engines.dynamodb.wire import Patience
from conveyor.engines.job_records import bucket_of
from conveyor.engines.records import Document
from conveyor.engines.tasks import TaskEvent, TaskFilter
from conveyor.errors import EngineFailed, InvalidSetting
from conveyor.model import (
    Compression,
    Counts,
    Ingested,
    Job,
    ListFormat,
    Mode,
    Options,
    Range,
    RunId,
    Source,
    UploadRecord,
    shard_of,
    task_id,
)
from conveyor.read import merge
from conveyor.read.results import result_page
from conveyor.states import RunState, TaskStatus
from conveyor.telemetry import metrics
from tests.faults.shim import Answer, Call, Forward, Shim, json_answer
from tests.servers.aws import REGION, aws
from tests.servers.dynamodb import open_engine, url_for
from tests.support.clocks import ManualClock
from tests.support.make_jobs import ACME, DAY, REASONS_WITHOUT_CODE, end, make_job, make_notice, make_run, seeds

replace = msgspec.structs.replace

pytestmark = pytest.mark.server


@pytest.fixture
async def engine(place: Path, clock: ManualClock) -> AsyncIterator[DynamoEngine]:
    async with open_engine(place, clock) as opened:
        yield opened


async def raw(engine: DynamoEngine, pk: str, table: str = "tasks") -> dict[str, Any]:
    """All items of a partition by sort key, as DynamoDB has them."""
    payload = {
        "TableName": getattr(engine._address, table),
        "KeyConditionExpression": "pk = :pk",
        "ExpressionAttributeValues": {":pk": {"S": pk}},
    }
    answer = await engine._wire.call("Query", payload)
    return {item["sk"]["S"]: item for item in answer["Items"]}


async def change(engine: DynamoEngine, key: Key, table: str, *names: str) -> None:
    """Take attributes away from an item, as if they had never been."""
    expression = "REMOVE " + ", ".join(f"#{number}" for number in range(len(names)))
    payload = {
        "TableName": getattr(engine._address, table),
        "Key": {"pk": {"S": key.pk}, "sk": {"S": key.sk}},
        "UpdateExpression": expression,
        "ExpressionAttributeNames": {f"#{number}": name for number, name in enumerate(names)},
    }
    await engine._wire.call("UpdateItem", payload)


async def set_attributes(engine: DynamoEngine, key: Key, table: str = "records", **values: Any) -> None:
    """Set attributes of an item, in DynamoDB's own form, behind the engine's back."""
    names = list(values)
    payload = {
        "TableName": getattr(engine._address, table),
        "Key": {"pk": {"S": key.pk}, "sk": {"S": key.sk}},
        "UpdateExpression": "SET " + ", ".join(f"#{number} = :{number}" for number in range(len(names))),
        "ExpressionAttributeNames": {f"#{number}": name for number, name in enumerate(names)},
        "ExpressionAttributeValues": {f":{number}": values[name] for number, name in enumerate(names)},
    }
    await engine._wire.call("UpdateItem", payload)


async def make_old(engine: DynamoEngine, job: Job) -> None:
    """Index an active job as the version before did."""
    key = Key(f"Job#{job.job_id}", "acme#job")
    await change(engine, key, "records", "ap", "as")
    await set_attributes(engine, key, dp={"S": f"Active#{bucket(job.job_id)}"}, ds={"N": str(job.created_at)})


class TestLayout:
    @pytest.mark.parametrize("shards", [0, 1])
    async def test_one_shard_is_the_unsharded_layout(
        self, engine: DynamoEngine, clock: ManualClock, shards: int
    ) -> None:
        run = make_run(clock, shards)
        await engine.tasks.put(run, seeds(3))
        await engine.tasks.finish(run, [end(1, TaskStatus.FAILED, code="x", http_status=500, at=5.5)])
        items = await raw(engine, f"Job#{run.job_id}")
        first = f"acme#{run.run_id}#task#"
        assert [sk for sk in items if sk.startswith(first)] == sorted(
            first + task_id(run.run_id, index) for index in range(3)
        )
        assert items[first + task_id(run.run_id, 0)] == {
            "pk": {"S": f"Job#{run.job_id}"},
            "sk": {"S": first + task_id(run.run_id, 0)},
            "v": {"N": "1"},
            "index": {"N": "0"},
            "input": {"S": '"input 0"'},
            "ttl": {"N": str(int(clock.now()) + 5 * 365 * 86_400)},
        }
        ended = items[first + task_id(run.run_id, 1)]["ended"]["M"]
        assert ended.pop("by")
        assert ended == {
            "status": {"N": "2"},
            "attempts": {"N": "1"},
            "http_status": {"N": "500"},
            "error_code": {"S": "x"},
            "detail": {"S": "{}"},
            "at": {"N": "5.5"},
        }

    async def test_shards_are_partitions_of_their_own(self, engine: DynamoEngine, clock: ManualClock) -> None:
        run = make_run(clock, 8)
        await engine.tasks.put(run, seeds(60))
        await engine.tasks.note(run, [TaskEvent(index, 1.0, "noted", "{}") for index in range(10)])
        for shard in range(8):
            items = await raw(engine, f"Job#{run.job_id}#TS{shard}")
            expected = {task_id(run.run_id, index) for index in range(60)}
            expected = {each for each in expected if shard_of(each, 8) == shard}
            assert {sk.rpartition("#")[2] for sk in items if "#task#" in sk} == expected
        assert [sk for sk in await raw(engine, f"Job#{run.job_id}") if "#task#" in sk] == []
        assert partition(replace(run, shard_count=1), 0) == f"Job#{run.job_id}"

    async def test_a_batch_is_a_call_for_25_and_a_count_is_a_call(
        self, engine: DynamoEngine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[str] = []
        once = engine._wire.once

        async def counted(action: str, payload: Any) -> dict[str, Any]:
            calls.append(action)
            return await once(action, payload)

        monkeypatch.setattr(engine._wire, "once", counted)
        run = make_run(clock)
        await engine.tasks.put(run, seeds(500))
        assert sorted(calls) == ["BatchExecuteStatement"] * 20 + ["PutItem"]
        calls.clear()
        await engine.tasks.unfinished(run, range(500))
        assert calls == ["BatchGetItem"] * 5
        calls.clear()
        await engine.tasks.finish(run, [end(index) for index in range(500)])
        assert sorted(calls) == ["BatchExecuteStatement"] * 20 + ["BatchGetItem", "PutItem", "Query", "UpdateItem"]
        calls.clear()
        assert len(await engine.tasks.page(run, 0, None, 100, TaskFilter())) == 100
        assert calls == ["Query"], "a small job is read with one query"

    async def test_counts_go_on_after_the_clock_was_set_back(
        self, engine: DynamoEngine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(counters, "_MAX_RUNS", 1)
        one, other = make_run(clock), make_run(clock)
        for run in (one, other):
            await engine.tasks.put(run, seeds(2))
        await engine.tasks.finish(one, [end(0)])
        # The counters forget the first run.
        await engine.tasks.finish(other, [end(0)])
        clock.advance(1)
        clock.step(-7200)
        assert (await engine.tasks.finish(one, [end(1)])).moved
        assert await engine.tasks.counts(one) == Counts(succeeded=2)

    async def test_codes_without_end_do_not_fill_an_item(self, engine: DynamoEngine, clock: ManualClock) -> None:
        run = make_run(clock)
        await engine.tasks.put(run, seeds(600))
        for start in range(0, 600, 100):
            ends = [
                end(index, TaskStatus.FAILED, code=f"code {index}" + "x" * 500) for index in range(start, start + 100)
            ]
            assert len((await engine.tasks.finish(run, ends)).moved) == 100
        assert await engine.tasks.counts(run) == Counts(failed=600)
        assert 100 <= len(await engine.tasks.error_codes(run, 1000)) <= 600
        assert await engine.tasks.recount(run) == Counts(failed=600)


class TestEarlierForms:
    async def test_a_job_without_shard_count_and_versions(self, engine: DynamoEngine, clock: ManualClock) -> None:
        """Written before there were shards, versions and revisions: unsharded, version 1, and changed as any other."""
        job = make_job(clock, latched=False, state=RunState.INGESTING)
        await engine.records.jobs.create_job(job, make_notice(clock, job), None)
        key = Key(f"Job#{job.job_id}", "acme#job")
        await change(engine, key, "records", "v", "task_shard_count", "version", "rev", "swept", "next_index", "ranges")
        found = await engine.records.jobs.job(ACME, job.job_id)
        assert found == job
        assert found.key.shard_count == 1
        await engine.tasks.put(found.key, seeds(2))
        assert len(await raw(engine, f"Job#{job.job_id}")) == 3
        where = (job.job_id, job.run.run_id)
        await engine.records.jobs.set_total(*where, 2, 0)
        run = await engine.records.jobs.latch(*where)
        assert run is not None
        assert run.total == 2
        assert await engine.records.jobs.change_options(
            *where[:1], 1, Options(attempts=2), make_notice(clock, job, "x")
        )
        assert await engine.records.jobs.move_run(*where, {RunState.RUNNING}, RunState.COMPLETED, None, None)
        found = await engine.records.jobs.job(ACME, job.job_id)
        assert found is not None
        assert (found.state, found.version, found.options.attempts) == (RunState.COMPLETED, 2, 2)

    @pytest.mark.parametrize(("reason", "code"), REASONS_WITHOUT_CODE.items())
    async def test_a_run_without_a_code(
        self, engine: DynamoEngine, clock: ManualClock, reason: str, code: str | None
    ) -> None:
        job = make_job(clock)
        await engine.records.jobs.create_job(job, make_notice(clock, job), None)
        where = (job.job_id, job.run.run_id)
        await engine.records.jobs.move_run(*where, {RunState.RUNNING}, RunState.FAILED, reason, None)
        found = await engine.records.jobs.job(ACME, job.job_id)
        assert found is not None
        assert found.run.reason_code == code

    async def test_a_job_with_an_expiry_from_its_creation(self, engine: DynamoEngine, clock: ManualClock) -> None:
        """Unfinished, it does not expire; finished, it keeps the time that it has."""
        jobs = engine.records.jobs
        for ended in (False, True):
            job = make_job(clock, retention_days=3)
            await jobs.create_job(job, make_notice(clock, job), None)
            if ended:
                await jobs.move_run(job.job_id, job.run.run_id, {RunState.RUNNING}, RunState.FAILED, None, None)
            until = clock.now() + 60
            number = {"N": str(until)}
            await engine._wire.call(
                "UpdateItem",
                {
                    "TableName": engine._address.records,
                    "Key": {"pk": {"S": f"Job#{job.job_id}"}, "sk": {"S": "acme#job"}},
                    "UpdateExpression": "SET expires_at = :until, ep = :ep, es = :until",
                    "ExpressionAttributeValues": {":until": number, ":ep": {"S": f"Jobs#{bucket(job.job_id)}"}},
                },
            )
            clock.advance(61)
            shown = await jobs.job(ACME, job.job_id)
            assert (shown is None) == ended
            assert ended or (shown is not None and shown.expires_at is None)
            assert [found.job_id for found in (await jobs.jobs(ACME, None, 10)).items] == [] if ended else [job.job_id]
            assert [found.job_id for found in await jobs.active_jobs()] == [] if ended else [job.job_id]
            assert [found.job_id for found in await jobs.purgeable_jobs(clock.now(), 10)] == (
                [job.job_id] if ended else []
            )
            await jobs.purge_job(job.job_id)
            if not ended:
                assert await jobs.move_run(
                    job.job_id, job.run.run_id, {RunState.RUNNING}, RunState.CANCELLED, None, None
                )
                shown = await jobs.job(ACME, job.job_id)
                assert shown is not None and shown.expires_at == clock.now() + 3 * 86_400
            await jobs.mark_deleted(ACME, job.job_id)
            await jobs.purge_job(job.job_id)

    async def test_an_active_job_in_the_index_of_the_version_before(
        self, engine: DynamoEngine, clock: ManualClock
    ) -> None:
        """It is read from there until it changes, and is in its bucket like the others."""
        jobs = engine.records.jobs
        old, new = [make_job(clock) for _ in range(2)]
        for job in (old, new):
            await jobs.create_job(job, make_notice(clock, job), None)
        await make_old(engine, old)
        both = sorted([old.job_id, new.job_id])
        assert [job.job_id for job in await jobs.active_jobs()] == both
        assert [job.job_id for job in await jobs.active_jobs([bucket_of(old.job_id)])] == [old.job_id]
        await jobs.move_run(old.job_id, old.run.run_id, {RunState.RUNNING}, RunState.PAUSED, None, None)
        item = (await raw(engine, f"Job#{old.job_id}", "records"))["acme#job"]
        assert ("ap" in item, "dp" in item) == (True, False)
        assert [job.job_id for job in await jobs.active_jobs()] == both
        await jobs.move_run(old.job_id, old.run.run_id, {RunState.PAUSED}, RunState.CANCELLED, None, None)
        assert [job.job_id for job in await jobs.active_jobs()] == [new.job_id]

    async def test_what_the_version_before_writes_meanwhile(self, engine: DynamoEngine, clock: ManualClock) -> None:
        """It leaves the keys of the new index as they are, also when it ends the job; what it adds is found later."""
        jobs = engine.records.jobs
        ended, added = [make_job(clock) for _ in range(2)]
        await jobs.create_job(ended, make_notice(clock, ended), None)
        assert len(await jobs.active_jobs()) == 1
        kept = (await raw(engine, f"Job#{ended.job_id}", "records"))["acme#job"]
        await jobs.move_run(ended.job_id, ended.run.run_id, {RunState.RUNNING}, RunState.FAILED, None, None)
        await set_attributes(engine, Key(f"Job#{ended.job_id}", "acme#job"), ap=kept["ap"], **{"as": kept["as"]})
        assert await jobs.active_jobs() == []
        await jobs.create_job(added, make_notice(clock, added), None)
        await make_old(engine, added)
        clock.advance(31)
        assert [job.job_id for job in await jobs.active_jobs()] == [added.job_id]

    async def test_tasks_without_a_version(self, engine: DynamoEngine, clock: ManualClock) -> None:
        run = make_run(clock)
        await engine.tasks.put(run, seeds(3))
        for index in range(3):
            key = Key(f"Job#{run.job_id}", f"acme#{run.run_id}#task#{task_id(run.run_id, index)}")
            await change(engine, key, "tasks", "v")
        assert (await engine.tasks.finish(run, [end(0)])).moved == frozenset({0})
        await engine.tasks.put(run, seeds(3))
        assert await engine.tasks.unfinished(run, range(3)) == {1, 2}
        assert [task.index for task in await engine.tasks.at(run, range(3))] == [0, 1, 2]

    async def test_rows_without_a_version(self, engine: DynamoEngine) -> None:
        row = Document("schedule", ACME, "one", b"body")
        await engine.records.documents.create_documents([row])
        await change(engine, Key("Rows#schedule#acme", "row#one"), "records", "v", "version", "rev")
        assert await engine.records.documents.document("schedule", ACME, "one") == row
        assert await engine.records.documents.replace_document(row) == replace(row, version=2)

    async def test_what_a_later_version_added_stays(self, engine: DynamoEngine, clock: ManualClock) -> None:
        job = make_job(clock)
        await engine.records.jobs.create_job(job, make_notice(clock, job), None)
        payload = {
            "TableName": engine._address.records,
            "Key": {"pk": {"S": f"Job#{job.job_id}"}, "sk": {"S": "acme#job"}},
            "UpdateExpression": "SET novelty = :value",
            "ExpressionAttributeValues": {":value": {"S": "kept"}},
        }
        await engine._wire.call("UpdateItem", payload)
        await engine.records.jobs.move_run(job.job_id, job.run.run_id, {RunState.RUNNING}, RunState.PAUSED, None, None)
        items = await raw(engine, f"Job#{job.job_id}", "records")
        assert items["acme#job"]["novelty"] == {"S": "kept"}

    async def test_a_form_that_is_not_known_is_refused(self, engine: DynamoEngine, clock: ManualClock) -> None:
        job = make_job(clock)
        await engine.records.jobs.create_job(job, make_notice(clock, job), None)
        payload = {
            "TableName": engine._address.records,
            "Key": {"pk": {"S": f"Job#{job.job_id}"}, "sk": {"S": "acme#job"}},
            "UpdateExpression": "SET v = :value",
            "ExpressionAttributeValues": {":value": {"N": "2"}},
        }
        await engine._wire.call("UpdateItem", payload)
        with pytest.raises(EngineFailed, match="newer"):
            await engine.records.jobs.job(ACME, job.job_id)

    async def test_an_item_of_a_newer_version_hides_no_others(self, engine: DynamoEngine, clock: ManualClock) -> None:
        """Listings leave it out, and go on after it."""
        jobs, documents = engine.records.jobs, engine.records.documents
        made = [make_job(clock) for _ in range(4)]
        rows = [Document("schedule", ACME, f"{number}", b"", due_at=clock.now()) for number in range(4)]
        for job in made:
            await jobs.create_job(job, make_notice(clock, job), None)
        await documents.create_documents(rows)
        await set_attributes(engine, Key(f"Job#{made[1].job_id}", "acme#job"), v={"N": "2"})
        await set_attributes(engine, Key(f"Job#{made[2].job_id}", "acme#job"), kind={"S": "dream"})
        await set_attributes(engine, Key(f"Job#{made[3].job_id}", "acme#notice#000000000001"), v={"N": "2"})
        await set_attributes(engine, Key("Rows#schedule#acme", "row#1"), v={"N": "2"})
        known = {made[0].job_id, made[3].job_id}
        assert {job.job_id for job in await jobs.active_jobs()} == known
        assert {job.job_id for job in await jobs.jobs_of([(ACME, job.job_id) for job in made])} == known
        for newer in made[1:3]:
            with pytest.raises(EngineFailed, match="written by a newer Conveyor"):
                await jobs.job(ACME, newer.job_id)
        listed, cursor = [], None
        while True:
            page = await jobs.jobs(ACME, cursor, 1)
            listed += page.items
            if (cursor := page.next_cursor) is None:
                break
        assert {job.job_id for job in listed} == known
        assert [row.id for row in await documents.due_documents("schedule", clock.now(), 10)] == ["0", "2", "3"]
        first = await documents.documents("schedule", ACME, None, 2)
        assert ([row.id for row in first.items], first.next_cursor) == (["0"], "1")
        assert len(await engine.records.outbox.undispatched(10)) == 3


class TestBoundedReads:
    """A request reads so many items and hands on a cursor, however few of them match."""

    async def test_a_listing_of_results_over_shards(
        self, engine: DynamoEngine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(dynamodb_tasks, "MAX_SCANNED", 80)
        monkeypatch.setattr(merge, "MAX_SCANNED", 80)
        monkeypatch.setattr(dynamodb_tasks, "_LEAST_SCANNED", 5)
        run = make_run(clock, 4)
        await engine.tasks.put(run, seeds(400))
        rare = list(range(0, 400, 60))
        await engine.tasks.finish(run, [end(index, TaskStatus.FAILED, code="rare") for index in rare])
        found, reads, cursor = [], [], None
        for _ in range(40):
            before = sum(metrics.ROWS_READ.series.values())
            page = await result_page(engine.tasks, run, TaskFilter(error_code="rare"), 20, cursor)
            found += [task.index for task in page.items]
            reads.append(page.read)
            assert sum(metrics.ROWS_READ.series.values()) - before == page.read, "those that do not match are counted"
            if (cursor := page.next_cursor) is None:
                break
        assert sorted(found) == rare
        assert max(reads) <= 80 + 4 * 20
        assert sum(reads) >= 400

    async def test_a_filter_that_nearly_all_match_reads_little_more_than_the_page(
        self, engine: DynamoEngine, clock: ManualClock
    ) -> None:
        run = make_run(clock)
        await engine.tasks.put(run, seeds(600))
        await engine.tasks.finish(run, [end(index) for index in range(600)])
        page = await result_page(engine.tasks, run, TaskFilter(status=TaskStatus.SUCCEEDED), 100, None)
        assert (len(page.items), page.read) == (100, 101)

    async def test_the_events_of_one_task(
        self, engine: DynamoEngine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(trail, "MAX_SCANNED", 10)
        run = make_run(clock)
        await engine.tasks.put(run, seeds(40))
        await engine.tasks.note(run, [TaskEvent(index % 40, 1.0, "noted", "{}") for index in range(80)])
        found, pages, cursor = [], 0, None
        while True:
            page = await engine.tasks.events(run, task_id(run.run_id, 33), cursor, 10)
            found += [event.seq for event in page.items]
            pages += 1
            if (cursor := page.next_cursor) is None:
                break
        assert found == [34, 74]
        assert pages >= 8

    async def test_jobs_and_documents_behind_many_that_expired(
        self, engine: DynamoEngine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for module in (dynamodb_jobs, dynamodb_documents):
            monkeypatch.setattr(module, "MAX_SCANNED", 5)
        jobs, documents = engine.records.jobs, engine.records.documents
        lasting = make_job(clock)
        await jobs.create_job(lasting, make_notice(clock, lasting), None)
        for _ in range(12):
            clock.advance(1)
            job = make_job(clock, retention_days=1)
            await jobs.create_job(job, make_notice(clock, job), None)
            await jobs.move_run(job.job_id, job.run.run_id, {RunState.RUNNING}, RunState.FAILED, None, None)
        rows = [Document("export", ACME, f"{number:02d}", b"", expires_at=clock.now() + 1) for number in range(12)]
        await documents.create_documents([*rows, Document("export", ACME, "99", b"")])
        clock.advance(2 * DAY)
        empty = await jobs.jobs(ACME, None, 10)
        assert empty.items == [] and empty.next_cursor is not None
        listed, cursor = [], empty.next_cursor
        while cursor is not None:
            page = await jobs.jobs(ACME, cursor, 10)
            listed += [job.job_id for job in page.items]
            cursor = page.next_cursor
        assert listed == [lasting.job_id]
        first = await documents.documents("export", ACME, None, 10)
        assert (first.items, first.next_cursor) == ([], "04")
        last = await documents.documents("export", ACME, "09", 10)
        assert ([row.id for row in last.items], last.next_cursor) == (["99"], None)

    async def test_a_task_of_a_newer_version_hides_no_others(self, engine: DynamoEngine, clock: ManualClock) -> None:
        """Listings leave it out. Readers of all tasks do not: they would silently lose it."""
        run = make_run(clock)
        await engine.tasks.put(run, seeds(5))
        name = task_id(run.run_id, 3)
        await set_attributes(engine, Key(f"Job#{run.job_id}", f"acme#{run.run_id}#task#{name}"), "tasks", v={"N": "2"})
        listed, cursor = [], None
        while True:
            page = await result_page(engine.tasks, run, TaskFilter(), 1, cursor)
            listed += [task.index for task in page.items]
            if (cursor := page.next_cursor) is None:
                break
        assert sorted(listed) == [0, 1, 2, 4]
        with pytest.raises(EngineFailed, match="newer"):
            await engine.tasks.page(run, 0, None, 10, TaskFilter())


class TestActiveIndex:
    async def test_a_look_reads_small_entries_and_only_changed_jobs(
        self, engine: DynamoEngine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        jobs = engine.records.jobs
        made = [make_job(clock, headers={"x": "y" * 500}) for _ in range(20)]
        for job in made:
            await jobs.create_job(job, make_notice(clock, job), None)
        assert len(await jobs.active_jobs()) == 20
        calls: list[tuple[str, Any, dict[str, Any]]] = []
        once = engine._wire.once

        async def counted(action: str, payload: Any) -> dict[str, Any]:
            calls.append((action, payload, await once(action, payload)))
            return calls[-1][2]

        monkeypatch.setattr(engine._wire, "once", counted)
        assert len(await jobs.active_jobs()) == 20
        assert {action for action, _, _ in calls} == {"Query"}
        assert len(calls) == ACTIVE_PARTITIONS
        entries = [item for _, _, answer in calls for item in answer["Items"]]
        assert {name for entry in entries for name in entry} == {"pk", "sk", "ap", "as", "rev"}
        assert all(len(str(entry)) < 300 for entry in entries)
        await jobs.move_run(made[3].job_id, made[3].run.run_id, {RunState.RUNNING}, RunState.PAUSED, None, None)
        calls.clear()
        assert len(await jobs.active_jobs()) == 20
        (read,) = [payload for action, payload, _ in calls if action == "BatchGetItem"]
        assert len(read["RequestItems"][engine._address.records]["Keys"]) == 1
        calls.clear()
        await jobs.active_jobs([bucket_of(made[3].job_id)])
        assert [action for action, _, _ in calls] == ["Query"], "a bucket is a part of one partition"

    async def test_it_remembers_no_job_that_has_ended(self, engine: DynamoEngine, clock: ManualClock) -> None:
        jobs = engine.records.jobs
        for _ in range(3):
            job = make_job(clock)
            await jobs.create_job(job, make_notice(clock, job), None)
            await jobs.active_jobs()
            await jobs.move_run(job.job_id, job.run.run_id, {RunState.RUNNING}, RunState.FAILED, None, None)
        await jobs.active_jobs()
        assert jobs._active._seen == {}


class TestRanges:
    async def test_a_list_of_thousands_of_ranges_is_split_in_one_step(
        self, engine: DynamoEngine, clock: ManualClock
    ) -> None:
        source = Source("uploads/acme/one", 1 << 40, "0" * 64)
        ranges = [
            Range(
                number,
                source,
                ListFormat.CSV,
                Compression.NONE,
                number * 100,
                number * 100 + 100,
                number * 10,
                "a,b" * 20,
            )
            for number in range(3000)
        ]
        job = make_job(clock, latched=False, state=RunState.INGESTING)
        await engine.records.jobs.create_job(job, make_notice(clock, job), None)
        assert await engine.records.ingests.split(job.job_id, job.run.run_id, ranges)
        assert await engine.records.ingests.ranges(job.run.run_id) == ranges
        for number in (0, 1, 1499, 2999):
            assert await engine.records.ingests.range(job.run.run_id, number) == ranges[number]
        assert await engine.records.ingests.range(job.run.run_id, 3000) is None
        assert len(await raw(engine, f"Run#{job.run.run_id}", "records")) < 20

    async def test_a_run_from_before_the_sums_is_added_up(self, engine: DynamoEngine, clock: ManualClock) -> None:
        records = engine.records
        job = make_job(clock, latched=False, state=RunState.INGESTING, mode=Mode.OPEN)
        await records.jobs.create_job(job, make_notice(clock, job), None)
        source, where = Source("lists/acme/one", 500, "0" * 64), (job.job_id, job.run.run_id)
        first = await records.ingests.append_range(*where, source, 3, None, False)
        assert isinstance(first, Range)
        await records.jobs._table.delete([Key(f"Run#{job.run.run_id}", "sums")])
        assert isinstance(await records.ingests.append_range(*where, source, 3, None, False), Range)
        assert await records.ingests.checkpoint(
            job.run.run_id, replace(first, index=3, offset=500, tasks=3, done=True), 1
        )
        assert "sums" not in await raw(engine, f"Run#{job.run.run_id}", "records"), "half of them would be wrong"
        assert await records.ingests.ingested(job.run.run_id) == Ingested(2, 1, 3, 0, 500, 1000)


async def live_through_a_job(engine: DynamoEngine, clock: ManualClock) -> None:
    """A job of an upload, with ranges, tasks, events and a rerun, which ends."""
    records, now = engine.records, clock.now()
    upload = UploadRecord(ACME, "upl_1", "uploads/acme/upl_1", 100, "0" * 64, now, now + DAY)
    await records.access.create_upload(upload, None)
    source = Source(upload.key, 100, "0" * 64)
    job = make_job(clock, latched=False, state=RunState.INGESTING, source=source, retention_days=1)
    where = (job.job_id, job.run.run_id)
    await records.jobs.create_job(job, make_notice(clock, job), None)
    span = Range(0, source, ListFormat.JSONL, Compression.NONE, 0, None, 0)
    assert await records.ingests.split(*where, [span])
    await engine.tasks.put(job.key, seeds(5))
    assert await records.ingests.checkpoint(job.run.run_id, replace(span, index=5, tasks=5, done=True), 1)
    await records.jobs.latch(*where)
    await engine.tasks.note(job.key, [TaskEvent(0, now, "noted", "{}")])
    await engine.tasks.finish(job.key, [end(index) for index in range(3)])
    await engine.tasks.recount(job.key)
    assert await records.jobs.move_run(*where, {RunState.RUNNING}, RunState.FAILED, None, None)
    rerun = replace(job, run=replace(job.run, run_id=RunId(clock.new_id("run")), number=2, last_batch=True))
    assert await records.jobs.add_run(rerun, make_notice(clock, job, "again"), None) is True
    await engine.tasks.put(rerun.key, seeds(2))
    assert await engine.tasks.cancel_pending(rerun.key, 10, now) == 2
    where = (job.job_id, rerun.run.run_id)
    assert await records.jobs.move_run(*where, set(RunState), RunState.CANCELLED, None, None)


class TestTimeToLive:
    async def test_it_is_for_what_nobody_reads_any_more(self, engine: DynamoEngine, clock: ManualClock) -> None:
        now = clock.now()
        rows = [
            Document("export", ACME, "lasting", b""),
            Document("export", ACME, "expiring", b"", expires_at=now + DAY),
            Document("export", ACME, "due", b"", expires_at=now + DAY, due_at=now),
        ]
        await engine.records.documents.create_documents(rows)
        items = await raw(engine, "Rows#export#acme", "records")
        assert {sk: int(item["ttl"]["N"]) for sk, item in items.items() if "ttl" in item} == {
            "row#expiring": now + DAY + 60,
            # Its owner still acts on it.
            "row#due": now + 366 * DAY,
        }
        await engine.records.documents.replace_document(replace(rows[2], due_at=None))
        assert (await raw(engine, "Rows#export#acme", "records"))["row#due"]["ttl"] == {"N": str(int(now + DAY + 60))}

    async def test_every_item_of_a_job_goes_by_itself_but_not_before_the_job(
        self, engine: DynamoEngine, clock: ManualClock
    ) -> None:
        """Five years after it was written, or a year after the job's expiry: what retention forgot, and no more."""
        await live_through_a_job(engine, clock)
        items = [
            item
            for table in (engine._address.records, engine._address.tasks)
            for item in (await engine._wire.call("Scan", {"TableName": table}))["Items"]
        ]
        kinds = {re.sub(r"[0-9a-f]{64}|(?:run|job|upl)_\w+|\d+", "*", item["sk"]["S"]) for item in items}
        assert kinds >= {
            "acme#job",
            "acme#job#notices",
            "acme#notice#*",
            "acme#run#*",
            "acme#*#task#*",
            "acme#*#event#*",
            "acme#*#count#*",
            "acme#*#run",
            "plan#*",
            "range#*",
            "sums",
            "upload",
            "job#*",
        }
        assert [item["sk"]["S"] for item in items if "ttl" not in item] == []
        assert {item["sk"]["S"] for item in items if int(item["ttl"]["N"]) < clock.now() + 364 * DAY} == set()

    async def test_a_job_is_stamped_anew_with_its_expiry(self, engine: DynamoEngine, clock: ManualClock) -> None:
        jobs = engine.records.jobs
        job = make_job(clock, retention_days=3)
        await jobs.create_job(job, make_notice(clock, job), None)
        key, now = Key(f"Job#{job.job_id}", "acme#job"), clock.now()

        async def days() -> float:
            item = (await raw(engine, key.pk, "records"))[key.sk]
            return round((int(item["ttl"]["N"]) - now) / DAY)

        assert await days() == 5 * 365
        await jobs.move_run(job.job_id, job.run.run_id, {RunState.RUNNING}, RunState.FAILED, None, None)
        assert await days() == 365 + 3
        assert await jobs.change_options(job.job_id, 1, Options(retention_days=300), make_notice(clock, job, "x"))
        assert await days() == 365 + 300
        clock.advance(10 * DAY)
        rerun = replace(job.run, run_id=RunId(clock.new_id("run")), number=2, created_at=clock.now())
        assert await jobs.add_run(replace(job, run=rerun), make_notice(clock, job, "y"), None) is True
        assert await days() == 5 * 365 + 10

    async def test_an_upload_is_stamped_anew(self, engine: DynamoEngine, clock: ManualClock) -> None:
        access, now = engine.records.access, clock.now()
        await access.create_upload(UploadRecord(ACME, "upl_1", "uploads/acme/upl_1", 1, "0" * 64, now, now + DAY), None)
        stamps = []
        for until in (now + 9 * DAY, now + 5 * DAY):
            await access.keep_upload("upl_1", until)
            stamps.append(int((await raw(engine, "Upload#upl_1", "records"))["upload"]["ttl"]["N"]))
        assert stamps == [now + 374 * DAY] * 2


class TestTables:
    async def test_making_them_again_changes_nothing(self, engine: DynamoEngine) -> None:
        await engine.migrate()
        await engine.migrate()
        for name in (engine._address.records, engine._address.tasks):
            table = (await engine._wire.call("DescribeTable", {"TableName": name}))["Table"]
            assert table["TableStatus"] == "ACTIVE"
            assert table["BillingModeSummary"]["BillingMode"] == "PAY_PER_REQUEST"
            ttl = (await engine._wire.call("DescribeTimeToLive", {"TableName": name}))["TimeToLiveDescription"]
            assert (ttl["TimeToLiveStatus"], ttl["AttributeName"]) == ("ENABLED", "ttl")

    async def test_an_index_that_is_missing_is_added(self, engine: DynamoEngine, clock: ManualClock) -> None:
        delete = {"GlobalSecondaryIndexUpdates": [{"Delete": {"IndexName": "due"}}]}
        await engine._wire.call("UpdateTable", {"TableName": engine._address.records, **delete})
        found = dict(await engine.checks())
        assert "conveyor migrate" in (found[f"DynamoDB: table {engine._address.records}"] or "")
        await engine.migrate()
        job = make_job(clock)
        await engine.records.jobs.create_job(job, make_notice(clock, job), None)
        assert [each.job_id for each in await engine.records.jobs.active_jobs()] == [job.job_id]

    async def test_point_in_time_recovery_is_turned_on_if_asked_for(self, place: Path, clock: ManualClock) -> None:
        async with DynamoEngine.open(f"{url_for(place)}&pitr=true", clock) as engine:
            await engine.migrate()
            answer = await engine._wire.call("DescribeContinuousBackups", {"TableName": engine._address.tasks})
        recovery = answer["ContinuousBackupsDescription"]["PointInTimeRecoveryDescription"]
        assert recovery["PointInTimeRecoveryStatus"] == "ENABLED"


class TestWarmThroughput:
    """The emulator keeps no warm throughput: the shim shows what it is asked for, and answers with what there is."""

    async def test_tables_and_indexes_are_made_warm(self, place: Path, clock: ManualClock) -> None:
        seen = SeenUnits()
        async with warm_engine(place, clock, seen, "12000,40000", "13000,5000") as engine:
            await engine.migrate()
        tables = {name.rpartition("-")[2]: units for name, units in seen.created.items()}
        assert tables["tasks"] == {"": (12_000, 40_000)}
        assert tables["records"] == dict.fromkeys(["", "listed", "active", "due", "expiring"], (13_000, 5_000))

    async def test_those_that_exist_are_raised_and_never_lowered(self, place: Path, clock: ManualClock) -> None:
        async with open_engine(place, clock):
            pass
        seen = SeenUnits({"": (30_000, 4_000), "listed": (30_000, 10_000), "active": (12_000, 4_000)})
        async with warm_engine(place, clock, seen, "20000,8000", "20000,8000") as engine:
            await engine.migrate()
        assert seen.created == {}
        tables = {name.rpartition("-")[2]: units for name, units in seen.updated.items()}
        raised, new = (30_000, 8_000), (20_000, 8_000)
        assert tables == {"tasks": {"": raised}, "records": {"": raised, "active": new, "due": new, "expiring": new}}

    async def test_without_the_option_nothing_is_asked_for(self, place: Path, clock: ManualClock) -> None:
        seen = SeenUnits()
        async with Shim(aws(), seen) as shim, DynamoEngine.open(url_for(place, shim.url), clock) as engine:
            await engine.migrate()
        assert all(units == {} for units in seen.created.values())
        assert seen.updated == {}


class SeenUnits:
    """An interceptor: the warm units that tables and their indexes are asked for; and those that they say to have."""

    def __init__(self, present: dict[str, tuple[int, int]] | None = None) -> None:
        self._present = present or {}
        self.created: dict[str, dict[str, tuple[int, int]]] = {}
        self.updated: dict[str, dict[str, tuple[int, int]]] = {}

    async def __call__(self, call: Call, forward: Forward) -> Answer:
        payload = call.payload
        if call.action == "CreateTable":
            parts = [payload, *payload.get("GlobalSecondaryIndexes", ())]
            self._note(self.created.setdefault(payload["TableName"], {}), parts)
        elif call.action == "UpdateTable":
            parts = [payload, *(each["Update"] for each in payload.get("GlobalSecondaryIndexUpdates", ()))]
            assert len(parts) == 1 or "WarmThroughput" not in payload, "one change at a time"
            self._note(self.updated.setdefault(payload["TableName"], {}), parts)
            return json_answer(200, {"TableDescription": {}})
        answer = await forward(call)
        if call.action == "DescribeTable" and answer.status == 200 and self._present:
            described = answer.payload
            table = described["Table"]
            for part in (table, *(table.get("GlobalSecondaryIndexes") or ())):
                if (units := self._present.get(part.get("IndexName", ""))) is not None:
                    part["WarmThroughput"] = {"ReadUnitsPerSecond": units[0], "WriteUnitsPerSecond": units[1]}
            return answer.with_payload(described)
        return answer

    def _note(self, where: dict[str, tuple[int, int]], parts: list[dict[str, Any]]) -> None:
        for part in parts:
            if (warm := part.get("WarmThroughput")) is not None:
                where[part.get("IndexName", "")] = (warm["ReadUnitsPerSecond"], warm["WriteUnitsPerSecond"])


@asynccontextmanager
async def warm_engine(
    place: Path, clock: ManualClock, seen: SeenUnits, tasks: str, records: str
) -> AsyncIterator[DynamoEngine]:
    async with Shim(aws(), seen) as shim:
        url = f"{url_for(place, shim.url)}&warm_tasks={tasks}&warm_records={records}"
        async with DynamoEngine.open(url, clock) as engine:
            yield engine


class TestChecks:
    async def test_all_is_well(self, place: Path) -> None:
        async with open_engine(place, SystemClock()) as engine:
            found = await engine.checks()
        assert [what for what, problem in found if problem is not None] == []
        assert len(found) == 6

    async def test_without_tables(self, place: Path) -> None:
        async with DynamoEngine.open(url_for(place), SystemClock()) as engine:
            found = dict(await engine.checks())
            assert found["DynamoDB: reachable"] is None
            assert all(
                "conveyor migrate" in (found[f"DynamoDB: table {name}"] or "")
                for name in (engine._address.records, engine._address.tasks)
            )

    async def test_a_clock_that_is_off(self, place: Path, clock: ManualClock) -> None:
        async with open_engine(place, clock) as engine:
            found = dict(await engine.checks())
        assert "set it by NTP" in (found["DynamoDB: clock"] or "")

    async def test_nobody_there(self, place: Path, clock: ManualClock) -> None:
        url = url_for(place, "http://127.0.0.1:9")
        async with DynamoEngine.open(url, clock, Patience(base=0.001, cap=0.01, limit=0.05)) as engine:
            ((what, problem),) = await engine.checks()
        assert what == "DynamoDB: reachable"
        assert problem is not None


class TestAddress:
    def test_a_url_is_read(self) -> None:
        assert parse_address(f"dynamodb://{REGION}/conveyor") == DynamoAddress(REGION, "conveyor")
        full = parse_address("dynamodb://us-gov-west-1/a_b.C-1?endpoint=http%3A%2F%2F127.0.0.1%3A8000&pitr=true")
        assert full == DynamoAddress("us-gov-west-1", "a_b.C-1", "http://127.0.0.1:8000", True)
        assert (full.records, full.tasks) == ("a_b.C-1-records", "a_b.C-1-tasks")
        warm = parse_address(f"dynamodb://{REGION}/conveyor?warm_tasks=12000%2C40000&warm_records=1,2")
        assert (warm.warm_tasks, warm.warm_records) == (WarmThroughput(12_000, 40_000), WarmThroughput(1, 2))

    @pytest.mark.parametrize(
        "url",
        [
            "",
            "dynamodb://",
            "dynamodb://eu-central-1",
            "dynamodb://eu-central-1/",
            "dynamodb://Europe/conveyor",
            "dynamodb://eu-central-1/a/b",
            "dynamodb://eu-central-1/ä",
            'dynamodb://eu-central-1/x"; DROP',
            "dynamodb://eu-central-1/" + "x" * 201,
            "dynamo://eu-central-1/conveyor",
            "dynamodb://eu-central-1/conveyor?endpoint=127.0.0.1",
            "dynamodb://eu-central-1/conveyor?pitr=perhaps",
            "dynamodb://eu-central-1/conveyor?region=eu-west-1",
            "dynamodb://eu-central-1/conveyor?warm_tasks=12000",
            "dynamodb://eu-central-1/conveyor?warm_tasks=0,1",
            "dynamodb://eu-central-1/conveyor?warm_records=1,many",
        ],
    )
    def test_what_is_no_url_of_tables_is_refused_with_what_to_write(self, url: str) -> None:
        with pytest.raises(InvalidSetting, match=r"DynamoDB|dynamodb://"):
            parse_address(url)
