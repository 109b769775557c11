"""`conveyor backup` and `conveyor restore`: copy the embedded engines while a server runs, and bring a copy back.

The database is copied first, as it is at one moment, then the blobs: a body is durable before its row, so the blobs
hold what the rows refer to, unless it was deleted in between. The copy is verified; what is missing in it then is
copied again, with a newer database, which refers to it no more.
"""

import shutil
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conveyor.cli import EXIT_ERROR
from conveyor.cli.output import print_json
from conveyor.cli.shared_options import AsJson, Data
from conveyor.errors import BadInput
from conveyor.settings import Settings

if TYPE_CHECKING:
    from conveyor.system import EmbeddedCopy
    from conveyor.verify.findings import Findings

_ARCHIVES = {".tar": "w", ".tar.gz": "w:gz", ".tgz": "w:gz"}
_ROUNDS = 5
# Findings that a newer database may not have. Counts and messages are as they are in the source.
_COPIED = ("body_missing", "body_damaged", "list", "export")

Place = Annotated[
    Path,
    typer.Argument(metavar="PLACE", help="New directory, or new file that ends in .tar, .tar.gz or .tgz."),
]
Backup = Annotated[Path, typer.Argument(metavar="BACKUP", exists=True, help="Directory or file of a backup.")]


def backup(place: Place, data: Data = None, as_json: AsJson = False) -> None:
    """Back up the data directory, also of a running server, and verify the copy.

    For the embedded engines: the database, the blobs and the keys. A backup in a directory is itself a data directory.
    Exits 1 if the copy has findings, which the source then has too.
    """
    settings = _embedded(data)
    if place.exists():
        raise BadInput(f"{place} exists already. Choose a new name.")
    if not (settings.data / "conveyor.db").exists():
        raise BadInput(f"{settings.data} holds no database. Choose the data directory with --data.")
    kind = _archive_kind(place)
    staged = place.with_name(f"{place.name}.partial")
    # What a backup that died has left.
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(mode=0o700, parents=True)
    try:
        copy, findings = _copy(settings, staged)
        _publish(staged, place, kind)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    _report(place, "Backed up", copy, findings, as_json)


def restore(backup: Backup, data: Data = None, as_json: AsJson = False) -> None:
    """Restore a backup into a new data directory, and verify it."""
    from conveyor.cli.run_directory import check_data

    settings = _embedded(data)
    check_data(settings.data)
    if settings.data.exists() and any(settings.data.iterdir()):
        raise BadInput(f"{settings.data} is not empty. Move it away, or choose another directory with --data.")
    staged = settings.data.with_name(f"{settings.data.name}.partial")
    shutil.rmtree(staged, ignore_errors=True)
    try:
        _unpack(backup, staged)
        findings = _verified(staged)
        if settings.data.exists():
            settings.data.rmdir()
        _publish(staged, settings.data, None)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    _report(settings.data, "Restored", None, findings, as_json)


def _embedded(data: Path | None) -> Settings:
    from conveyor import faults
    from conveyor.settings import blob_directory
    from conveyor.telemetry.logs import configure_log

    settings = Settings.load(data=data)
    if settings.crash_at is not None:
        faults.arm(faults.kill_at(settings.crash_at))
    configure_log("error", quiet=True, form=settings.log_format)
    shared = [name for name in ("records", "tasks", "queue", "coordinator") if getattr(settings, name)]
    if shared or blob_directory(settings) is None:
        raise BadInput(
            "Only the embedded engines are backed up by Conveyor. Use the backups of your database and object store."
        )
    return settings


def _archive_kind(place: Path) -> str | None:
    return next((kind for ending, kind in _ARCHIVES.items() if place.name.endswith(ending)), None)


def _copy(settings: Settings, staged: Path) -> "tuple[EmbeddedCopy, Findings]":
    from conveyor.system import copy_embedded

    for _ in range(_ROUNDS):
        copy = copy_embedded(settings, staged)
        findings = _verified(staged)
        if not any(kind.value in _COPIED for kind in findings.by_kind):
            break
    return copy, findings


def _verified(place: Path) -> "Findings":
    from conveyor.cli.loop import run_async

    findings = run_async(_verify(place))
    # Only a running server has these.
    for name in ("owner.lock", "conveyor.db-wal", "conveyor.db-shm"):
        (place / name).unlink(missing_ok=True)
    return findings


async def _verify(place: Path) -> "Findings":
    from conveyor.system import open_system
    from conveyor.verify.findings import UNREADABLE, Findings, error_text
    from conveyor.verify.installation import Installation

    findings = Findings()
    async with open_system(Settings(data=place)) as system:
        try:
            await Installation(system, findings).verify()
        except UNREADABLE as error:
            findings.fail(error_text(error))
    return findings


def _publish(staged: Path, place: Path, kind: str | None) -> None:
    """Give the copy its name, once all of it is durable."""
    from conveyor.faults import crashpoint
    from conveyor.system import make_durable

    if kind is not None:
        archive = place.with_name(f"{place.name}.writing")
        with tarfile.open(archive, kind) as tar:  # type: ignore[call-overload]  # the mode is one of the table above
            tar.add(staged, arcname="conveyor-data")
        archive.chmod(0o600)
        staged = archive
    make_durable(staged)
    crashpoint("backup.publish.before")
    staged.rename(place)
    make_durable(place.absolute().parent)
    crashpoint("backup.publish.after")


def _unpack(backup: Path, staged: Path) -> None:
    if backup.is_dir():
        shutil.copytree(backup, staged)
        return
    try:
        with tarfile.open(backup) as tar:
            staged.mkdir(mode=0o700)
            tar.extractall(staged, filter="data")
    except tarfile.TarError as error:
        raise BadInput(f"{backup} is not a backup: {error}.") from None
    inside = staged / "conveyor-data"
    if not (inside / "conveyor.db").exists():
        raise BadInput(f"{backup} is not a backup: it holds no database.")
    for each in list(inside.iterdir()):
        each.rename(staged / each.name)
    inside.rmdir()


def _report(place: Path, verb: str, copy: "EmbeddedCopy | None", findings: "Findings", as_json: bool) -> None:
    import msgspec

    from conveyor.cli import formatting as text

    checked = findings.checked
    if as_json:
        shown: dict[str, Any] = {
            "place": str(place),
            "files": None if copy is None else copy.files,
            "bytes": None if copy is None else copy.bytes,
            "checked": msgspec.to_builtins(checked),
            "findings": {kind.value: of_kind.count for kind, of_kind in findings.by_kind.items()},
            "failures": findings.failures,
        }
        print_json(shown)
    else:
        held = "" if copy is None else f", {text.count(copy.files)} files, {text.size(copy.bytes)}"
        print(f"{verb} to {place}{held}.")
        print(
            f"Verified {text.count(checked.jobs)} jobs, {text.count(checked.tasks)} tasks and "
            f"{text.count(checked.bodies)} bodies: {text.count(findings.left)} findings."
        )
        for failure in findings.failures:
            print(f"Could not check: {failure}")
        if findings.left:
            print("`conveyor verify --data` with this directory shows them.")
    if findings.left or findings.failures:
        raise typer.Exit(EXIT_ERROR)
