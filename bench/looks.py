"""Looks: how long a look at a job takes while it runs, from a process of its own, as a user's client is.

`python -m bench.looks HOST PORT KEY PATH` asks until the run has ended and prints, as JSON, what state it saw each time
and how many milliseconds that took.
"""

import http.client
import json
import sys
import time

_EVERY = 0.02


def main() -> None:
    host, port, key, path = sys.argv[1:]
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    times = []
    while True:
        started = time.perf_counter()
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"})
        response = connection.getresponse()
        body = response.read()
        took = (time.perf_counter() - started) * 1000
        if response.status != 200:
            sys.exit(f"{path} was answered {response.status}")
        job = json.loads(body)
        if job["run"]["ended_at"] is not None:
            break
        times.append((job["state"], took))
        time.sleep(_EVERY)
    print(json.dumps(times))


if __name__ == "__main__":
    main()
