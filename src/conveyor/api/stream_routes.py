"""Streams: what happens to a job, as it happens."""

from typing import Any

from litestar import Response, get
from litestar.params import FromPath

from conveyor.api import schemas as shapes
from conveyor.api.dependencies import ApiRequest, StreamsPart, SystemPart, TenantPart, find_job, stream
from conveyor.read.job_stream import JobStream
from conveyor.read.jobs_stream import JobsStream

MEDIA_TYPE = "text/event-stream"
_LONGEST_ID = 200
# Proxies that gather an answer before they pass it on are asked not to.
_UNGATHERED = {"X-Accel-Buffering": "no"}


@get(
    "/jobs/{job_id:str}/stream",
    summary="Follow a job",
    media_type=MEDIA_TYPE,
    responses=shapes.problems(404, 429),
)
async def follow_job(
    request: ApiRequest, job_id: FromPath[str], system: SystemPart, tenant: TenantPart, streams: StreamsPart
) -> Response[Any]:
    """Server-sent events: those of `/events`, each under its id, and `progress` with the counts at most once a second
    while they change. It ends with the run. Who comes again with `Last-Event-ID` misses nothing; who has seen the end
    gets 204."""
    job = await find_job(system.records, tenant, job_id)
    following = JobStream(system, streams, job)
    if not await following.resume(request.headers.get("last-event-id", "")[:_LONGEST_ID] or None):
        return Response(None, status_code=204)
    return await stream(following.frames(), MEDIA_TYPE, _UNGATHERED)


@get("/stream", summary="Follow all jobs", media_type=MEDIA_TYPE, responses=shapes.problems(429))
async def follow_jobs(system: SystemPart, tenant: TenantPart, streams: StreamsPart) -> Response[Any]:
    """Server-sent events for the 50 newest jobs: `job` with a job as the list has it, first all of them and then each
    that changed, looked at every 1.5 seconds; `gone` with the id of one that was deleted or expired."""
    return await stream(JobsStream(system, streams, tenant).frames(), MEDIA_TYPE, _UNGATHERED)
