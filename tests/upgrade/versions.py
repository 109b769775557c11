"""Versions of Conveyor as folders to run from: a commit's wheel, unpacked, and this source with one more expansion of
the schema, which stands in for the next version."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[2]

_SQLITE = "ALTER TABLE jobs ADD COLUMN upgrade_trial TEXT; CREATE TABLE upgrade_trial (id INTEGER PRIMARY KEY)"
_POSTGRES = _SQLITE.replace("TEXT", "text").replace("INTEGER", "integer")


def commit_of(name: str) -> str:
    shown = subprocess.run(
        ["git", "rev-parse", "--verify", f"{name}^{{commit}}"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    return shown.stdout.strip()


def earlier(name: str, place: Path) -> Path:
    """The wheel of a commit, unpacked."""
    source, dist, unpacked = place / "source", place / "dist", place / "earlier"
    archive = subprocess.run(["git", "archive", commit_of(name)], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as tar:
        tar.extractall(source, filter="data")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(dist)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    [wheel] = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(unpacked)
    return unpacked


def later(place: Path) -> Path:
    """This source, with one more expansion on SQLite and on Postgres."""
    folder = place / "later"
    shutil.copytree(ROOT / "src", folder, ignore=shutil.ignore_patterns("__pycache__"))
    engines = folder / "conveyor/engines"
    module = engines / "sqlite/database.py"
    text = module.read_text()
    said = "EXPANSIONS: tuple[str, ...] = ("
    assert said in text
    module.write_text(text.replace(said, f"{said}*({_SQLITE!r},), ", 1))
    expansions = engines / "postgres/expansions"
    expansions.mkdir(exist_ok=True)
    number = 1 + len(list(expansions.glob("*.sql")))
    (expansions / f"{number:04d}_upgrade_trial.sql").write_text(_POSTGRES)
    return folder
