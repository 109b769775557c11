"""pace: what `pace: auto` finds, beside the best that a fixed setting does.

A server that degrades: it answers within 50 ms up to N requests at once, more slowly beyond that, so that throughput
falls, and with 503 above 3 N. Auto is compared with the best of several fixed widths, of which the user would have to
know the right one. A fast server: nginx, beside a run with `pace: fixed`.
"""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import nginx
from bench.child import ROOT, Setup
from bench.figures import Figure, rates
from bench.meter import Meter

FAST = 50_000
SLOW = 12_000
# Requests that the degrading server serves at once, its latency, and the widths that are tried.
N = 32
LATENCY = 0.05
WIDTHS = (16, 28, 32, 40, 64, 128)
AT_MOST = 256


def run(setup: Setup) -> list[Figure]:
    fast: dict[str, list[dict[str, Any]]] = {"auto": [], "fixed": []}
    slow: dict[str, list[dict[str, Any]]] = {"auto": [], "best": []}
    for _ in range(setup.repeat):
        with nginx.serving(setup.scratch) as site:
            at = {"url": site.url, "servers": site.servers, "count": setup.count(FAST), "concurrency": 100}
            fast["auto"].append(setup.ours("bench.pace:ours", **at, pace="auto"))
            fast["fixed"].append(setup.bare("bench.pace:ours", **at, pace="fixed"))
        with degrading() as (url, server):
            at = {"url": url, "servers": [server], "count": setup.count(SLOW)}
            slow["auto"].append(setup.ours("bench.pace:ours", **at, concurrency=AT_MOST, pace="auto"))
            fixed = [setup.bare("bench.pace:ours", **at, concurrency=width, pace="fixed") for width in WIDTHS]
            # A width at which tasks fail is none that a user would choose.
            whole = [each for each in fixed if not each["failed"]]
            slow["best"].append(max(whole, key=lambda each: each["count"] / each["seconds"]))
    more = {
        "retried": [each["retried"] for each in slow["auto"]],
        "failed": [each["failed"] for each in slow["auto"]],
        "best width": [each["concurrency"] for each in slow["best"]],
    }
    return [
        Figure(
            "pace", "fetches, fast server", "/s", rates(fast["auto"]), "fixed", rates(fast["fixed"]), ("at least", 0.95)
        ),
        Figure(
            "pace",
            f"fetches, server degrades above {N}",
            "/s",
            rates(slow["auto"]),
            "best fixed concurrency",
            rates(slow["best"]),
            ("at least", 0.9),
            more,
        ),
        Figure(
            "pace",
            "tasks with more than one attempt",
            "share",
            [each["retried"] / each["count"] for each in slow["auto"]],
            "one of 100",
            [0.01 for _ in slow["auto"]],
            ("at most", 1.0),
        ),
    ]


async def ours(url: str, servers: list[int], count: int, concurrency: int, pace: str, place: str) -> dict[str, Any]:
    from bench.belt import TENANT, belt, ended

    listed = Path(place) / "urls.txt"
    with listed.open("w") as file:
        file.writelines(f"{url}/{number}\n" for number in range(count))
    spec = {"concurrency": concurrency, "result_layout": "packed", "pace": pace}
    async with belt(place, allow_private_targets=True) as embedded:
        meter = Meter(servers)
        job = await embedded.submit_list([str(listed)], spec, TENANT)
        job = await ended(embedded, job.job_id)
        spent = meter.stop()
        counts = await embedded.system.tasks.recount(job.key)
        retried = await _retried(embedded.system, job)
    return {"count": count, "failed": counts.failed, "retried": retried, "concurrency": concurrency, **spent}


async def _retried(system: Any, job: Any) -> int:
    from conveyor.engines.tasks import TaskFilter

    retried, after = 0, None
    while page := await system.tasks.page(job.key, 0, after, 1000, TaskFilter()):
        after = page[-1].task_id
        retried += sum(task.attempts > 1 for task in page)
    return retried


@contextlib.contextmanager
def degrading() -> Iterator[tuple[str, int]]:
    """The degrading server, in a process of its own: its URL and its process id."""
    command = [sys.executable, "-m", "bench.pace"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}", process.pid
        finally:
            process.terminate()


class Degrading:
    """Latency grows with the square of the load above N; from 3 N on it refuses."""

    def __init__(self) -> None:
        self._busy = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                self._busy += 1
                try:
                    if self._busy > 3 * N:
                        writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")
                        continue
                    await asyncio.sleep(LATENCY * max(1.0, self._busy / N) ** 2)
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
                finally:
                    self._busy -= 1
        writer.close()


async def _serve() -> None:
    server = await asyncio.start_server(Degrading().serve, "127.0.0.1", 0, backlog=1000)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_serve())
