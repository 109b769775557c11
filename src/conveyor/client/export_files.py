"""Wait for exports and download their files. Includes the format that a file name implies."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from conveyor.client.client_session import ClientSession
from conveyor.client.downloads import DownloadSource, download
from conveyor.client.job_options import ExportOptions, Filter
from conveyor.client.transport import Json
from conveyor.client.upload_file import BytesProgress, measure
from conveyor.errors import BadInput, ExportFailed

# Export format by file suffix.
FORMATS = {".zip": "zip", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet"}
_COMPRESSED_INSIDE = frozenset({"zip", "parquet"})
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_SELECT = (*Filter.__annotations__, "changed")
FIRST_POLL = 0.1
MAX_POLL = 2.0


@dataclass(frozen=True)
class CopyProgress:
    """What is told while an export is made and copied."""

    on_status: Callable[[Json], None] | None = None
    on_bytes: BytesProgress | None = None


def export_spec(options: ExportOptions, to: Path | None = None) -> dict[str, Any]:
    """Make the body of POST /v1/jobs/{id}/exports. The name of the file fills in the format and the compression. Raises
    BadInput."""
    chosen = {name: value for name, value in options.items() if value is not None}
    select = {name: str(chosen.pop(name)) if name == "run" else chosen.pop(name) for name in _SELECT if name in chosen}
    spec = {**({} if to is None else named_form(to)), **chosen}
    if to is not None and "format" not in spec:
        raise BadInput(f"Unknown format of {to.name}. End the name with {', '.join(FORMATS)}, or pass `format`.")
    return {**spec, "select": select}


def named_form(to: Path) -> dict[str, Any]:
    """The format and compression that the name of a file implies. Raises BadInput."""
    suffixes = [suffix.lower() for suffix in to.suffixes]
    compression = _COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    if compression is not None:
        suffixes.pop()
    if compression is not None and suffixes and FORMATS.get(suffixes[-1]) in _COMPRESSED_INSIDE:
        raise BadInput(f"{to.name}: a {suffixes[-1]} file is compressed inside. Leave out {to.suffixes[-1]}.")
    implied = {"format": FORMATS.get(suffixes[-1]) if suffixes else None, "compression": compression}
    return {name: value for name, value in implied.items() if value is not None}


def part_paths(to: Path, count: int) -> list[Path]:
    """The paths for the parts of an export. Several parts have numbers in their names."""
    if count == 1:
        return [to]
    stem, dot, suffix = to.name.partition(".")
    return [to.with_name(f"{stem}-{number:04d}{dot}{suffix}") for number in range(1, count + 1)]


async def wait_for_export(session: ClientSession, export_id: str, on_status: Callable[[Json], None] | None) -> Json:
    """Poll the export until it is ready, and return it. Raises ExportFailed."""
    delay = FIRST_POLL
    while True:
        export = await session.export(export_id)
        if on_status is not None:
            on_status(export)
        if export["state"] == "ready":
            return export
        if export["state"] == "failed":
            raise refused_export(export)
        await session.io.pause(delay)
        delay = min(MAX_POLL, delay * 1.5)


async def save_export(session: ClientSession, export: Json, to: Path, progress: BytesProgress | None) -> list[Path]:
    """Download all parts of a ready export, checked against their sha256, and the manifest if there are several. After
    a failure, the next call resumes."""
    parts = export["parts"]
    total, before = sum(part["size"] for part in parts), 0
    files = part_paths(to, len(parts))
    for number, (part, path) in enumerate(zip(parts, files, strict=True)):
        part_progress = None if progress is None else partial(_report_total, progress, before, total)
        if len(parts) == 1 or not await session.io.run_blocking(_is_complete, path, part):
            await download(session.transport, partial(part_source, session, export["id"], number), path, part_progress)
        before += part["size"]
    if len(parts) > 1:
        text = json.dumps(await session.manifest(export["id"]), indent=1) + "\n"
        await session.io.run_blocking(to.with_name(to.name + ".manifest.json").write_text, text)
    return files


def refused_export(export: Json) -> ExportFailed:
    """The error of an export that failed."""
    return ExportFailed(f"The export failed: {export['error']['message']}", reason=export["error"]["code"])


async def part_source(session: ClientSession, export_id: str, number: int) -> DownloadSource:
    """Where to download a part, counted from 0; its link may be new."""
    part = (await session.export(export_id))["parts"][number]
    return DownloadSource(part["url"], part["size"], part["sha256"])


def _is_complete(path: Path, part: Json) -> bool:
    """Whether an earlier call has downloaded this part."""
    return path.is_file() and measure(path) == (part["size"], part["sha256"])


def _report_total(progress: BytesProgress, before: int, total: int, size: int, _: int | None) -> None:
    progress(before + size, total)
