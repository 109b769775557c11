"""`python -m bench.soak --seconds 60`: jobs without end while Postgres and Redis are killed every few seconds.

The roles run as an operator runs them, each in a process of its own, on Postgres and Redis; clients hand over small
jobs, uploaded lists and open jobs, and ask again, under the same key, until they have an answer. Both servers go down
hard, again and again. Then all is left in peace, and the ledger is drawn up: every job that was answered has ended, its
counts are a recount of its rows and what was handed over, it was told once, and there is no job that nobody asked for.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from bench.child import ROOT, run_async
from conveyor.auth.keys import make_key
from conveyor.clock import SystemClock
from conveyor.model import JobId, TenantId
from conveyor.settings import Settings
from conveyor.states import ENDED
from conveyor.system import System, migrate, open_system
from tests.servers.launch import launched
from tests.servers.postgres import Server
from tests.servers.redis import RedisServer
from tests.stacks.ledger import Entry, audit, fails
from tests.support.api import Answer, client

TENANT = TenantId("soak")
ROLES = (["work"], ["work"], ["ingest"], ["sweep"])
SCRATCH = ROOT / ".cache" / "bench"

_CONVEYOR = str(Path(sys.executable).with_name("conveyor"))
_PAUSE = 0.1
# Seconds that the last jobs have to end in, once nothing goes wrong any more.
_PATIENCE = 180.0


class Clients:
    """Those who hand jobs over, until they are told to stop; each then finishes the job that it is at."""

    def __init__(self, url: str, key: str, chance: random.Random) -> None:
        self._url = url
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        self._http = client()
        self._chance = chance
        self._keys = itertools.count()
        self.stopped = False
        self.entries: list[Entry] = []
        self.said: Counter[str] = Counter()

    async def run(self) -> None:
        async with self._http:
            await asyncio.gather(*(self._keep(each) for each in (self._small, self._small, self._staged, self._opened)))

    async def _keep(self, hand_over: Callable[[], Any]) -> None:
        while not self.stopped:
            await hand_over()
            await asyncio.sleep(self._chance.uniform(0, 2 * _PAUSE))

    async def _small(self) -> None:
        count = self._chance.randint(1, 40)
        self._enter(await self._post("/v1/jobs", {**_SPEC, "tasks": _inputs(count)}), count, "small")

    async def _staged(self) -> None:
        count = self._chance.randint(100, 2000)
        data = b"".join(b"%d\n" % number for number in _inputs(count))
        asked = {"size": len(data), "sha256": sha256(data).hexdigest()}
        promised = (await self._post("/v1/uploads", asked)).json
        # It can be filled once: a conflict is an answer that was lost before.
        await self._asked("PUT", promised["url"], data, promised["headers"], right={200, 204, 409})
        source = {"upload_id": promised["upload_id"], "format": "jsonl"}
        self._enter(await self._post("/v1/jobs", {**_SPEC, "source": source}), count, "staged")

    async def _opened(self) -> None:
        job_id = (await self._post("/v1/jobs", {**_SPEC, "mode": "open"})).json["id"]
        total = 0
        batches = self._chance.randint(1, 6)
        for batch in range(batches):
            count = self._chance.randint(1, 200)
            tasks = {"tasks": _inputs(count, total), "last_batch": batch == batches - 1}
            await self._post(f"/v1/jobs/{job_id}/tasks", tasks)
            total += count
        self.said["open"] += 1
        self.entries.append(_entry(job_id, total))

    def _enter(self, answer: Answer, total: int, how: str) -> None:
        self.said[how] += 1
        self.entries.append(_entry(answer.json["id"], total))

    async def _post(self, path: str, value: Any) -> Answer:
        key = {"idempotency-key": f"key-{next(self._keys)}"}
        return await self._asked("POST", path, json.dumps(value).encode(), key, right={201, 202})

    async def _asked(self, method: str, path: str, body: bytes, headers: dict[str, str], right: set[int]) -> Answer:
        """Ask until there is an answer. That the request is still under way is none yet."""
        url = path if path.startswith("http") else self._url + path
        own = {} if method == "PUT" else self._headers
        while True:
            try:
                request = self._http.request(method, url).headers({**own, **headers}).body_bytes(body)
                response = await request.build().send()
                answer = Answer(response.status, {}, bytes(await response.bytes()))
            except Exception as error:
                self.said[f"again: {type(error).__name__}"] += 1
            else:
                if answer.status in right:
                    return answer
                in_flight = answer.status == 409 and answer.json["code"] == "idempotency_in_flight"
                if answer.status < 500 and answer.status != 429 and not in_flight:
                    raise AssertionError(f"{method} {path}: {answer.status} {answer.body!r}")
                self.said[f"again: {answer.status}"] += 1
            await asyncio.sleep(_PAUSE)


_SPEC = {"kind": "python", "handler": "bench.uneven", "attempts": 1}


def _inputs(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def _entry(job_id: str, total: int) -> Entry:
    return Entry(JobId(job_id), total, sum(map(fails, range(total))), TENANT)


class Trouble:
    """Takes the servers down, until it is told to stop, and leaves them running."""

    def __init__(self, postgres: Server, redis: RedisServer, every: float, chance: random.Random) -> None:
        self._postgres = postgres
        self._redis = redis
        self._every = every
        self._chance = chance
        self.done: Counter[str] = Counter()

    async def run(self, until: float) -> None:
        while True:
            pause = self._every * self._chance.uniform(0.5, 1.5)
            if time.monotonic() + pause >= until:
                return
            await asyncio.sleep(pause)
            what = self._chance.choice(("postgres", "redis", "both", "forget"))
            if what in ("redis", "both"):
                await asyncio.to_thread(self._redis.kill)
            if what in ("postgres", "both"):
                await asyncio.to_thread(self._postgres.stop)
            if what == "forget":
                await asyncio.to_thread(self._redis.say, "FLUSHALL")
                self.done["FLUSHALL of Redis"] += 1
                continue
            await asyncio.sleep(self._chance.uniform(0, 1.5))
            if what in ("postgres", "both"):
                await asyncio.to_thread(self._postgres.start)
                self.done["restarts of Postgres"] += 1
            if what in ("redis", "both"):
                await asyncio.to_thread(self._redis.start)
                self.done["restarts of Redis"] += 1


@contextmanager
def roles(environ: dict[str, str], log: Path) -> Iterator[tuple[str, list["subprocess.Popen[str]"]]]:
    """Each in a process of its own; the address of the API."""
    processes: list[subprocess.Popen[str]] = []
    with log.open("w") as said:

        def start(*command: str, stdout: int) -> "subprocess.Popen[str]":
            given = launched(_CONVEYOR, *command)
            process = subprocess.Popen(given, env=environ, cwd=ROOT, stdout=stdout, stderr=said, text=True)
            processes.append(process)
            return process

        try:
            api = start("api", "--port", "0", stdout=subprocess.PIPE)
            for command in ROLES:
                start(*command, stdout=subprocess.DEVNULL)
            assert api.stdout is not None
            yield api.stdout.readline().split()[-1], processes
        finally:
            for process in processes:
                process.send_signal(signal.SIGTERM)
            for process in processes:
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                if process.stdout is not None:
                    process.stdout.close()


async def soak(place: Path, postgres: Server, redis: RedisServer, options: argparse.Namespace) -> list[str]:
    """Run it, print the ledger, and return what is wrong with it."""
    # With its own settings: what this machine's user has set is not soaked.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CONVEYOR_")}
    environ = {**kept, **_environment(place, postgres, redis), "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    settings = Settings.load(environ)
    await migrate(settings, SystemClock())
    text, key = make_key(SystemClock(), TENANT)
    async with open_system(settings) as system:
        await system.records.access.create_key(key)
    trouble = Trouble(postgres, redis, options.every, random.Random(f"trouble {options.seed}"))
    with roles(environ, place / "log") as (url, processes):
        clients = Clients(url, text, random.Random(f"clients {options.seed}"))
        began = time.monotonic()
        working = asyncio.create_task(clients.run())
        await trouble.run(began + options.seconds)
        await asyncio.sleep(max(0.0, began + options.seconds - time.monotonic()))
        clients.stopped = True
        await working
        async with open_system(settings) as system:
            ended = await _until_ended(system, clients.entries)
        died = [process.args for process in processes if process.poll() is not None]
    wrong = [f"died with {process.returncode}: {process.args!r}" for process in processes if process.args in died]
    wrong += [] if trouble.done else ["nothing was taken down: give it more --seconds"]
    wrong += [] if ended else [f"not all have ended {_PATIENCE:g} s after the last trouble"]
    async with open_system(settings) as system:
        wrong += await _wrong(system, clients.entries)
    _show(clients, trouble, time.monotonic() - began, wrong)
    if wrong and options.log:
        Path(options.log).write_text((place / "log").read_text())
    return wrong


def _environment(place: Path, postgres: Server, redis: RedisServer) -> dict[str, str]:
    return {
        "CONVEYOR_DATA": str(place / "data"),
        "CONVEYOR_RECORDS": postgres.url,
        "CONVEYOR_TASKS": postgres.url,
        "CONVEYOR_QUEUE": postgres.url,
        "CONVEYOR_COORDINATOR": redis.url,
        "CONVEYOR_APP": "bench.app",
        "CONVEYOR_BLOBS": f"file://{place.absolute()}/data/blobs",
        "CONVEYOR_SIGNING_KEY": "s" * 32,
        "CONVEYOR_LOG_LEVEL": "warning",
    }


async def _until_ended(system: System, entries: Sequence[Entry]) -> bool:
    limit = time.monotonic() + _PATIENCE
    for entry in entries:
        while True:
            job = await system.records.jobs.job(entry.tenant, entry.job_id)
            if job is not None and job.state in ENDED:
                break
            if time.monotonic() > limit:
                return False
            await asyncio.sleep(_PAUSE)
    return True


async def _wrong(system: System, entries: Sequence[Entry]) -> list[str]:
    wrong = [line for entry in entries for line in await audit(system, entry)]
    asked, cursor = {entry.job_id for entry in entries}, None
    while True:
        page = await system.records.jobs.jobs(TENANT, cursor, 1000)
        wrong += [f"{job.job_id}: nobody asked for it" for job in page.items if job.job_id not in asked]
        cursor = page.next_cursor
        if cursor is None:
            break
    letters = (await system.queue.dead_letters(None, 1000)).items
    return wrong + [f"given up: {letter.queue} {letter.reason}" for letter in letters]


def _show(clients: Clients, trouble: Trouble, seconds: float, wrong: list[str]) -> None:
    tasks = sum(entry.total for entry in clients.entries)
    print(f"{len(clients.entries)} jobs with {tasks} tasks in {seconds:.0f} s")
    for what, count in sorted((clients.said + trouble.done).items()):
        print(f"  {count:6}  {what}")
    print(f"  {len(wrong):6}  wrong")
    for line in wrong[:50]:
        print(f"          {line[:500]}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long there is trouble")
    parser.add_argument("--every", type=float, default=4.0, help="seconds from one trouble to the next, about")
    parser.add_argument("--seed", type=int, default=1, help="which troubles, and which jobs")
    parser.add_argument("--log", help="where to leave what the roles said, if something is wrong")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    SCRATCH.mkdir(parents=True, exist_ok=True)
    # On disk and with its own settings: what is committed has to survive.
    postgres, redis = Server(SCRATCH, {}), RedisServer()
    try:
        with tempfile.TemporaryDirectory(prefix="soak-", dir=SCRATCH) as place:
            return 1 if run_async(soak(Path(place), postgres, redis, options)) else 0
    finally:
        redis.close()
        postgres.close()


if __name__ == "__main__":
    sys.exit(main())
