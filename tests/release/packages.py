"""The files of a release: built, complete, and with their checksums."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.release.bom import bill_of_materials, locked
from tests.release.changelog import check_changelog

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def build(place: Path) -> tuple[Path, Path]:
    """Build wheel and sdist. Their files have the time of the commit, so that a second build gives the same bytes."""
    shutil.rmtree(place, ignore_errors=True)
    shown = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    environment = {**os.environ, "SOURCE_DATE_EPOCH": shown.stdout.strip()}
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(place), "-t", "wheel", "-t", "sdist"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    [wheel], [sdist] = place.glob("*.whl"), place.glob("*.tar.gz")
    return wheel, sdist


def check(wheel: Path, sdist: Path) -> None:
    """Both have the license, the version, and all of the source."""
    version = project()["version"]
    source = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*") if _is_source(path)}
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    assert f"conveyor_jobs-{version}.dist-info/licenses/LICENSE" in names, "the wheel lacks LICENSE"
    assert source <= names, sorted(source - names)[:5]
    with tarfile.open(sdist) as unpacked:
        contained = set(unpacked.getnames())
    top = f"conveyor_jobs-{version}"
    assert f"{top}/LICENSE" in contained, "the sdist lacks LICENSE"
    assert {f"{top}/src/{name}" for name in source} <= contained
    check_changelog((ROOT / "CHANGELOG.md").read_text(), version)


def _is_source(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts


def describe(place: Path) -> Path:
    """Write the bill of materials of everything that the image installs, which is all extras but Parquet."""
    named = project()
    packages = locked(ROOT / "requirements/image.txt")
    document = bill_of_materials(named["name"], named["version"], named["license"], packages)
    path = place / f"conveyor_jobs-{named['version']}.cdx.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path


def sign_off(place: Path) -> Path:
    """Write the checksums, in the form that `sha256sum --check` reads."""
    files = sorted(path for path in place.iterdir() if path.name != "SHA256SUMS")
    sums = place / "SHA256SUMS"
    sums.write_text("".join(f"{sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files))
    return sums
