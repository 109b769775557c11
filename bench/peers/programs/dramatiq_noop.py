"""dramatiq on Redis, without results: two processes of eight threads, its defaults on two cores."""

import os
import subprocess
import sys
import time

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from marks import arguments, marker, report, until_marked

broker = RedisBroker(url=os.environ["PEERS_REDIS"])
dramatiq.set_broker(broker)
_marks = marker(os.environ["PEERS_MARKS"])


@dramatiq.actor
def nothing(number: int) -> None:
    os.write(_marks, b".")


def main() -> None:
    asked = arguments()
    worker = subprocess.Popen(
        [sys.executable, "-m", "dramatiq", "dramatiq_noop", "-p", "2", "-t", "8", "--skip-logging"]
    )
    try:
        nothing.send(-1)
        until_marked(os.environ["PEERS_MARKS"], 1)
        started = time.perf_counter()
        for number in range(asked["count"]):
            nothing.send(number)
        sent = time.perf_counter() - started
        until_marked(os.environ["PEERS_MARKS"], asked["count"] + 1)
        report(seconds=time.perf_counter() - started, sent=sent)
    finally:
        worker.terminate()
        worker.wait(timeout=30)


if __name__ == "__main__":
    # By the name under which the workers import it: a task of __main__ is unknown to them.
    from dramatiq_noop import main as send

    send()
