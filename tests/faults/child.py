"""A process that runs one job to its end, unless it is killed in it.

    python -m tests.faults.child DIRECTORY SCENARIO     CONVEYOR_CRASH_AT=name:n says where to die

A run submits the job, or finds it and goes on, as a client does that sends the same request until it has an answer.
Every crash point that it passes is a line in DIRECTORY/passed, every answer one in DIRECTORY/answers. Triggers in the
database write down each move of a task, and what was still pending when a run was completed.
"""

import asyncio
import dataclasses
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import apsw
import msgspec

# Imported here and not in open_system, so that a fork has them.
from conveyor import faults
from conveyor.accept import submit as accept_submit
from conveyor.accept.add_tasks import AddTasks
from conveyor.accept.control import Control
from conveyor.accept.option_changes import change_options
from conveyor.accept.redrive import redrive, redrive_all
from conveyor.accept.rerun import Rerun, RerunSpec
from conveyor.accept.resume import resume_ingest
from conveyor.accept.spec import JobSpec, SourceSpec, TasksSpec
from conveyor.accept.submit import Submit
from conveyor.embedded import Embedded
from conveyor.engines.coordinator import ingest_lease
from conveyor.engines.queue import CONTROL, Outgoing, QueueName
from conveyor.engines.sqlite.queue import SqliteQueue
from conveyor.errors import EngineFailed, IdempotencyInFlight, NotFound, UploadConflict
from conveyor.export import exporter, sorting
from conveyor.export.direct import export_to_file
from conveyor.export.exports import Exports, ExportState
from conveyor.export.request import ExportCompression, ExportSpec
from conveyor.export.writer import ExportWriter
from conveyor.ingest import ingester as ingest_worker
from conveyor.ingest.ingester import Ingester
from conveyor.ingest.pipeline import IngestPipeline
from conveyor.jobs import active_jobs
from conveyor.jobs.dead_lettered_tasks import DeadLetterFilter
from conveyor.jobs.idempotency import Accepted, IdempotentRequest
from conveyor.lists import reader as lists
from conveyor.lists.uploads import Uploads, UploadSpec
from conveyor.model import (
    Backoff,
    Job,
    JobId,
    JobKind,
    ListFormat,
    Mode,
    OnExhausted,
    Outcome,
    ResultLayout,
    RunKey,
    TaskError,
    TaskRef,
    TaskSeed,
    TenantId,
)
from conveyor.process import feeder, worker
from conveyor.process.executors import LocalExecutor
from conveyor.read import walk
from conveyor.recover import retention, sweeper
from conveyor.recover.retention import Removed, Retention
from conveyor.settings import Settings
from conveyor.states import ENDED, RunState, TaskStatus
from conveyor.system import System, open_system
from tests.faults import plants
from tests.support.export_jobs import Unordered
from tests.support.logs import be_plain

TENANT = TenantId("acme")
TOTAL = 200
FIRST_BATCH = 120
POISON = 3
LIST = b"".join(b"%d\n" % index for index in range(TOTAL))
SCENARIOS = (
    "inline",  # small and closed, accepted in one write
    "skipping",  # the same with an invalid task
    "steps",  # as inline, where records, tasks and queue are not one database
    "staged",  # an inline list over the limit: staged, then ingested
    "staged_steps",
    "list",  # a file of this machine
    "upload",  # promised, filled, then a job is made of it
    "small_list",  # the same, small enough to be read in the request; a line of it is invalid
    "open",  # two batches, the last one closes
    "closed",  # two batches, then /close
    "resumed",  # the list is missing; it comes back and the ingest is resumed
    "redriven",  # the same, by the dead letter
    "doubled",  # every message comes twice
    "doubled_steps",
    "stale",  # an ingester outlives its lease
    "export",
    "exported",  # offline, and a second export that is deleted
    "exported_sorted",  # the same where tasks can not be walked in order
    "exported_to",  # copied to a listed place
    "export_failed",
    "rerun",  # what failed once more, then all of it
    "parked",  # the same, and what failed is dead-lettered and redriven
    "parked_steps",
    "paused",  # before its list is read; its options are changed, and it is resumed
    "removed",  # a job of an upload is deleted once it has ended
    "poison",
)

PARKED = ("parked", "parked_steps")
EXPORTED = ("exported", "exported_sorted", "exported_to", "export_failed")

