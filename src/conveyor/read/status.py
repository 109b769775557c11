"""Status. Gets a job as stored, adds its counts and top errors, by the latest outcome of each task over all runs, and
the current state of its run (counts, tasks in progress, rate, time left, what it waits for, task latency), and returns
the public job. Nothing is counted for it: the cost does not grow with the job, and concurrent readers share one cached
result.
"""

import asyncio
from typing import Any, TypeVar

import msgspec

from conveyor.clock import Clock
from conveyor.coordination.breaker_states import current_wait
from conveyor.coordination.durations import TaskTime, task_time
from conveyor.coordination.limits import run_slots
from conveyor.coordination.waits import Wait
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.records import Records
from conveyor.engines.tasks import Tasks, is_reachable
from conveyor.errors import TasksElsewhere
from conveyor.jobs.job_counts import JobCounts, job_counts, run_counts
from conveyor.jobs.secrets import shown_options
from conveyor.model import Counts, Ingested, Job, Lineage, Mode, Run
from conveyor.read.breakdown_views import read_breakdown, total_tally
from conveyor.read.results import iso_time
from conveyor.read.runs import LATEST_PER_TASK
from conveyor.read.transfers import Transfers, transfers
from conveyor.states import ENDED, WORKABLE, RunState

T = TypeVar("T")

TOP_ERRORS = 5
# Earlier runs shown with a job, newest first.
MAX_RUNS = 50

_WINDOW = 10.0
_SAMPLE_EVERY = 0.5
_SAMPLE_TTL = 60.0
# Age of a cached status in seconds: when to refresh it, and when to drop it.
_FRESH = 0.5
_OLDEST = 1.0
# The progress of a finished ingest does not change any more.
_INGESTED_TTL = 600.0


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """How many tasks were finished at a time, by the wall clock: readers in several processes share the samples."""

    at: float
    ended: int


class Live(msgspec.Struct, frozen=True, array_like=True):
    """The state of a run at one moment."""

    at: float
    run: Run
    counts: Counts
    running: int
    rate: float
    # Of the job.
    whole: JobCounts
    ingest: Ingested | None
    time: TaskTime | None
    wait: Wait | None
    # The job's runs before this one, newest first, with their counts.
    older: list[tuple[Run, Counts]] = []
    transfers: Transfers | None = None


_samples = msgspec.json.Decoder(list[Sample])
_live = msgspec.json.Decoder(Live)
_ingested = msgspec.json.Decoder(Ingested)


async def job_json(records: Records, tasks: Tasks, coordinator: Coordinator, clock: Clock, job: Job) -> dict[str, Any]:
    """A job as listings show it. `options` has only values that differ from the defaults. A job whose tasks are out of
    reach does not hide the others: its counts are 0, and its reason says why."""
    if not is_reachable(tasks, job.key):
        return _unreachable_json(job, clock, await _first_total(records, job))
    return _job_json(job, await _read_live(records, tasks, coordinator, clock, job))


async def _first_total(records: Records, job: Job) -> int:
    """How many tasks the job has. Its first run has them all."""
    runs = await records.jobs.runs(job.job_id) if job.run.number > 1 else []
    return next((run.total for run in runs if run.number == 1), job.run.total)


def _unreachable_json(job: Job, clock: Clock, total: int) -> dict[str, Any]:
    wait = Wait(TasksElsewhere.code, f"The tasks of this job are in the task engine {job.task_store}, not open here.")
    whole = JobCounts(total, Counts())
    live = Live(clock.now(), _without_secrets(job.run), Counts(), 0, 0.0, whole, None, None, wait)
    shown = _job_json(msgspec.structs.replace(job, reason=wait.detail), live)
    # Nothing is known of them.
    counts = {**shown["run"]["counts"], "pending": 0}
    return {**shown, "reason_code": wait.code, "counts": counts, "run": {**shown["run"], "counts": counts}}


