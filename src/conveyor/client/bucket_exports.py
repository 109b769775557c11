"""Export into a bucket or directory of the caller. The server makes the files of the export; the client copies each as
soon as it is complete, through a temporary file, with the caller's own credentials.

Below the prefix are `_export.json`, which is written first and names the export, `part-0001-<export id>.<ending>` and
so on, and `_manifest.json`, which is written last and names all parts. A part has the id of its export in its name,
and an object is seen whole or not at all: one with the right name and size is that part. So a call that broke off is
continued by the same call.
"""

import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from conveyor.client.client_session import ClientSession
from conveyor.client.downloads import download
from conveyor.client.export_files import (
    FIRST_POLL,
    FORMATS,
    MAX_POLL,
    CopyProgress,
    part_source,
    refused_export,
    wait_for_export,
)
from conveyor.client.object_stores import StoredPrefix, open_prefix
from conveyor.client.transport import Json
from conveyor.client.upload_file import BytesProgress
from conveyor.errors import BadInput, DestinationUnavailable, NotFound

BEGIN = "_export.json"
END = "_manifest.json"

_OWN_PART = re.compile(r"part-\d{4}-(export_[A-Za-z0-9]+)\.[a-z.]+")
# What is looked at to tell whether a prefix is empty, and who wrote there.
_MAX_NAMES = 10_000
# A file of this size suits the readers of tables, and is what a lost connection repeats at most.
_PART_BYTES = 128 * 1024 * 1024
_DEFAULTS = {"format": "jsonl", "compression": "gzip", "part_bytes": _PART_BYTES}


@dataclass(frozen=True)
class BucketExport:
    """A finished export: its JSON, and the URLs of its files."""

    data: Json
    urls: list[str]
    manifest: str


@dataclass(frozen=True)
class _Earlier:
    """What an earlier call left below the prefix."""

    begun: Json | None
    is_complete: bool
    parts: list[str]


