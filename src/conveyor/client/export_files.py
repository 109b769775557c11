"""Exports: a job's results as files, made by the server and downloaded. What a file's name says of its form; waiting
for an export; its parts on this disk."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from conveyor.client.client_session import ClientSession
from conveyor.client.downloads import Remote, download
from conveyor.client.job_options import ExportOptions, Filter
from conveyor.client.transport import Json
from conveyor.client.upload_file import Moved, measure
from conveyor.errors import BadInput, ExportFailed

# What the end of a file's name asks for.
FORMATS = {".zip": "zip", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet"}
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_SELECT = tuple(Filter.__annotations__)
_FIRST_LOOK = 0.1
_LONGEST_LOOK = 2.0


def export_spec(options: ExportOptions, to: Path | None = None) -> dict[str, Any]:
    """The body of POST /v1/jobs/{id}/exports: what is asked for, and where that says nothing what the name of the file
    does. Raises BadInput."""
    given = {name: value for name, value in options.items() if value is not None}
    select = {name: str(given.pop(name)) if name == "run" else given.pop(name) for name in _SELECT if name in given}
    form = {**({} if to is None else named_form(to)), **given}
    if to is not None and "format" not in form:
        raise BadInput(f"What is {to.name} to be? Give it an ending out of {', '.join(FORMATS)}, or name the format.")
    return {**form, "select": select}


def named_form(to: Path) -> dict[str, Any]:
    """What the name of a file says of its format and compression."""
    endings = [ending.lower() for ending in to.suffixes]
    compression = _COMPRESSIONS.get(endings[-1]) if endings else None
    if compression is not None:
        endings.pop()
    said = {"format": FORMATS.get(endings[-1]) if endings else None, "compression": compression}
    return {name: value for name, value in said.items() if value is not None}


def part_paths(to: Path, count: int) -> list[Path]:
    """The files that the parts of an export go to: one under its own name, several with their numbers in it."""
    if count == 1:
        return [to]
    stem, dot, ending = to.name.partition(".")
    return [to.with_name(f"{stem}-{number:04d}{dot}{ending}") for number in range(1, count + 1)]


async def wait_for_export(session: ClientSession, export_id: str, seen: Callable[[Json], None] | None) -> Json:
    """The export, once it is ready. Raises ExportFailed."""
    look = _FIRST_LOOK
    while True:
        export = await session.export(export_id)
        if seen is not None:
            seen(export)
        if export["state"] == "ready":
            return export
        if export["state"] == "failed":
            raise ExportFailed(f"The export failed: {export['error']['message']}", reason=export["error"]["code"])
        await session.io.pause(look)
        look = min(_LONGEST_LOOK, look * 1.5)


async def save_export(session: ClientSession, export: Json, to: Path, progress: Moved | None) -> list[Path]:
    """Download all parts of an export that is ready, each checked against its sha256, and of several the manifest too.
    If it breaks off, the next call goes on."""
    parts = export["parts"]
    total, before = sum(part["size"] for part in parts), 0
    files = part_paths(to, len(parts))
    for number, (part, path) in enumerate(zip(parts, files, strict=True)):
        moved = None if progress is None else partial(_of_all, progress, before, total)
        if len(parts) == 1 or not await session.io.aside(_is_there, path, part):
            await download(session.transport, partial(_part, session, export["id"], number), path, moved)
        before += part["size"]
    if len(parts) > 1:
        text = json.dumps(await session.manifest(export["id"]), indent=1) + "\n"
        await session.io.aside(to.with_name(to.name + ".manifest.json").write_text, text)
    return files


async def _part(session: ClientSession, export_id: str, number: int) -> Remote:
    part = (await session.export(export_id))["parts"][number]
    return Remote(part["url"], part["size"], part["sha256"])


def _is_there(path: Path, part: Json) -> bool:
    """Whether an earlier call has written this part already."""
    return path.is_file() and measure(path) == (part["size"], part["sha256"])


def _of_all(progress: Moved, before: int, total: int, size: int, _: int | None) -> None:
    progress(before + size, total)
