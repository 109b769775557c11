"""An export as files in a directory: each body by itself, and `manifest.jsonl` with a line for each task.

The server makes a zip in parts. Each part is downloaded once it is complete, unpacked, and removed. `.conveyor.json`
says how far that is, so that the same call continues after a failure; it is removed at the end. A file is written under
another name first, and the manifest last.
"""

import json
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from conveyor.client.client_session import ClientSession
from conveyor.client.downloads import download
from conveyor.client.export_files import FIRST_POLL, MAX_POLL, CopyProgress, part_source, refused_export
from conveyor.client.transport import Json
from conveyor.client.upload_file import BytesProgress
from conveyor.errors import BadInput, ConveyorError, NotFound

MANIFEST = "manifest.jsonl"
STATE = ".conveyor.json"

_LINES = ".manifest.jsonl.part"
_BODY = ".body.part"
_ZIP = ".part.zip"
_PART_BYTES = 128 * 1024 * 1024
_COPY_BYTES = 1024 * 1024


def is_folder(to: str | os.PathLike[str]) -> bool:
    """Whether it names a directory: by a slash at its end, or because there is one."""
    return str(to).endswith(("/", os.sep)) or Path(to).is_dir()


def check_folder(place: Path, overwrite: bool) -> None:
    """Check that files can be written there. Raises BadInput."""
    if place.exists() and not place.is_dir():
        raise BadInput(f"{place} is a file. Choose another directory with -o.")
    parent = place if place.exists() else place.absolute().parent
    if not parent.is_dir():
        raise BadInput(f"The directory {parent} does not exist. Create it, or choose another with -o.")
    if not os.access(parent, os.W_OK):
        raise BadInput(f"The directory {parent} is not writable. Choose another with -o.")
    if not overwrite and place.exists() and any(place.iterdir()):
        raise BadInput(f"{place}/ is not empty. Choose another directory, or pass --overwrite to replace its results.")


def remove_listed(place: Path) -> None:
    """Remove earlier results: the files that a manifest lists, also that of an export that was not finished, then the
    manifest. Anything else stays."""
    for manifest in (place / MANIFEST, place / _LINES):
        try:
            with manifest.open("rb") as lines:
                for line in lines:
                    name = json.loads(line).get("file")
                    if name is not None and _is_safe(name):
                        (place / name).unlink(missing_ok=True)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (ValueError, AttributeError):
            message = f"{manifest} is not the manifest of an export. Remove it, or choose another directory."
            raise BadInput(message) from None
        manifest.unlink()


async def export_to_folder(
    session: ClientSession,
    job_id: str,
    place: Path,
    spec: Mapping[str, Any],
    *,
    overwrite: bool = False,
    export_id: str | None = None,
    idempotency_key: str | None = None,
    progress: CopyProgress,
) -> Json:
    """Make the export, or continue the one that was begun in the directory, and return it. Raises BadInput,
    ExportFailed."""
    if spec.get("format", "zip") != "zip" or spec.get("compression") is not None:
        raise BadInput(f"A directory has a file for each body. For a table, name a file, such as {place.name}.csv.")
    run_blocking = session.io.run_blocking
    state = await run_blocking(_read_state, place)
    if state is None or overwrite or state.get("job_id") != job_id:
        await run_blocking(check_folder, place, overwrite)
        state = {"job_id": job_id, "parts": 0, "lines": 0}
    elif export_id is None:
        export_id = state["export_id"]
    if export_id is None:
        wanted = {"part_bytes": _PART_BYTES, **spec, "format": "zip"}
        export = await session.create_export(job_id, wanted, idempotency_key)
    else:
        export = await _existing(session, export_id)
    await run_blocking(partial(place.mkdir, exist_ok=True))
    if state["parts"] == 0:
        await run_blocking(remove_listed, place)
    state["export_id"] = export["id"]
    await run_blocking(_write_state, place, state)
    export = await _unpack_all(session, place, export, state, progress)
    await run_blocking(_finish, place)
    return export


async def _existing(session: ClientSession, export_id: str) -> Json:
    try:
        return await session.export(export_id)
    except NotFound:
        message = f"The export {export_id} does not exist, or has expired. Pass --overwrite to start anew."
        raise BadInput(message) from None


async def _unpack_all(
    session: ClientSession,
    place: Path,
    export: Json,
    state: Json,
    told: CopyProgress,
) -> Json:
    delay = FIRST_POLL
    while True:
        if told.on_status is not None:
            told.on_status(export)
        if export["state"] == "failed":
            raise refused_export(export)
        before = sum(part["size"] for part in export["parts"][: state["parts"]])
        total = sum(part["size"] for part in export["parts"])
        for part in export["parts"][state["parts"] :]:
            progress = None if told.on_bytes is None else partial(_report, told.on_bytes, before, total)
            source = partial(part_source, session, export["id"], part["number"] - 1)
            await download(session.transport, source, place / _ZIP, progress)
            state["lines"] = await session.io.run_blocking(_unpack, place, state["lines"])
            state["parts"] += 1
            await session.io.run_blocking(_write_state, place, state)
            before, delay = before + part["size"], FIRST_POLL
        if export["state"] == "ready":
            return export
        await session.io.pause(delay)
        delay = min(MAX_POLL, delay * 1.5)
        export = await session.export(export["id"])


def _report(progress: BytesProgress, before: int, total: int, size: int, _: int | None) -> None:
    progress(before + size, total)


def _unpack(place: Path, lines: int) -> int:
    """Write the files of the part, and add its lines to the manifest, which has `lines` bytes. Returns its size."""
    import zipfile  # noqa: PLC0415  (few commands need it, and it takes long)

    with zipfile.ZipFile(place / _ZIP) as archive:
        for entry in archive.infolist():
            if entry.filename == MANIFEST or entry.is_dir():
                continue
            if not _is_safe(entry.filename):
                raise ConveyorError(f"The export has a file with an unsafe name: {entry.filename!r}.")
            with archive.open(entry) as source, (place / _BODY).open("wb") as file:
                shutil.copyfileobj(source, file, _COPY_BYTES)
            path = place / entry.filename
            path.parent.mkdir(parents=True, exist_ok=True)
            (place / _BODY).replace(path)
        with (place / _LINES).open("ab") as file:
            file.truncate(lines)
            with archive.open(MANIFEST) as source:
                shutil.copyfileobj(source, file, _COPY_BYTES)
            file.flush()
            os.fsync(file.fileno())
            lines = file.tell()
    # What the state says to be there is on the disk.
    os.sync()
    (place / _ZIP).unlink()
    return lines


def _finish(place: Path) -> None:
    (place / _LINES).replace(place / MANIFEST)
    (place / STATE).unlink()
    for left in (place / _BODY, *place.glob(f"{_ZIP}*")):
        left.unlink(missing_ok=True)


def _read_state(place: Path) -> Json | None:
    try:
        state = json.loads((place / STATE).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return state if isinstance(state, dict) and {"job_id", "export_id", "parts", "lines"} <= state.keys() else None


def _write_state(place: Path, state: Json) -> None:
    new = place / f"{STATE}.new"
    with new.open("w") as file:
        json.dump(state, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(place / STATE)


def _is_safe(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name
