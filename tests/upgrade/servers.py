"""`conveyor up` and single commands of one version or another, as processes, and a load whose every job is known."""

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conveyor import Client
from tests.support.up_process import ROOT, Up, environment
from tests.upgrade.versions import NEWER_OPTION

APP = "tests.everyday.app"
# Of the jobs that the later version accepts, one in so many has an option that the earlier one does not know.
_NEWER_EVERY = 5
_PAUSE_SECONDS = 0.05

_CONVEYOR = "import sys; from conveyor.cli import main; main(sys.argv[1:])"
_MONITOR = "import json; from conveyor.recover.lambda_handler import handler; print(json.dumps(handler({}, None)))"


def server(place: Path, source: Path, settings: dict[str, str]) -> Up:
    """A server of the version in this folder; not started yet."""
    place.mkdir(exist_ok=True)
    return Up(place, "--app", APP, **{"PYTHONPATH": f"{source}:{ROOT}", **settings})


def conveyor(source: Path, settings: dict[str, str], *arguments: str) -> str:
    """Run a command of the version in this folder; what it prints."""
    return _python(source, settings, _CONVEYOR, *arguments)


def monitor_pass(source: Path, settings: dict[str, str], data: Path) -> dict[str, Any]:
    """One pass of the monitor of the version in this folder, as its Lambda function makes it; its counts."""
    printed = _python(source, {**settings, "CONVEYOR_DATA": str(data), "CONVEYOR_LOG_LEVEL": "error"}, _MONITOR)
    counts: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return counts


def _python(source: Path, settings: dict[str, str], code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=environment(**{"PYTHONPATH": str(source), **settings}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Load:
    """Submits jobs to some servers in turn, until it is stopped. What a server has accepted must be finished in the
    end: `accepted` has what both versions know, `newer` what only the later one does."""

    def __init__(self, tasks: int, has_newer: bool) -> None:
        self.accepted: list[str] = []
        self.newer: list[str] = []
        self._tasks = tasks
        self._has_newer = has_newer
        self._stopped = threading.Event()
        self._failures: list[BaseException] = []

    @property
    def total(self) -> int:
        return len(self.accepted) + len(self.newer)

    @contextmanager
    def on(self, *servers: Up, later: Up | None = None) -> Iterator[None]:
        """Submit during the block, to `later` too."""
        self._stopped.clear()
        submitting = threading.Thread(target=self._submit, args=(servers, later))
        submitting.start()
        try:
            yield
        finally:
            self._stopped.set()
            submitting.join()
            assert self._failures == [], self._failures

    def _submit(self, servers: Sequence[Up], later: Up | None) -> None:
        everyone = [*servers, *([] if later is None else [later])]
        try:
            clients = [Client(each.url, key=each.key) for each in everyone]
            for turn in range(1_000_000):
                if self._stopped.is_set():
                    break
                which = turn % len(clients)
                is_newer = self._has_newer and everyone[which] is later and turn // len(clients) % _NEWER_EVERY == 0
                self._submit_one(clients[which], is_newer)
                self._stopped.wait(_PAUSE_SECONDS)
            for client in clients:
                client.close()
        except BaseException as error:
            self._failures.append(error)

    def _submit_one(self, client: Client, is_newer: bool) -> None:
        tasks = [{"page": "plain", "n": n, "noise": random.randbytes(2000).hex()} for n in range(self._tasks)]
        options: Any = NEWER_OPTION if is_newer else {}
        made = client.submit(tasks, handler="everyday.quick", **options)
        (self.newer if is_newer else self.accepted).append(made.id)

    def check_by_earlier(self, up: Up) -> int:
        """Everything that the earlier version knows is finished, and listed without what it does not know."""
        with Client(up.url, key=up.key) as client:
            for job_id in self.accepted:
                self._check_one(client, job_id)
            assert sorted(job.id for job in client.jobs()) == sorted(self.accepted)
        return len(self.accepted)

    def check_by_later(self, up: Up) -> int:
        """Everything is finished, and listed."""
        with Client(up.url, key=up.key) as client:
            for job_id in (*self.accepted, *self.newer):
                self._check_one(client, job_id)
            assert sorted(job.id for job in client.jobs()) == sorted((*self.accepted, *self.newer))
        return self.total

    def _check_one(self, client: Client, job_id: str) -> None:
        """Wait for a job, and read all of its results and one body."""
        job = client.job(job_id).wait()
        assert (job.ok, job.total) == (True, self._tasks), job_id
        results = list(job.results())
        assert len({result.task_id for result in results}) == len(results) == self._tasks, job_id
        assert job.body(random.choice(results)), job_id


class Passes:
    """Passes of a version's monitor, one after the other, while a block runs."""

    def __init__(self, source: Path, settings: dict[str, str], data: Path) -> None:
        self._given = (source, settings, data)
        self.number = 0

    def during(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            monitor_pass(*self._given)
            self.number += 1