async def status_json(
    records: Records, tasks: Tasks, coordinator: Coordinator, clock: Clock, job: Job
) -> dict[str, Any]:
    """A job with all its runs. A fresh cached status is reused; a change of state has a cache entry of its own."""
    live = await _cached_live(coordinator, job)
    if live is None or not _is_fresh(live, clock):
        live = await refresh_status(records, tasks, coordinator, clock, job)
    return _status_json(job, live)


async def hot_status_json(
    records: Records, tasks: Tasks, coordinator: Coordinator, clock: Clock, job: Job
) -> tuple[dict[str, Any], bool]:
    """`status_json` for clients that poll: it returns a stale status rather than wait. The flag says that the caller
    should refresh it."""
    live = await _cached_live(coordinator, job)
    if live is None:
        live = await refresh_status(records, tasks, coordinator, clock, job)
    return _status_json(job, live), not _is_fresh(live, clock)


async def refresh_status(records: Records, tasks: Tasks, coordinator: Coordinator, clock: Clock, job: Job) -> Live:
    """Read the state of the run, and cache it for other readers."""
    current, older = await asyncio.gather(
        _read_live(records, tasks, coordinator, clock, job), _older_runs(records, tasks, job)
    )
    time = current.time or await _kept_time(records, tasks, coordinator, job, current.counts)
    live = msgspec.structs.replace(current, older=older, time=time)
    await coordinator.cache(_status_key(job), msgspec.json.encode(live), _OLDEST)
    return live


async def _kept_time(
    records: Records, tasks: Tasks, coordinator: Coordinator, job: Job, counts: Counts
) -> TaskTime | None:
    """The latency of all attempts, where the coordinator has forgotten that of the last ones."""
    if counts.succeeded + counts.failed == 0:
        return None
    tally = total_tally((await read_breakdown(records, tasks, coordinator, job, job.run)).breakdown)
    p50, p95 = tally.percentile(0.5), tally.percentile(0.95)
    return None if p50 is None or p95 is None else TaskTime(p50, p95)


async def _cached_live(coordinator: Coordinator, job: Job) -> Live | None:
    return _decoded(_live, await coordinator.cached(_status_key(job)))


def _status_key(job: Job) -> str:
    return f"status:{job.run.run_id}:{job.state}"


def _is_fresh(live: Live, clock: Clock) -> bool:
    return 0 <= clock.now() - live.at < _FRESH


def _status_json(job: Job, live: Live) -> dict[str, Any]:
    shown = _job_json(job, live)
    return {**shown, "runs": [shown["run"], *(run_json(run, counts, 0) for run, counts in live.older)]}


async def _older_runs(records: Records, tasks: Tasks, job: Job) -> list[tuple[Run, Counts]]:
    if job.run.number == 1:
        return []
    before = [run for run in await records.jobs.runs(job.job_id) if run.number < job.run.number]
    runs = [_without_secrets(run) for run in reversed(before[-MAX_RUNS:])]
    counts = await asyncio.gather(*(tasks.counts(job.key_of(run)) for run in runs))
    return list(zip(runs, counts, strict=True))


async def _read_live(records: Records, tasks: Tasks, coordinator: Coordinator, clock: Clock, job: Job) -> Live:
    run = job.run
    # Concurrently: each is a round trip to the store.
    whole, ingest, moving = await asyncio.gather(
        job_counts(records, tasks, job, coordinator, TOP_ERRORS),
        _ingest(records, coordinator, job),
        transfers(records.documents, tasks, job),
    )
    counts = whole.run
    return Live(
        at=clock.now(),
        run=_without_secrets(run),
        counts=counts,
        running=await _running(coordinator, run, counts),
        rate=await _rate(coordinator, clock, run, counts),
        whole=whole,
        ingest=ingest,
        time=await task_time(coordinator, run.run_id),
        wait=await wait_of(coordinator, clock, job, counts),
        transfers=moving,
    )


