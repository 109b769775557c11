"""Progress. Gets a job as it is stored, adds what is known of its run at this moment (counts, what workers hold, rate,
time left, what it waits for, how long tasks take, most frequent errors), and hands on the public job. None of it is
counted for that: the cost does not grow with the job, and readers within the same moment share what one of them found.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from conveyor.clock import Clock
from conveyor.coordination.durations import TaskTime, task_time
from conveyor.coordination.limits import run_slots
from conveyor.coordination.waits import Wait, waiting
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.records import Records
from conveyor.engines.tasks import Tasks
from conveyor.model import Counts, Ingested, Job, Lineage, Mode, Run
from conveyor.read.results import iso_time
from conveyor.states import ENDED, WORKABLE, RunState

T = TypeVar("T")

TOP_ERRORS = 5
# Earlier runs that a job is shown with, the newest of them.
MOST_RUNS = 50

_HIDDEN = "[hidden]"
_WINDOW = 10.0
_SAMPLE_EVERY = 0.5
_SAMPLE_TTL = 60.0
# How old what is shown may be, before it is found out anew, and at all.
_FRESH = 0.5
_OLDEST = 1.0
# How far a list is does not change once all of it is ingested.
_INGESTED_TTL = 600.0


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """How many tasks had ended, at a time. The wall clock, since readers in several processes share the
    samples."""

    at: float
    ended: int


class Live(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a run at one moment."""

    at: float
    run: Run
    counts: Counts
    running: int
    rate: float
    errors: list[tuple[str, int]]
    ingest: Ingested | None
    time: TaskTime | None
    wait: Wait | None
    # The job's runs before this one, newest first, with their counts.
    older: list[tuple[Run, Counts]] = []


_samples = msgspec.json.Decoder(list[Sample])
_live = msgspec.json.Decoder(Live)
_ingested = msgspec.json.Decoder(Ingested)


async def job_json(records: Records, tasks: Tasks, coordinator: Coordinator, clock: Clock, job: Job) -> dict[str, Any]:
    """A job as the API lists it. `options` has only what differs from the defaults."""
    return _job_json(job, await _look(records, tasks, coordinator, clock, job))


async def status_json(
    records: Records, tasks: Tasks, coordinator: Coordinator, clock: Clock, job: Job
) -> dict[str, Any]:
    """The same with all its runs. What was found for another reader a moment ago serves this one too; a run that has
    moved since is looked at again."""
    live = await _kept(coordinator, job)
    if live is None or not _is_fresh(live, clock):
        live = await refresh_status(records, tasks, coordinator, clock, job)
    return _status_json(job, live)


async def hot_status_json(
    records: Records, tasks: Tasks, coordinator: Coordinator, clock: Clock, job: Job
) -> tuple[dict[str, Any], bool]:
    """The same, for who asks again and again: of a moment before that, if need be, rather than late. The second says
    that it is time to find it out anew."""
    live = await _kept(coordinator, job)
    if live is None:
        live = await refresh_status(records, tasks, coordinator, clock, job)
    return _status_json(job, live), not _is_fresh(live, clock)


async def refresh_status(records: Records, tasks: Tasks, coordinator: Coordinator, clock: Clock, job: Job) -> Live:
    """Look, and keep what is found for others."""
    found, older = await asyncio.gather(_look(records, tasks, coordinator, clock, job), _older(records, tasks, job))
    live = msgspec.structs.replace(found, older=older)
    await coordinator.cache(_status_key(job), msgspec.json.encode(live), _OLDEST)
    return live


async def _kept(coordinator: Coordinator, job: Job) -> Live | None:
    return _decoded(_live, await coordinator.cached(_status_key(job)))


def _status_key(job: Job) -> str:
    return f"status:{job.run.run_id}:{job.state}"


def _is_fresh(live: Live, clock: Clock) -> bool:
    return 0 <= clock.now() - live.at < _FRESH


def _status_json(job: Job, live: Live) -> dict[str, Any]:
    shown = _job_json(job, live)
    return {**shown, "runs": [shown["run"], *(run_json(*each, 0) for each in live.older)]}


async def _older(records: Records, tasks: Tasks, job: Job) -> list[tuple[Run, Counts]]:
    if job.run.number == 1:
        return []
    before = [run for run in await records.runs(job.job_id) if run.number < job.run.number]
    runs = [_without_secrets(run) for run in reversed(before[-MOST_RUNS:])]
    counts = await asyncio.gather(*(tasks.counts(job.key_of(run)) for run in runs))
    return list(zip(runs, counts, strict=True))


async def verify_json(records: Records, tasks: Tasks, job: Job) -> dict[str, Any]:
    """Count the rows of every run, and hold the kept counts to them; what differs is mended. While a run goes on, tasks
    end between the two looks: then only counts that are ahead of the rows are known to be wrong."""
    found: list[dict[str, Any]] = []
    for run in await records.runs(job.job_id):
        kept = await tasks.counts(job.key_of(run))
        counted = await tasks.recount(job.key_of(run))
        exact = run.state in ENDED and counted.ended == run.total
        found.append(
            {
                "run": run.run_id,
                "number": run.number,
                "kept": kept,
                "counted": counted,
                "drift": _drift(kept, counted, exact),
                "exact": exact,
            }
        )
    return {"drift": sum(each["drift"] for each in found), "runs": found}


def _drift(kept: Counts, counted: Counts, exact: bool) -> int:
    pairs = zip(msgspec.structs.astuple(kept), msgspec.structs.astuple(counted), strict=True)
    return sum(abs(ours - truth) if exact else max(0, ours - truth) for ours, truth in pairs)


