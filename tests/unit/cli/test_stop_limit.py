"""SIGTERM ends a command in bounded time, even one whose disk never answers."""

import asyncio
import signal
import subprocess
import sys
import threading

import pytest

from conveyor.cli import EXIT_TERMINATED, loop

HANGS = """
import threading
from conveyor.cli import loop

async def main(stop):
    stop.listen()
    print("ready", flush=True)
    await stop.event.wait()
    # As a thread that waits for a disk.
    threading.Event().wait()

loop.run_async(main(loop.Stop(lambda: None, 0.1)))
"""


# Seconds after which a command is taken for one that never exits.
PATIENCE = 30.0


def test_a_command_that_does_not_stop_exits() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HANGS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        try:
            _, said = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert process.returncode == EXIT_TERMINATED
    assert said.startswith("conveyor: Not stopped after 0.1 s: a disk or an engine does not answer.")


def test_a_command_that_stops_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(loop, "leave", left.append)
    before = threading.active_count()

    async def main(stop: loop.Stop) -> None:
        stop.listen()
        signal.raise_signal(signal.SIGTERM)
        await stop.event.wait()
        await asyncio.sleep(0)

    loop.run_async(main(loop.Stop(lambda: None, 60.0)))
    assert loop._stop_limit._timer is None
    assert threading.active_count() <= before + 1
    assert left == []
