"""DynamoDB, SQS and S3 on loopback: one ministack for each test process, started when it is first asked for.

It listens on 127.0.0.1 only, on a free port, keeps nothing on disk, and dies with the test process.
"""

import atexit
import functools
import math
import mmap
import os
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import botocore.session

REGION = "eu-central-1"
ACCESS_KEY = "test"
SECRET_KEY = "test"

# What the clients of AWS look for; no other source of credentials is asked.
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    "AWS_DEFAULT_REGION": REGION,
    "AWS_REGION": REGION,
    "AWS_EC2_METADATA_DISABLED": "true",
}

_START_SECONDS = 60.0

# Every client would read anew what botocore has on all services, for a fifth of a second.
botocore.session.create_loader = functools.cache(botocore.session.create_loader)


class ServerTime:
    """The emulator's own clock, which its visibility timeouts, delays and TTL go by. The server removes the file."""

    def __init__(self) -> None:
        with tempfile.NamedTemporaryFile(prefix="conveyor-aws-time-", delete=False) as file:
            file.write(struct.pack("dd", 0.0, math.nan))
            file.flush()
            self.path = Path(file.name)
            self._shared = mmap.mmap(file.fileno(), 16)

    def advance(self, seconds: float) -> None:
        """Let `seconds` have passed."""
        offset, still = self._read()
        self._write(offset + seconds, still + seconds)

    def stand_at(self, moment: float) -> None:
        """Stand still at this moment, until told otherwise: a long poll then ends only when it is advanced."""
        self._write(self._read()[0], moment)

    def reset(self) -> None:
        """Go with the machine's clock again."""
        self._write(0.0, math.nan)

    def now(self) -> float:
        offset, still = self._read()
        return time.time() + offset if math.isnan(still) else still

    def _read(self) -> tuple[float, float]:
        offset, still = struct.unpack("dd", self._shared[:16])
        return offset, still

    def _write(self, offset: float, still: float) -> None:
        self._shared[:16] = struct.pack("dd", offset, still)


class _Server:
    def __init__(self) -> None:
        self.time = ServerTime()
        with tempfile.TemporaryFile("w+") as log:
            self._process = subprocess.Popen(
                # -P: its own directory has modules with the names of packages.
                [sys.executable, "-P", str(Path(__file__).with_name("aws_server.py")), str(self.time.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={
                    **{name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
                    **CREDENTIALS,
                    "BIND_HOST": "127.0.0.1",
                    "MINISTACK_HOST": "127.0.0.1",
                    "MINISTACK_REGION": REGION,
                    "LOG_LEVEL": "ERROR",
                    "PERSIST_STATE": "0",
                    # State machines wait a hundredth of the time that they would.
                    "SFN_WAIT_SCALE": "0.01",
                },
            )
            atexit.register(self._stop)
            assert self._process.stdout is not None
            port = self._process.stdout.readline().strip()
            self.endpoint = f"http://127.0.0.1:{port}"
            try:
                self._wait()
            except AssertionError:
                log.seek(0)
                raise AssertionError(f"ministack did not start:\n{log.read()}") from None

    @property
    def pid(self) -> int:
        return self._process.pid

    def _wait(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.endpoint}/_ministack/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise AssertionError

    def _stop(self) -> None:
        self._process.kill()
        self._process.wait()


_servers: dict[int, _Server] = {}


def _server() -> _Server:
    # By process: a fork has to start its own.
    pid = os.getpid()
    if pid not in _servers:
        os.environ.update(CREDENTIALS)
        _servers[pid] = _Server()
    return _servers[pid]


def aws() -> str:
    """The endpoint of the emulator, as a URL. The environment of this process then has credentials for it."""
    return _server().endpoint


def server_pid() -> int:
    """The emulator's process."""
    return _server().pid


def server_time() -> ServerTime:
    """The emulator's clock."""
    return _server().time
