"""Runs the shell blocks of a page, in order, as a reader would who has a few terminals."""

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from tests.docs.blocks import blocks
from tests.support.up_process import environment

PATIENCE = 60.0
# Blocks under this title go on while the others run.
ASIDE = "another terminal"
# What stands in a page as a port is one that is free here.
PORTS = ("8080", "8081", "8082")

# Stops at the first command that fails. Exit code 3 is no failure: some tasks of a job failed.
_STRICT = "trap 'code=$?; [ $code -eq 3 ] || exit $code' ERR"

# Ends with its standard input, and all that it started with it: when the test process dies, however that comes about.
_KEEPER = """
import os, signal, subprocess, sys, threading

def keep():
    sys.stdin.buffer.read()
    os.killpg(child.pid, signal.SIGKILL)

child = subprocess.Popen(["bash", "-c", sys.argv[1]], stdin=subprocess.PIPE, start_new_session=True)
threading.Thread(target=keep, daemon=True).start()
os._exit(child.wait() & 255)
"""


def free_port() -> int:
    """Below those that the system gives out by itself, so that nobody is given it before it is used."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Terminal:
    """A directory and an environment. What is printed aside goes to `log`."""

    def __init__(self, place: Path, log: IO[str], replaced: Mapping[str, str], **more: str) -> None:
        self.place = place
        self._log = log
        self.ports = {name: free_port() for name in PORTS}
        self._replaced = {**{name: str(port) for name, port in self.ports.items()}, **replaced}
        bin_directory = str(Path(sys.executable).parent)
        self.environment = environment(
            PATH=f"{bin_directory}{os.pathsep}{os.environ['PATH']}",
            CONVEYOR_PORT=str(self.ports["8080"]),
            CONVEYOR_URL=f"http://127.0.0.1:{self.ports['8080']}",
            COLUMNS="120",
            **more,
        )
        self._aside: list[subprocess.Popen[bytes]] = []

    def run_page(self, page: Path) -> str:
        """Every shell block; what those in the foreground printed."""
        printed = ""
        # One shell for what is typed in one terminal: variables and the directory stay.
        script: list[str] = []
        for block in blocks(page):
            if block.language != "sh":
                continue
            code = self._as_here(block.code)
            if block.title == ASIDE:
                printed += self.run("\n".join(script))
                script = _state(script)
                self.start(code)
            else:
                script.append(code)
        return printed + self.run("\n".join(script))

    def run(self, code: str) -> str:
        done = subprocess.run(
            ["bash", "-uo", "pipefail", "-c", f"{_STRICT}\n{code}"],
            cwd=self.place,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, (code, done.returncode, done.stdout, done.stderr)
        return done.stdout

    def start(self, code: str) -> None:
        """Leave it running, once the ports that it names are open."""
        before = {port for port in self.ports.values() if _open(port)}
        process = subprocess.Popen(
            [sys.executable, "-c", _KEEPER, code],
            cwd=self.place,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
        )
        self._aside.append(process)
        wanted = [port for port in self.ports.values() if str(port) in code]
        if "conveyor up" in code:
            wanted.append(self.ports["8080"])
        limit = time.monotonic() + PATIENCE
        while not all(_open(port) for port in wanted if port not in before):
            if process.poll() is not None or time.monotonic() > limit:
                self._log.seek(0)
                raise AssertionError(f"nobody listens: {code}\n{self._log.read()}")
            time.sleep(0.02)

    def close(self) -> None:
        for process in self._aside:
            assert process.stdin is not None
            process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()

    def _as_here(self, code: str) -> str:
        for said, here in self._replaced.items():
            code = code.replace(said, here)
        return code


def _state(script: list[str]) -> list[str]:
    """What a shell keeps of what was typed: its variables and its directory."""
    return [
        line
        for code in script
        for line in code.splitlines()
        if line.startswith(("export ", "cd ")) or (line.split("=")[0].isupper() and "=" in line and "$(" not in line)
    ]


def _open(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@contextmanager
def terminal(place: Path, replaced: Mapping[str, str] | None = None, **more: str) -> Iterator[Terminal]:
    with tempfile.TemporaryFile("w+") as log:
        made = Terminal(place, log, replaced or {}, **more)
        try:
            yield made
        finally:
            made.close()
