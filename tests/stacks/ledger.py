"""A ledger of jobs: what was handed over, and whether that is what came of it."""

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, TypeVar, cast

import msgspec

from conveyor.accept.add_tasks import AddTasks
from conveyor.accept.spec import JobSpec, TasksSpec
from conveyor.accept.submit import Submit
from conveyor.engines.queue import CONTROL
from conveyor.engines.tasks import Finished, TaskFilter, Tasks
from conveyor.errors import IdempotencyInFlight, Unavailable
from conveyor.jobs.idempotency import IdempotentRequest
from conveyor.model import (
    Counts,
    Job,
    JobId,
    ListFormat,
    Outcome,
    RunId,
    RunKey,
    Source,
    Task,
    TaskEnd,
    TaskError,
    TaskRef,
    TenantId,
)
from conveyor.process.executors import LocalExecutor
from conveyor.states import ENDED, RunState, TaskStatus
from conveyor.system import System

T = TypeVar("T")

ACME = TenantId("acme")

_PAGE = 1000
_LOOK_SECONDS = 1.0


class Uneven(LocalExecutor):
    """An executor: one task in ten fails for good, one in ten only the first time, the others succeed."""

    def __init__(self) -> None:
        self.ran: Counter[tuple[RunId, int]] = Counter()

    def grain(self, job: Job) -> int:
        return 10

    def target(self, ref: TaskRef) -> str | None:
        return "somewhere"

    async def attempt(self, job: Job, refs: Sequence[TaskRef]) -> list[Outcome]:
        self.ran.update((job.run.run_id, ref.index) for ref in refs)
        return [self._outcome(ref) for ref in refs]

    def _outcome(self, ref: TaskRef) -> Outcome:
        if fails(ref.index):
            return Outcome(TaskStatus.FAILED, http_status=404, error=TaskError("http_404", "not there"))
        if ref.index % 10 == 3 and ref.attempt == 1:
            return Outcome(TaskStatus.FAILED, http_status=503, error=TaskError("http_503", "not now"))
        return Outcome(TaskStatus.SUCCEEDED, body=ref.input.encode())

    async def close(self) -> None:
        """Nothing is held."""


def fails(index: int) -> bool:
    return index % 10 == 7


