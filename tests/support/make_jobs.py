"""Jobs and runs as tests need them: right in every field, and different where the test says so."""

import math
from typing import Any

from conveyor.clock import Clock
from conveyor.model import (
    Compression,
    Job,
    JobId,
    JobKind,
    ListFormat,
    Mode,
    Options,
    OutboxEvent,
    Range,
    ResultLayout,
    Run,
    RunId,
    RunKey,
    Source,
    TaskEnd,
    TaskSeed,
    TenantId,
    expiry_of,
)
from conveyor.states import ENDED, RunState, TaskStatus

ACME = TenantId("acme")
OTHER = TenantId("other")
DAY = 86_400.0

# Reasons as the versions wrote them that had no codes, and the codes that they stand for.
REASONS_WITHOUT_CODE = {
    "ingest failed: OSError: the store is down (tried 5 times)": "ingest_failed",
    "ingest failed: The list has 2 lines that are not valid: line 1: empty; line 3: no URL": "list_rejected",
    "ingest failed: The list has 1 line that is not valid: line 1: (tried 5 times) ": "list_rejected",
    "ingest failed: The list can not be read\nto its end": "list_unreadable",
    "failure threshold: 3 tasks failed, the limit is 3": "failure_threshold",
    "deadline: not done within 60 s; its list is not ingested": "deadline",
    "cancelled on request": "cancelled",
    "paused on request": "paused",
    "there were no tasks": "no_tasks",
    "the list has no tasks (7 lines were not valid)": "no_tasks",
    "closed: nothing was added for 60 s; there were no tasks": "no_tasks",
    "closed: nothing was added for 60 s": "idle_timeout",
    "by hand": None,
}

# Jobs as the versions wrote them whose retention counted from the creation: state, options, whether it was deleted,
# expiry, end of the run; and the expiry that they have now.
JOBS_WITH_EXPIRY: list[tuple[str, str, bool, float, float | None, float]] = [
    ("running", "{}", False, 9e9, None, math.inf),
    ("paused", '{"retention_days":2.5}', False, 9e9, None, math.inf),
    ("completed", "{}", False, 9e9, 9e9 - DAY, 9e9 + 13 * DAY),
    ("failed", '{"retention_days":2.5}', False, 9e9, 9e9 - DAY, 9e9 + 1.5 * DAY),
    # Expired, or deleted: a part of it may be gone.
    ("running", "{}", False, 5.0, None, 5.0),
    ("completed", "{}", False, 5.0, 4.0, 5.0),
    ("cancelled", "{}", True, 9e9, 5.0, 9e9),
]


def make_job(
    clock: Clock,
    *,
    tenant: TenantId = ACME,
    total: int = 0,
    latched: bool = True,
    state: RunState = RunState.RUNNING,
    shards: int = 1,
    layout: ResultLayout = ResultLayout.OBJECT,
    kind: JobKind = JobKind.PYTHON,
    source: Source | None = None,
    mode: Mode = Mode.CLOSED,
    **options: Any,
) -> Job:
    """A job that nobody has written yet. A finished one ended now."""
    now = clock.now()
    ended_at = now if state in ENDED else None
    run = Run(RunId(clock.new_id("run")), 1, state, total, latched, now, ended_at, sealed=latched, touched_at=now)
    chosen = Options(**options)
    return Job(
        tenant=tenant,
        job_id=JobId(clock.new_id("job")),
        name="a job",
        kind=kind,
        mode=mode,
        options=chosen,
        task_shard_count=shards,
        result_layout=layout,
        state=state,
        reason=None,
        created_at=now,
        expires_at=expiry_of(chosen, ended_at),
        run=run,
        source=source,
    )


def make_notice(clock: Clock, job: Job, event: str = "job.accepted", **data: Any) -> OutboxEvent:
    return OutboxEvent(clock.new_id("evt"), job.tenant, job.job_id, job.run.run_id, event, clock.now(), data)


def make_run(clock: Clock, shards: int = 1, tenant: TenantId = ACME) -> RunKey:
    """Where a run's tasks would be, for tests that need no job around them."""
    return RunKey(tenant, JobId(clock.new_id("job")), RunId(clock.new_id("run")), shards)


def seeds(count: int, start: int = 0) -> list[TaskSeed]:
    return [TaskSeed(index, f'"input {index}"') for index in range(start, start + count)]


def end(
    index: int,
    status: TaskStatus = TaskStatus.SUCCEEDED,
    *,
    code: str | None = None,
    http_status: int | None = None,
    attempts: int = 1,
    detail: str = "{}",
    at: float = 1_800_000_000.0,
) -> TaskEnd:
    """A terminal transition; a failed one has a code unless told otherwise."""
    return TaskEnd(index, status, attempts, http_status, code, detail, at)


def some_ranges() -> list[Range]:
    """Ranges of every kind: with an end and without, of known length and compressed, at every stage."""
    source = Source("lists/acme/one", 1000, "0" * 64)
    jsonl, none, gzip = ListFormat.JSONL, Compression.NONE, Compression.GZIP
    return [
        Range(0, source, jsonl, none, 0, 400, 0, index=4, offset=100, tasks=3, invalid=1),
        Range(1, source, jsonl, none, 400, None, 40, index=90, offset=1001, tasks=50, done=True),
        Range(2, source, jsonl, none, 0, None, 100, index=100),
        Range(3, source, jsonl, gzip, 0, None, 200, index=220, offset=5000, tasks=20),
        Range(4, source, jsonl, gzip, 0, None, 300, index=330, offset=7000, tasks=28, invalid=2, done=True),
    ]
