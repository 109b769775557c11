"""Visitors: one tenant that floods a server, and one with a small job now and then, from a process of their own.

`python -m bench.visitors URL POLITE_KEY FLOOD_KEY IDLE_SECONDS FLOOD_SECONDS JOBS_A_SECOND` prints what they saw as
JSON: how long the small jobs took before the flood and during it, and what became of the flood's requests.
"""

import http.client
import json
import sys
import threading
import time
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

SMALL_TASKS = 4
FLOOD_TASKS = 100

_FLOODERS = 8
_SMALL_EVERY = 0.5
_LOOK_SECONDS = 0.01
_REFUSALS = (429, 503)


class Visitor:
    """One connection, with a key."""

    def __init__(self, url: str, key: str) -> None:
        at = urlsplit(url)
        self._connection = http.client.HTTPConnection(str(at.hostname), at.port, timeout=120)
        self._key = key

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any, str | None]:
        """The status, what was said, and when to come again."""
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        self._connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = self._connection.getresponse()
        return response.status, json.loads(response.read()), response.getheader("Retry-After")

    def submit(self, tasks: int) -> tuple[int, Any, str | None]:
        return self.ask("POST", "/v1/jobs", {"tasks": [f"https://www.example.com/{number}" for number in range(tasks)]})


def small_jobs(visitor: Visitor, until: float) -> list[float]:
    """How long each took, in milliseconds, from its request to the look that saw its end."""
    waits = []
    while time.perf_counter() < until:
        began = time.perf_counter()
        status, job, _ = visitor.submit(SMALL_TASKS)
        if status != 201:
            sys.exit(f"a small job was answered {status}: {job}")
        while visitor.ask("GET", f"/v1/jobs/{job['id']}")[1]["state"] != "completed":
            time.sleep(_LOOK_SECONDS)
        took = time.perf_counter() - began
        waits.append(took * 1000)
        time.sleep(max(0.0, _SMALL_EVERY - took))
    return waits


def flood(visitor: Visitor, every: float, until: float, seen: Counter[str]) -> None:
    """A job each so many seconds, whatever the answer; one that is late is sent at once."""
    due = time.perf_counter()
    while due < until:
        time.sleep(max(0.0, due - time.perf_counter()))
        due += every
        status, answer, again = visitor.submit(FLOOD_TASKS)
        if status in (201, 202):
            seen["accepted"] += 1
        elif status in _REFUSALS and again is not None and int(again) > 0:
            seen[f"refused: {answer['code']}"] += 1
        else:
            seen[f"wrong: {status} {answer}"] += 1


def main() -> None:
    url, polite, flooding = sys.argv[1:4]
    idle, busy, rate = map(float, sys.argv[4:])
    visitor = Visitor(url, polite)
    before = small_jobs(visitor, time.perf_counter() + idle)
    until = time.perf_counter() + busy
    seen = [Counter[str]() for _ in range(_FLOODERS)]
    threads = [
        threading.Thread(target=flood, args=(Visitor(url, flooding), _FLOODERS / rate, until, each)) for each in seen
    ]
    for thread in threads:
        thread.start()
    during = small_jobs(visitor, until)
    for thread in threads:
        thread.join()
    print(json.dumps({"before": before, "during": during, "flood": sum(seen, Counter())}))


if __name__ == "__main__":
    main()
