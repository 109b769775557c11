"""`conveyor up` of one version or another, as a process, and a load on it whose every accepted job is known."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conveyor import Client
from tests.support.up_process import Up

APP = "tests.everyday.app"
TASKS = 60


def server(place: Path, source: Path, settings: dict[str, str]) -> Up:
    """A server of the version in this folder; not started yet."""
    place.mkdir(exist_ok=True)
    root = str(Path(__file__).parents[2])
    return Up(place, "--app", APP, **{"PYTHONPATH": f"{source}:{root}", **settings})


class Load:
    """Submits jobs to some servers in turn, until it is stopped. What a server has accepted must be finished in the
    end."""

    def __init__(self) -> None:
        self.accepted: list[str] = []
        self._urls: list[tuple[str, str]] = []
        self._stopped = threading.Event()
        self._failures: list[BaseException] = []

    @contextmanager
    def on(self, *servers: Up) -> Iterator[None]:
        """Submit during the block."""
        self._urls = [(each.url, each.key) for each in servers]
        self._stopped.clear()
        submitting = threading.Thread(target=self._submit)
        submitting.start()
        try:
            yield
        finally:
            self._stopped.set()
            submitting.join()
            assert self._failures == [], self._failures

    def _submit(self) -> None:
        try:
            clients = [Client(url, key=key) for url, key in self._urls]
            for turn in range(1_000_000):
                if self._stopped.is_set():
                    break
                tasks = [{"page": "plain", "n": n, "noise": random.randbytes(2000).hex()} for n in range(TASKS)]
                self.accepted.append(clients[turn % len(clients)].submit(tasks, handler="everyday.quick").id)
                self._stopped.wait(0.05)
            for client in clients:
                client.close()
        except BaseException as error:
            self._failures.append(error)

    def check(self, up: Up) -> int:
        """Wait for every job, and read all of its results and one body; the number of jobs."""
        with Client(up.url, key=up.key) as client:
            for job_id in self.accepted:
                job = client.job(job_id).wait()
                assert (job.ok, job.total) == (True, TASKS), job_id
                results = list(job.results())
                assert len(results) == TASKS
                assert job.body(random.choice(results)), job_id
        return len(self.accepted)
