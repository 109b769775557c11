"""fetch: small pages from a local nginx, every body and every status kept.

Bare limits: a pyreqwest loop that keeps nothing; a pyreqwest script that writes each body to a file of its own, without
fsync and without a word about what happened; and curl, where it is. All have 100 requests under way.
"""

import asyncio
import random
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from bench import nginx
from bench.child import MeasurementFailed, Setup
from bench.figures import Figure, cpu_each, details, rates
from bench.meter import Meter

COUNT = 50_000
CONCURRENCY = 100

_SMALL = 10
_SAMPLE = 500
_PAGE = 1000


def run(setup: Setup) -> list[Figure]:
    count = setup.count(COUNT)
    few = count // _SMALL
    runs: list[dict[str, dict[str, Any]]] = []
    with nginx.serving(setup.scratch) as site:
        for _ in range(setup.repeat):
            at = {"url": site.url, "servers": site.servers, "count": count}
            measured = {
                "ours": setup.ours("bench.fetch:ours", **at),
                "nothing": setup.bare("bench.fetch:keeps_nothing", **at),
                "files": setup.bare("bench.fetch:writes_files", **at),
                "few": setup.bare("bench.fetch:ours", **{**at, "count": few}),
            }
            if shutil.which("curl") is not None:
                measured["curl"] = setup.bare("bench.fetch:by_curl", **at)
            runs.append(measured)
    return _figures(runs, count, few)


def _figures(runs: list[dict[str, dict[str, Any]]], count: int, few: int) -> list[Figure]:
    by_name = {name: [each[name] for each in runs] for name in runs[0]}
    ours, nothing, files = by_name["ours"], by_name["nothing"], by_name["files"]
    peaks = {name: [float(each["peak_mib"]) for each in by_name[name]] for name in ("ours", "few")}
    limit, to_files = "pyreqwest, keeps nothing", "pyreqwest, a file each"
    more = {"count": count, **details(ours)}
    return [
        Figure("fetch", "fetches", "/s", rates(ours), limit, rates(nothing), ("at least", 0.6), more),
        Figure("fetch", "fetches", "/s", rates(ours), to_files, rates(files), ("at least", 1.0)),
        *[
            Figure("fetch", "fetches", "/s", rates(ours), "curl --parallel, a file each", rates(curl))
            for name, curl in by_name.items()
            if name == "curl"
        ],
        Figure("fetch", "CPU time", "µs/fetch", cpu_each(ours), limit, cpu_each(nothing), ("at most", 1.8)),
        Figure("fetch", "CPU time", "µs/fetch", cpu_each(ours), to_files, cpu_each(files)),
        Figure("fetch", "peak memory", "MiB", peaks["ours"], f"ours, {few:,} fetches", peaks["few"], ("at most", 1.25)),
    ]


async def ours(url: str, servers: list[int], count: int, place: str) -> dict[str, Any]:
    from bench.belt import TENANT, belt, check_counts, ended

    listed = Path(place) / "urls.txt"
    with listed.open("w") as file:
        file.writelines(f"{url}/{number}\n" for number in range(count))
    spec = {"concurrency": CONCURRENCY, "result_layout": "packed"}
    async with belt(place, allow_private_targets=True) as embedded:
        meter = Meter(servers)
        job = await embedded.submit_list([str(listed)], spec, TENANT)
        staged = meter.lap()
        job = await ended(embedded, job.job_id)
        spent = meter.stop()
        await check_counts(embedded.system, job, count)
        await _check_rows(embedded.system, job, url, count)
    return {"count": count, "staged": staged, **spent}


async def _check_rows(system: Any, job: Any, url: str, count: int) -> None:
    """Every row has its status, its body's place and the page's sha256; of some bodies, the bytes are read too."""
    from conveyor.engines.tasks import TaskFilter
    from conveyor.read.results import read_body

    sample = set(random.Random(count).sample(range(count), min(_SAMPLE, count)))
    seen: set[int] = set()
    after = None
    while page := await system.tasks.page(job.key, 0, after, _PAGE, TaskFilter()):
        after = page[-1].task_id
        for task in page:
            expected = nginx.page(task.index)
            body = task.detail.body
            if task.http_status != 200 or body is None or body.sha256 != sha256(expected).hexdigest():
                raise MeasurementFailed(f"task {task.index} has status {task.http_status} and body {body}")
            if bytes(task.input) != f'"{url}/{task.index}"'.encode():
                raise MeasurementFailed(f"task {task.index} is not line {task.index} of the list")
            if task.index in sample and await read_body(system.blobs, task) != expected:
                raise MeasurementFailed(f"the body of task {task.index} is not the page")
            seen.add(task.index)
    if seen != set(range(count)):
        raise MeasurementFailed(f"{count} fetches, but {len(seen)} rows")


async def keeps_nothing(url: str, servers: list[int], count: int, place: str) -> dict[str, Any]:
    total = 0

    def keep(_: int, body: bytes) -> None:
        nonlocal total
        total += len(body)

    spent = await _loop(url, servers, count, keep)
    if total != sum(len(nginx.page(number)) for number in range(count)):
        raise MeasurementFailed(f"the bare loop read {total} bytes")
    return spent


async def writes_files(url: str, servers: list[int], count: int, place: str) -> dict[str, Any]:
    bodies = Path(place) / "bodies"
    bodies.mkdir()

    def keep(number: int, body: bytes) -> None:
        with open(f"{bodies}/{number}", "wb") as file:  # noqa: PTH123  (what a bare script would do, and quicker)
            file.write(body)

    spent = await _loop(url, servers, count, keep)
    _check_files(bodies, count)
    return spent


def by_curl(url: str, servers: list[int], count: int, place: str) -> dict[str, Any]:
    bodies = Path(place) / "bodies"
    bodies.mkdir()
    config = Path(place) / "curl.config"
    with config.open("w") as file:
        file.writelines(f'url = "{url}/{number}"\noutput = "{bodies}/{number}"\n' for number in range(count))
    most = str(CONCURRENCY)
    command = ["curl", "--silent", "--show-error", "--fail", "--parallel", "--parallel-max", most, "-K", str(config)]
    meter = Meter(servers)
    # Its progress meter is not silent.
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    spent = meter.stop()
    if ended.returncode != 0:
        raise MeasurementFailed(f"curl ended with {ended.returncode}: {ended.stderr[-300:]}")
    _check_files(bodies, count)
    return {"count": count, **spent}


async def _loop(url: str, servers: list[int], count: int, keep: Callable[[int, bytes], None]) -> dict[str, Any]:
    from pyreqwest.client import ClientBuilder

    numbers = iter(range(count))
    async with ClientBuilder().no_proxy().build() as client:

        async def fetcher() -> None:
            for number in numbers:
                response = await client.get(f"{url}/{number}").build().send()
                if response.status != 200:
                    raise MeasurementFailed(f"nginx answered {response.status}")
                keep(number, (await response.bytes()).to_bytes())

        meter = Meter(servers)
        fetchers: list[Awaitable[None]] = [fetcher() for _ in range(CONCURRENCY)]
        await asyncio.gather(*fetchers)
        spent = meter.stop()
    return {"count": count, **spent}


def _check_files(bodies: Path, count: int) -> None:
    if sum(1 for _ in bodies.iterdir()) != count:
        raise MeasurementFailed("not every body has its file")
    for number in random.Random(count).sample(range(count), min(_SAMPLE, count)):
        if (bodies / str(number)).read_bytes() != nginx.page(number):
            raise MeasurementFailed(f"file {number} is not the page")
