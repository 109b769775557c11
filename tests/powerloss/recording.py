"""The recording: two lives of a system with all that its clients ask for. A seed decides on sizes and on what comes at
the same time."""

import asyncio
import random
import secrets
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from structlog.testing import capture_logs

from conveyor.clock import Clock
from conveyor.engines import local_logs
from conveyor.engines.sqlite import database, shrinking
from conveyor.model import JobId
from conveyor.recover import retention
from tests.machine.loop import LoopClock, VirtualLoop
from tests.powerloss.check import check_disk
from tests.powerloss.client import Client
from tests.powerloss.ledger import Known, Ledger
from tests.powerloss.life import RecordedDatabase, ThreadedDatabase, living
from tests.powerloss.origin import WAYS
from tests.powerloss.recorder import Recorder
from tests.powerloss.vfs import recorded_databases
from tests.support.clocks import JumpingClock
from tests.support.places import quick_place

# A log of bodies is full after a few batches.
LOG_BYTES = 48 * 1024
_OPTIONS: dict[str, Any] = {"chunk_size": 5, "attempts": 2, "backoff": {"base": 0.1}}
_PYTHON: dict[str, Any] = {"kind": "python", "handler": "any", **_OPTIONS}
_FETCH: dict[str, Any] = {"kind": "fetch", **_OPTIONS}
_DOWNLOAD: dict[str, Any] = {**_OPTIONS, "kind": "download", "chunk_size": 1}


# Starts what was recorded on the disk in a directory, and holds it to what was told. Raises Broken.
CheckDisk = Callable[[Path, VirtualLoop, int, Known], None]


def check_lives(place: Path, loop: VirtualLoop, seed: int, known: Known) -> None:
    """A server, started on the disk."""
    loop.run_until_complete(check_disk(place, LoopClock(loop, seed), seed, known))


class Recording(NamedTuple):
    """What was done to the disk, and what clients were told."""

    seed: int
    record: Recorder
    ledger: Ledger
    check: CheckDisk = check_lives


class Story:
    """What clients do. Each part is a job of its own, from its acceptance to its end."""

    def __init__(self, client: Client, chance: random.Random, life: int) -> None:
        self._client = client
        self._chance = chance
        self._life = life

    async def inline(self) -> JobId:
        """A short list in the request; most results are part of their rows. Then all of it again."""
        job_id = await self._client.submit(self._name("inline"), self._tasks("inline", 4, 12), **_PYTHON)
        await self._client.until_ended(job_id)
        await self._client.rerun(self._name("rerun"), job_id)
        await self._client.until_ended(job_id)
        return job_id

    async def staged(self) -> JobId:
        """A list in the request that is too long to be accepted at once."""
        job_id = await self._client.submit(self._name("staged"), self._tasks("staged", 32, 45), **_PYTHON)
        await self._client.until_ended(job_id)
        return job_id

    async def fetched(self) -> JobId:
        """Pages that a fetcher has appended to its own log, and an export of them."""
        job_id = await self._client.submit(self._name("fetched"), self._tasks("fetched", 12, 28), **_FETCH)
        await self._client.until_ended(job_id)
        await self._client.export(self._name("zip"), job_id, format="zip", compression="none")
        return job_id

    async def uploaded(self) -> JobId:
        """A list that is uploaded and ingested, and an export of it that is deleted."""
        job_id = await self._client.upload(self._name("uploaded"), self._tasks("uploaded", 15, 40), **_PYTHON)
        await self._client.until_ended(job_id)
        export_id = await self._client.export(self._name("jsonl"), job_id, format="jsonl", bodies="base64")
        await self._client.delete_export(export_id)
        return job_id

    async def added(self) -> JobId:
        """An open job, and batches for it."""
        job_id = await self._client.open_job(self._name("added"), **_PYTHON)
        for number in range(3):
            await asyncio.sleep(self._chance.choice((0.0, 0.3, 1.0)))
            tasks = self._tasks(f"added-{number}", 3, 9)
            await self._client.add(self._name(f"batch {number}"), job_id, tasks, is_last=number == 2)
        await self._client.until_ended(job_id)
        return job_id

    async def objects(self) -> JobId:
        """An object for each body; the job is deleted, running or not, and purged."""
        spec = {**_PYTHON, "result_layout": "object"}
        job_id = await self._client.submit(self._name("objects"), self._tasks("objects", 6, 12), **spec)
        await asyncio.sleep(self._chance.choice((0.2, 1.0, 5.0)))
        await self.gone(job_id)
        return job_id

    async def downloaded(self) -> JobId:
        """Files that come in pieces, from all kinds of origins."""
        tasks = [f"http://files.test/{self._life}/{how}/{self._chance.getrandbits(16)}" for how in WAYS]
        job_id = await self._client.submit(self._name("downloaded"), tasks, **_DOWNLOAD)
        await self._client.until_ended(job_id)
        return job_id

    async def gone(self, job_id: JobId) -> None:
        """A job is deleted and purged."""
        await self._client.delete(job_id)
        await self._client.until_purged(job_id)

    def _name(self, what: str) -> str:
        return f"{what} of life {self._life}"

    def _tasks(self, name: str, least: int, most: int) -> list[str]:
        count = self._chance.randint(least, most)
        return [f"http://target.test/{self._life}/{name}/{number}" for number in range(count)]