_ORACLE = """
CREATE TABLE IF NOT EXISTS harness_moves (run_no, idx, old, new);
CREATE TABLE IF NOT EXISTS harness_ends (run_id, total, ended, pending);
CREATE TRIGGER IF NOT EXISTS harness_move AFTER UPDATE OF status ON tasks BEGIN
    INSERT INTO harness_moves VALUES (NEW.run_no, NEW.idx, OLD.status, NEW.status);
END;
CREATE TRIGGER IF NOT EXISTS harness_end AFTER UPDATE OF state ON runs WHEN NEW.state = 'completed' BEGIN
    INSERT INTO harness_ends
    SELECT NEW.run_id, NEW.total, count(*) FILTER (WHERE status <> 0), count(*) FILTER (WHERE status = 0)
    FROM tasks WHERE run_no = (SELECT run_no FROM task_runs WHERE run_id = NEW.run_id);
END;
"""


def body_of(index: int) -> bytes:
    return f"body of {index} ".encode() * (index + 1)


def expected(scenario: str, index: int) -> tuple[TaskStatus, int, str | None]:
    """How a task must end: its status, attempts and error code."""
    if scenario == "poison" and index == POISON:
        return TaskStatus.FAILED, 1, "worker_lost"
    if index % 50 == 13:
        return (TaskStatus.FAILED, *((4, "handler_raised") if scenario in PARKED else (1, "result_not_json")))
    return TaskStatus.SUCCEEDED, 2 if index % 10 == 7 else 1, None


class Scripted(LocalExecutor):
    """An executor whose outcomes follow from the index. One task takes the process with it."""

    def __init__(self, scenario: str) -> None:
        self._scenario = scenario

    def grain(self, job: Job) -> int:
        return 1

    def target(self, ref: TaskRef) -> str | None:
        return None

    async def attempt(self, job: Job, refs: Sequence[TaskRef]) -> list[Outcome]:
        if self._scenario.startswith("doubled"):
            # So that both of a pair are under way.
            await asyncio.sleep(0.02)
        return [self._outcome(ref) for ref in refs]

    async def close(self) -> None:
        pass

    def _outcome(self, ref: TaskRef) -> Outcome:
        if self._scenario == "poison" and ref.index == POISON:
            os.kill(os.getpid(), signal.SIGKILL)
        if ref.index % 50 == 13 and self._scenario not in PARKED:
            return Outcome(TaskStatus.FAILED, error=TaskError("result_not_json", "for good"))
        if ref.index % 50 == 13 or (ref.index % 10 == 7 and ref.attempt == 1):
            return Outcome(TaskStatus.FAILED, error=TaskError("handler_raised", "at first"))
        return Outcome(TaskStatus.SUCCEEDED, body=body_of(ref.index), content_type="text/plain")


