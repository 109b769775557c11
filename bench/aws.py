"""aws: what a million tasks cost on AWS, and what shards are for.

cost: a staged list runs through the whole system on DynamoDB, SQS and S3, on an emulator behind a proxy that counts
every call and what it would be billed as; a table of public prices turns that into dollars. Beside it the same list in
the layout that most begin with: a message for each task and an object for each result, which here are two options of
the job. The cost to the end of its life adds what is stored for 14 days and what the purge deletes.

shards: the ingest of a list behind a proxy that lets no partition have more than 1,000 writes a second, as DynamoDB
does, with the tasks of the run in eight partitions and in one. A small job stays in one, and is read with one query.

What is polled while nothing happens is not in the figures: it depends on the hours, not on the tasks.
"""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.child import MeasurementFailed, Setup
from bench.figures import Figure, details, rates
from bench.meter import Meter
from conveyor.deploy.aws_prices import DYNAMODB_STORAGE, PRICES, S3_STORAGE
from conveyor.process.executors import LocalExecutor

TASKS = 20_000
INGEST = 24_000
SMALL = 500
SHARDS = 8
_LOOK_SECONDS = 0.25
# So that both ingesters have something to do.
_RANGE_BYTES = 128 * 1024
BODY = b"The belt carries one page after the other. " * 48

_MONTHS = 14 / 30


