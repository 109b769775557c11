"""The answer to an accepted job, as it is sent and as it is stored for replay: a part of what GET shows of the job."""

import msgspec

from conveyor.clock import iso_text
from conveyor.jobs.job_counts import JobCounts
from conveyor.model import Counts, Job, JobId, JobKind, Mode, ResultLayout, RunId
from conveyor.read.runs import LATEST_PER_TASK
from conveyor.states import RunState

NONE_FINISHED = Counts()


class CountsView(msgspec.Struct, frozen=True):
    """Tasks of a job or of a run by status; their sum is the total. `unchanged` are some of the succeeded ones."""

    pending: int
    running: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    unchanged: int = 0


class RunView(msgspec.Struct, frozen=True):
    """A run as a client sees it."""

    id: RunId
    number: int
    state: RunState
    total: int
    counts: CountsView


class AcceptedView(msgspec.Struct, frozen=True):
    """A job when it was accepted, without its options: headers and gateways carry secrets."""

    id: JobId
    name: str | None
    kind: JobKind
    mode: Mode
    state: RunState
    reason: str | None
    # Stable, where the text of the reason may change.
    reason_code: str | None
    task_shard_count: int
    result_layout: ResultLayout
    created_at: str
    expires_at: str | None
    # By the latest outcome of each task over all runs.
    view: str
    total: int
    counts: CountsView
    run: RunView
    # Invalid tasks of the request, or lines of its list if that was read already. They were skipped.
    invalid_lines: int


def answer(job: Job, counts: Counts = NONE_FINISHED, whole: JobCounts | None = None, *, invalid: int = 0) -> bytes:
    """The body of the 201 or 202. `counts` are those of the run, `whole` those of the job if it has earlier runs;
    `invalid` are lines that are known to be invalid, and not counted yet."""
    run = job.run
    of_job = whole or JobCounts(run.total, counts, invalid=run.invalid)
    view = AcceptedView(
        id=job.job_id,
        name=job.name,
        kind=job.kind,
        mode=job.mode,
        state=job.state,
        reason=job.reason,
        reason_code=job.run.reason_code,
        task_shard_count=job.task_shard_count,
        result_layout=job.result_layout,
        created_at=iso_text(job.created_at),
        expires_at=None if job.expires_at is None else iso_text(job.expires_at),
        view=LATEST_PER_TASK,
        total=of_job.total,
        counts=_shown(of_job.total, of_job.counts),
        run=RunView(run.run_id, run.number, run.state, run.total, _shown(run.total, counts)),
        invalid_lines=of_job.invalid + invalid,
    )
    return msgspec.json.encode(view)


def _shown(total: int, counts: Counts) -> CountsView:
    return CountsView(
        pending=max(total - counts.ended, 0),
        succeeded=counts.succeeded,
        failed=counts.failed,
        cancelled=counts.cancelled,
        unchanged=counts.unchanged,
    )
