"""What only the DynamoDB engine has: where its items are, items of earlier forms, its tables and its checks."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conveyor.clock import SystemClock
from conveyor.engines.dynamodb import DynamoEngine
from conveyor.engines.dynamodb.address import DynamoAddress, parse_address
from conveyor.engines.dynamodb.layout import partition
from conveyor.engines.dynamodb.schema import bucket
from conveyor.engines.dynamodb.table import Key
from conveyor.engines.dynamodb.wire import Patience
from conveyor.engines.records import Document
from conveyor.engines.tasks import TaskEvent, TaskFilter
from conveyor.errors import EngineFailed, InvalidSetting
from conveyor.model import Compression, Counts, Ingested, ListFormat, Mode, Options, Range, Source, shard_of, task_id
from conveyor.states import RunState, TaskStatus
from tests.servers.aws import REGION
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
        assert sorted(calls) == ["BatchExecuteStatement"] * 20 + ["BatchGetItem", "Query", "UpdateItem"]
        calls.clear()
        assert len(await engine.tasks.page(run, 0, None, 100, TaskFilter())) == 100
        assert calls == ["Query"], "a small job is read with one query"

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
        assert {sk: int(item["ttl"]["N"]) >= now + DAY for sk, item in items.items() if "ttl" in item} == {
            "row#expiring": True
        }
        await engine.records.documents.replace_document(replace(rows[2], due_at=None))
        assert "ttl" in (await raw(engine, "Rows#export#acme", "records"))["row#due"]


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

    @pytest.mark.parametrize(
        "url",
        [
            "",
            "dynamodb://",
            "dynamodb://eu-central-1",
            "dynamodb://eu-central-1/",
            "dynamodb:///conveyor",
            "dynamodb://Europe/conveyor",
            "dynamodb://eu-central-1/a/b",
            "dynamodb://eu-central-1/ä",
            'dynamodb://eu-central-1/x"; DROP',
            "dynamodb://eu-central-1/" + "x" * 201,
            "dynamo://eu-central-1/conveyor",
            "dynamodb://eu-central-1/conveyor?endpoint=127.0.0.1",
            "dynamodb://eu-central-1/conveyor?pitr=perhaps",
            "dynamodb://eu-central-1/conveyor?region=eu-west-1",
        ],
    )
    def test_what_is_no_url_of_tables_is_refused_with_what_to_write(self, url: str) -> None:
        with pytest.raises(InvalidSetting, match=r"DynamoDB|dynamodb://"):
            parse_address(url)
