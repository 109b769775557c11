"""The wheel on every Python of this machine: installed into an empty environment from the lock, then the tutorial."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.docs.tutorial_page import MILLION, PAGES, run_tutorial
from tests.release.packages import ROOT
from tests.support.bash_completion import completed
from tests.support.up_process import environment

VERSIONS = ("3.11", "3.12", "3.13", "3.14")


def pythons() -> dict[str, Path]:
    """The interpreters that are here, by version: on the PATH, or beside it as pyenv keeps them."""
    found: dict[str, Path] = {f"{sys.version_info.major}.{sys.version_info.minor}": Path(sys.executable).resolve()}
    for version in VERSIONS:
        kept = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python3"))
        on_path = shutil.which(f"python{version}")
        for candidate in [*map(str, reversed(kept)), *([on_path] if on_path else [])]:
            if version not in found and _version_of(candidate) == version:
                found[version] = Path(candidate)
    return {version: found[version] for version in VERSIONS if version in found}


def _version_of(python: str) -> str | None:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run(
        [python, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None


@contextmanager
def installed(python: Path, wheel: Path) -> Iterator[Path]:
    """An empty environment with the wheel and what the lock names; its folder of programs."""
    with tempfile.TemporaryDirectory(prefix="conveyor-release-") as folder:
        place = Path(folder) / "venv"
        subprocess.run([str(python), "-m", "venv", str(place)], check=True)
        pip = [str(place / "bin/python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        locked = ["--require-hashes", "--only-binary", ":all:", "-r", str(ROOT / "requirements/run.txt")]
        subprocess.run([*pip, *locked], check=True)
        subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
        subprocess.run([str(place / "bin/python"), "-m", "pip", "check"], check=True, stdout=subprocess.DEVNULL)
        yield place / "bin"


def try_out(programs: Path, place: Path, version: str) -> dict[str, object]:
    """The version, completion in bash and the whole tutorial; raises if one goes wrong."""
    printed = _run(programs, place, "--version")
    assert printed.strip() == f"conveyor {version}", printed
    offered = completed(programs, place, "conveyor", "ver")
    assert offered == ["verify", "version"], offered
    run_tutorial(place, programs.parent, f"{programs}/conveyor demo --pages {PAGES}")
    return {"version": version, "completes": offered, "tutorial_tasks": PAGES + MILLION}


def _run(programs: Path, place: Path, *arguments: str) -> str:
    command = [str(programs / "conveyor"), *arguments]
    settings = environment(PYTHONNOUSERSITE="1")
    done = subprocess.run(command, cwd=place, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
