"""Client: one method per route, JSON in and out, pages followed as they are asked for."""

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import msgspec

from conveyor.client.downloads import download
from conveyor.client.files import Sent, measure, pieces_of
from conveyor.client.problems import not_conveyor
from conveyor.client.transport import Query, Transport
from conveyor.errors import ConveyorError, ExportFailed

Json = dict[str, Any]

# What the API answers to a second PUT, and what an object store does.
_STORED_BEFORE = frozenset({409, 412})
# Between two looks at an export.
_LOOK_SECONDS = 0.3
# That one redrive takes.
_MOST_IDS = 1000


class Client:
    """A server under `url`, seen by the tenant of `key`."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self._transport = Transport(url, key)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connections."""
        self._transport.close()

    def submit(self, spec: Json, idempotency_key: str, source: Json | None = None) -> Json:
        """Hand over a job, of its own `tasks` or of a `source` that was uploaded: {upload_id, format, compression}.
        Sending it again under the same key gives the same job."""
        body = spec if source is None else {**spec, "source": source}
        return self._json("POST", "/v1/jobs", body=body, idempotency_key=idempotency_key)

    def upload(self, path: Path, idempotency_key: str, progress: Sent | None = None) -> str:
        """Send a list, whatever its size; `progress` gets the bytes sent and their total. Returns the upload's id."""
        size, digest = measure(path)
        promised = {"size": size, "sha256": digest}
        place = self._json("POST", "/v1/uploads", body=promised, idempotency_key=idempotency_key)
        upload_id: str = place["upload_id"]
        try:
            self._transport.put(place["url"], place["headers"], size, lambda: pieces_of(path, size, progress))
        except ConveyorError as error:
            # A try whose answer was lost has stored it. The link takes this list and no other.
            if error.status not in _STORED_BEFORE or not self._json("GET", _path("uploads", upload_id))["stored"]:
                raise
        return upload_id

    def job(self, job_id: str, verify: bool = False) -> Json:
        """The job with its live counts; with `verify`, held to a count of its rows."""
        return self._json("GET", _path("jobs", job_id), query={"verify": "true"} if verify else None)

    def jobs(self, page_size: int = 100) -> Iterator[Json]:
        """All jobs, newest first."""
        return self._pages("/v1/jobs", {"limit": page_size})

    def results(self, job_id: str, page_size: int = 500, **filters: str | int | None) -> Iterator[Json]:
        """Tasks of a job with their outcome; `filters` are the route's: status, error_code, http_status, tag, run."""
        given = {name: value for name, value in filters.items() if value is not None}
        return self._pages(_path("jobs", job_id, "results"), {"limit": page_size, **given})

    def task(self, job_id: str, task_id: str) -> Json:
        """One task."""
        return self._json("GET", _path("jobs", job_id, "tasks", task_id))

    def events(self, job_id: str, page_size: int = 500) -> Iterator[Json]:
        """What happened to the job, oldest first."""
        return self._pages(_path("jobs", job_id, "events"), {"limit": page_size})

    def body(self, job_id: str, task_id: str, to: Path | BinaryIO) -> int:
        """Write a task's result body to a file or a stream; returns its size."""
        path = _path("jobs", job_id, "tasks", task_id, "body")
        return self._save(path, to) if isinstance(to, Path) else self._copy(path, to)

    def archive(self, job_id: str, to: Path, progress: Callable[[int], None] | None = None) -> int:
        """Write the archive of all results to a file while the server makes it; `progress` gets the bytes so far.
        Returns the size. For large jobs `export` is the one that goes on where it broke off."""
        return self._save(_path("jobs", job_id, "export"), to, progress)

    def create_export(self, job_id: str, spec: Json, idempotency_key: str) -> Json:
        """Have results made into files: {format, compression, bodies, select, part_bytes, partial}. The export as it
        is then; sent again under the same key it is the same one."""
        return self._json("POST", _path("jobs", job_id, "exports"), body=spec, idempotency_key=idempotency_key)

    def show_export(self, export_id: str) -> Json:
        """An export: its state, how far it is, and its parts."""
        return self._json("GET", _path("exports", export_id))

    def exports(self, job_id: str, page_size: int = 50) -> Iterator[Json]:
        """The job's exports, oldest first."""
        return self._pages(_path("jobs", job_id, "exports"), {"limit": page_size})

    def export_manifest(self, export_id: str) -> Json:
        """What the parts of an export hold, with counts and the sha256 of each."""
        return self._json("GET", _path("exports", export_id, "manifest"))

    def delete_export(self, export_id: str) -> None:
        """Remove an export with its files."""
        self._transport.send("DELETE", _path("exports", export_id))

    def wait_for_export(self, export_id: str, progress: Callable[[Json], None] | None = None) -> Json:
        """The export, once it is ready; `progress` gets it as it is now and then. Raises ExportFailed."""
        while True:
            export = self.show_export(export_id)
            if progress is not None:
                progress(export)
            if export["state"] == "ready":
                return export
            if export["state"] == "failed":
                raise ExportFailed(f"The export failed: {export['error']['message']}", reason=export["error"]["code"])
            self._transport.pause(_LOOK_SECONDS)

    def download_part(
        self, export_id: str, number: int, to: Path, progress: Callable[[int], None] | None = None
    ) -> int:
        """Write a part of an export to a file, checked against its sha256; returns its size. If it breaks off, the
        next call with the same file goes on."""
        return download(self._transport, lambda: self.show_export(export_id)["parts"][number - 1], to, progress)

    def export(self, job_id: str, to: Path, spec: Json | None = None, idempotency_key: str | None = None) -> list[Path]:
        """All of it: have the export made, wait for it, and download it. Several parts get numbers in their names.
        Returns the files."""
        key = idempotency_key or f"export {secrets.token_hex(16)}"
        export = self.wait_for_export(self.create_export(job_id, spec or {}, key)["id"])
        files = part_paths(to, len(export["parts"]))
        for number, path in enumerate(files, start=1):
            self.download_part(export["id"], number, path)
        return files

    def invalid(self, job_id: str, page_size: int = 500) -> Iterator[Json]:
        """Lines of the job's list that were no task, in the order of the list."""
        return self._pages(_path("jobs", job_id, "invalid"), {"limit": page_size})

    def rerun(
        self,
        job_id: str,
        select: str | Json = "failed",
        options: Json | None = None,
        idempotency_key: str | None = None,
    ) -> Json:
        """Run tasks of a job again: `failed`, `all`, or those that match {status, error_code, http_status, tag}. A list
        that could not be ingested is tried again instead. The job as it is then."""
        body = {"select": select, "options": options or {}}
        return self._json("POST", _path("jobs", job_id, "rerun"), body=body, idempotency_key=idempotency_key)

    def cancel(self, job_id: str) -> Json:
        """Start nothing more of a job, for good; the job as it is then."""
        return self._json("POST", _path("jobs", job_id, "cancel"))

    def pause(self, job_id: str) -> Json:
        """Start nothing more of a job until it is resumed; the job as it is then."""
        return self._json("POST", _path("jobs", job_id, "pause"))

    def resume(self, job_id: str) -> Json:
        """Go on with a paused job; the job as it is then."""
        return self._json("POST", _path("jobs", job_id, "resume"))

    def change(self, job_id: str, options: Json) -> Json:
        """Replace options of a job that has not ended; the job as it is then."""
        return self._json("PATCH", _path("jobs", job_id), body=options)

    def delete(self, job_id: str) -> None:
        """Remove a job with all its results."""
        self._transport.send("DELETE", _path("jobs", job_id))

    def dead_letters(self, page_size: int = 500) -> Iterator[Json]:
        """What was given up, oldest first."""
        return self._pages("/v1/dead-letters", {"limit": page_size})

    def redrive(self, ids: Sequence[str]) -> Json:
        """Send dead letters back to their queues: {redriven, skipped}."""
        counts = {"redriven": 0, "skipped": 0}
        for start in range(0, len(ids), _MOST_IDS):
            part = self._json("POST", "/v1/dead-letters/redrive", body={"ids": ids[start : start + _MOST_IDS]})
            counts = {name: number + part[name] for name, number in counts.items()}
        return counts

    def health(self) -> Json:
        """What /healthz says; needs no key."""
        return self._json("GET", "/healthz")

    def create_key(self, tenant: str, name: str | None = None) -> Json:
        """A new key of a tenant: {key, key_id, tenant}. With an admin's key, as all that follows."""
        return self._json("POST", "/v1/keys", body={"tenant": tenant, "name": name})

    def keys(self, tenant: str | None = None) -> Iterator[Json]:
        """Keys of one tenant, or of all, without their secrets."""
        return self._pages("/v1/keys", {"tenant": tenant} if tenant else {})

    def revoke_key(self, key_id: str) -> None:
        """End a key."""
        self._transport.send("DELETE", _path("keys", key_id))

    def _json(self, method: str, path: str, **parts: Any) -> Json:
        answer = self._transport.send(method, path, **parts)
        try:
            return msgspec.json.decode(answer, type=Json)
        except msgspec.DecodeError:
            raise not_conveyor(200) from None

    def _pages(self, path: str, query: Query) -> Iterator[Json]:
        cursor: str | None = None
        while True:
            page = self._json("GET", path, query={**query, "cursor": cursor} if cursor else query)
            yield from page["items"]
            cursor = page.get("next_cursor")
            if cursor is None:
                return

    def _copy(self, path: str, to: BinaryIO, progress: Callable[[int], None] | None = None) -> int:
        size = 0
        with self._transport.stream(path) as pieces:
            for piece in pieces:
                to.write(piece)
                size += len(piece)
                if progress:
                    progress(size)
        return size

    def _save(self, path: str, to: Path, progress: Callable[[int], None] | None = None) -> int:
        """To `<name>.part` first: a file under its own name is whole."""
        part = to.with_name(to.name + ".part")
        try:
            with part.open("wb") as file:
                size = self._copy(path, file, progress)
                file.flush()
                os.fsync(file.fileno())
            part.replace(to)
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise
        return size


def part_paths(to: Path, count: int) -> list[Path]:
    """The files that the parts of an export go to: one under its own name, several with their numbers in it."""
    if count == 1:
        return [to]
    stem, dot, ending = to.name.partition(".")
    return [to.with_name(f"{stem}-{number:04d}{dot}{ending}") for number in range(1, count + 1)]


def _path(*parts: str) -> str:
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)
