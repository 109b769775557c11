"""Replacements: a job that takes the place of another one. The old job is cancelled, and no task of the new one starts
before nothing of the old one is in flight.

Two documents describe it. The successor of a job, or of an idempotency key that no job has, names the job that took its
place; the first to write it wins, so that of several requests each replaces the one before it. The replacement of a new
job lists the runs that it waits for. It is written with the job; the ingester marks it as done (ingest/handover.py).
"""

from collections.abc import Sequence
from hashlib import sha256

import msgspec

from conveyor.clock import Clock, seconds_since
from conveyor.coordination.limits import run_slots
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.queue import Queue
from conveyor.engines.records import Document, Records
from conveyor.engines.tasks import Tasks
from conveyor.errors import Unavailable
from conveyor.jobs.chunks import is_in_flight
from conveyor.model import Job, JobId, RunId, TenantId
from conveyor.states import RunState

REPLACEMENT = "replacement"
SUCCESSOR = "successor"

# As long as SQS keeps a message, and a day.
_KEEP_SECONDS = 15 * 86_400.0
_ROWS = 5000
# Longer than workers take to see that a run has finished.
_LOOK_SECONDS = 1.0


class ReplacedRun(msgspec.Struct, frozen=True, omit_defaults=True):
    """A run that has to stop."""

    job_id: JobId
    run_id: RunId
    # The replaced job itself was waiting for it.
    inherited: bool = False


class Replacement(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of the document of a new job, as JSON."""

    runs: Sequence[ReplacedRun]
    # Nothing of these runs is in flight any more.
    done: bool = False


class Successor(msgspec.Struct, frozen=True):
    """The body of the document of a replaced job, or of a key, as JSON."""

    job_id: JobId
    at: float


_replacement = msgspec.json.Decoder(Replacement)
_successor = msgspec.json.Decoder(Successor)


def replacement_of(row: Document) -> Replacement:
    return _replacement.decode(row.body)


def with_replacement(row: Document, replacement: Replacement) -> Document:
    """The document to write."""
    return msgspec.structs.replace(row, body=msgspec.json.encode(replacement))


def replacement_documents(job: Job, runs: Sequence[ReplacedRun]) -> list[Document]:
    """The documents to write with a job that waits for these runs: one, or none."""
    if not runs:
        return []
    row = Document(REPLACEMENT, job.tenant, job.job_id, b"", job_id=job.job_id)
    return [with_replacement(row, Replacement(runs))]


def key_name(key: str) -> str:
    """The id of the successor of an idempotency key."""
    return f"key:{sha256(key.encode()).hexdigest()}"


def successor_document(tenant: TenantId, name: str, job_id: JobId, now: float) -> Document:
    body = msgspec.json.encode(Successor(job_id, now))
    return Document(SUCCESSOR, tenant, name, body, expires_at=now + _KEEP_SECONDS)


def successor_of(row: Document) -> Successor:
    return _successor.decode(row.body)


class Drain:
    """Tells whether anything of a run is in flight."""

    def __init__(
        self, records: Records, tasks: Tasks, queue: Queue, coordinator: Coordinator, clock: Clock, lease: float
    ) -> None:
        self._records = records
        self._tasks = tasks
        self._queue = queue
        self._coordinator = coordinator
        self._clock = clock
        self._lease = lease

    async def is_drained(self, tenant: TenantId, replaced: ReplacedRun) -> bool:
        """Whether the run has finished and none of its tasks is running, or can start.

        A worker that received references before the run finished holds their messages, and slots once a task runs; it
        drops references of finished tasks that it receives later. What a dead worker held expires with its lease."""
        run = await self._records.jobs.run(replaced.job_id, replaced.run_id)
        if run is not None:
            now = self._clock.now()
            passed = 0.0 if run.ended_at is None else seconds_since(run.ended_at, now)
            if passed < _LOOK_SECONDS:
                return False
            job = await self._records.jobs.job(tenant, replaced.job_id)
            is_cancelled = job is not None and run.state is RunState.CANCELLED
            if job is not None and is_cancelled and await self._tasks.cancel_pending(job.key_of(run), _ROWS, now):
                return False
            # Later than that, a message in flight is of another run, on an engine that cannot tell.
            if passed <= self._lease and await is_in_flight(self._queue, replaced.run_id):
                return False
        try:
            return await self._coordinator.permits_in_use(run_slots(replaced.run_id)) == 0
        except Unavailable:
            # Whether a task runs is not known: the ingest of the new job looks again.
            return False
