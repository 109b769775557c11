"""ClientSession: one coroutine per request of the API. `submission`, `following` and `export_files` combine
requests."""

import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from conveyor.client.io import Io
from conveyor.client.resources import Event, InvalidLine, Result
from conveyor.client.transport import Json, Query, Transport, decode, path_of
from conveyor.errors import BadInput, RunNotEnded

# Rows per page.
_PAGE = 1000
# Maximum number of ids in one redrive request.
_MAX_REDRIVE_IDS = 1000


def new_key() -> str:
    """A new, unique Idempotency-Key."""
    return f"sdk_{secrets.token_hex(16)}"


class ClientSession:
    """A session with the server at `url`, as the tenant of `key`."""

    def __init__(self, io: Io, url: str, key: str | None, patience: float) -> None:
        self.io = io
        self.transport = Transport(io, url, key, patience)

    async def request(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        body: object = None,
        idempotency_key: str | None = None,
    ) -> Any:
        """Call any route. Returns its JSON, or None if the answer has no body."""
        answer = await self.transport.send(method, path, query, body, idempotency_key)
        return decode(answer, object) if answer else None

    def pages(self, path: str, query: Query | None = None) -> AsyncGenerator[Json, None]:
        """Iterate over all items of any listing."""
        return self.transport.listing(path, {"limit": 100, **(query or {})}, dict)

    async def create_job(self, spec: Mapping[str, Any], idempotency_key: str) -> Json:
        return await self.transport.json("POST", "/v1/jobs", body=spec, idempotency_key=idempotency_key)

    async def job(self, job_id: str, verify: bool = False, run: str | int | None = None) -> Json:
        query = {**({"verify": "true"} if verify else {}), **({} if run is None else {"run": run})} or None
        return await self.transport.json("GET", path_of("jobs", job_id), query=query)

    def jobs(self, where: Mapping[str, str] | None = None) -> AsyncGenerator[Json, None]:
        return self.transport.listing("/v1/jobs", {"limit": 100, **(where or {})}, dict)

    def results(self, job_id: str, where: Mapping[str, Any], page: int = _PAGE) -> AsyncGenerator[Result, None]:
        filters = {name: value for name, value in where.items() if value is not None}
        return self.transport.listing(path_of("jobs", job_id, "results"), {"limit": page, **filters}, Result)

    def events(self, job_id: str, task_id: str | None = None) -> AsyncGenerator[Event, None]:
        query: dict[str, str | int] = {"limit": _PAGE, **({} if task_id is None else {"task": task_id})}
        return self.transport.listing(path_of("jobs", job_id, "events"), query, Event)

    def invalid(self, job_id: str) -> AsyncGenerator[InvalidLine, None]:
        return self.transport.listing(path_of("jobs", job_id, "invalid"), {"limit": _PAGE}, InvalidLine)

    async def breakdown(self, job_id: str, part: str, run: str | int | None) -> Json:
        """The `errors` or the `hosts` of a run."""
        query = None if run is None else {"run": str(run)}
        return await self.transport.json("GET", path_of("jobs", job_id, part), query=query)

    async def task(self, job_id: str, task_id: str) -> Result:
        return decode(await self.transport.send("GET", path_of("jobs", job_id, "tasks", task_id)), Result)

    async def control(self, job_id: str, action: str) -> Json:
        """Cancel, pause, resume or close a job. Idempotent."""
        return await self.transport.json("POST", path_of("jobs", job_id, action), safe=True)

    async def change(self, job_id: str, options: Mapping[str, Any]) -> Json:
        return await self.transport.json("PATCH", path_of("jobs", job_id), body=options)

    async def rerun(
        self,
        job_id: str,
        select: str | Mapping[str, Any] | None,
        options: Mapping[str, Any],
        idempotency_key: str | None,
        extract_only: bool = False,
        changed_only: bool = False,
    ) -> Json:
        body = {
            "select": select,
            "options": options,
            "extract_only": extract_only or None,
            "changed_only": changed_only or None,
        }
        body = {name: value for name, value in body.items() if value is not None}
        key = idempotency_key or new_key()
        return await self.transport.json("POST", path_of("jobs", job_id, "rerun"), body=body, idempotency_key=key)

    async def duplicate(
        self, job_id: str, name: str | None, options: Mapping[str, Any], idempotency_key: str | None
    ) -> Json:
        body = {**({} if name is None else {"name": name}), "options": options}
        key = idempotency_key or new_key()
        return await self.transport.json("POST", path_of("jobs", job_id, "duplicate"), body=body, idempotency_key=key)

    async def add(self, job_id: str, body: Mapping[str, Any], idempotency_key: str) -> Json:
        path = path_of("jobs", job_id, "tasks")
        return await self.transport.json("POST", path, body=body, idempotency_key=idempotency_key)

    async def delete(self, *path: str) -> None:
        await self.transport.send("DELETE", path_of(*path))

    async def create_export(self, job_id: str, spec: Mapping[str, Any], idempotency_key: str | None) -> Json:
        path, key = path_of("jobs", job_id, "exports"), idempotency_key or new_key()
        return await self.transport.json("POST", path, body=spec, idempotency_key=key)

    async def export(self, export_id: str) -> Json:
        return await self.transport.json("GET", path_of("exports", export_id))

    async def manifest(self, export_id: str) -> Json:
        return await self.transport.json("GET", path_of("exports", export_id, "manifest"))

    def exports(self, job_id: str) -> AsyncGenerator[Json, None]:
        return self.transport.listing(path_of("jobs", job_id, "exports"), {"limit": 50}, dict)

    def dead_letters(self, error_code: str | None, job_id: str | None) -> AsyncGenerator[Json, None]:
        where = {"error_code": error_code, "job_id": job_id}
        filters = {name: value for name, value in where.items() if value is not None}
        return self.transport.listing("/v1/dead-letters", {"limit": _PAGE, **filters}, dict)

    async def redrive(
        self,
        ids: Sequence[str] | None,
        every: bool,
        error_code: str | None,
        job_id: str | None,
        dry_run: bool,
    ) -> Json:
        by_match = every or error_code is not None or job_id is not None
        if (ids is None) != by_match:
            raise BadInput("Pass the ids of dead letters, or else all, error_code or job_id.")
        if ids is None:
            where = {"all": every or None, "error_code": error_code, "job_id": job_id, "dry_run": dry_run or None}
            body = {name: value for name, value in where.items() if value is not None}
            return await self.transport.json("POST", "/v1/dead-letters/redrive", body=body)
        done: Json = {"redriven": 0, "skipped": 0, "runs": [], "requeued": 0, "blocked": 0}
        more = {"dry_run": True} if dry_run else {}
        for start in range(0, len(ids), _MAX_REDRIVE_IDS):
            chosen = ids[start : start + _MAX_REDRIVE_IDS]
            try:
                part = await self.transport.json("POST", "/v1/dead-letters/redrive", body={"ids": chosen, **more})
            except RunNotEnded:
                if not done["redriven"]:
                    raise
                # An earlier part has started a rerun of the same job.
                part = {"skipped": len(chosen), "blocked": len(chosen)}
            done = {name: value + part.get(name, type(value)()) for name, value in done.items()}
        return done

    def breakers(self, all_tenants: bool) -> AsyncGenerator[Json, None]:
        return self.transport.listing("/v1/breakers", {"all_tenants": "true"} if all_tenants else None, dict)

    async def reset_breakers(self, targets: Sequence[str] | None, all_tenants: bool) -> Json:
        """Reset breakers. Idempotent."""
        body: Json = (
            {"all_tenants": all_tenants} if targets is None else {"targets": list(targets), "all_tenants": all_tenants}
        )
        return await self.transport.json("POST", "/v1/breakers/reset", body=body, safe=True)

    async def health(self) -> Json:
        return await self.transport.json("GET", "/healthz")

    async def create_key(self, tenant: str, name: str | None) -> Json:
        return await self.transport.json("POST", "/v1/keys", body={"tenant": tenant, "name": name})

    def keys(self, tenant: str | None) -> AsyncGenerator[Json, None]:
        return self.transport.listing("/v1/keys", {"tenant": tenant} if tenant else None, dict)