class Watched:
    """Tasks, with a note of who was told that it ended which task."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self.moved: Counter[tuple[RunId, int]] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tasks, name)

    async def finish(self, run: RunKey, ends: Collection[TaskEnd]) -> Finished:
        finished = await self._tasks.finish(run, cast(Any, ends))
        self.moved.update((run.run_id, index) for index in finished.moved)
        return finished


def watched(system: System) -> tuple[System, Watched]:
    """The same system, with its tasks watched."""
    tasks = Watched(system.tasks)
    return replace(system, tasks=cast(Tasks, cast(Any, tasks))), tasks


@dataclass(frozen=True)
class Entry:
    """One job that was handed over."""

    job_id: JobId
    total: int
    # What its tasks have to come to.
    failed: int = 0
    tenant: TenantId = ACME

    @property
    def counts(self) -> Counts:
        return Counts(succeeded=self.total - self.failed, failed=self.failed)


class Ledger:
    """Hands jobs over, as the API does and each under a key of its own, until it has an answer; and keeps account."""

    def __init__(self, system: System, **options: Any) -> None:
        self._system = system
        self._options = {"kind": "python", "handler": "anything", **options}
        self._submit = Submit(system)
        self._add = AddTasks(system)
        self.entries: list[Entry] = []

    async def small(self, count: int) -> None:
        """One whose tasks are in the request."""
        accepted = await self._answered(
            lambda: self._submit.submit(ACME, self._spec(tasks=_inputs(count)), self._key())
        )
        self._enter(accepted.subject, count)

    async def staged(self, count: int) -> None:
        """One of a list that is in the store already."""
        data = b"".join(b"%s\n" % bytes(line) for line in _inputs(count))
        key, job_id = f"lists/{ACME}/{self._system.clock.new_id('list')}", JobId(self._system.clock.new_id("job"))
        await self._answered(lambda: self._system.blobs.put(key, data))
        source = Source(key, len(data), sha256(data).hexdigest(), ListFormat.JSONL)
        request = self._key()
        await self._answered(lambda: self._submit.submit_as(job_id, ACME, self._spec(), source, request))
        self._enter(job_id, count)

    async def opened(self, batches: Sequence[int]) -> None:
        """One that is added to, and closed with its last batch."""
        accepted = await self._answered(lambda: self._submit.submit(ACME, self._spec(mode="open"), self._key()))
        job_id = JobId(accepted.subject)
        for number, count in enumerate(batches, 1):
            spec = TasksSpec(_inputs(count), last_batch=number == len(batches))
            request = self._key()

            async def add(spec: TasksSpec = spec, request: IdempotentRequest = request) -> object:
                job = await self._system.records.jobs.job(ACME, job_id)
                assert job is not None
                return await self._add.add(job, spec, request)

            await self._answered(add)
        self._enter(job_id, sum(batches))

    async def until_ended(self) -> None:
        """Wait until every job has, and what is left of it is cleared up."""
        system = self._system
        for entry in self.entries:
            while (await self._answered(lambda entry=entry: self._job(entry))).state not in ENDED:  # type: ignore[misc]
                await system.clock.sleep(_LOOK_SECONDS)
        while await self._answered(self._left):
            await system.clock.sleep(_LOOK_SECONDS)

    async def _job(self, entry: Entry) -> Job:
        job = await self._system.records.jobs.job(entry.tenant, entry.job_id)
        assert job is not None
        return job

    async def _left(self) -> bool:
        unswept = await self._system.records.jobs.unswept_jobs(1)
        return bool(unswept) or (await self._system.queue.depth(CONTROL)).total > 0

    def _enter(self, job_id: str, total: int) -> None:
        self.entries.append(Entry(JobId(job_id), total, sum(map(fails, range(total)))))

    def _spec(self, **more: Any) -> JobSpec:
        return msgspec.convert({**self._options, **more}, JobSpec)

    def _key(self) -> IdempotentRequest:
        key = self._system.clock.new_id("key")
        return IdempotentRequest("POST /v1/jobs", key, key)

    async def _answered(self, ask: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await ask()
            except (Unavailable, IdempotencyInFlight):
                await self._system.clock.sleep(1.0)


def _inputs(count: int) -> list[msgspec.Raw]:
    return [msgspec.Raw(json.dumps({"n": number}).encode()) for number in range(count)]


async def audit(system: System, entry: Entry) -> list[str]:
    """What is not as it has to be of a job that has ended: from its rows, not from what was counted along the way."""
    job = await system.records.jobs.job(entry.tenant, entry.job_id)
    if job is None:
        return [f"{entry.job_id} is not there"]
    tasks, told = await _tasks(system, job), await _notices(system, job)
    kept, truth = await system.tasks.counts(job.key), await system.tasks.recount(job.key)
    wrong = [
        task.index for task in tasks if (task.status is TaskStatus.FAILED) != bool(entry.failed and fails(task.index))
    ]
    ends = {name: told[name] for name in ("run.completed", "run.failed", "run.cancelled") if told[name]}
    expected = {
        "state": (job.state, RunState.COMPLETED),
        "total": ((job.run.total, job.run.last_batch, job.run.invalid), (entry.total, True, 0)),
        "rows": (sorted(task.index for task in tasks), list(range(entry.total))),
        "wrong ends": (wrong, []),
        "counts": (kept, entry.counts),
        "recount": (truth, entry.counts),
        "accepted": (told["job.accepted"], 1),
        "ends": (ends, {"run.completed": 1}),
    }
    return [
        f"{entry.job_id} ({job.reason}): {name} is {found}, not {right}"
        for name, (found, right) in expected.items()
        if found != right
    ]


async def _tasks(system: System, job: Job) -> list[Task]:
    found: list[Task] = []
    for shard in range(max(1, job.task_shard_count)):
        after = None
        while page := await system.tasks.page(job.key, shard, after, _PAGE, TaskFilter()):
            found += page
            after = page[-1].task_id
    return found


async def _notices(system: System, job: Job) -> Counter[str]:
    page = await system.records.outbox.events(job.tenant, job.job_id, None, _PAGE)
    return Counter(event.event for event in page.items)
