"""`python -m tests.million`: one large job on the AWS stack with real processes, whose workers are killed on the way.

It starts the emulator of DynamoDB, SQS and S3, a Redis, and the roles as processes of their own; stages a list, kills
one of the two workers with SIGKILL twice, and at the end counts every row.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from conveyor import Client
from tests.servers import aws, dynamodb, redis, s3, sqs

_ROLES = ("api", "ingest", "sweep", "work", "work")
_KILL_AT = (0.3, 0.6)
_TENANT = "million"
_SHOW_SECONDS = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.million", description=__doc__)
    parser.add_argument("--tasks", type=int, default=1_000_000)
    tasks = parser.parse_args().tasks
    with TemporaryDirectory(prefix="conveyor-million-") as folder:
        return _run(Path(folder), tasks)


def _environ(place: Path) -> dict[str, str]:
    settings = {
        "RECORDS": dynamodb.url_for(place),
        "TASKS": dynamodb.url_for(place),
        "QUEUE": sqs.url_of(place, wait=20, settle=60),
        "COORDINATOR": redis.redis().url,
        "BLOBS": s3.url_of(place),
        "SIGNING_KEY": "0123456789abcdef0123456789abcdef",
        "DATA": str(place),
        # The emulator looks at every item of a partition for each query: with 8, a recount holds it up for minutes.
        "TASK_SHARD_COUNT": "64",
        "APP": "bench.app",
        "LOG_LEVEL": "warning",
    }
    return os.environ | aws.CREDENTIALS | {f"CONVEYOR_{name}": value for name, value in settings.items()}


class Roles:
    """The processes of the fleet."""

    def __init__(self, place: Path, environ: dict[str, str]) -> None:
        self._place = place
        self._environ = environ
        self.workers: list[subprocess.Popen[bytes]] = []
        self._others: list[subprocess.Popen[bytes]] = []
        self.port = redis.free_port()

    def start(self, role: str) -> None:
        extra = ["--port", str(self.port)] if role == "api" else []
        with (self._place / f"{role}.log").open("ab") as log:
            process = subprocess.Popen(_conveyor(role, *extra), env=self._environ, stdout=log, stderr=log)
        (self.workers if role == "work" else self._others).append(process)

    def replace_worker(self) -> None:
        """Kill a worker, with its children, and start another."""
        worker = self.workers.pop(0)
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        self.start("work")

    def close(self) -> None:
        for process in (*self.workers, *self._others):
            process.terminate()
        for process in (*self.workers, *self._others):
            process.wait(timeout=60)


def _conveyor(*words: str) -> list[str]:
    return [str(Path(sys.executable).parent / "conveyor"), *words]


def _run(place: Path, tasks: int) -> int:
    environ = _environ(place)
    subprocess.run(_conveyor("migrate"), env=environ, check=True)
    made = subprocess.run(
        _conveyor("keys", "create", "--json", "--tenant", _TENANT), env=environ, check=True, capture_output=True
    )
    key = json.loads(made.stdout)["key"]
    listed = place / "list.jsonl"
    with listed.open("w") as file:
        file.writelines(f"{number}\n" for number in range(tasks))
    roles = Roles(place, environ)
    try:
        for role in _ROLES:
            roles.start(role)
        return _follow(roles, key, listed, tasks)
    finally:
        roles.close()
        for log in sorted(place.glob("*.log")):
            lines = log.read_text().splitlines()
            print(f"{log.name}: {len(lines)} lines of level warning or above", *lines[-3:], sep="\n  ")


def _wait_for_api(port: int) -> None:
    """Wait until the API listens."""
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)


def _follow(roles: Roles, key: str, listed: Path, tasks: int) -> int:
    _wait_for_api(roles.port)
    with Client(f"http://127.0.0.1:{roles.port}", key) as client:
        began = time.monotonic()
        job = client.submit(listed, handler="bench.noop", concurrency=512)
        print(f"accepted after {time.monotonic() - began:.1f} s", flush=True)
        kills, shown_at = list(_KILL_AT), began
        while not job.refresh().ended:
            done = job.done
            if kills and done >= kills[0] * tasks:
                kills.pop(0)
                roles.replace_worker()
                print(f"{time.monotonic() - began:.0f} s: a worker was killed, {done:,} tasks had finished", flush=True)
            if time.monotonic() - shown_at > _SHOW_SECONDS:
                shown_at = time.monotonic()
                print(f"{shown_at - began:.0f} s: {done:,} tasks", flush=True)
            time.sleep(1.0)
        seconds = time.monotonic() - began
        print(f"{job.state} after {seconds:.0f} s, {tasks / seconds:,.0f} tasks/s: {job.summary()}", flush=True)
        (exported,) = job.export(listed.with_name("rows.jsonl"))
        statuses = _statuses(exported)
        rows = sorted(index for index, _ in statuses)
        is_exact = (
            job.succeeded == tasks and rows == list(range(tasks)) and {each for _, each in statuses} == {"succeeded"}
        )
        print(f"{len(rows):,} rows; each task once and succeeded: {is_exact}", flush=True)
        return 0 if is_exact else 1


def _statuses(exported: Path) -> list[tuple[int, str]]:
    """Index and status of each row of an export."""
    with exported.open() as lines:
        return [(row["index"], row["status"]) for row in map(json.loads, lines)]


if __name__ == "__main__":
    sys.exit(main())
