"""Celery on Redis, without results: `ignore_result`, a large prefetch and no worker chatter, as its guide to
optimizing advises for many short tasks. The producer comes from the pool, once for all tasks."""

import os
import subprocess
import sys
import time

from celery import Celery
from marks import arguments, marker, report, until_marked

app = Celery("peers", broker=os.environ["PEERS_REDIS"])
app.conf.update(
    task_ignore_result=True,
    task_store_errors_even_if_ignored=False,
    worker_prefetch_multiplier=128,
    worker_send_task_events=False,
    task_send_sent_event=False,
    broker_connection_retry_on_startup=True,
)
_marks = marker(os.environ["PEERS_MARKS"])


@app.task
def nothing(number: int) -> None:
    os.write(_marks, b".")


def main() -> None:
    asked = arguments()
    quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel", "ERROR"]
    command = [sys.executable, "-m", "celery", "-A", "celery_noop", "worker", "-P", "prefork", "-c", "2", *quiet]
    worker = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        nothing.delay(-1)
        until_marked(os.environ["PEERS_MARKS"], 1)
        started = time.perf_counter()
        with app.producer_pool.acquire(block=True) as producer:
            for number in range(asked["count"]):
                nothing.apply_async((number,), producer=producer)
        sent = time.perf_counter() - started
        until_marked(os.environ["PEERS_MARKS"], asked["count"] + 1)
        report(seconds=time.perf_counter() - started, sent=sent)
    finally:
        worker.terminate()
        worker.wait(timeout=30)


if __name__ == "__main__":
    # By the name under which the workers import it: a task of __main__ is unknown to them.
    from celery_noop import main as send

    send()
