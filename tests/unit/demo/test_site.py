"""The site of the demo as a process: how it ends."""

import subprocess
import sys
import urllib.request

import pytest

COMMAND = [sys.executable, "-m", "conveyor.demo.site"]


def test_it_ends_with_the_pipe_of_who_started_it() -> None:
    with subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline())
        process.communicate(timeout=20)
        assert process.returncode == 0


def test_it_serves_on_in_the_background() -> None:
    """Its input is at its end there."""
    with subprocess.Popen(COMMAND, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=1)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/quick/1", timeout=20) as answer:
                assert answer.status == 200
        finally:
            process.terminate()
