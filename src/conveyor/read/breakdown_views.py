"""Breakdowns of runs, as people read them: errors by code and host with samples, hosts with their throughput, latency,
breaker and pace, and attempts over time.

A large run has a stored breakdown (jobs/breakdowns.py). The rows and events of a small one are read, and its breakdown
is made of them: it is exact. Either way the cost does not grow with the job.
"""

import asyncio
from typing import Any
from urllib.parse import urlsplit

import msgspec

from conveyor.clock import Clock, iso_text
from conveyor.coordination.breaker_states import list_breakers
from conveyor.coordination.paces import list_paces
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.records import Records
from conveyor.engines.tasks import TaskFilter, Tasks
from conveyor.jobs.breakdowns import (
    OTHER,
    SMALL_RUN,
    Breakdown,
    ErrorGroup,
    ErrorSample,
    FailedAttempt,
    HostTally,
    decode_breakdown,
    encode_breakdown,
    stored_breakdown,
)
from conveyor.jobs.job_counts import run_counts
from conveyor.jobs.task_hosts import task_host
from conveyor.model import EventRecord, Job, Run, RunKey, Task, TaskError, TenantId, task_id
from conveyor.states import ENDED, TaskStatus
from conveyor.system import System

# Error codes whose exact counts are read.
_MAX_CODES = 100
# Events of a small run that are read at most.
_MAX_EVENTS = 5000
_EVENTS = 1000
# How long a breakdown that was made of rows is cached, in seconds: while the run is unfinished, and after.
_FRESH = 2.0
_FINISHED_FRESH = 30.0


class ReadBreakdown(msgspec.Struct, frozen=True):
    """A breakdown, and whether it is exact: made of the rows of the run."""

    breakdown: Breakdown
    is_exact: bool


async def read_breakdown(records: Records, tasks: Tasks, coordinator: Coordinator, job: Job, run: Run) -> ReadBreakdown:
    """The breakdown of one run."""
    key = job.key_of(run)
    if run.total > SMALL_RUN:
        return ReadBreakdown(await stored_breakdown(records.documents, key), is_exact=False)
    name = f"breakdown:{run.run_id}:{run.state}"
    raw = await coordinator.cached(name)
    cached = None if not raw else decode_breakdown(raw[1:])
    if raw and cached is not None:
        return ReadBreakdown(cached, is_exact=raw[:1] == b"=")
    found = await _of_rows(tasks, key)
    body = (b"=" if found.is_exact else b"~") + encode_breakdown(found.breakdown)
    await coordinator.cache(name, body, _FINISHED_FRESH if run.state in ENDED else _FRESH)
    return found


async def errors_json(system: System, job: Job, run: Run) -> dict[str, Any]:
    """The failed attempts of a run by error code and host. The counts of failed tasks by code are exact; those without
    a known host are listed for all others."""
    # Before the counts, so that no group has more than its code.
    found = await read_breakdown(system.records, system.tasks, system.coordinator, job, run)
    counted = await run_counts(system.tasks, job, run, _MAX_CODES)
    groups = {code: dict(hosts) for code, hosts in found.breakdown.groups.items()}
    for code, failed in counted.top_errors(_MAX_CODES):
        hosts = groups.setdefault(code, {})
        rest = failed - sum(group.failed for group in hosts.values())
        if rest > 0:
            known = hosts.get(OTHER, ErrorGroup())
            hosts[OTHER] = msgspec.structs.replace(known, failed=known.failed + rest)
    key = job.key_of(run)
    items = [_group_json(key, code, host, group) for code, hosts in groups.items() for host, group in hosts.items()]
    items.sort(key=lambda item: (-item["failed"], -item["retried"], item["code"], item["host"] or ""))
    return {
        "run_id": run.run_id,
        "is_exact": found.is_exact,
        "at": _time(found.breakdown.at),
        "failed": counted.counts.failed,
        "retried": sum(item["retried"] for item in items),
        "items": items,
    }