class Client:
    """Sends requests under keys, again while they are under way, and writes down what it is told."""

    def __init__(self, system: System, directory: Path, scenario: str) -> None:
        self.system = system
        self.scenario = scenario
        self.directory = directory
        self.submit = Submit(system)
        self.told: dict[str, Accepted] = {}

    async def ask(self, key: str, send: Callable[[IdempotentRequest], Awaitable[Accepted]]) -> Accepted:
        while True:
            try:
                accepted = await send(IdempotentRequest("POST /v1", key, f"fingerprint of {key}"))
                break
            except IdempotencyInFlight:
                await asyncio.sleep(0.005)
        line = {"key": key, "status": accepted.status, "body": accepted.body.decode(), "subject": accepted.subject}
        with (self.directory / "answers").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if key in self.told:
            assert accepted == self.told[key]._replace(replayed=True), "the replay is another answer"
        self.told[key] = accepted
        return accepted

    async def job(self, job_id: str) -> Job:
        job = await self.system.records.jobs.job(TENANT, JobId(job_id))
        assert job is not None
        return job

    def spec(self) -> JobSpec:
        layout = ResultLayout.OBJECT if self.scenario == "steps" else ResultLayout.PACKED
        backoff = Backoff(base=0.001, jitter=False)
        spec = JobSpec(kind=JobKind.PYTHON, handler="scripted", chunk_size=10, backoff=backoff, result_layout=layout)
        on_exhausted = OnExhausted.DEAD_LETTER if self.scenario in PARKED else OnExhausted.FAIL
        return msgspec.structs.replace(spec, on_exhausted=on_exhausted)

    async def accepted(self) -> JobId:
        """The job, submitted or found again."""
        if self.scenario == "list":
            return await self._of_a_file()
        spec = self.spec()
        if self.scenario in ("open", "closed"):
            return await self._open_job(msgspec.structs.replace(spec, mode=Mode.OPEN))
        if self.scenario in ("upload", "small_list", "removed", "resumed", "redriven"):
            source = SourceSpec(await self._uploaded(), format=ListFormat.JSONL)
            spec = msgspec.structs.replace(spec, source=source)
        else:
            skipped = [msgspec.Raw(b"1e999")] if self.scenario == "skipping" else []
            spec = msgspec.structs.replace(spec, tasks=[*_tasks(0, TOTAL), *skipped])
        answer = await self.ask("job", lambda request: self.submit.submit(TENANT, spec, request))
        return JobId(answer.subject)

    async def _of_a_file(self) -> JobId:
        jobs = (await self.system.records.jobs.jobs(TENANT, None, 1)).items
        if jobs:
            return jobs[0].job_id
        path = self.directory / "list.jsonl"
        path.write_bytes(LIST)
        spec = json.loads(msgspec.json.encode(self.spec()))
        for field in ("source", "tasks", "name"):
            spec.pop(field, None)
        return (await Embedded(self.system).submit_list([str(path)], spec, TENANT)).job_id

    async def _open_job(self, spec: JobSpec) -> JobId:
        answer = await self.ask("job", lambda request: self.submit.submit(TENANT, spec, request))
        add = AddTasks(self.system)
        ends = self.scenario == "open"
        batches = [
            ("first", TasksSpec(_tasks(0, FIRST_BATCH))),
            ("last", TasksSpec(_tasks(FIRST_BATCH, TOTAL), last_batch=ends)),
        ]
        for key, batch in batches:
            job = await self.job(answer.subject)
            await self.ask(key, lambda request, job=job, batch=batch: add.add(job, batch, request))
        if not ends:
            await add.close(await self.job(answer.subject))
        return JobId(answer.subject)

    async def _uploaded(self) -> str:
        uploads = Uploads(self.system)
        data = LIST + b"{nonsense\n" if self.scenario == "small_list" else LIST
        spec = UploadSpec(len(data), sha256(data).hexdigest())
        answer = await self.ask("upload", lambda request: uploads.promise(TENANT, spec, "{}/{}".format, request))
        upload_id, _, signature = json.loads(answer.body)["url"].partition("/")
        # It is stored already if the answer was lost with the last process.
        with suppress(UploadConflict):
            await uploads.fill(upload_id, signature, None, None, _pieces(data))
        if self.scenario in ("resumed", "redriven") and not (self.directory / "mended").exists():
            await self.system.blobs.delete([f"uploads/{TENANT}/{upload_id}"])
        return upload_id


def _tasks(start: int, stop: int) -> list[msgspec.Raw]:
    return [msgspec.Raw(b"%d" % index) for index in range(start, stop)]


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 100):
        yield data[start : start + 100]


async def until(client: Client, job_id: JobId, patience: float) -> Job:
    """The job, once it has ended and nothing of it is left in a queue."""
    records, queue = client.system.records, client.system.queue

    async def done() -> Job:
        while True:
            job = await client.job(job_id)
            if job.state in ENDED and not await records.jobs.unswept_jobs(1):
                depth = await queue.depth(CONTROL)
                if depth.ready + depth.held + depth.delayed == 0:
                    return job
            await asyncio.sleep(0.003)

    return await asyncio.wait_for(done(), patience)


async def mended(client: Client, job: Job, patience: float) -> None:
    """What an operator does about a missing list: put it back, and have the ingest go on."""
    assert job.source is not None
    if job.state is RunState.FAILED:
        await client.system.blobs.put(job.source.key, LIST)
        (client.directory / "mended").touch()
        if client.scenario == "resumed":
            await resume_ingest(client.system, job)
    if client.scenario == "redriven":
        letters = (await client.system.queue.dead_letters(None, 100)).items
        await redrive(client.system, TENANT, [letter.message_id for letter in letters])
    await until(client, job.job_id, patience)


async def removed(client: Client, job_id: JobId) -> None:
    system = client.system
    (client.directory / "removing").write_text(job_id)
    await system.records.jobs.mark_deleted(TENANT, job_id)
    await retire(client)
    (client.directory / "removed").touch()


async def retire(client: Client) -> None:
    system = client.system
    role = Retention(system.records, system.tasks, system.queue, system.coordinator, system.blobs, system.clock)
    while await role.run_once() != Removed():
        pass


async def rerun(client: Client, job_id: JobId, patience: float) -> None:
    """What failed once more, then everything once more."""
    again = Rerun(client.system)
    if client.scenario in PARKED and (await client.job(job_id)).run.number == 1:
        await redrive_all(client.system, TENANT, DeadLetterFilter())
        await until(client, job_id, patience)
    for number, select in ((2, "failed"), (3, "all"))[client.scenario in PARKED :]:
        job, spec = await client.job(job_id), RerunSpec(select)
        await client.ask(select, lambda request, job=job, spec=spec: again.rerun(job, spec, request))
        # It has ended already if the last process came so far.
        assert (await until(client, job_id, patience)).run.number >= number