def _job_json(job: Job, live: Live) -> dict[str, Any]:
    run, wait = live.run, _shown_wait(live.wait)
    return {
        "id": job.job_id,
        "name": job.name,
        "state": job.state,
        "reason": job.reason or (None if wait is None else wait.detail),
        "reason_code": run.reason_code or (None if wait is None else wait.code),
        "waiting": None if live.wait is None else wait_json(live.wait),
        "kind": job.kind,
        "mode": job.mode,
        "task_shard_count": job.task_shard_count,
        "result_layout": job.result_layout,
        "options": msgspec.to_builtins(job.options),
        "created_at": iso_time(job.created_at),
        "expires_at": iso_time(job.expires_at),
        **_counts_json(run, live),
        "run": run_json(run, live.counts, live.running),
        "ingest": None if live.ingest is None else msgspec.structs.asdict(live.ingest),
        "invalid_lines": live.whole.invalid,
        "rate": round(live.rate, 3),
        "eta": _eta(run, live.counts, live.rate),
        "task_time": live.time,
        "transfers": None if live.transfers is None else msgspec.structs.asdict(live.transfers),
    }


def _counts_json(run: Run, live: Live) -> dict[str, Any]:
    """The job by the latest outcome of each task: one that a rerun runs has its earlier outcome until it finishes."""
    return {"view": LATEST_PER_TASK, **_view_json(live.whole, live.running if run.number == 1 else 0)}


def _view_json(whole: JobCounts, running: int) -> dict[str, Any]:
    return {
        "total": whole.total,
        "counts": {
            "pending": max(whole.total - whole.counts.ended - running, 0),
            "running": running,
            **msgspec.structs.asdict(whole.counts),
        },
        "top_errors": [{"code": code, "count": count} for code, count in whole.top_errors(TOP_ERRORS)],
    }


async def of_run(tasks: Tasks, job: Job, run: Run, shown: dict[str, Any]) -> dict[str, Any]:
    """The job with the total, the counts and the errors of one of its runs."""
    running = shown["run"]["counts"]["running"] if run.run_id == job.run.run_id else 0
    return {**shown, "view": run.run_id, **_view_json(await run_counts(tasks, job, run, TOP_ERRORS), running)}


def run_json(run: Run, counts: Counts, running: int) -> dict[str, Any]:
    """A run as the API shows it. Pending tasks of a finished run will be cancelled by the sweeper."""
    return {
        "id": run.run_id,
        "number": run.number,
        "state": run.state,
        "reason_code": run.reason_code,
        "total": run.total,
        "counts": {
            "pending": max(run.total - counts.ended - running, 0),
            "running": running,
            **msgspec.structs.asdict(counts),
        },
        "created_at": iso_time(run.created_at),
        "ended_at": iso_time(run.ended_at),
        "lineage": None if run.lineage is None else _lineage_json(run.lineage),
    }


def _lineage_json(lineage: Lineage) -> dict[str, Any]:
    return {
        "parent": lineage.parent,
        "status": [status.label for status in lineage.statuses],
        "error_code": lineage.error_code,
        "http_status": lineage.http_status,
        "tag": lineage.tag,
        "indexes": list(lineage.indexes),
        "dead_lettered": lineage.dead_lettered,
        "damaged": lineage.damaged,
        "extract_only": lineage.extract_only,
        "changed_only": lineage.changed_only,
        "host": lineage.host,
        "options": shown_options(lineage.overrides),
    }


def _without_secrets(run: Run) -> Run:
    if run.lineage is None:
        return run
    overrides = shown_options(run.lineage.overrides)
    return msgspec.structs.replace(run, lineage=msgspec.structs.replace(run.lineage, overrides=overrides))


async def wait_of(coordinator: Coordinator, clock: Clock, job: Job, counts: Counts) -> Wait | None:
    """Why no task of the run starts now, or None."""
    run = job.run
    if run.state in ENDED:
        return None
    if run.state is RunState.PAUSED:
        return Wait("paused", "The job is paused. Resume it to continue.")
    wait = await current_wait(coordinator, clock, job)
    if wait is not None or run.state is not RunState.INGESTING or counts.ended < run.total:
        return wait
    if job.mode is Mode.OPEN and not run.sealed and run.lineage is None:
        return Wait("open", "The job waits for more tasks.")
    return Wait("ingesting", "The list is being ingested.")


