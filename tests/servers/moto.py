"""A second Step Functions on loopback, the one that minds HeartbeatSeconds: moto, with an SQS beside it. One server for
each test process, started when it is first asked for; it listens on 127.0.0.1 only and dies with the test process.

Heartbeats go by a clock that tests move. A missed one is raised as States.Timeout.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from tests.servers.aws import CREDENTIALS, ServerTime

_CONFIG = {"stepfunctions": {"execute_state_machine": True}}


class _Server:
    def __init__(self) -> None:
        self.time = ServerTime()
        with tempfile.TemporaryFile("w+") as log:
            self._process = subprocess.Popen(
                # -P: its own directory has modules with the names of packages.
                [sys.executable, "-P", str(Path(__file__).with_name("moto_server.py")), str(self.time.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={name: value for name, value in os.environ.items() if not name.startswith("AWS_")} | CREDENTIALS,
            )
            atexit.register(self._stop)
            assert self._process.stdout is not None
            port = self._process.stdout.readline().strip()
            if not port:
                log.seek(0)
                raise AssertionError(f"moto did not start:\n{log.read()}")
        self.endpoint = f"http://127.0.0.1:{port}"
        asked = urllib.request.Request(
            f"{self.endpoint}/moto-api/config",
            data=json.dumps(_CONFIG).encode(),
            headers={"content-type": "application/json"},
            method="POST",
        )
        with urllib.request.urlopen(asked, timeout=60):
            return

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


def moto() -> str:
    """The endpoint of the emulator, as a URL. The environment of this process then has credentials for it."""
    return _server().endpoint


def moto_time() -> ServerTime:
    """The clock that its heartbeats go by."""
    return _server().time