def bucket_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The body of POST /v1/jobs/{id}/exports: by default compressed lines of JSON, in parts."""
    if "format" in spec:
        return {"part_bytes": _PART_BYTES, **spec}
    return {**_DEFAULTS, **spec}


async def export_to_prefix(
    session: ClientSession,
    job_id: str,
    to: str,
    spec: Mapping[str, Any],
    *,
    overwrite: bool = False,
    export_id: str | None = None,
    idempotency_key: str | None = None,
    progress: CopyProgress,
) -> BucketExport:
    """Make the export, or continue the one that the prefix or `export_id` names. Nothing is written or made before
    prefix, credentials and job are checked. Raises BadInput, DestinationUnavailable, ExportFailed."""
    _check_prefix(to)
    prefix = await session.io.run_blocking(open_prefix, to)
    earlier = await session.io.run_blocking(_look, prefix, overwrite)
    export = await _continued(session, prefix, job_id, earlier, overwrite, export_id)
    is_new = export is None
    if export is None:
        export = await session.create_export(job_id, bucket_spec(spec), idempotency_key)
    begun = {"job_id": job_id, "export_id": export["id"], "format": export["format"]}
    await session.io.run_blocking(prefix.write, BEGIN, _text(begun))
    export = await _copy_all(session, prefix, export, is_new, progress)
    names = [part_object(export, part) for part in export["parts"]]
    manifest = await session.manifest(export["id"])
    for part, name in zip(manifest["parts"], names, strict=True):
        part["name"] = name
    await session.io.run_blocking(prefix.write, END, _text(manifest))
    stale = sorted(set(earlier.parts).difference(names))
    if stale:
        await session.io.run_blocking(prefix.remove, stale)
    return BucketExport(export, [prefix.url + name for name in names], prefix.url + END)


async def export_by_server(
    session: ClientSession,
    job_id: str,
    to: str,
    spec: Mapping[str, Any],
    *,
    overwrite: bool = False,
    export_id: str | None = None,
    idempotency_key: str | None = None,
    progress: CopyProgress,
) -> BucketExport:
    """Have the server write the same files, with its own credentials, below a place that its operator lists; or wait
    for the export that `export_id` names. Raises BadInput, DestinationRefused, ExportFailed."""
    _check_prefix(to)
    if overwrite:
        raise BadInput("A server never writes over what is there: overwrite is for your own credentials.")
    if export_id is None:
        export = await session.create_export(job_id, {**bucket_spec(spec), "to": to}, idempotency_key)
        export_id = str(export["id"])
    export = await wait_for_export(session, export_id, progress.on_status)
    if export["job_id"] != job_id or export["to"] is None:
        raise BadInput(f"The export {export_id} is of another job, or is not one that the server writes elsewhere.")
    return BucketExport(export, [part["to"] for part in export["parts"]], export["to"] + END)


def part_object(export: Json, part: Json) -> str:
    """The name of a part below the prefix."""
    ending = str(part["name"]).partition(".")[2]
    return f"part-{part['number']:04d}-{export['id']}.{ending}"


def _check_prefix(to: str) -> None:
    last = to.rpartition("/")[2]
    if any(last.lower().endswith(ending) for ending in FORMATS):
        raise BadInput(
            f"{to} is the name of a file. Pass a prefix that ends with a slash: the export is split into files below "
            "it, and the format is an option of its own."
        )


def _look(prefix: StoredPrefix, overwrite: bool) -> _Earlier:
    """What is below the prefix. Raises BadInput if that is not an export that this call may continue or replace."""
    try:
        names = prefix.names(_MAX_NAMES)
    except DestinationUnavailable as error:
        if overwrite:
            # A caller that may write need not have the right to list.
            return _Earlier(None, False, [])
        raise DestinationUnavailable(f"{error.message} To write without a look, pass --overwrite.") from None
    begun = prefix.read(BEGIN) if BEGIN in names else None
    parts = [name for name in names if _OWN_PART.fullmatch(name)]
    last = prefix.read(END) if END in names else None
    earlier = _Earlier(_decode(begun), last is not None and _names_export(last) == _names_export(begun), parts)
    if overwrite:
        return earlier
    foreign = [name for name in names if name not in (BEGIN, END, *parts)]
    if foreign or (names and earlier.begun is None):
        raise BadInput(
            f"{prefix.url} is not empty (it has {(foreign or names)[0]}). Choose another prefix, or allow the export "
            "to be written beside what is there: --overwrite, overwrite=True."
        )
    if earlier.is_complete:
        raise BadInput(
            f"{prefix.url} has a complete export already. Choose another prefix, or replace it: --overwrite, "
            "overwrite=True."
        )
    return earlier


async def _continued(
    session: ClientSession,
    prefix: StoredPrefix,
    job_id: str,
    earlier: _Earlier,
    overwrite: bool,
    export_id: str | None,
) -> Json | None:
    """The export to continue; None to start one. Raises BadInput if what was begun cannot be continued."""
    begun = earlier.begun
    if export_id is None:
        if overwrite or begun is None:
            return None
        export_id = str(begun.get("export_id"))
    elif begun is not None and begun.get("export_id") != export_id and not overwrite:
        raise BadInput(f"{prefix.url} has files of another export. Choose another prefix, or pass --overwrite.")
    try:
        export = await session.export(export_id)
    except NotFound:
        raise BadInput(
            f"The export {export_id} does not exist, or has expired. Start it anew: --overwrite, overwrite=True."
        ) from None
    if export["job_id"] != job_id:
        raise BadInput(f"{prefix.url} has files of job {export['job_id']}. Choose another prefix, or pass --overwrite.")
    if export["state"] == "failed":
        raise refused_export(export)
    return export


async def _copy_all(
    session: ClientSession, prefix: StoredPrefix, export: Json, is_new: bool, progress: CopyProgress
) -> Json:
    """Copy each part once it is complete, until the export is ready. Returns it."""
    copied, size, delay = 0, 0, FIRST_POLL
    while True:
        if progress.on_status is not None:
            progress.on_status(export)
        if export["state"] == "failed":
            raise refused_export(export)
        known = sum(part["size"] for part in export["parts"])
        for part in export["parts"][copied:]:
            if is_new or await session.io.run_blocking(prefix.size, part_object(export, part)) != part["size"]:
                await _copy(session, prefix, export, part, _added(progress.on_bytes, size, known))
            copied, size, delay = copied + 1, size + part["size"], FIRST_POLL
        if export["state"] == "ready":
            return export
        await session.io.pause(delay)
        delay = min(MAX_POLL, delay * 1.5)
        export = await session.export(export["id"])


async def _copy(
    session: ClientSession, prefix: StoredPrefix, export: Json, part: Json, progress: BytesProgress | None
) -> None:
    name = part_object(export, part)
    with tempfile.TemporaryDirectory(prefix="conveyor-") as place:
        path = Path(place) / name
        await download(session.transport, partial(part_source, session, export["id"], part["number"] - 1), path)
        await session.io.run_blocking(prefix.write_file, name, path, progress)


def _added(progress: BytesProgress | None, before: int, total: int) -> BytesProgress | None:
    return None if progress is None else lambda size, _: progress(before + size, total)


def _text(value: Json) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _names_export(text: bytes | None) -> str | None:
    return (_decode(text) or {}).get("export_id")


def _decode(text: bytes | None) -> Json | None:
    try:
        value = json.loads(text or b"null")
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
