"""Submits of small jobs over HTTP, against one writer that commits the rows of such a job in a transaction for each.

Eight clients wait for each answer before they send the next request, which is bytes that were made before. They are
eight connections in one thread, so that what is measured is the server: their own CPU is printed beside its.

`python -m bench.submits DATA` serves the API without any role, so that jobs are accepted and none runs.
"""

import asyncio
import json
import os
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.child import ROOT, MeasurementFailed, run_async

CLIENTS = 8
TASKS = 10

_PATIENCE = 60.0
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.I)


def submitted(count: int, with_workers: bool, place: str) -> dict[str, Any]:
    """Submit jobs of ten tasks that do nothing, with an idempotency key each, as the SDK does. With workers, they run
    in the same process at the same time, as they do on every `conveyor up`."""
    with (_up if with_workers else _api)(place) as (address, key, pid):
        requests = [_request(address, key, number) for number in range(count)]
        before, own = cpu_seconds(pid), time.process_time()
        seconds = _send_all(address, requests)
        used, own = cpu_seconds(pid) - before, time.process_time() - own
    each = {"cpu_us": round(used / count * 1e6), "client_cpu_us": round(own / count * 1e6)}
    return {"count": count, "seconds": seconds, **each, "disturbed": 0}


def _request(address: tuple[str, int], key: str, number: int) -> bytes:
    body = json.dumps({"kind": "python", "handler": "bench.noop", "tasks": list(range(TASKS))}).encode()
    head = (
        f"POST /v1/jobs HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nIdempotency-Key: submit-{number}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _send_all(address: tuple[str, int], requests: Sequence[bytes]) -> float:
    """The seconds that all requests took, over several connections that wait for each answer."""
    connections = [socket.create_connection(address) for _ in range(CLIENTS)]
    by_descriptor = {each.fileno(): each for each in connections}
    answers = dict.fromkeys(by_descriptor, b"")
    poll = select.epoll()
    for connection in connections:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        poll.register(connection, select.EPOLLIN)
    left, answered = iter(requests), 0
    began = time.perf_counter()
    for connection in connections:
        connection.sendall(next(left))
    while answered < len(requests):
        for descriptor, _ in poll.poll(_PATIENCE) or _fail("no answer"):
            answers[descriptor] += by_descriptor[descriptor].recv(65536) or _fail("the connection was closed")
            if not _is_whole(answers[descriptor]):
                continue
            if not answers[descriptor].startswith(b"HTTP/1.1 201 "):
                _fail(answers[descriptor][:300].decode())
            answers[descriptor], answered = b"", answered + 1
            if (request := next(left, None)) is not None:
                by_descriptor[descriptor].sendall(request)
    seconds = time.perf_counter() - began
    poll.close()
    for connection in connections:
        connection.close()
    return seconds


def _is_whole(answer: bytes) -> bool:
    head = answer.find(b"\r\n\r\n")
    length = _LENGTH.search(answer) if head > 0 else None
    return length is not None and len(answer) >= head + 4 + int(length[1])


def _fail(what: str) -> Any:
    raise MeasurementFailed(f"a submit failed: {what}")


def cpu_seconds(root: int) -> float:
    """Seconds of a server and of the processes that it started."""
    pids = [root]
    for task in Path(f"/proc/{root}/task").iterdir():
        pids += [int(child) for child in (task / "children").read_text().split()]
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def _up(place: str) -> Iterator[tuple[tuple[str, int], str, int]]:
    from tests.support.up_process import running

    with running(Path(place), "--app", "bench.app", CONVEYOR_LOG_LEVEL="error") as up:
        assert up._process is not None
        yield _address(up.direct), up.key, up._process.pid


@contextmanager
def _api(place: str) -> Iterator[tuple[tuple[str, int], str, int]]:
    data = Path(place) / "data"
    process = subprocess.Popen([sys.executable, "-m", "bench.submits", str(data)], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().decode().strip()
        yield _address(url), (data / "local.key").read_text().strip(), process.pid
    finally:
        process.terminate()
        process.wait()


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return str(parts.hostname), int(parts.port or 0)


async def _serve(data: Path) -> None:
    from conveyor.api.server import serve
    from conveyor.cli.local_key import ensure_local_key
    from conveyor.settings import Settings
    from conveyor.system import open_system
    from conveyor.telemetry.logs import configure_log

    configure_log("error")
    async with open_system(Settings.load({}, data=data)) as system:
        await ensure_local_key(system)
        await serve(system, "127.0.0.1", 0, asyncio.Event(), lambda url: print(url, flush=True))


def bare_commits(count: int, place: str) -> dict[str, Any]:
    """One transaction for each job: its row, its run, an event, a message, ten tasks. Nothing around it."""
    import apsw

    from conveyor.engines.sqlite.database import WRITER_PRAGMAS

    db = apsw.Connection(str(Path(place) / "bare.db"))
    for pragma in WRITER_PRAGMAS:
        db.execute(pragma)
    db.execute(
        "CREATE TABLE jobs (id TEXT PRIMARY KEY, body TEXT) WITHOUT ROWID;"
        "CREATE TABLE runs (id TEXT PRIMARY KEY, body TEXT) WITHOUT ROWID;"
        "CREATE TABLE events (seq INTEGER PRIMARY KEY, body TEXT);"
        "CREATE TABLE messages (id INTEGER PRIMARY KEY, body BLOB);"
        "CREATE TABLE tasks (job TEXT, idx INTEGER, input TEXT, PRIMARY KEY (job, idx)) WITHOUT ROWID;"
    )
    row = "x" * 400
    tasks = json.dumps(list(range(TASKS)))
    began = time.perf_counter()
    for number in range(count):
        job = f"job_{number:026d}"
        db.execute("BEGIN IMMEDIATE")
        db.execute("INSERT INTO jobs VALUES (?, ?)", (job, row))
        db.execute("INSERT INTO runs VALUES (?, ?)", (job, row))
        db.execute("INSERT INTO events (body) VALUES (?)", (row,))
        db.execute("INSERT INTO messages (body) VALUES (?)", (row.encode(),))
        db.execute("INSERT INTO tasks SELECT ?, key, value FROM json_each(?)", (job, tasks))
        db.execute("COMMIT")
    return {"count": count, "seconds": time.perf_counter() - began, "disturbed": 0}


if __name__ == "__main__":
    run_async(_serve(Path(sys.argv[1])))
