"""huey on Redis, without results: two worker processes, short polls."""

import os
import subprocess
import sys
import time

from huey import RedisHuey
from marks import arguments, marker, report, until_marked

huey = RedisHuey("peers", url=os.environ["PEERS_REDIS"], results=False, blocking=True)
_marks = marker(os.environ["PEERS_MARKS"])


@huey.task()
def nothing(number: int) -> None:
    os.write(_marks, b".")


def main() -> None:
    asked = arguments()
    options = ["-w", "2", "-k", "process", "-n", "-q"]
    worker = subprocess.Popen([sys.executable, "-m", "huey.bin.huey_consumer", "huey_noop.huey", *options])
    try:
        nothing(-1)
        until_marked(os.environ["PEERS_MARKS"], 1)
        started = time.perf_counter()
        for number in range(asked["count"]):
            nothing(number)
        sent = time.perf_counter() - started
        until_marked(os.environ["PEERS_MARKS"], asked["count"] + 1)
        report(seconds=time.perf_counter() - started, sent=sent)
    finally:
        worker.terminate()
        worker.wait(timeout=30)


if __name__ == "__main__":
    # By the name under which the workers import it: a task of __main__ is unknown to them.
    from huey_noop import main as send

    send()
