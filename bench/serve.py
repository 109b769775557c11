"""serve: what a user does with a job of a million, over HTTP, in the process that also runs it.

One job is run at the pace of fetches, watched, paged through, run again in part, in whole as fast as it goes, once more
and cancelled on the way, and deleted. The bare limit of a time is the goal itself; that of the last page is the first
one, that of the memory a job of ten thousand.
"""

import asyncio
import heapq
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench.api import Api, served_api
from bench.child import MeasurementFailed, Setup
from bench.figures import Figure
from bench.ingest import write_list
from bench.meter import Meter
from conveyor.process.executors import LocalExecutor

COUNT = 1_000_000
SMALL = 10_000
# One task of so many fails in the first run.
FAILS = 1000

_STATUS_EVERY = 0.02
_PAGE = 100
_PAGES = 21
# What is cancelled is cancelled once so much of it has ended.
_CANCEL_AT = 0.05

# How long a run at the pace of fetches takes, and of how many tasks its attempts are.
_SLOW_SECONDS = 60.0
_SLOW_GRAIN = 8
_SLOTS = 64

_WATCHED = {
    "running": "while it runs",
    "ingesting": "while its list is ingested too",
    "full": "at full speed",
}

# The goals, in milliseconds.
_STATUS, _CANCEL, _DELETE, _RERUN = 10.0, 2000.0, 100.0, 2000.0


def run(setup: Setup) -> list[Figure]:
    count = setup.count(COUNT)
    large, small = [], []
    seconds = setup.seconds(_SLOW_SECONDS)
    for _ in range(setup.repeat):
        large.append(setup.ours("bench.serve:served", count=count, seconds=seconds))
        small.append(setup.bare("bench.serve:served", count=min(SMALL, count), seconds=seconds))

    def against(goal: float, name: str, field: str, of: Sequence[dict[str, Any]], **more: Any) -> Figure:
        limit, ours = f"goal, {goal:g} ms", [each[field] for each in of]
        return Figure("serve", name, "ms", ours, limit, [goal] * len(ours), ("at most", 1.0), more)

    first, last = ([each[page] for each in large] for page in ("first_page", "last_page"))
    peaks, small_peaks = ([each["peak_mib"] for each in side] for side in (large, small))
    swept = {"swept_a_second": statistics.median(each["swept"] for each in large)}
    return [
        *(
            against(_STATUS, f"status {when}, p99", f"{name}_p99", large, p50=[each[f"{name}_p50"] for each in large])
            for name, when in _WATCHED.items()
        ),
        Figure("serve", "last page of results", "ms", last, "first page", first, ("at most", 1.5)),
        against(_RERUN, f"rerun of 1 in {FAILS:,}: first start", "rerun_start", large),
        against(_CANCEL, "cancel: last start after it", "cancel_effective", large, **swept),
        against(_DELETE, "delete answers", "delete", large),
        Figure("serve", "peak memory", "MiB", peaks, f"ours, {SMALL:,} tasks", small_peaks, ("at most", 1.25)),
    ]


async def served(count: int, seconds: float, place: str) -> dict[str, Any]:
    from bench.belt import TENANT, store
    from conveyor.embedded import Embedded
    from conveyor.model import JobKind

    path = write_list(place, count)
    async with store(place) as system:
        executor = _Marking(count, seconds)
        embedded = Embedded(system, executors={JobKind.FETCH: executor})
        meter = Meter()
        async with embedded.running(), served_api(system) as api:
            job = await embedded.submit_list([str(path)], {"attempts": 1}, TENANT)
            found = await _watch(api, job.job_id, count)
            await _check(api, job.job_id, count)
            found |= await _pages(api, job)
            found |= await _rerun(api, job.job_id, executor)
            found |= await _full_speed(api, job.job_id, count)
            found |= await _cancel(api, job.job_id, executor, count)
            found |= await _delete(api, job.job_id)
        return {"count": count, **found, **meter.stop()}


async def _watch(api: Api, job_id: str, count: int) -> dict[str, float]:
    """How long a look at the job takes, while its list is ingested and after that."""
    looks = await asyncio.to_thread(api.looks, f"/v1/jobs/{job_id}")
    return {
        name: value
        for state in ("ingesting", "running")
        for name, value in _quantiles(state, [took for seen, took in looks if seen == state], count).items()
    }


async def _full_speed(api: Api, job_id: str, count: int) -> dict[str, float]:
    """All of it again, as fast as it goes."""
    await api.json("POST", f"/v1/jobs/{job_id}/rerun", {"select": "all"})
    looks = await asyncio.to_thread(api.looks, f"/v1/jobs/{job_id}")
    return _quantiles("full", [took for _, took in looks], count)


def _quantiles(name: str, times: Sequence[float], count: int) -> dict[str, float]:
    if len(times) < 2:
        if count < SMALL:
            # Over between two looks.
            return dict.fromkeys((f"{name}_p50", f"{name}_p99"), max(times, default=math.nan))
        raise MeasurementFailed(f"the job was not seen twice: {name}")
    hundredths = statistics.quantiles(times, n=100, method="inclusive")
    return {f"{name}_p50": hundredths[49], f"{name}_p99": hundredths[98]}


