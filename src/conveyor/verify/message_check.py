"""Messages belong to runs that exist. Queues are never received from: an engine that can name them tells which runs
have messages, and dead letters are listed."""

from collections.abc import Iterable

from conveyor.engines.queue import NamesQueues, QueueName, run_of, run_queues
from conveyor.jobs.dead_letters import decode_dead_letter
from conveyor.model import JobId, Run, RunId
from conveyor.system import System
from conveyor.verify.findings import Finding, FindingKind, Findings, Pacing

_LETTERS = 1000
_PURGEABLE = 10_000
# Runs with messages that are in memory together.
_RUNS = 100_000


class MessageCheck:
    """Checks queues and dead letters."""

    def __init__(self, system: System, findings: Findings, pacing: Pacing) -> None:
        self._system = system
        self._findings = findings
        self._pacing = pacing
        # Runs that had messages before the jobs were read, without those of the jobs so far.
        self._unknown: set[RunId] = set()

    async def begin(self) -> None:
        """Find the runs that have messages. Call it before the jobs are read: a message follows its run."""
        queue = self._system.queue
        if not isinstance(queue, NamesQueues):
            self._findings.notes.append("Messages: this queue engine cannot tell which runs have some.")
            return
        name: QueueName | None = None
        while (name := await queue.next_queue(name)) is not None:
            run_id = run_of(name)
            if run_id is None:
                continue
            if len(self._unknown) >= _RUNS:
                self._findings.notes.append(f"Messages: more than {_RUNS} runs have some. The others were not checked.")
                return
            self._unknown.add(run_id)

    def see(self, runs: Iterable[Run]) -> None:
        """These runs exist."""
        self._unknown.difference_update([run.run_id for run in runs])

    async def end(self) -> None:
        """Find messages of runs that nobody has seen."""
        jobs = self._system.records.jobs
        if self._unknown:
            # Retention drops the queues of jobs that were deleted; a rerun may have begun since the jobs were read.
            for job in await jobs.purgeable_jobs(self._system.clock.now(), _PURGEABLE):
                self.see(await jobs.runs(job.job_id))
            self.see(job.run for job in await jobs.active_jobs())
        for run_id in sorted(self._unknown):
            if await jobs.runs(JobId(run_id.replace("run_", "job_", 1))):
                continue
            left = sum([(await self._system.queue.depth(name)).total for name in run_queues(run_id)])
            if left:
                detail = f"{left} messages belong to {run_id}, which does not exist."
                self._findings.add(Finding(FindingKind.MESSAGE, detail))

    async def check_dead_letters(self) -> None:
        """Dead letters belong to jobs that exist, or that retention has not purged yet."""
        jobs, cursor = self._system.records.jobs, None
        while True:
            page = await self._system.queue.dead_letters(cursor, _LETTERS)
            owners = [owner for owner in map(decode_dead_letter, page.items) if owner is not None]
            known = {job.job_id for job in await jobs.jobs_of(sorted({(each.tenant, each.job_id) for each in owners}))}
            for owner in owners:
                self._findings.checked.dead_letters += 1
                if owner.job_id not in known and not await jobs.runs(owner.job_id):
                    detail = f"The job of dead letter {owner.message_id} does not exist."
                    self._findings.add(Finding(FindingKind.DEAD_LETTER, detail, owner.job_id))
            cursor = page.next_cursor
            if cursor is None:
                return
            await self._pacing.rest()
