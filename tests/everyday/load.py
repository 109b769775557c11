"""One load on one server, from its first job to the end of its last."""

import asyncio
import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from conveyor.client import AsyncClient
from tests.everyday.clients import Clients
from tests.everyday.figures import Figures
from tests.everyday.mix import BURST, Job, job_of
from tests.everyday.server import complaints, server
from tests.everyday.site import Site
from tests.everyday.watch import Watch

# Loops that take one job after the other, over so many connections' worth of clients.
_CLIENTS = 24
_SESSIONS = 4
# Beyond the time for new jobs, until all must have ended.
PATIENCE = 240.0


async def everyday(
    stack: str = "embedded", seconds: float = 30.0, seed: int = 1, largest: int = 10_000, jobs: int | None = None
) -> Figures:
    """Submit jobs for so many seconds, or so many of them, and wait until all have ended."""
    figures = Figures()
    with tempfile.TemporaryDirectory(prefix="everyday-") as name:
        place = Path(name)
        async with Site() as site, server(stack, place) as up:
            await _load(up.direct, up.key, site, figures, place, seconds, seed, largest, jobs)
            log = place / "log"
            figures.unexpected += [f"the site was asked for {path}" for path in site.unexpected]
            figures.requests = sum(ledger.requests.total() for ledger in site.jobs.values())
        figures.unexpected += [f"the server's log: {line[:400]}" for line in complaints(log)]
    return figures


async def _load(
    url: str,
    key: str,
    site: Site,
    figures: Figures,
    place: Path,
    seconds: float,
    seed: int,
    largest: int,
    jobs: int | None,
) -> None:
    sessions = [AsyncClient(url, key) for _ in range(_SESSIONS)]
    watch = Watch(sessions[0], site, figures)
    began = time.monotonic()
    drawn = _drawn(seed, largest, jobs, began + seconds)
    watching = asyncio.create_task(watch.run())
    try:
        async with asyncio.timeout(seconds + PATIENCE), asyncio.TaskGroup() as group:
            clients = [Clients(session, site, watch, figures, place) for session in sessions]
            for number, job in enumerate(itertools.islice(drawn, BURST)):
                group.create_task(clients[number % _SESSIONS].carry_out(job))
            for number in range(_CLIENTS):
                group.create_task(_one_after_another(clients[number % _SESSIONS], drawn))
    except TimeoutError:
        figures.unexpected.append(f"not all jobs ended within {seconds + PATIENCE:.0f} s")
    finally:
        figures.seconds = time.monotonic() - began
        if watching.done():
            watching.result()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        for session in sessions:
            await session.close()


def _drawn(seed: int, largest: int, jobs: int | None, until: float) -> Iterator[Job]:
    """The jobs of this load, for as long as there is time."""
    for number in itertools.count() if jobs is None else range(jobs):
        if number > BURST and time.monotonic() > until:
            return
        yield job_of(seed, number, largest)


async def _one_after_another(clients: Clients, jobs: Iterator[Job]) -> None:
    for job in jobs:
        await clients.carry_out(job)