async def _check(api: Api, job_id: str, count: int) -> None:
    shown = await api.json("GET", f"/v1/jobs/{job_id}?verify=true")
    counts = shown["run"]["counts"]
    if shown["verify"]["drift"] or counts["succeeded"] + counts["failed"] != count:
        raise MeasurementFailed(f"{count} tasks, but the rows say {shown['verify']}")


async def _pages(api: Api, job: Any) -> dict[str, float]:
    """The cursor of the last page follows from the ids."""
    from conveyor.model import task_id

    total = (await api.json("GET", f"/v1/jobs/{job.job_id}"))["run"]["total"]
    # Not all of them at once: that would be memory of ours, and not of what is measured.
    before_last = heapq.nlargest(_PAGE + 1, (task_id(job.run.run_id, index) for index in range(total)))[-1]
    path = f"/v1/jobs/{job.job_id}/results?limit={_PAGE}"
    times: dict[str, list[float]] = {"first_page": [], "last_page": []}
    for _ in range(_PAGES):
        for name, cursor in (("first_page", ""), ("last_page", f"&cursor={before_last}")):
            started = time.perf_counter()
            page = await api.json("GET", path + cursor)
            times[name].append((time.perf_counter() - started) * 1000)
            if len(page["items"]) != _PAGE or (page["next_cursor"] is None) != bool(cursor):
                raise MeasurementFailed(f"the {name} has {len(page['items'])} items")
    return {name: statistics.median(each) for name, each in times.items()}


async def _rerun(api: Api, job_id: str, executor: "_Marking") -> dict[str, float]:
    """From the request to the first attempt of the new run."""
    started = time.perf_counter()
    run_id = (await api.json("POST", f"/v1/jobs/{job_id}/rerun", {"select": "failed"}))["run"]["id"]
    shown = await _until(api, job_id, lambda run: run["ended_at"] is not None)
    began = executor.first[run_id]
    if shown["run"]["counts"]["succeeded"] != shown["runs"][1]["counts"]["failed"]:
        raise MeasurementFailed(f"the rerun came to {shown['run']}")
    return {"rerun_start": (began - started) * 1000}


async def _cancel(api: Api, job_id: str, executor: "_Marking", count: int) -> dict[str, float]:
    """All of it once more, cancelled on the way: how long after the request something still started, and how fast what
    was left is swept."""
    run_id = (await api.json("POST", f"/v1/jobs/{job_id}/rerun", {"select": "all"}))["run"]["id"]
    shown = await _until(api, job_id, lambda run: run["ended_at"] or run["counts"]["succeeded"] >= _CANCEL_AT * count)
    if shown["run"]["ended_at"] is not None:
        raise MeasurementFailed("the run ended before it could be cancelled")
    started = time.perf_counter()
    await api.json("POST", f"/v1/jobs/{job_id}/cancel")
    shown = await _until(api, job_id, lambda run: run["ended_at"] and run["counts"]["pending"] == 0)
    swept = shown["run"]["counts"]["cancelled"] / (time.perf_counter() - started)
    last = executor.last.get(run_id, started)
    return {"cancel_effective": max(0.0, last - started) * 1000, "swept": swept}


async def _until(api: Api, job_id: str, right: Callable[[dict[str, Any]], object]) -> Any:
    """The job, once its run is so."""
    while not right((shown := await api.json("GET", f"/v1/jobs/{job_id}"))["run"]):  # noqa: ASYNC110  (seen from outside)
        await asyncio.sleep(_STATUS_EVERY)
    return shown


async def _delete(api: Api, job_id: str) -> dict[str, float]:
    started = time.perf_counter()
    await api.send("DELETE", f"/v1/jobs/{job_id}")
    return {"delete": (time.perf_counter() - started) * 1000}


class _Marking(LocalExecutor):
    """Fetches nothing; some tasks fail in the first run. Marks when each run first and last started something."""

    def __init__(self, count: int, seconds: float) -> None:
        self._pause = seconds * _SLOTS * _SLOW_GRAIN / count
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}

    def grain(self, job: Any) -> int:
        return _SLOW_GRAIN if _is_slow(job) else 64

    def target(self, ref: Any) -> str | None:
        return None

    async def attempt(self, job: Any, refs: Sequence[Any]) -> list[Any]:
        from conveyor.model import Outcome, TaskError
        from conveyor.states import TaskStatus

        now = time.perf_counter()
        self.first.setdefault(job.run.run_id, now)
        self.last[job.run.run_id] = now
        # An attempt waits for something, so that others have their turn, be it for no time at all.
        await asyncio.sleep(self._pause if _is_slow(job) else 0)
        error = TaskError("http_503", "as every so many")
        return [
            Outcome(TaskStatus.FAILED, http_status=503, error=error)
            if job.run.number == 1 and ref.index % FAILS == 0
            else Outcome(TaskStatus.SUCCEEDED, http_status=200)
            for ref in refs
        ]

    async def close(self) -> None:
        pass


def _is_slow(job: Any) -> bool:
    """The first run, and the one that is cancelled, which must be caught on its way."""
    return job.run.number in (1, 4)