async def paused(client: Client, job_id: JobId) -> None:
    control, mark = Control(client.system), client.directory / "went on"
    if mark.exists():
        return
    job = await control.pause(await client.job(job_id))
    job = await change_options(client.system, job, {"concurrency": 7})
    await control.resume(job)
    mark.touch()


def copied_to(directory: Path) -> str:
    """The place that is listed."""
    return f"file://{directory.absolute()}/copied/"


async def exported(client: Client, job_id: JobId, patience: float) -> None:
    """One export is made, and one is deleted, made or not."""
    exports, job = Exports(client.system), await client.job(job_id)
    spec = ExportSpec(compression=ExportCompression.NONE, part_bytes=128 * 1024)
    to = f"{copied_to(client.directory)}kept/" if client.scenario == "exported_to" else None
    asked = msgspec.structs.replace(spec, to=to)
    kept = await client.ask("export", lambda request: exports.create(job, asked, request))
    gone = await client.ask("gone", lambda request: exports.create(job, spec, request))
    with suppress(NotFound):
        await exports.delete(TENANT, gone.subject)

    async def done() -> None:
        while (await exports.find(TENANT, kept.subject)).export.state not in (ExportState.READY, ExportState.FAILED):  # noqa: ASYNC110  (seen from outside)
            await asyncio.sleep(0.003)

    await asyncio.wait_for(done(), patience)
    (client.directory / "export").write_text(kept.subject)


async def _write_nothing(_: object) -> None:
    raise EngineFailed("A stored body is missing.")


class _Stuck:
    """Tasks of an ingester that hangs in its first write until it is let go."""

    def __init__(self, system: System) -> None:
        self._tasks = system.tasks
        self.there = asyncio.Event()
        self.go = asyncio.Event()

    async def put(self, run: RunKey, seeds: Sequence[TaskSeed]) -> None:
        self.there.set()
        await self.go.wait()
        await self._tasks.put(run, seeds)


async def overtake(client: Client, embedded: Embedded, job_id: JobId) -> None:
    """One ingester hangs, its lease lapses, another does its range; then the first goes on as if nothing were."""
    system = client.system
    ingest = IngestPipeline(
        system.settings, system.clock, system.records, system.tasks, system.queue, system.blobs, embedded.lifecycle
    )
    quick = Ingester(ingest, system.coordinator, "quick")
    job = await client.job(job_id)
    if job.run.sealed:
        return
    await quick.tick()
    one = await system.records.ingests.range(job.run.run_id, 0)
    assert one is not None
    lease = await system.coordinator.lease(ingest_lease(job.run.run_id, 0), "slow", 60)
    assert lease is not None
    stuck = _Stuck(system)

    async def lost() -> bool:
        return False

    slow = asyncio.create_task(
        dataclasses.replace(ingest, tasks=stuck).ingest_range(job, one, lease, lost, lost)  # type: ignore[arg-type]
    )
    await stuck.there.wait()
    await system.coordinator.release(lease)
    await quick.tick()
    now = await system.records.ingests.range(job.run.run_id, 0)
    assert now is not None
    assert now.done
    stuck.go.set()
    assert not await slow


def doubling(send: Callable[..., Awaitable[list[int]]]) -> Callable[..., Awaitable[list[int]]]:
    async def twice(self: SqliteQueue, queue: QueueName, messages: Sequence[Outgoing]) -> list[int]:
        return await send(self, queue, [*messages, *messages])

    return twice


