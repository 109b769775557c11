"""Builds the image without a daemon: with buildah, under chroot isolation. Where no base image can be pulled, a Debian
made by debootstrap stands in for it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WORK = ROOT / "build" / "image"
NAME = "localhost/conveyor"

_STAND_IN = "localhost/conveyor-base"
_PULL_SECONDS = 60
_STORAGE = ("--storage-driver", "vfs", "--root", str(WORK / "storage"), "--runroot", str(WORK / "run"))


def buildah(*arguments: str, seconds: float | None = None) -> str:
    """What one call of buildah prints."""
    command = ["buildah", *_STORAGE, *arguments]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=seconds)
    return done.stdout.strip()


def build() -> str:
    """Build the image; returns its base."""
    WORK.mkdir(parents=True, exist_ok=True)
    base = pulled(default_base()) or stand_in()
    options = ["--isolation", "chroot", "--format", "docker", "--pull-never", "--build-arg", f"BASE={base}"]
    buildah("build", *options, *_volumes(), "-f", "deploy/docker/Dockerfile", "-t", NAME, ".")
    return base


def default_base() -> str:
    """The base that the Dockerfile names."""
    match = re.search(r"^ARG BASE=(.+)$", (ROOT / "deploy/docker/Dockerfile").read_text(), re.MULTILINE)
    assert match is not None
    return f"docker.io/library/{match[1]}"


def pulled(base: str) -> str | None:
    """The base image from its registry; None if it cannot be had."""
    try:
        buildah("pull", "--quiet", "--retry", "0", base, seconds=_PULL_SECONDS)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        print(f"{base} cannot be pulled: a Debian made by debootstrap stands in for it.", flush=True)
        return None
    return base


def stand_in() -> str:
    """A minimal Debian with its own Python, made once."""
    if _STAND_IN in buildah("images", "--format", "{{.Name}}").splitlines():
        return _STAND_IN
    tree = WORK / "debian"
    shutil.rmtree(tree, ignore_errors=True)
    packages = "--include=python3,python3-venv,ca-certificates"
    command = ["debootstrap", "--variant=minbase", packages, _suite(), str(tree), _mirror()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    for folder in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale", "usr/share/man"):
        shutil.rmtree(tree / folder, ignore_errors=True)
    container = buildah("from", "scratch")
    buildah("add", "--quiet", container, str(tree), "/")
    buildah("commit", "--quiet", "--rm", container, _STAND_IN)
    shutil.rmtree(tree)
    return _STAND_IN


def _suite() -> str:
    match = re.search(r"^VERSION_CODENAME=(.+)$", Path("/etc/os-release").read_text(), re.MULTILINE)
    assert match is not None, "debootstrap needs to know the suite of this Debian"
    return match[1]


def _mirror() -> str:
    """Where this machine's own packages come from."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)"]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    mirrors = [line for line in printed.stdout.splitlines() if "security" not in line]
    return mirrors[0] if mirrors else "http://deb.debian.org/debian"


def _volumes() -> list[str]:
    """What pip of this machine is configured with, and the directories and files that it names."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = dict(re.findall(r"^[^.\n]*\.([a-z-]+)='(.*)'$", printed, re.MULTILINE))
    configured = WORK / "pip.conf"
    configured.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in found.items()))
    words = [word for value in found.values() for word in value.split()]
    # The files of an index are often beside it.
    named = [Path(word[7:]).parent if word.startswith("file://") else Path(word) for word in words]
    paths = sorted({path for path in named if path.is_absolute() and path.exists()})
    mounts = [f"{path}:{path}:ro" for path in paths] + [f"{configured}:/etc/pip.conf:ro"]
    return [argument for mount in mounts for argument in ("--volume", mount)]


class Image:
    """The built image: its configuration, and its files in a directory of their own."""

    def __init__(self) -> None:
        self._container = buildah("from", "--pull-never", NAME)
        self.files = Path(buildah("mount", self._container))
        inspected: dict[str, Any] = json.loads(buildah("inspect", "--type", "image", NAME))
        self.config: dict[str, Any] = inspected["Docker"]["config"]

    @property
    def environment(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in self.config["Env"])

    @property
    def command(self) -> list[str]:
        return [*self.config["Entrypoint"], *self.config["Cmd"]]

    @property
    def user(self) -> tuple[int, int]:
        user, _, group = self.config["User"].partition(":")
        return int(user), int(group)

    def size(self) -> int:
        """The bytes of all its files."""
        return sum(path.lstat().st_size for path in _files(self.files))

    def close(self) -> None:
        buildah("umount", self._container)
        buildah("rm", self._container)


def _files(root: Path) -> list[Path]:
    return [Path(folder) / name for folder, _, names in os.walk(root) for name in names]