def _shown_wait(wait: Wait | None) -> Wait | None:
    """The wait that a job shows as its reason. Every ingest waits for its list: that is no reason."""
    return None if wait is None or wait.code in ("open", "ingesting") else wait


def wait_json(wait: Wait) -> dict[str, Any]:
    """A wait as the API shows it."""
    return {
        "code": wait.code,
        "detail": wait.detail,
        "until": iso_time(wait.until),
        "target": wait.target,
        "error": wait.error,
    }


async def _ingest(records: Records, coordinator: Coordinator, job: Job) -> Ingested | None:
    """The progress of the ingest; None for a run whose tasks were written on accept."""
    run = job.run
    if job.source is None and job.mode is Mode.CLOSED and run.lineage is None:
        return None
    if not run.last_batch:
        return await records.ingests.ingested(run.run_id)
    # Cached: an open job may have very many ranges.
    key = f"ingested:{run.run_id}"
    ingested = _decoded(_ingested, await coordinator.cached(key))
    if ingested is None:
        ingested = await records.ingests.ingested(run.run_id)
        await coordinator.cache(key, msgspec.json.encode(ingested), _INGESTED_TTL)
    is_written_on_accept = ingested.ranges == 0 and job.mode is Mode.CLOSED and run.lineage is None
    return None if is_written_on_accept else ingested


async def _running(coordinator: Coordinator, run: Run, counts: Counts) -> int:
    """Tasks in progress. The figure lags behind the counts, so it is limited to the unfinished tasks."""
    if run.state not in WORKABLE:
        return 0
    return max(min(await coordinator.permits_in_use(run_slots(run.run_id)), run.total - counts.ended), 0)


async def _rate(coordinator: Coordinator, clock: Clock, run: Run, counts: Counts) -> float:
    if run.state in ENDED:
        # Cancelled tasks took no time.
        worked = counts.succeeded + counts.failed
        return _average(run, worked, run.created_at if run.ended_at is None else run.ended_at)
    sample = Sample(clock.now(), counts.ended)
    before = await _add_sample(coordinator, f"rate:{run.run_id}", sample)
    anchor = _anchor(before, sample.at)
    if anchor is None:
        return _average(run, counts.ended, sample.at)
    return max(sample.ended - anchor.ended, 0) / (sample.at - anchor.at)


async def _add_sample(coordinator: Coordinator, key: str, sample: Sample) -> list[Sample]:
    """Store a sample, unless the last one is fresh, and return the samples before it. Readers may overwrite each
    other's samples: a lost sample makes the window a little longer."""
    cached = _decoded(_samples, await coordinator.cached(key)) or []
    before = [earlier for earlier in cached if earlier.at <= sample.at]
    if not before or sample.at - before[-1].at >= _SAMPLE_EVERY:
        old = [earlier for earlier in before if earlier.at < sample.at - _WINDOW]
        recent = before[len(old) :]
        await coordinator.cache(key, msgspec.json.encode([*old[-1:], *recent, sample]), _SAMPLE_TTL)
    return before


def _decoded(decoder: msgspec.json.Decoder[T], raw: bytes | None) -> T | None:
    """None for a value in the form of another version: it is computed again."""
    try:
        return decoder.decode(raw) if raw else None
    except msgspec.MsgspecError:
        return None


def _anchor(before: list[Sample], now: float) -> Sample | None:
    """The sample to compute the rate from: the oldest in the window, or else the newest before it. Never one so fresh
    that the quotient is noise."""
    old = [sample for sample in before if sample.at < now - _WINDOW]
    recent = [sample for sample in before if now - _WINDOW <= sample.at <= now - _SAMPLE_EVERY]
    return next(iter([*recent[:1], *old[-1:]]), None)


def _average(run: Run, ended: int, until: float) -> float:
    seconds = until - run.created_at
    return ended / seconds if seconds > 0 else 0.0


def _eta(run: Run, counts: Counts, rate: float) -> float | None:
    """Seconds to completion at this rate; None if the run is finished or paused, or its total is not final."""
    if run.state not in WORKABLE or not run.last_batch or rate <= 0:
        return None
    return round(max(run.total - counts.ended, 0) / rate, 1)
