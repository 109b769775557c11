"""Breakdown parts: how often a worker writes them, for few runs and for many."""

from conveyor.engines.queue import QueueName
from conveyor.jobs.breakdowns import BREAKDOWN
from conveyor.model import InputJson, Job, Outcome, TaskRef
from conveyor.process.breakdown_parts import BreakdownParts
from conveyor.process.load_tally import LoadTally
from conveyor.process.recorded_outcomes import RecordedOutcome
from conveyor.process.recorder import LeasedChunk
from conveyor.states import TaskStatus
from conveyor.system import System
from tests.support.clocks import JumpingClock
from tests.support.make_jobs import make_job

RUNS = 48


def outcomes(job: Job, count: int) -> list[RecordedOutcome]:
    chunk = LeasedChunk(QueueName("run"), "receipt", count)
    done = Outcome(TaskStatus.SUCCEEDED)
    return [RecordedOutcome(job, chunk, TaskRef(index, InputJson("1")), done, None) for index in range(count)]


async def written(system: System, jobs: list[Job]) -> int:
    found = [await system.records.documents.document(BREAKDOWN, job.tenant, job.run.run_id) for job in jobs]
    return sum(document is not None for document in found)


async def test_few_attempts_of_many_runs_are_written_rarely(system: System, clock: JumpingClock) -> None:
    parts = BreakdownParts(system.records.documents, clock, "worker", LoadTally(system.coordinator, "worker"))
    slow = [make_job(clock, total=1000) for _ in range(RUNS)]
    quick = make_job(clock, total=1000)
    for job, count in [*((job, 2) for job in slow), (quick, 200)]:
        parts.add(job, outcomes(job, count), [], range(count), clock.now())
    clock.advance(6.0)
    await parts.write_due()
    assert (await written(system, [quick]), await written(system, slow)) == (1, 0), "it costs what attempts cost"
    for _ in range(RUNS):
        clock.advance(2.0)
        await parts.write_due()
    assert await written(system, slow) == RUNS, "and none waits for more than a minute and its turn"


async def test_a_run_alone_is_written_at_once(system: System, clock: JumpingClock) -> None:
    parts = BreakdownParts(system.records.documents, clock, "worker", LoadTally(system.coordinator, "worker"))
    job = make_job(clock, total=1000)
    parts.add(job, outcomes(job, 1), [], range(1), clock.now())
    clock.advance(6.0)
    await parts.write_due()
    assert await written(system, [job]) == 1


async def test_the_first_figures_of_a_large_run_come_soon(system: System, clock: JumpingClock) -> None:
    """Somebody may be looking, and a kill takes along what is not written."""
    parts = BreakdownParts(system.records.documents, clock, "worker", LoadTally(system.coordinator, "worker"))
    job = make_job(clock, total=1000)
    parts.add(job, outcomes(job, 200), [], range(200), clock.now())
    clock.advance(1.5)
    await parts.write_due()
    first = await system.records.documents.document(BREAKDOWN, job.tenant, job.run.run_id)
    parts.add(job, outcomes(job, 200), [], range(200), clock.now())
    clock.advance(1.5)
    await parts.write_due()
    second = await system.records.documents.document(BREAKDOWN, job.tenant, job.run.run_id)
    assert first is not None
    assert first == second, "the next ones cost what they did"
