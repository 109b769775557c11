"""The log of a whole server at its most talkative, with secrets in everything it is given: none comes out again. And
the metrics of its child processes, read at a port of their own."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from conveyor.client import AsyncClient
from tests.support.api import client
from tests.support.processes import fetchers_of
from tests.support.target_site import Listener, answer, read_request
from tests.support.up_process import ROOT, environment
from tests.support.working import until

CANARY = "canary5ecret"

# It ends with its standard input: when the test process dies, however that comes about.
_COMMAND = """
import os, sys, threading
threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
from conveyor.cli import main
main(sys.argv[1:])
"""


class Gateway(Listener):
    """Fetches nothing: it answers 200, and cuts off what asks for it."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            seen = await read_request(reader)
            if "cut" in seen.target:
                return
            answer(writer, b"here", set_cookie=f"session={CANARY}")


@asynccontextmanager
async def talking(place: Path, **settings: str) -> AsyncIterator[tuple[int, Path]]:
    """`conveyor up`, its process and the file with all that it says on standard error."""
    log, data = place / "log", place / "data"
    with log.open("wb") as said:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _COMMAND, "up", "--port", "0"),
            cwd=ROOT,
            env=environment(CONVEYOR_DATA=str(data), CONVEYOR_LOG_LEVEL="debug", **settings),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=said,
        )
    try:

        async def there() -> bool:
            assert process.returncode is None, log.read_text()
            return (data / "local.url").exists() and bool((data / "local.url").read_text().strip())

        await until(there)
        yield process.pid, log
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def test_no_secret_is_in_the_log(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    settings = {
        "CONVEYOR_ALLOW_PRIVATE_TARGETS": "1",
        "CONVEYOR_SIGNING_KEY": CANARY * 4,
        "CONVEYOR_METRICS_TOKEN": CANARY * 3,
        "CONVEYOR_METRICS_PORT": str(port),
        "CONVEYOR_FETCHERS": "1",
    }
    async with Gateway() as gateway, talking(tmp_path, **settings) as (process, log):
        url = (tmp_path / "data/local.url").read_text().strip()
        key = (tmp_path / "data/local.key").read_text().strip()
        place = f"127.0.0.1:{gateway.port}"
        async with AsyncClient(url, key) as conveyor, client() as http:
            await _abuse(http, url)
            options: dict[str, Any] = {
                "headers": {"Authorization": f"Bearer {CANARY}", "X-Custom": CANARY},
                "attempts": 1,
                "notify": [{"type": "webhook", "url": f"http://{place}/{CANARY}/cut?token={CANARY}"}],
            }
            ways = [
                {"url": f"http://{place}/gate?api_key={CANARY}&url={{url}}", "headers": {"X-Key": CANARY}},
                {"proxy": f"http://user:{CANARY}@{place}"},
                None,
            ]
            tasks = [f"http://{place}/{way}?session={CANARY}" for way in ("a", "cut", "b")]
            for gate in ways:
                more = {} if gate is None else {"gateway": gate}
                job = await conveyor.submit([*tasks, f"http://name.invalid/?{CANARY}"], **options, **more)
                await job.wait()
            for child in fetchers_of(process):
                os.kill(child, signal.SIGKILL)
            text = await _scraped(http, port)
            assert 'conveyor_child_restarts_total{kind="fetcher"} 1.0' in text
            assert 'conveyor_child_processes{kind="fetcher"} 1.0' in text
            memory = re.search(r'conveyor_child_resident_bytes{kind="fetcher"} (\S+)', text)
            assert memory is not None and float(memory[1]) > 1e6
    said = log.read_text()
    events = [json.loads(line)["event"] for line in said.splitlines() if line.startswith("{")]
    assert {"job accepted", "run moved", "request", "fetcher ended; restarting"} <= set(events)
    assert CANARY not in said
    assert key.rpartition("_")[2] not in said
    assert not [line for line in said.splitlines() if not line.startswith(("{", "conveyor: "))]


async def _abuse(http: Any, url: str) -> None:
    """Requests with secrets where none belong."""
    sha = sha256(b"x").hexdigest()
    for method, path, headers in (
        ("GET", f"/v1/jobs?key={CANARY}", {"authorization": f"Bearer {CANARY}"}),
        ("GET", f"/v1/jobs/x?token={CANARY}", {"authorization": f"Basic {CANARY}"}),
        ("PUT", f"/v1/uploads/{sha[:10]}/content?signature={CANARY}", {}),
        ("GET", f"/nowhere?{CANARY}", {"cookie": f"conveyor_session={CANARY}", "x-request-id": f"?{CANARY}"}),
        ("POST", "/v1/jobs", {"authorization": f"Bearer cv_{'0' * 26}_{CANARY}"}),
    ):
        response = await http.request(method, url + path).headers(headers).build().send()
        assert response.status >= 400


async def _scraped(http: Any, port: int) -> str:
    """The metrics, once the fetcher that was killed is there again."""

    async def look() -> str:
        request = http.get(f"http://127.0.0.1:{port}/metrics").headers({"authorization": f"Bearer {CANARY * 3}"})
        response = await request.build().send()
        assert response.status == 200
        return bytes(await response.bytes()).decode()

    def back(text: str) -> bool:
        return 'restarts_total{kind="fetcher"} 1.0' in text and 'child_processes{kind="fetcher"} 1.0' in text

    return await until(look, back)
