"""`make image`: build the image, start it as a container would, and print its size and its times."""

import json
import shutil
import socket
import sys
import tempfile
import urllib.request
from pathlib import Path

from tests.image.build import Image, build
from tests.image.container import Container

_MIB = 1024 * 1024
_TOOLS = ("buildah", "debootstrap", "unshare", "nsenter", "setpriv")
# What nobody needs to run it, and somebody who breaks in would like to find.
_BUILD_TOOLS = ("cc", "gcc", "g++", "make", "ld", "git", "curl", "wget")


def main() -> None:
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        sys.exit(
            f"`make image` needs {' '.join(missing)} (Debian, Ubuntu: apt-get install buildah debootstrap util-linux)."
        )
    base = build()
    image = Image()
    try:
        _check_files(image)
        figures = {"base": base, "mib": round(image.size() / _MIB), "conveyor_mib": _own_size(image), **_started(image)}
    finally:
        image.close()
    print(json.dumps(figures))


def _check_files(image: Image) -> None:
    assert image.user[0] != 0
    assert image.config["Healthcheck"]["Test"][0] == "CMD", "the health check needs no shell"
    found = [
        tool
        for tool in _BUILD_TOOLS
        for folder in ("usr/bin", "usr/local/bin")
        if (image.files / folder / tool).exists()
    ]
    assert not found, found
    environment = image.files / "opt/conveyor"
    assert not list(environment.glob("lib/python*/site-packages/pip")), "pip is in the environment"
    data = (image.files / "data").stat()
    assert (data.st_uid, data.st_mode & 0o777) == (image.user[0], 0o700), "other users can read /data"
    owned = [str(path) for path in environment.rglob("*") if path.lstat().st_uid != 0]
    assert not owned, owned[:3]


def _own_size(image: Image) -> int:
    files = (image.files / "opt/conveyor").rglob("*")
    return round(sum(path.lstat().st_size for path in files if not path.is_dir()) / _MIB)


def _started(image: Image) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="conveyor-image-") as folder:
        port, metrics_port = _free_ports()
        with Container(image, Path(folder) / "data", port, metrics_port) as container:
            assert container.status("Uid").split()[0] == str(image.user[0])
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10) as answer:
                assert answer.status == 200
            refused = container.run("/usr/bin/touch", "/opt/conveyor/x")
            assert "Read-only file system" in refused.stderr, refused
            healthy = container.run(*image.config["Healthcheck"]["Test"][1:])
            assert healthy.returncode == 0, healthy
            version = container.run("/opt/conveyor/bin/conveyor", "version").stdout.strip()
            job = container.run("/opt/conveyor/bin/conveyor", "jobs", "--json")
            assert job.returncode == 0, job
            memory = int(container.status("VmRSS").split()[0])
            stopped = container.stop()
        assert stopped < 10, stopped
    return {
        "version": version,
        "healthy_after_seconds": round(container.seconds, 2),
        "resident_mib": round(memory / 1024),
        "stopped_after_seconds": round(stopped, 2),
    }


def _free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


if __name__ == "__main__":
    main()