async def work(settings: Settings, directory: Path, scenario: str, patience: float) -> None:
    async with open_system(settings) as opened:
        in_steps = "steps" in scenario
        system = dataclasses.replace(opened, atomic_flush=None) if in_steps else opened
        if in_steps or scenario == "doubled":
            system = dataclasses.replace(system, atomic_accept=None)
        if scenario == "exported_sorted":
            system = dataclasses.replace(system, tasks=Unordered(system.tasks))  # type: ignore[arg-type]
        database = system.records.jobs._database  # type: ignore[attr-defined]
        await database.write(_watch)
        client = Client(system, directory, scenario)
        if (directory / "removed").exists():
            return
        if (directory / "removing").exists():
            await removed(client, JobId((directory / "removing").read_text()))
            return
        embedded = Embedded(system, {JobKind.PYTHON: Scripted(scenario)})
        if scenario in ("open", "closed"):
            async with embedded.running():
                job_id = await client.accepted()
                await until(client, job_id, patience)
        else:
            job_id = await client.accepted()
            if scenario == "stale":
                await overtake(client, embedded, job_id)
            if scenario == "paused":
                await paused(client, job_id)
            async with embedded.running():
                if scenario in ("resumed", "redriven"):
                    if not (directory / "mended").exists():
                        await until(client, job_id, patience)
                    await mended(client, await client.job(job_id), patience)
                else:
                    await until(client, job_id, patience)
                    await meanwhile(client, job_id, patience)
        # The same requests once more: answered, so replayed.
        assert await client.accepted() == job_id
        assert scenario == "list" or client.told["job"].replayed
        if scenario == "closed":
            # Closing again sends a message that nobody needs.
            await system.queue.drop(CONTROL)
        await afterwards(client, job_id)


async def meanwhile(client: Client, job_id: JobId, patience: float) -> None:
    """What is done with a job that has ended, with every role at work."""
    if client.scenario in EXPORTED:
        await exported(client, job_id, patience)
    if client.scenario == "rerun" or client.scenario in PARKED:
        await rerun(client, job_id, patience)


async def afterwards(client: Client, job_id: JobId) -> None:
    """What is done with a job that has ended, with no role at work."""
    system = client.system
    if client.scenario == "export":
        await export_to_file(system.tasks, system.blobs, await client.job(job_id), client.directory / "out.zip")
    if client.scenario in EXPORTED:
        await retire(client)
    if client.scenario == "removed":
        await removed(client, job_id)


def _watch(db: apsw.Connection) -> None:
    db.execute(_ORACLE)


def listening(directory: Path, crash_at: str | None) -> Callable[[str], None]:
    """Write down each point, and die where it was said."""
    descriptor = os.open(directory / "passed", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    die: Callable[[str], None] = faults.kill_at(crash_at) if crash_at else lambda name: None

    def hook(name: str) -> None:
        os.write(descriptor, f"{name}\n".encode())
        die(name)

    return hook


def prepare() -> None:
    """Small and quick, so that a short job takes every path several times. In this process only."""
    lists.BATCH = 30
    accept_submit._TASKS_PER_WRITE = 60
    sweeper._EVERY = 0.02
    active_jobs.FRESH_SECONDS = 0.0
    sweeper._STALLED = 0.1
    worker._LOOK_FOR_RUNS = 0.02
    feeder._LONGEST_POLL = 0.02
    feeder._TRIAL_PAUSE = 0.01
    ingest_worker._IDLE = 0.01
    ingest_worker._BUSY_ELSEWHERE = 0.02
    retention.SETTLE_SECONDS = -1.0
    exporter._IDLE = 0.01
    exporter._MAX_ATTEMPTS = 2
    exporter._FIRST_PAUSE = 0.01
    walk.ROWS = 30
    sorting.PAGE = 20
    sorting._SPOOL_BYTES = 20_000
    sorting._READ_BYTES = 2_000
    sorting.FAN_IN = 2


def run(
    directory: Path, scenario: str, crash_at: str | None = None, planted: Sequence[str] = (), patience: float = 60.0
) -> None:
    assert scenario in SCENARIOS
    settings = Settings.load(
        {},
        data=directory / "data",
        flush_seconds=0.002,
        idempotency_lease_seconds=0.02,
        ingest_range_bytes=300,
        export_piece_bytes=64 * 1024,
        export_buckets=f"{TENANT}={copied_to(directory)}",
        sync_task_limit=50 if scenario in ("staged", "staged_steps", "stale", "paused") else 1000,
        # A small list is read in the request only in one scenario.
        sync_list_bytes=64 * 1024 if scenario == "small_list" else 0,
        force_task_shards=scenario in ("open", "staged_steps"),
        task_shard_count=4,
    )
    sys.setswitchinterval(0.0005)
    with (directory / "starts").open("a") as file:
        file.write("x")
    if scenario.startswith("doubled"):
        SqliteQueue.send = doubling(SqliteQueue.send)  # type: ignore[method-assign, assignment]
    if scenario == "export_failed":
        ExportWriter.run = _write_nothing  # type: ignore[method-assign, assignment]
    for name in planted:
        plants.PLANTS[name](directory)
    faults.arm(listening(directory, crash_at))
    asyncio.run(work(settings, directory, scenario, patience))


if __name__ == "__main__":
    be_plain()
    prepare()
    run(Path(sys.argv[1]), sys.argv[2], Settings.load(os.environ).crash_at)
