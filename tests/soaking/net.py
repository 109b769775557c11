"""One soak of one stack: clients hand jobs over while one trouble follows the other; then all is well again, everything
has to end, and the ledger and `conveyor verify` have to find nothing.

`python -m tests.soaking.net --stack postgres --seconds 120` runs one alone.
"""

import argparse
import asyncio
import dataclasses
import json
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from conveyor.client import AsyncClient
from tests.everyday.site import Site
from tests.soaking.outside_ledger import Abandoned, OutsideLedger, SoakFigures
from tests.soaking.soaked_server import SoakedServer, soaked_server
from tests.soaking.troubles import Troubled, troubles_of

STACKS = ("embedded", "postgres", "aws")

_CLIENTS = 4
_MAX_UNFINISHED = 12
# Seconds in which all must have ended, after the last trouble.
_DRAIN = 400.0
_CLIENT_PATIENCE = 60.0


async def soak(stack: str, seconds: float, seed: int) -> SoakFigures:
    """The figures of one soak. `wrong` has what it found."""
    figures = SoakFigures()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        place = Path(name)
        async with Site() as site, soaked_server(stack, place) as (server, disk):
            chance = random.Random(seed)
            async with AsyncClient(server.url, server.key, patience=_CLIENT_PATIENCE) as client:
                ledger = OutsideLedger(client, site, figures, seed)
                await _under_troubles(Troubled(server, disk, chance), ledger, figures, seconds)
                await _drain(ledger, figures)
            figures.requests = site.requests
            await _verify(server, figures)
        figures.errors = _errors(place / "log")
    return figures


async def _under_troubles(world: Troubled, ledger: OutsideLedger, figures: SoakFigures, seconds: float) -> None:
    until = time.monotonic() + seconds

    async def client() -> None:
        while time.monotonic() < until:
            if len(ledger.unfinished) < _MAX_UNFINISHED:
                with suppress(Abandoned):
                    await ledger.submit()
            await asyncio.sleep(0.1)

    async def watcher() -> None:
        while time.monotonic() < until:
            await _look(ledger)
            await asyncio.sleep(0.5)

    async def troubles() -> None:
        known = troubles_of(world)
        while time.monotonic() < until:
            await world.lasts(0.5, 6.0)
            name = world.chance.choice(list(known))
            await known[name](world)
            figures.troubles[name] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(_CLIENTS):
            group.create_task(client())
        group.create_task(watcher())
        group.create_task(troubles())


async def _look(ledger: OutsideLedger) -> None:
    for entry in ledger.unfinished:
        try:
            await ledger.look(entry)
            if entry.ended:
                await ledger.audit(entry)
        except Abandoned:
            entry.ended = True


async def _drain(ledger: OutsideLedger, figures: SoakFigures) -> None:
    try:
        async with asyncio.timeout(_DRAIN):
            while ledger.unfinished:
                await _look(ledger)
                await asyncio.sleep(0.5)
    except TimeoutError:
        for entry in ledger.unfinished:
            figures.wrong.append(f"job {entry.number} did not end within {_DRAIN:g} s: {entry.job.data}")


async def _verify(server: SoakedServer, figures: SoakFigures) -> None:
    await asyncio.to_thread(server.stop)
    found = await asyncio.to_thread(server.verify)
    if found is not None:
        figures.wrong.append(f"conveyor verify: {found}")


def _errors(log: Path) -> Counter[str]:
    """What the server called an error, by its event: most is what the troubles did to it."""
    errors: Counter[str] = Counter()
    for line in log.read_text().splitlines():
        with suppress(ValueError):
            said = json.loads(line)
            errors[said["event"].partition("\n")[0]] += said.get("level") == "error"
    return +errors


def report(stack: str, seconds: float, seed: int) -> int:
    """Soak one stack, and print what came of it. Returns how much is wrong."""
    figures = asyncio.run(soak(stack, seconds, seed))
    for problem in figures.wrong:
        print(f"{stack}, seed {seed}: {problem}", flush=True)
    shown = {name: value for name, value in dataclasses.asdict(figures).items() if name != "wrong"}
    shown |= {name: dict(getattr(figures, name)) for name in ("troubles", "refusals", "errors")}
    print(f"{stack}: {len(figures.wrong)} wrong in {seconds:.0f} s, seed {seed}; {shown}", flush=True)
    return len(figures.wrong)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soaking.net", description=__doc__)
    parser.add_argument("--stack", choices=STACKS, default="embedded")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    return 1 if report(given.stack, given.seconds, given.seed) else 0


if __name__ == "__main__":
    sys.exit(main())