async def _look(records: Records, tasks: Tasks, coordinator: Coordinator, clock: Clock, job: Job) -> Live:
    run = job.run
    # At the same time: each is a moment of waiting for the store.
    counts, errors, ingest = await asyncio.gather(
        tasks.counts(job.key), tasks.error_codes(job.key, TOP_ERRORS), _ingest(records, coordinator, job)
    )
    return Live(
        at=clock.now(),
        run=_without_secrets(run),
        counts=counts,
        running=await _running(coordinator, run, counts),
        rate=await _rate(coordinator, clock, run, counts),
        errors=errors if counts.failed else [],
        ingest=ingest,
        time=await task_time(coordinator, run.run_id),
        wait=await _wait(coordinator, job, counts),
    )


def _job_json(job: Job, live: Live) -> dict[str, Any]:
    run, held_back = live.run, _held_back(live.wait)
    return {
        "id": job.job_id,
        "name": job.name,
        "state": job.state,
        "reason": job.reason or (None if held_back is None else held_back.detail),
        "reason_code": run.reason_code or (None if held_back is None else held_back.code),
        "waiting": None if live.wait is None else _wait_json(live.wait),
        "kind": job.kind,
        "mode": job.mode,
        "task_shard_count": job.task_shard_count,
        "result_layout": job.result_layout,
        "options": msgspec.to_builtins(job.options),
        "created_at": iso_time(job.created_at),
        "expires_at": iso_time(job.expires_at),
        "run": run_json(run, live.counts, live.running),
        "ingest": None if live.ingest is None else msgspec.structs.asdict(live.ingest),
        "invalid_lines": run.invalid,
        "rate": round(live.rate, 3),
        "eta": _eta(run, live.counts, live.rate),
        "task_time": live.time,
        "top_errors": [{"code": code, "count": count} for code, count in live.errors],
    }


def run_json(run: Run, counts: Counts, running: int) -> dict[str, Any]:
    """A run as the API shows it. What an ended one has pending is still to be cancelled behind it."""
    return {
        "id": run.run_id,
        "number": run.number,
        "state": run.state,
        "reason_code": run.reason_code,
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
        "options": without_secrets(lineage.overrides),
    }


def without_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """Headers and gateways carry passwords: who may look at a job need not know them."""
    shown: dict[str, Any] = {}
    for name, value in options.items():
        if name == "headers" and isinstance(value, Mapping):
            shown[name] = dict.fromkeys(value, _HIDDEN)
        elif name == "body" and value is not None:
            # Of a call to an export API.
            shown[name] = _HIDDEN
        elif name == "gateway" and isinstance(value, Mapping):
            shown[name] = {part: _HIDDEN for part, given in value.items() if given}
        else:
            shown[name] = without_secrets(value) if isinstance(value, Mapping) else value
    return shown


def _without_secrets(run: Run) -> Run:
    if run.lineage is None:
        return run
    overrides = without_secrets(run.lineage.overrides)
    return msgspec.structs.replace(run, lineage=msgspec.structs.replace(run.lineage, overrides=overrides))


async def _wait(coordinator: Coordinator, job: Job, counts: Counts) -> Wait | None:
    """Why nothing of it starts now, if something holds it back."""
    run = job.run
    if run.state in ENDED:
        return None
    if run.state is RunState.PAUSED:
        return Wait("paused", "It is paused; resume it to go on.")
    said = await waiting(coordinator, run.run_id)
    if said is not None or run.state is not RunState.INGESTING or counts.ended < run.total:
        return said
    if job.mode is Mode.OPEN and not run.sealed and run.lineage is None:
        return Wait("open", "It waits for tasks to be added.")
    return Wait("ingesting", "Its list is being ingested.")


def _held_back(wait: Wait | None) -> Wait | None:
    """What a job shows as its reason while it waits. Waiting for a list is part of every ingest, and no reason."""
    return None if wait is None or wait.code in ("open", "ingesting") else wait


def _wait_json(wait: Wait) -> dict[str, Any]:
    return {"code": wait.code, "detail": wait.detail, "until": iso_time(wait.until)}


async def _ingest(records: Records, coordinator: Coordinator, job: Job) -> Ingested | None:
    """How far its list is; None for a run that was written whole when it was accepted."""
    run = job.run
    if job.source is None and job.mode is Mode.CLOSED and run.lineage is None:
        return None
    if not run.last_batch:
        return await records.ingested(run.run_id)
    # An open job may have been made of very many ranges.
    key = f"ingested:{run.run_id}"
    found = _decoded(_ingested, await coordinator.cached(key))
    if found is None:
        found = await records.ingested(run.run_id)
        await coordinator.cache(key, msgspec.json.encode(found), _INGESTED_TTL)
    return found


async def _running(coordinator: Coordinator, run: Run, counts: Counts) -> int:
    """What workers hold. It lags behind the counts, so it is kept within what can be left."""
    if run.state not in WORKABLE:
        return 0
    return max(min(await coordinator.held(run_slots(run.run_id)), run.total - counts.ended), 0)


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
    before = [each for each in _decoded(_samples, await coordinator.cached(key)) or [] if each.at <= sample.at]
    if not before or sample.at - before[-1].at >= _SAMPLE_EVERY:
        old = [each for each in before if each.at < sample.at - _WINDOW]
        recent = before[len(old) :]
        await coordinator.cache(key, msgspec.json.encode([*old[-1:], *recent, sample]), _SAMPLE_TTL)
    return before


def _decoded(decoder: msgspec.json.Decoder[T], raw: bytes | None) -> T | None:
    """None for a value that another version wrote: it is made again."""
    try:
        return decoder.decode(raw) if raw else None
    except msgspec.MsgspecError:
        return None


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
