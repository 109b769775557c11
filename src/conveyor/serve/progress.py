"""Progress. Gets a job as it is stored, adds what is known of its run at this moment (counts, what workers
hold, rate, time left, most frequent errors), and hands on the public job.
"""

from typing import Any

import msgspec

from conveyor.clock import Clock
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.records import Records
from conveyor.engines.tasks import Tasks
from conveyor.model import Counts, Job, Mode, Run
from conveyor.serve.results import iso_time
from conveyor.states import ENDED, WORKABLE

TOP_ERRORS = 5

_WINDOW = 10.0
_SAMPLE_EVERY = 0.5
_SAMPLE_TTL = 60.0


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """How many tasks had ended, at a time. The wall clock, since readers in several processes share the
    samples."""

    at: float
    ended: int


_samples = msgspec.json.Decoder(list[Sample])


async def job_json(records: Records, tasks: Tasks, coordinator: Coordinator, clock: Clock, job: Job) -> dict[str, Any]:
    """A job as the API shows it. `options` has only what differs from the defaults."""
    run = job.run
    counts = await tasks.counts(job.key)
    rate = await _rate(coordinator, clock, run, counts)
    errors = await tasks.error_codes(job.key, TOP_ERRORS) if counts.failed else []
    return {
        "id": job.job_id,
        "name": job.name,
        "state": job.state,
        "reason": job.reason,
        "kind": job.kind,
        "mode": job.mode,
        "task_shard_count": job.task_shard_count,
        "result_layout": job.result_layout,
        "options": msgspec.to_builtins(job.options),
        "created_at": iso_time(job.created_at),
        "expires_at": iso_time(job.expires_at),
        "run": run_json(run, counts, await _running(coordinator, run, counts)),
        "ingest": await _ingest(records, job),
        "invalid_lines": run.invalid,
        "rate": round(rate, 3),
        "eta": _eta(run, counts, rate),
        "top_errors": [{"code": code, "count": count} for code, count in errors],
    }


def run_json(run: Run, counts: Counts, running: int) -> dict[str, Any]:
    """A run as the API shows it."""
    return {
        "id": run.run_id,
        "number": run.number,
        "state": run.state,
        "total": run.total,
        "counts": {
            "pending": max(run.total - counts.ended - running, 0),
            "running": running,
            "succeeded": counts.succeeded,
            "failed": counts.failed,
            "cancelled": counts.cancelled,
        },
        "created_at": iso_time(run.created_at),
        "ended_at": iso_time(run.ended_at),
    }


async def _ingest(records: Records, job: Job) -> dict[str, Any] | None:
    """How far its list is; None for a job that was written whole when it was accepted."""
    if job.source is None and job.mode is Mode.CLOSED:
        return None
    return msgspec.structs.asdict(await records.ingested(job.run.run_id))


async def _running(coordinator: Coordinator, run: Run, counts: Counts) -> int:
    """What workers hold. It lags behind the counts, so it is kept within what can be left."""
    if run.state not in WORKABLE:
        return 0
    return max(min(await coordinator.held(f"run:{run.run_id}"), run.total - counts.ended), 0)


async def _rate(coordinator: Coordinator, clock: Clock, run: Run, counts: Counts) -> float:
    if run.state in ENDED:
        return _average(run, run.total, run.created_at if run.ended_at is None else run.ended_at)
    sample = Sample(clock.now(), counts.ended)
    before = await _remember(coordinator, f"rate:{run.run_id}", sample)
    anchor = _anchor(before, sample.at)
    if anchor is None:
        return _average(run, counts.ended, sample.at)
    return max(sample.ended - anchor.ended, 0) / (sample.at - anchor.at)


async def _remember(coordinator: Coordinator, key: str, sample: Sample) -> list[Sample]:
    """The samples before this one, which is kept too unless the last is fresh. Readers may overwrite each
    other's: a lost sample makes the window a little longer."""
    before = [each for each in _decode(await coordinator.cached(key)) if each.at <= sample.at]
    if not before or sample.at - before[-1].at >= _SAMPLE_EVERY:
        old = [each for each in before if each.at < sample.at - _WINDOW]
        recent = before[len(old) :]
        await coordinator.cache(key, msgspec.json.encode([*old[-1:], *recent, sample]), _SAMPLE_TTL)
    return before


def _decode(raw: bytes | None) -> list[Sample]:
    """None at all for a value that another version wrote: the meter starts again."""
    try:
        return _samples.decode(raw) if raw else []
    except msgspec.MsgspecError:
        return []


def _anchor(before: list[Sample], now: float) -> Sample | None:
    """The oldest sample of the last seconds; if nobody looked for a while, the newest from before. Never one
    so fresh that the quotient is noise."""
    old = [each for each in before if each.at < now - _WINDOW]
    recent = [each for each in before if now - _WINDOW <= each.at <= now - _SAMPLE_EVERY]
    return next(iter([*recent[:1], *old[-1:]]), None)


def _average(run: Run, ended: int, until: float) -> float:
    seconds = until - run.created_at
    return ended / seconds if seconds > 0 else 0.0


def _eta(run: Run, counts: Counts, rate: float) -> float | None:
    """Seconds to the end at this rate; None when it can not be told: ended, paused, or the total not final."""
    if run.state not in WORKABLE or not run.last_batch or rate <= 0:
        return None
    return round(max(run.total - counts.ended, 0) / rate, 1)
