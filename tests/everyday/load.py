"""One load on one server, from its first job to the end of its last."""

import asyncio
import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from conveyor.client import AsyncClient
from tests.everyday.clients import Clients
from tests.everyday.figures import Figures
from tests.everyday.mix import Job, job_of
from tests.everyday.server import complaints, server
from tests.everyday.site import Site
from tests.everyday.watch import Watch
from tests.support.up_process import Up

_SESSIONS = 4
# Beyond the time for new jobs, until all must have ended.
PATIENCE = 240.0


class Load(NamedTuple):
    """How much of it. `burst` jobs are submitted at once; then so many clients take one job after the other, for so
    many seconds or until there were so many jobs."""

    seconds: float = 30.0
    seed: int = 1
    burst: int = 30
    clients: int = 24
    largest: int = 10_000
    jobs: int | None = None

    def drawn(self) -> Iterator[Job]:
        """Its jobs, for as long as there is time."""
        until = time.monotonic() + self.seconds
        for number in itertools.count() if self.jobs is None else range(self.jobs):
            if number > self.burst and time.monotonic() > until:
                return
            yield job_of(self.seed, number, self.burst, self.largest)


async def everyday(stack: str = "embedded", load: Load | None = None) -> Figures:
    """Put a load on a server of this stack, and wait until all its jobs have ended."""
    load, figures = load or Load(), Figures()
    with tempfile.TemporaryDirectory(prefix="everyday-") as name:
        place = Path(name)
        async with Site() as site, server(stack, place) as up:
            await _carry_out(load, up, site, figures, place)
            figures.unexpected += [f"the site was asked for {path}" for path in site.unexpected]
            figures.requests = site.requests
        errors, figures.warnings = complaints(place / "log")
        figures.unexpected += [f"the server's log: {line[:400]}" for line in errors]
    return figures


async def _carry_out(load: Load, up: Up, site: Site, figures: Figures, place: Path) -> None:
    sessions = [AsyncClient(up.direct, up.key) for _ in range(_SESSIONS)]
    watch = Watch(sessions[0], site, figures)
    drawn = load.drawn()
    began = time.monotonic()
    watching = asyncio.create_task(watch.run())
    try:
        async with asyncio.timeout(load.seconds + PATIENCE), asyncio.TaskGroup() as group:
            clients = [Clients(session, site, watch, figures, place) for session in sessions]
            for number, job in enumerate(itertools.islice(drawn, load.burst)):
                group.create_task(clients[number % _SESSIONS].carry_out(job))
            for number in range(load.clients):
                group.create_task(_one_after_another(clients[number % _SESSIONS], drawn))
    except TimeoutError:
        figures.unexpected.append(f"not all jobs ended within {load.seconds + PATIENCE:.0f} s")
    finally:
        figures.seconds = time.monotonic() - began
        if watching.done():
            watching.result()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        for session in sessions:
            await session.close()


async def _one_after_another(clients: Clients, jobs: Iterator[Job]) -> None:
    for job in jobs:
        await clients.carry_out(job)