PARTS: dict[str, Callable[[Story], Awaitable[JobId]]] = {
    "inline": Story.inline,
    "staged": Story.staged,
    "fetched": Story.fetched,
    "uploaded": Story.uploaded,
    "added": Story.added,
    "objects": Story.objects,
    "downloaded": Story.downloaded,
}


def recorded(seed: int, parts: Sequence[str] = tuple(PARTS), *, threads: bool = False) -> Recording:
    """Record the lives of a system in which these parts happen: on a loop whose time is an input, the same each time,
    or in real time with the threads of production, in whatever order these do it."""
    with quick_place() as place, pytest.MonkeyPatch.context() as patch, capture_logs():
        patch.setattr(local_logs, "LOG_BYTES", LOG_BYTES)
        patch.setattr(shrinking, "KEPT_PAGES", 0)
        return (_with_threads if threads else _on_loop)(place, seed, parts, patch)


def _on_loop(place: Path, seed: int, parts: Sequence[str], patch: pytest.MonkeyPatch) -> Recording:
    chance = random.Random(seed)
    patch.setattr(secrets, "token_hex", lambda size: f"{chance.getrandbits(8 * size):0{2 * size}x}")
    patch.setattr(database, "SqliteDatabase", RecordedDatabase)
    loop = VirtualLoop()
    record = Recorder(place, loop.time)
    ledger = Ledger(record)
    try:
        with recorded_databases(record), record.recording():
            loop.run_until_complete(_lives(place, LoopClock(loop, seed), seed, ledger, parts))
    finally:
        loop.close()
    record.check_complete()
    return Recording(seed, record, ledger)


def _with_threads(place: Path, seed: int, parts: Sequence[str], patch: pytest.MonkeyPatch) -> Recording:
    patch.setattr(database, "SqliteDatabase", ThreadedDatabase)
    patch.setattr(retention, "SETTLE_SECONDS", 0.3)
    patch.setattr(retention, "_EVERY", 0.2)
    # As if it were the time of the loop on which systems are started later.
    clock, start = JumpingClock(seed), LoopClock(VirtualLoop()).now()
    clock.advance(start - clock.now())
    record = Recorder(place, lambda: clock.now() - start)
    ledger = Ledger(record)
    with recorded_databases(record), record.recording():
        asyncio.run(_lives(place, clock, seed, ledger, parts))
    record.check_complete()
    return Recording(seed, record, ledger)


async def _lives(place: Path, clock: Clock, seed: int, ledger: Ledger, parts: Sequence[str]) -> None:
    chance = random.Random(seed)
    async with living(place, clock, seed, is_first=True) as system:
        client = Client(system, ledger)
        made = await _life(client, Story(client, chance, 1), parts)
    async with living(place, clock, seed + 1, is_first=True) as system:
        client = Client(system, ledger)
        story = Story(client, chance, 2)
        doomed = [name for name in made if name != "objects"]
        gone = [story.gone(made[chance.choice(doomed)])] if doomed else []
        await _life(client, story, parts, *gone)


async def _life(client: Client, story: Story, parts: Sequence[str], *more: Awaitable[None]) -> dict[str, JobId]:
    await client.arrive()
    watching = asyncio.create_task(client.watch())
    made = await asyncio.gather(*(PARTS[part](story) for part in parts), *more)
    watching.cancel()
    return dict(zip(parts, made, strict=False))
