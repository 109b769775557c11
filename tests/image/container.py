"""Runs a command of the image as a container would: in mount and process namespaces of its own, on a root filesystem
that is read-only, as the image's user, as process 1. The network is the machine's: it listens on loopback."""

import http.client
import os
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.image.build import Image

PATIENCE = 60.0

_UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--kill-child")

# $1 is the root, $2 the volume. The root filesystem becomes read-only after the mounts in it.
_SCRIPT = """
set -e
mount --make-rprivate /
mount --bind "$1" "$1"
mount --rbind /dev "$1/dev"
mount -t proc proc "$1/proc"
mount -t tmpfs -o mode=1777 tmpfs "$1/tmp"
mount --bind "$2" "$1/data"
mount -o remount,bind,ro "$1"
root=$1; shift 2
exec chroot --userspec="$USERSPEC" "$root" /usr/bin/env -i "$@"
"""


class Container:
    """A process of the image. `seconds` is how long it took until it was healthy."""

    def __init__(self, image: Image, data: Path, port: int, metrics_port: int) -> None:
        self._image = image
        self._ports = {"CONVEYOR_PORT": str(port), "CONVEYOR_METRICS_PORT": str(metrics_port)}
        self._environment = {**image.environment, "CONVEYOR_HOST": "127.0.0.1", **self._ports}
        self._data = data
        self._metrics_port = metrics_port
        self.seconds = 0.0

    def __enter__(self) -> Self:
        user, group = self._image.user
        self._data.mkdir(mode=0o700)
        os.chown(self._data, user, group)
        settings = [f"{name}={value}" for name, value in self._environment.items()]
        self._process = subprocess.Popen(
            [
                *_UNSHARE,
                "sh",
                "-c",
                _SCRIPT,
                "sh",
                str(self._image.files),
                str(self._data),
                *settings,
                *self._image.command,
            ],
            env={"PATH": os.environ["PATH"], "USERSPEC": f"{user}:{group}"},
        )
        began = time.monotonic()
        while not self._answers():
            assert self._process.poll() is None, "the container ended"
            assert time.monotonic() - began < PATIENCE, "the container does not answer"
            time.sleep(0.01)
        self.seconds = time.monotonic() - began
        return self

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in it, as its user."""
        user, group = self._image.user
        enter = ["nsenter", "--target", str(self.pid), "--mount", "--pid", f"--root=/proc/{self.pid}/root"]
        settings = [f"{name}={value}" for name, value in self._environment.items()]
        become = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups"]
        return subprocess.run(
            [*enter, *become, "env", "-i", *settings, *command], capture_output=True, text=True, check=False
        )

    @property
    def pid(self) -> int:
        """Its process 1, as this machine counts."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return int(children[0])

    def status(self, name: str) -> str:
        """A field of the status of process 1."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:"))

    def stop(self) -> float:
        """Send SIGTERM to process 1; how long it took to end."""
        began = time.monotonic()
        os.kill(self.pid, signal.SIGTERM)
        self._process.wait(PATIENCE)
        return time.monotonic() - began

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._metrics_port, timeout=2)
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