async def run_hosts_json(system: System, job: Job, run: Run) -> dict[str, Any]:
    """The hosts of a run, those with the most attempts first, and how many finished tasks no host has."""
    found, breakers, paces = await asyncio.gather(
        read_breakdown(system.records, system.tasks, system.coordinator, job, run),
        _breakers(system.coordinator, system.clock, job.tenant),
        _paces(system.coordinator, system.clock, job.tenant),
    )
    now, breakdown = system.clock.now(), found.breakdown
    items = [
        {
            "host": host or None,
            **_tally_json(tally, run, now),
            "errors": _top_codes(breakdown, host),
            "breaker": breakers.get(host),
            "pace": paces.get(host),
        }
        for host, tally in breakdown.hosts.items()
    ]
    items.sort(key=lambda item: (-item["attempts"], item["host"] or ""))
    return {
        "run_id": run.run_id,
        "is_exact": found.is_exact,
        "at": _time(breakdown.at),
        "items": items,
        "other": _tally_json(breakdown.other, run, now) if breakdown.other.attempts else None,
        "missing": 0 if found.is_exact else await _missing(system.tasks, job.key_of(run), breakdown),
    }


async def _missing(tasks: Tasks, key: RunKey, breakdown: Breakdown) -> int:
    """How many finished tasks a breakdown that was read before does not have."""
    counts = await tasks.counts(key)
    known = total_tally(breakdown)
    return max(0, counts.succeeded + counts.failed - known.succeeded - known.failed)


def series_json(breakdown: Breakdown) -> dict[str, Any]:
    """Attempts over time, oldest first. Intervals without any are left out."""
    width = breakdown.width
    return {
        "seconds": width,
        "items": [
            {"at": iso_text(number * width), "succeeded": succeeded, "failed": failed, "retried": retried}
            for number, (succeeded, failed, retried) in sorted(breakdown.buckets.items())
        ],
    }


def total_tally(breakdown: Breakdown) -> HostTally:
    """All hosts together."""
    total = HostTally()
    for tally in (*breakdown.hosts.values(), breakdown.other):
        total.add(tally)
    return total


async def _of_rows(tasks: Tasks, key: RunKey) -> ReadBreakdown:
    """Make a breakdown of the rows and events of a small run."""
    shards = [tasks.page(key, shard, None, SMALL_RUN + 1, TaskFilter()) for shard in range(max(key.shard_count, 1))]
    rows = [task for page in await asyncio.gather(*shards) for task in page]
    events, is_whole = await _events(tasks, key)
    hosts = {task.index: task_host(bytes(task.input).decode()) or "" for task in rows}
    breakdown = Breakdown()
    for task in sorted(rows, key=lambda task: task.finished_at or 0.0):
        _add_row(breakdown, task, hosts[task.index])
    for event in events:
        if event.event == "task.retried" and event.index is not None:
            breakdown.add_failures([_retried(event, hosts.get(event.index, ""))], event.at)
    breakdown.at = max([task.finished_at or 0.0 for task in rows] + [event.at for event in events[-1:]], default=0.0)
    return ReadBreakdown(breakdown, is_exact=is_whole)


def _add_row(breakdown: Breakdown, task: Task, host: str) -> None:
    at, detail = task.finished_at or 0.0, task.detail
    if task.status is TaskStatus.SUCCEEDED:
        breakdown.add_successes([host], [detail.elapsed], at)
    elif task.status is TaskStatus.FAILED:
        error = detail.error or TaskError(task.error_code or "unknown", "")
        failed = FailedAttempt(task.index, task.attempts, host, error, task.http_status, detail.elapsed, False)
        breakdown.add_failures([failed], at)


