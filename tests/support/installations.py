"""An installation in use: a job of each kind and in each state, with what belongs to it. Nothing in it is damaged."""

import json
from typing import Any, NamedTuple

from conveyor.model import Job, JobId
from conveyor.system import System
from conveyor.verify.findings import Findings
from conveyor.verify.installation import Installation
from tests.support.api import Api, staged
from tests.support.file_site import Behaviour, FileSite
from tests.support.make_jobs import ACME
from tests.support.target_site import Site
from tests.support.working import ended, until

# Of a file that is stored in pieces.
FILE_BYTES = 600_000
HANDLER = {"kind": "python", "handler": "tests.echo"}


class Used(NamedTuple):
    """The ids of what is in it."""

    fetched: str
    objects: str
    listed: str
    opened: str
    downloaded: str
    paused: str
    deleted: str
    export: str
    schedule: str


async def use(api: Api, site: Site) -> Used:
    """Use an installation whose roles are running."""
    urls = [site.url(f"/ok?size={size}") for size in (0, 100, 700, 900, 5000, 2_000_000)]
    fetched = await _submit(api, tasks=[*urls, site.url("/status/404"), site.url("/flaky/1/x")], attempts=1)
    objects = await _submit(api, tasks=urls, result_layout="object")
    lines = b"".join(b'{"n": %d}\n' % number for number in range(500)) + b"{broken\n"
    source = {"upload_id": await staged(api, lines), "format": "jsonl"}
    made = await api.submit({**HANDLER, "source": source}, headers={"prefer": "respond-async"})
    assert made.status == 202, made.body
    listed = made.json["id"]
    opened = await _submit(api, **HANDLER, mode="open")
    for batch in range(2):
        added = await api.post(f"/v1/jobs/{opened}/tasks", {"tasks": [batch, "x" * 3000], "last_batch": batch == 1})
        assert added.status == 202, added.body
    async with FileSite(Behaviour(FILE_BYTES)) as files:
        downloaded = await _submit(api, kind="download", tasks=[files.url()])
        await ended(api, downloaded)
    paused, deleted = [await _submit(api, **HANDLER, tasks=[1, 2, 3], mode="closed") for _ in range(2)]
    await api.post(f"/v1/jobs/{paused}/pause")
    for job_id in (fetched, objects, listed, opened, deleted):
        await ended(api, job_id)
    assert (await api.request("DELETE", f"/v1/jobs/{deleted}")).status == 204
    # One fails again, one succeeds.
    assert (await api.post(f"/v1/jobs/{fetched}/rerun", {"select": {"status": ["failed"]}})).status == 202
    await ended(api, fetched)
    export = (await api.post(f"/v1/jobs/{fetched}/exports", {"format": "zip"})).json["id"]
    await until(lambda: _export(api, export), lambda shown: shown["state"] == "ready")
    job = {**HANDLER, "source": {"upload_id": await staged(api, b"1\n2\n"), "format": "jsonl"}}
    scheduled = await api.post("/v1/schedules", {"cron": "0 0 1 1 *", "job": job})
    assert scheduled.status == 201, scheduled.body
    schedule = scheduled.json["id"]
    return Used(fetched, objects, listed, opened, downloaded, paused, deleted, export, schedule)


async def verified(system: System, job_id: str | None = None, repair: bool = False) -> Findings:
    """What a verification finds; it must get through."""
    findings = Findings()
    installation = Installation(system, findings, repair=repair)
    await installation.verify(None if job_id is None else JobId(job_id))
    if repair and "orphan" in findings.by_kind:
        await installation.remove_orphans(None if job_id is None else JobId(job_id))
    assert findings.failures == []
    return findings


async def stored(system: System, job_id: str) -> Job:
    job = await system.records.jobs.job(ACME, JobId(job_id))
    assert job is not None
    return job


async def _submit(api: Api, **spec: Any) -> str:
    made = await api.submit(spec)
    assert made.status in {201, 202}, made.body
    job_id: str = made.json["id"]
    return job_id


async def _export(api: Api, export_id: str) -> Any:
    return json.loads((await api.get(f"/v1/exports/{export_id}")).body)
