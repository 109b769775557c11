"""Versions of Conveyor as folders to run from: a wheel, unpacked, and this source with what a next one would add."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[2]

# By commit: a clone need not have the tags.
RELEASES = {"v0.1.0": "effbd01ab587f936549e0f732ccce36ec9b2fe08"}

# A value of an option that only the later version knows.
NEWER_VALUE = "TRIAL"
NEWER_OPTION = {"on_exhausted": "trial"}

_SQLITE = "ALTER TABLE jobs ADD COLUMN upgrade_trial TEXT; CREATE TABLE upgrade_trial (id INTEGER PRIMARY KEY)"
_POSTGRES = _SQLITE.replace("TEXT", "text").replace("INTEGER", "integer")
# What the later version has in place of a line of this one: an expansion of SQLite, an attribute of every job in
# DynamoDB, and the value above.
_CHANGES = {
    "engines/sqlite/database.py": (
        # After those that this version has: their numbers are stored.
        'sql_file("expansions/0001_unchanged.sql"),',
        f'sql_file("expansions/0001_unchanged.sql"), {_SQLITE!r},',
    ),
    "engines/dynamodb/items.py": (
        '        "v": FORM,\n        **_fields(job,',
        '        "v": FORM,\n        "upgrade_trial": "later",\n        **_fields(job,',
    ),
    "model.py": ('    DEAD_LETTER = "dead_letter"\n', '    DEAD_LETTER = "dead_letter"\n    TRIAL = "trial"\n'),
}


def version_name(given: str) -> str:
    """A short name of a release, a wheel or a commit."""
    if given in RELEASES:
        return given
    return Path(given).name if _is_wheel(given) else _commit_of(given)[:7]


def earlier(given: str, place: Path) -> Path:
    """A wheel, or the one of a commit, unpacked."""
    wheel = Path(given) if _is_wheel(given) else _built(_commit_of(given), place)
    unpacked = place / "earlier"
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(unpacked)
    return unpacked


def skips_newer_rows(source: Path) -> bool:
    """Whether this version leaves out of a listing what a newer one wrote."""
    return (source / "conveyor/engines/newer_rows.py").exists()


def later(place: Path) -> Path:
    """This source, with more in the schema of each engine, and with an option that earlier versions do not know."""
    folder = place / "later"
    shutil.copytree(ROOT / "src", folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, (line, changed) in _CHANGES.items():
        module = folder / "conveyor" / name
        text = module.read_text()
        assert text.count(line) == 1, f"{name} does not say once: {line}"
        module.write_text(text.replace(line, changed))
    expansions = folder / "conveyor/engines/postgres/expansions"
    expansions.mkdir(exist_ok=True)
    number = 1 + len(list(expansions.glob("*.sql")))
    (expansions / f"{number:04d}_upgrade_trial.sql").write_text(_POSTGRES)
    return folder


def _is_wheel(given: str) -> bool:
    return given.endswith(".whl")


def _commit_of(name: str) -> str:
    command = ["git", "rev-parse", "--verify", f"{RELEASES.get(name, name)}^{{commit}}"]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def _built(commit: str, place: Path) -> Path:
    source, dist = place / "source", place / "dist"
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as tar:
        tar.extractall(source, filter="data")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(dist)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    [wheel] = dist.glob("*.whl")
    return wheel
