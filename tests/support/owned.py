"""One of everything that a tenant can have, and the ids of nothing: for tests of the routes that take ids."""

from dataclasses import asdict, dataclass
from hashlib import sha256

import msgspec

from conveyor.model import BodyRef, JobId, ResultDetail, TaskEnd, TenantId, task_id
from conveyor.notify.dispatcher import OutboxDispatcher
from conveyor.states import TaskStatus
from tests.support.api import Api
from tests.support.export_jobs import exporter

URL = "http://example.com/"


@dataclass(frozen=True)
class Owned:
    """The ids of a job with a task that has a body, an extracted result and an export; of an upload, an endpoint and a
    schedule."""

    job_id: str
    task_id: str
    upload_id: str
    export_id: str = "export_" + "0" * 26
    number: str = "1"
    webhook_id: str = "webhook_" + "0" * 26
    delivery_id: str = "webhook_" + "0" * 26 + ":evt_" + "0" * 26
    schedule_id: str = "schedule_" + "0" * 26

    def path(self, path: str) -> str:
        """The path and query with these ids in place of their names."""
        for name, value in asdict(self).items():
            path = path.replace(f"{{{name}}}", value)
        return path


UNKNOWN = Owned("job_" + "0" * 26, "0" * 64, "upload_" + "0" * 26)


async def make_owned(api: Api, tenant: str) -> Owned:
    """Make one of everything for the tenant of the key."""
    answer = await api.submit({"tasks": [URL, URL], "name": f"of {tenant}"})
    job = await api.system.records.jobs.job(TenantId(tenant), JobId(answer.json["id"]))
    assert job is not None
    body = f"secret of {tenant}".encode()
    key = f"results/{job.job_id}"
    await api.system.blobs.put(key, body)
    extracted = b'{"of":"%s"}' % tenant.encode()
    detail = ResultDetail(
        body=BodyRef(key, len(body), sha256(body).hexdigest()),
        extracted=BodyRef("", len(extracted), sha256(extracted).hexdigest(), inline=extracted),
    )
    end = TaskEnd(0, TaskStatus.SUCCEEDED, 1, 200, None, msgspec.json.encode(detail).decode(), 1.0)
    await api.system.tasks.finish(job.key, [end])
    upload_id = await api.upload(f"http://{tenant}.example/\n".encode())
    export_id = (await api.post(f"/v1/jobs/{job.job_id}/exports", {"partial": True})).json["id"]
    while await exporter(api.system).tick() == 0.0:
        pass
    webhook_id = (await api.post("/v1/webhooks", {"url": f"https://{tenant}.example/"})).json["id"]
    await OutboxDispatcher(api.system.settings, api.system.records, api.system.tasks, api.system.clock).run_once()
    sent = (await api.get(f"/v1/webhooks/{webhook_id}/deliveries")).json["items"][0]["id"]
    template = {"cron": "0 0 * * *", "job": {"tasks": [URL]}, "name": f"of {tenant}"}
    schedule_id = (await api.post("/v1/schedules", template)).json["id"]
    return Owned(
        job.job_id,
        task_id(job.run.run_id, 0),
        upload_id,
        export_id,
        webhook_id=webhook_id,
        delivery_id=sent,
        schedule_id=schedule_id,
    )
