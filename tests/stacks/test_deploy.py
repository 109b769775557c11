"""A deploy in the middle of a job: rows, messages and cursors from before there were shards go through the new code."""

import asyncio
from pathlib import Path

import msgspec

from conveyor.clock import SystemClock
from conveyor.embedded import Embedded
from conveyor.engines.dynamodb import DynamoEngine
from conveyor.engines.dynamodb.table import Key
from conveyor.engines.queue import CONTROL, Outgoing, run_queue
from conveyor.engines.tasks import TaskFilter
from conveyor.model import Job, JobKind, TaskId, TaskSeed, task_id
from conveyor.read import cursors as cursor
from conveyor.read.results import result_page
from conveyor.settings import Settings
from conveyor.states import ENDED, RunState
from conveyor.system import System, migrate, open_system
from tests.conformance.test_dynamodb import change
from tests.servers import dynamodb
from tests.stacks.conftest import urls
from tests.stacks.ledger import Entry, Uneven, audit, fails
from tests.support.make_jobs import ACME, make_job, make_notice, seeds

TASKS = 25
ABSENT_FROM_A_JOB = ("v", "task_shard_count", "version", "rev", "swept", "next_index", "ranges")


async def from_before(system: System, place: Path) -> Job:
    """A job with its tasks, as a release without shards and versions left it."""
    job = make_job(system.clock, total=TASKS)
    job = msgspec.structs.replace(job, options=msgspec.structs.replace(job.options, handler="anything"))
    await system.tasks.put(job.key, seeds(TASKS))
    await system.records.jobs.create_job(job, make_notice(system.clock, job), None)
    async with DynamoEngine.open(dynamodb.url_for(place), system.clock) as engine:
        await change(engine, Key(f"Job#{job.job_id}", "acme#job"), "records", *ABSENT_FROM_A_JOB)
        for index in range(TASKS):
            key = Key(f"Job#{job.job_id}", f"acme#{job.run.run_id}#task#{task_id(job.run.run_id, index)}")
            await change(engine, key, "tasks", "v")
    return job


def old_message(job: Job, given: list[TaskSeed]) -> Outgoing:
    """References as they were: no shard count, no attempt, no version."""
    run = [job.tenant, job.job_id, job.run.run_id]
    return Outgoing(msgspec.msgpack.encode([run, [[seed.index, seed.input] for seed in given]]))


async def test_a_job_that_was_under_way(tmp_path: Path) -> None:
    settings = Settings.load({}, data=tmp_path, **urls("aws", tmp_path))
    clock = SystemClock()
    await migrate(settings, clock)
    async with open_system(settings, clock) as system:
        job = await from_before(system, tmp_path)
        queue = run_queue(job.run.run_id)
        assert await system.queue.send(queue, [old_message(job, seeds(10)), old_message(job, seeds(15, 10))]) == []
        # What the ingest of the old release still had to say: the new one finds nothing left to do.
        done = msgspec.json.encode({"op": "ingest_job", "tenant": ACME, "job_id": job.job_id, "run_id": job.run.run_id})
        assert await system.queue.send(CONTROL, [Outgoing(done)]) == []
        async with Embedded(system, dict.fromkeys(JobKind, Uneven())).running():
            while (found := await found_again(system, job)).state not in ENDED:  # noqa: ASYNC110  (seen from outside)
                await asyncio.sleep(0.05)
        assert (found.state, found.task_shard_count) == (RunState.COMPLETED, 1)
        failed = sum(map(fails, range(TASKS)))
        assert await audit(system, Entry(job.job_id, TASKS, failed)) == []
        await check_old_cursor(system, found)


async def found_again(system: System, job: Job) -> Job:
    found = await system.records.jobs.job(ACME, job.job_id)
    assert found is not None
    return found


async def check_old_cursor(system: System, job: Job) -> None:
    """One that a client has from the release before: a plain task id."""
    names = sorted(task_id(job.run.run_id, index) for index in range(TASKS))
    old: TaskId = names[9]
    assert cursor.decode(old, job.task_shard_count) == [old]
    page = await result_page(system.tasks, job.key, TaskFilter(), 10, old)
    assert [task.task_id for task in page.items] == names[10:20]
    assert page.next_cursor == names[19]
