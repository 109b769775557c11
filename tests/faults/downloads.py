"""A download whose server cuts and whose worker is killed, again and again; what it cost.

python -m tests.faults.downloads 500      for a file of so many megabytes
"""

import asyncio
import json
import random
import re
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from conveyor.clock import SystemClock
from conveyor.model import JobId
from conveyor.read.results import stream_body
from conveyor.settings import Settings
from conveyor.states import RunState, TaskStatus
from conveyor.system import open_system
from tests.faults.long_child import TENANT
from tests.support.file_site import Behaviour, FileSite, digest

_ROOT = Path(__file__).parents[2]


@dataclass
class Cost:
    """What a download took."""

    size: int
    seconds: float
    # Bytes that the workers read, and the most memory that any of them had. What the server sent and no worker came to
    # read, because it was killed, is not fetched; it depends on how busy the machine is.
    fetched: int
    peak_bytes: int
    cuts: int
    kills: int
    intact: bool
    attempts: int


async def measure(size: int, cuts: int, kills: int, rate: int, place: Path, seed: int = 5) -> Cost:
    """Download it all. Kills fall where so many bytes were sent, each somewhere in its part of the file."""
    chance = random.Random(seed)
    behaviour = Behaviour(size, cuts=[size * part // (cuts + 1) for part in range(1, cuts + 1)], rate=rate)
    want = digest(size)
    deaths = [int(size * (part + chance.random()) / (kills + 1)) for part in range(kills)]
    peak = fetched = before = 0
    started = time.monotonic()
    async with FileSite(behaviour) as site:
        spec = {"kind": "download", "tasks": [{"url": site.url(), "sha256": want}], "timeout": 10, "attempts": 1}
        (place / "spec.json").write_text(json.dumps(spec))
        for death in [*deaths, None]:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.faults.long_child", str(place), cwd=_ROOT
            )
            ended = asyncio.create_task(process.wait())
            while not ended.done() and (death is None or site.sent < death):
                await asyncio.wait([ended], timeout=0.005)
                peak = max(peak, _peak(process.pid))
            if death is None:
                assert ended.result() == 0, ended.result()
                fetched += site.sent - before
                continue
            assert not ended.done(), "it ended before it was killed"
            process.send_signal(signal.SIGSTOP)
            fetched += site.sent - before - _unread(site.port)
            process.kill()
            await ended
            while site.open_connections:  # noqa: ASYNC110  (seen from outside)
                await asyncio.sleep(0.001)
            before = site.sent
        left = len(behaviour.cuts)
    seconds = time.monotonic() - started
    async with open_system(Settings(data=place / "data"), SystemClock()) as system:
        job = await system.records.jobs.job(TENANT, JobId((place / "job").read_text()))
        assert job is not None
        assert job.state is RunState.COMPLETED
        (task,) = await system.tasks.at(job.key, [0])
        assert task.status is TaskStatus.SUCCEEDED, task.detail.error
        body = task.detail.body
        assert body is not None
        found = sha256()
        async for piece in stream_body(system.blobs, body):
            found.update(piece)
    intact = found.hexdigest() == body.sha256 == want and body.length == size
    return Cost(size, seconds, fetched, peak, cuts - left, kills, intact, task.attempts)


def _unread(port: int) -> int:
    """Bytes from this port that the kernel still has: on their way, or not yet read."""
    left = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, queues, *_ = line.split()
        sending, receiving = (int(text, 16) for text in queues.split(":"))
        if int(remote.split(":")[1], 16) == port:
            left += receiving
        elif int(local.split(":")[1], 16) == port and int(remote.split(":")[1], 16):
            left += sending
    return left


def _peak(pid: int) -> int:
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def main() -> None:
    size = int(float(sys.argv[1]) * 1_000_000)
    with tempfile.TemporaryDirectory() as place:
        cost = asyncio.run(measure(size, 20, 5, 60_000_000, Path(place)))
    print(cost)
    print(f"{cost.fetched / cost.size:.3f} times its size fetched, peak {cost.peak_bytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