def run(setup: Setup) -> list[Figure]:
    tasks, ingest = setup.count(TASKS), setup.count(INGEST)
    ours, plain, many, one, small = [], [], [], [], []
    for _ in range(setup.repeat):
        ours.append(setup.ours("bench.aws:cost", count=tasks))
        plain.append(setup.bare("bench.aws:cost", count=tasks, chunk_size=1, result_layout="object"))
        many.append(setup.ours("bench.aws:capped_ingest", count=ingest, shards=SHARDS))
        # The rate is the cap's: a part of the list says it.
        one.append(setup.bare("bench.aws:capped_ingest", count=max(SMALL, ingest // 4), shards=1))
        small.append(setup.bare("bench.aws:small_job", count=SMALL))
    layout = "a message a task, an object a result"
    dollars = [[each["dollars"] for each in side] for side in (ours, plain)]
    life = [[each["life"]["dollars"] for each in side] for side in (ours, plain)]
    calls = [[each["calls_each"] for each in side] for side in (ours, plain)]
    spent = {"calls": ours[-1]["calls"], "units": ours[-1]["units"], "layout_calls": plain[-1]["calls"]}
    return [
        Figure("aws", "cost of a million tasks", "$", dollars[0], layout, dollars[1], ("at most", 0.5), spent),
        Figure(
            "aws", "the same to the end of its life", "$", life[0], layout, life[1], ("at most", 0.5), ours[-1]["life"]
        ),
        Figure("aws", "calls", "calls/task", calls[0], layout, calls[1], None, {"by": ours[-1]["dollars_by"]}),
        Figure(
            "aws",
            f"ingest, {SHARDS} shards, 1,000 writes/s each",
            "tasks/s",
            rates(many),
            "one shard",
            rates(one),
            ("at least", 5.0),
            details(many),
        ),
        Figure(
            "aws",
            f"queries to list a small job of {SMALL}",
            "queries",
            [float(each["queries"]) for each in small],
            "one",
            [1.0] * len(small),
            ("at most", 1.0),
        ),
    ]


class Bill:
    """A proxy's interceptor: counts calls, and what AWS would bill for them."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.units: Counter[str] = Counter()
        # What each task is in bytes: ending it writes all of it again, and so does deleting it.
        self._sizes: dict[str, int] = {}
        self.object_bytes = 0

    @property
    def task_bytes(self) -> int:
        """The tasks that are stored."""
        return sum(self._sizes.values())

    def clear(self) -> None:
        self.calls.clear()
        self.units.clear()

    async def __call__(self, call: Any, forward: Any) -> Any:
        answer = await forward(call)
        self.calls[f"{call.service} {call.action}"] += 1
        if call.service == "dynamodb":
            self._dynamodb(call.action, call.payload, answer)
        elif call.service == "sqs":
            size = max(len(call.body), len(answer.body))
            self.units["sqs request"] += math.ceil(size / 65536)
        elif call.action in ("GET", "HEAD"):
            # A GET with a query is a listing.
            self.units["s3 put" if "list-type" in call.path else "s3 get"] += 1
        elif call.action != "DELETE":
            self.units["s3 put"] += 1
            self.object_bytes += len(call.body)
        return answer

    def dollars(self) -> dict[str, float]:
        return {name: count * PRICES[name] / 1e6 for name, count in self.units.items()}

    def _dynamodb(self, action: str, payload: dict[str, Any], answer: Any) -> None:
        writes, reads = "dynamodb write unit", "dynamodb read unit"
        if action == "BatchExecuteStatement":
            self.units[writes] += sum(self._statement(each) for each in payload["Statements"])
        elif action == "BatchWriteItem":
            for requests in payload["RequestItems"].values():
                self.units[writes] += sum(map(self._batched, requests))
        elif action == "TransactWriteItems":
            self.units[writes] += sum(2 * _indexed(each) for each in payload["TransactItems"])
        elif action in ("PutItem", "UpdateItem", "DeleteItem"):
            self.units[writes] += _written(len(answer.body))
        elif action == "BatchGetItem":
            # A consistent read of a small item is one unit, of one that is not there too.
            self.units[reads] += sum(len(each["Keys"]) for each in payload["RequestItems"].values())
        elif action == "Query":
            each = math.ceil(self._read(payload, answer) / 4096) or 1
            self.units[reads] += each if payload.get("ConsistentRead") else math.ceil(each / 2)

    def _batched(self, request: dict[str, Any]) -> int:
        if "DeleteRequest" in request:
            return _written(self._sizes.pop(request["DeleteRequest"]["Key"]["sk"]["S"], 200))
        return _written(_size(request))

    def _read(self, payload: dict[str, Any], answer: Any) -> int:
        """The bytes that a query read: whole items, although it returns only some of them, or a part of each."""
        items = answer.payload.get("Items", [])
        if "ProjectionExpression" in payload:
            return sum(self._sizes.get(item.get("sk", {}).get("S", ""), 200) for item in items)
        scanned = answer.payload.get("ScannedCount", len(items))
        return len(answer.body) * int(scanned) // len(items) if items else 300 * int(scanned)

    def _statement(self, statement: dict[str, Any]) -> int:
        parameters = statement["Parameters"]
        if statement["Statement"].startswith("INSERT"):
            size = sum(map(_size, parameters))
            self._sizes[parameters[1]["S"]] = size
            return _written(size)
        ended, _, sk = parameters[:3]
        self._sizes[sk["S"]] = self._sizes.get(sk["S"], 200) + _size(ended)
        return _written(self._sizes[sk["S"]])


def _size(value: Any) -> int:
    """About as DynamoDB counts: names and values, without the marks around them."""
    if isinstance(value, dict):
        return sum(len(name) + _size(each) for name, each in value.items())
    if isinstance(value, list):
        return sum(map(_size, value))
    return len(str(value).encode())


def _written(size: int) -> int:
    return math.ceil(size / 1024) or 1


def _indexed(write: dict[str, Any]) -> int:
    """Units of an item in a transaction, and of each index that has a copy of it."""
    ((kind, operation),) = write.items()
    if kind == "ConditionCheck":
        return 1
    each = _written(_size(operation))
    key = operation.get("Item") or operation.get("Key")
    job = str(key["sk"]["S"]).endswith("#job")
    copies = 3 if job else sum(name in operation.get("Item", {}) for name in ("lp", "dp", "ep"))
    return each * (1 + copies)


class PageExecutor(LocalExecutor):
    """Hands back a page of 2 KB for each reference, without a network."""

    def grain(self, job: Any) -> int:
        return 64

    def target(self, ref: Any) -> str | None:
        return None

    async def attempt(self, job: Any, refs: Sequence[Any]) -> list[Any]:
        from conveyor.model import Outcome
        from conveyor.states import TaskStatus

        return [
            Outcome(
                TaskStatus.SUCCEEDED,
                http_status=200,
                body=b"%d\n" % ref.index + BODY,
                content_type="text/html",
                elapsed=0.1,
            )
            for ref in refs
        ]

    async def close(self) -> None:
        pass


@asynccontextmanager
async def stack(place: str, *interceptors: Any, **settings: Any) -> AsyncIterator[Any]:
    """The system on the emulator, every call through a proxy."""
    from bench.belt import store
    from conveyor.clock import SystemClock
    from conveyor.settings import Settings
    from conveyor.system import migrate
    from tests.faults.shim import Shim
    from tests.servers import dynamodb, s3, sqs
    from tests.servers.aws import aws

    here = Path(place)
    async with Shim(aws(), *interceptors) as shim:
        given = {
            "records": dynamodb.url_for(here, shim.url),
            "tasks": dynamodb.url_for(here, shim.url),
            "queue": sqs.url_of(here, shim.url, wait=1),
            "blobs": s3.url_of(here).replace(aws(), shim.url),
            **settings,
        }
        await migrate(Settings.load({}, data=here, **given), SystemClock())
        async with store(place, **given) as system:
            yield system


def write_list(place: str, count: int) -> Path:
    path = Path(place) / "list.txt"
    path.write_text("".join(f"https://www.example.com/catalogue/item/{index}?from=list\n" for index in range(count)))
    return path


async def cost(count: int, place: str, **options: Any) -> dict[str, Any]:
    """From the submit of a list to the end of its run, with all calls on the way."""
    from bench.belt import TENANT, check_counts
    from conveyor.embedded import Embedded
    from conveyor.model import JobKind
    from tests.servers.aws import server_pid

    bill = Bill()
    async with stack(place, bill) as system:
        embedded = Embedded(system, executors={JobKind.FETCH: PageExecutor()})
        async with embedded.running():
            await embedded.until_ready()
            bill.clear()
            meter = Meter([server_pid()])
            job = await embedded.submit_list([str(write_list(place, count))], options, TENANT)
            while job.run.ended_at is None:
                # Seldom: asking is a call too.
                await asyncio.sleep(_LOOK_SECONDS)
                job = await embedded.job(TENANT, job.job_id)
            spent = meter.stop()
            calls, units, dollars = dict(bill.calls), dict(bill.units), bill.dollars()
        await check_counts(system, job, count)
        stored = {"dynamodb": bill.task_bytes * DYNAMODB_STORAGE, "s3": bill.object_bytes * S3_STORAGE}
        bill.clear()
        await purge(system, job)
        removal = bill.dollars()
    million = 1e6 / count
    stay = {name: value / 1e9 * _MONTHS * million for name, value in stored.items()}
    gone = {name: value * million for name, value in removal.items()}
    life = sum(dollars.values()) * million + sum(stay.values()) + sum(gone.values())
    return {
        "count": count,
        "dollars": sum(dollars.values()) * million,
        "life": {
            "dollars": life,
            "stored": {name: round(value, 3) for name, value in sorted(stay.items())},
            "purged": {name: round(value, 3) for name, value in sorted(gone.items())},
        },
        "dollars_by": {name: round(value * million, 3) for name, value in sorted(dollars.items())},
        "units": {name: round(number / count, 4) for name, number in sorted(units.items())},
        "calls": {name: round(number / count, 5) for name, number in sorted(calls.items())},
        "calls_each": sum(calls.values()) / count,
        **spent,
    }


async def purge(system: Any, job: Any) -> None:
    """What retention does to a job that has expired."""
    from conveyor.recover import retention

    retention.SETTLE_SECONDS = -1.0
    role = retention.Retention(
        system.records, system.tasks, system.queue, system.coordinator, system.blobs, system.clock
    )
    await system.records.jobs.mark_deleted(job.tenant, job.job_id)
    while await system.records.jobs.purgeable_jobs(system.clock.now() + 1, 1):
        await role.run_once()


async def capped_ingest(count: int, shards: int, place: str) -> dict[str, Any]:
    """The list is staged; the clock runs from the message that asks for its ingest to the latch."""
    from bench.belt import TENANT
    from conveyor.embedded import Embedded
    from conveyor.service import Service
    from conveyor.states import RunState
    from tests.faults.shim import PartitionCap
    from tests.servers.aws import server_pid

    given = {"task_shard_count": shards, "ingest_range_bytes": _RANGE_BYTES}
    async with stack(place, PartitionCap(1000.0), **given) as system:
        embedded = Embedded(system)
        services = [Service(role, system.clock) for role in embedded.ingesters()]
        path = write_list(place, count)
        meter = Meter([server_pid()])
        job = await embedded.submit_list([str(path)], {}, TENANT)
        tasks = [asyncio.create_task(service.run()) for service in services]
        while True:
            job = await embedded.job(TENANT, job.job_id)
            if job.state is not RunState.INGESTING:
                break
            await asyncio.sleep(0.02)
        spent = meter.stop()
        for service in services:
            service.stop()
        await asyncio.gather(*tasks)
        stored = len(await system.tasks.unfinished(job.key, range(count)))
        if (job.run.total, stored, job.task_shard_count) != (count, count, shards):
            raise MeasurementFailed(f"total {job.run.total}, stored {stored}, shards {job.task_shard_count}")
    return {"count": count, **spent}


async def small_job(count: int, place: str) -> dict[str, Any]:
    """How many queries list a job that was written in its request."""
    from bench.belt import TENANT
    from conveyor.accept.spec import decode_spec
    from conveyor.accept.submit import Submit
    from conveyor.engines.tasks import TaskFilter
    from conveyor.model import JobId

    bill = Bill()
    async with stack(place, bill) as system:
        tasks = ",".join(f'"https://www.example.com/{index}"' for index in range(count))
        accepted = await Submit(system).submit(TENANT, decode_spec(f'{{"tasks": [{tasks}]}}'.encode()))
        job = await system.records.jobs.job(TENANT, JobId(accepted.subject))
        if job is None or job.task_shard_count != 1:
            raise MeasurementFailed("a small job is not in one partition")
        bill.clear()
        listed = await system.tasks.page(job.key, 0, None, count, TaskFilter())
        if len(listed) != count:
            raise MeasurementFailed(f"{len(listed)} of {count} tasks were listed")
        return {"count": count, "queries": bill.calls["dynamodb Query"]}