async def _events(tasks: Tasks, key: RunKey) -> tuple[list[EventRecord], bool]:
    """The events of tasks, and whether they are all."""
    events: list[EventRecord] = []
    cursor: str | None = None
    while len(events) < _MAX_EVENTS:
        page = await tasks.events(key, None, cursor, _EVENTS)
        events += page.items
        cursor = page.next_cursor
        if cursor is None:
            return events, True
    return events, False


def _retried(event: EventRecord, host: str) -> FailedAttempt:
    data = event.data
    error = data.get("error") or {}
    return FailedAttempt(
        event.index or 0,
        int(data.get("attempt") or 1),
        host,
        TaskError(str(error.get("code", "unknown")), str(error.get("message", ""))),
        data.get("http_status"),
        float(data.get("elapsed") or 0.0),
        is_retried=True,
    )


def _group_json(key: RunKey, code: str, host: str, group: ErrorGroup) -> dict[str, Any]:
    return {
        "code": None if code == OTHER else code,
        "host": None if host in ("", OTHER) else host,
        "is_other": host == OTHER,
        "failed": group.failed,
        "retried": group.retried,
        "last_at": _time(group.last_at),
        "samples": [_sample_json(key, sample) for sample in group.samples],
    }


def _sample_json(key: RunKey, sample: ErrorSample) -> dict[str, Any]:
    return {
        "task_id": task_id(key.run_id, sample.index),
        "index": sample.index,
        "attempt": sample.attempt,
        "at": iso_text(sample.at),
        "message": sample.message,
        "http_status": sample.http_status,
    }


def _tally_json(tally: HostTally, run: Run, now: float) -> dict[str, Any]:
    """`rate` is the current one; of a finished run, the mean from the first attempt to the last."""
    # The first attempt took time, too: a short run is as long as it was.
    lasted = 1.0 if run.ended_at is None else min(max(run.ended_at - run.created_at, 0.001), 1.0)
    mean = tally.attempts / max(tally.last_at - tally.first_at, lasted)
    return {
        "attempts": tally.attempts,
        "succeeded": tally.succeeded,
        "failed": tally.failed,
        "retried": tally.retried,
        "rate": round(mean if run.state in ENDED else tally.rate(now), 3),
        "p50": tally.percentile(0.5),
        "p95": tally.percentile(0.95),
        "first_at": _time(tally.first_at),
        "last_at": _time(tally.last_at),
    }


def _top_codes(breakdown: Breakdown, host: str) -> list[dict[str, Any]]:
    """The three most frequent error codes of a host, of failed and retried attempts."""
    counts = [
        (group.failed + group.retried, code)
        for code, hosts in breakdown.groups.items()
        if (group := hosts.get(host)) is not None
    ]
    return [{"code": code, "count": count} for count, code in sorted(counts, key=lambda pair: (-pair[0], pair[1]))[:3]]


async def _breakers(coordinator: Coordinator, clock: Clock, tenant: TenantId) -> dict[str, dict[str, Any]]:
    """The breakers that are not closed, by host."""
    now = clock.now()
    return {
        host: {
            "target": target,
            "state": "open" if now < state.until else "half_open",
            "until": iso_text(state.until),
            "error": state.error or None,
        }
        for _, target, state in await list_breakers(coordinator, tenant)
        if (host := _host_in(target)) is not None
    }


async def _paces(coordinator: Coordinator, clock: Clock, tenant: TenantId) -> dict[str, dict[str, Any]]:
    now = clock.now()
    return {
        host: {
            "limit": max(1, int(state.limit)),
            "in_flight": sum(part.in_flight for part in state.live_parts(now).values()),
            "paused_until": iso_text(state.paused_until) if state.paused_until > now else None,
        }
        for host, state in (await list_paces(coordinator, tenant)).items()
    }


def _host_in(target: str) -> str | None:
    """The host in the name of a breaker; None for gateways and named upstreams."""
    try:
        return urlsplit(target).hostname if target.startswith(("http://", "https://")) else None
    except ValueError:
        return None


def _time(at: float) -> str | None:
    return iso_text(at) if at else None
