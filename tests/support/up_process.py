"""`conveyor up` as a process of its own, behind an address that stays while it is killed and started again."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0

# It ends with its standard input: when the test process dies, however that comes about.
COMMAND = """
import os, sys, threading
def watch():
    # Not sys.stdin.buffer: its lock, held in a read, breaks the interpreter's end.
    while os.read(0, 4096):
        pass
    os._exit(1)
threading.Thread(target=watch, daemon=True).start()
from conveyor.cli import main
main(sys.argv[1:])
"""


def environment(**more: str) -> dict[str, str]:
    """Without what the developer has set."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CONVEYOR_")}
    return {**clean, "NO_COLOR": "1", **more}


class Relay:
    """An address that leads to another, which may change or be nowhere."""

    def __init__(self) -> None:
        self.target: tuple[str, int] | None = None
        self._links: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def cut(self) -> None:
        """End all connections."""
        for link in list(self._links):
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            if self.target is None:
                return
            with socket.create_connection(self.target) as server, self._linked(client):
                back = threading.Thread(target=_pump, args=(server, client), daemon=True)
                back.start()
                _pump(client, server)
                back.join()

    @contextmanager
    def _linked(self, link: socket.socket) -> Iterator[None]:
        self._links.add(link)
        try:
            yield
        finally:
            self._links.discard(link)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while piece := source.recv(65536):
            sink.sendall(piece)
    # Either side may be gone already.
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


class Up:
    """A server that can be killed and started again."""

    program = COMMAND

    def __init__(self, place: Path, *arguments: str, **settings: str) -> None:
        self.data = place / "data"
        # What it printed since it was last started.
        self.output = place / "output"
        # Where its log goes; without it, where ours does.
        self.log: Path | None = None
        self._arguments = arguments
        self._settings = settings
        self._relay = Relay()
        self._process: subprocess.Popen[bytes] | None = None
        self.url = self._relay.url

    @property
    def key(self) -> str:
        return (self.data / "local.key").read_text().strip()

    def start(self) -> None:
        address = self.data / "local.url"
        address.unlink(missing_ok=True)
        settings = {"CONVEYOR_DATA": str(self.data), "CONVEYOR_ALLOW_PRIVATE_TARGETS": "1", **self._settings}
        with self.output.open("wb") as output, _appended(self.log) as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", self.program, "up", "--port", "0", *self._arguments],
                cwd=ROOT,
                env=environment(**{"CONVEYOR_LOG_LEVEL": "error", **settings}),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=log,
            )
        while not address.exists() or not (found := address.read_text().strip()):
            assert self._process.poll() is None
            time.sleep(0.02)
        self._relay.target = ("127.0.0.1", int(found.rpartition(":")[2]))

    @property
    def direct(self) -> str:
        """Its own address, past the one that stays."""
        assert self._relay.target is not None
        return f"http://127.0.0.1:{self._relay.target[1]}"

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._gone(self._process)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._gone(self._process)

    def _gone(self, process: "subprocess.Popen[bytes]") -> None:
        process.wait(PATIENCE)
        assert process.stdin is not None
        process.stdin.close()
        self._process, self._relay.target = None, None

    def close(self) -> None:
        self.stop()
        self._relay.close()


@contextmanager
def _appended(path: Path | None) -> Iterator[BinaryIO | None]:
    if path is None:
        yield None
        return
    with path.open("ab") as file:
        yield file


@contextmanager
def running(place: Path, *arguments: str, **settings: str) -> Iterator[Up]:
    up = Up(place, *arguments, **settings)
    try:
        up.start()
        yield up
    finally:
        up.close()
