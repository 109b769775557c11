"""Client: one method per route, JSON in and out, pages followed as they are asked for."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import msgspec

from conveyor.client.files import Sent, measure, pieces_of
from conveyor.client.problems import not_conveyor
from conveyor.client.transport import Query, Transport
from conveyor.errors import UploadConflict

Json = dict[str, Any]

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
        except UploadConflict:
            # A try whose answer was lost has stored it. The link takes this list and no other.
            if not self._json("GET", _path("uploads", upload_id))["stored"]:
                raise
        return upload_id

    def job(self, job_id: str) -> Json:
        """The job with its live counts."""
        return self._json("GET", _path("jobs", job_id))

    def jobs(self, page_size: int = 100) -> Iterator[Json]:
        """All jobs, newest first."""
        return self._pages("/v1/jobs", {"limit": page_size})

    def results(self, job_id: str, page_size: int = 500, **filters: str | int | None) -> Iterator[Json]:
        """Tasks of a job with their outcome; `filters` are the route's: status, error_code, http_status."""
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

    def export(self, job_id: str, to: Path, progress: Callable[[int], None] | None = None) -> int:
        """Write the archive of all results to a file; `progress` gets the bytes so far. Returns the size."""
        return self._save(_path("jobs", job_id, "export"), to, progress)

    def invalid(self, job_id: str, page_size: int = 500) -> Iterator[Json]:
        """Lines of the job's list that were no task, in the order of the list."""
        return self._pages(_path("jobs", job_id, "invalid"), {"limit": page_size})

    def rerun(self, job_id: str) -> Json:
        """Have a list that could not be ingested tried again; the job as it is then."""
        return self._json("POST", _path("jobs", job_id, "rerun"))

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


def _path(*parts: str) -> str:
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)
