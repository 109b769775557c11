"""A run that ends while its list is read: nothing is left of it, whoever was at work on it."""

import msgspec

from conveyor.accept.add_tasks import AddTasks
from conveyor.accept.control import Control
from conveyor.accept.spec import JobSpec, TasksSpec
from conveyor.accept.submit import Submit
from conveyor.engines.queue import CONTROL, Outgoing, recovery_queue, run_queue
from conveyor.model import IngestJob, JobKind, Mode
from tests.support.make_jobs import ACME
from tests.support.small_fleet import open_fleet


async def test_its_queues_stay_while_a_worker_holds_messages_of_it() -> None:
    """A worker sends references back until it hears that the run has ended. The sweeper waits for that, and knows of it
    by the messages that are held."""
    async with open_fleet() as fleet:
        system = fleet.system
        accepted = await Submit(system).submit(ACME, JobSpec(kind=JobKind.PYTHON, handler="any", mode=Mode.OPEN))
        job = await fleet.job(accepted.subject)
        await AddTasks(system).add(job, TasksSpec([msgspec.Raw(b"1")]))
        ingester, queue = fleet.ingester(), run_queue(job.run.run_id)
        await ingester.tick()
        (held,) = await system.queue.receive(queue, 10, 30.0)

        await Control(system).cancel(await fleet.job(job.job_id))
        message = msgspec.json.encode(IngestJob(ACME, job.job_id, job.run.run_id))
        await system.queue.send(CONTROL, [Outgoing(message)])
        await ingester.tick()
        for _ in range(3):
            await fleet.sweeper.run_once()
        await system.queue.send(recovery_queue(job.run.run_id), [Outgoing(held.body)])
        await system.queue.release(queue, [held.receipt], 0.0)
        for _ in range(3):
            await fleet.sweeper.run_once()

        assert (await fleet.depth(job)).total == 0
        assert not await system.records.jobs.unswept_jobs(10)
