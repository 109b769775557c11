"""Live event streams of one job, and of all jobs."""

from functools import partial
from typing import Any

from litestar import Response, get
from litestar.params import FromPath

from conveyor.api.auth import is_still_allowed
from conveyor.api.dependencies import ApiRequest, StreamsPart, SystemPart, TenantPart, find_job, stream
from conveyor.api.response_specs import problems
from conveyor.read.job_stream import JobStream
from conveyor.read.jobs_stream import JobsStream

MEDIA_TYPE = "text/event-stream"
_MAX_ID_LENGTH = 200
# Asks proxies not to buffer the response.
_UNBUFFERED = {"X-Accel-Buffering": "no"}


@get(
    "/jobs/{job_id:str}/stream",
    summary="Follow a job",
    media_type=MEDIA_TYPE,
    responses=problems(404, 429),
)
async def follow_job(
    request: ApiRequest, job_id: FromPath[str], system: SystemPart, tenant: TenantPart, streams: StreamsPart
) -> Response[Any]:
    """Server-sent events: those of `/events` with their ids, and `progress` with the counts, at most once a second
    while they change. The stream closes when the run finishes, or when its key or session is no longer valid.
    `Last-Event-ID` resumes it without gaps; after the last event the response is 204."""
    job = await find_job(system.records, tenant, job_id)
    following = JobStream(system, streams, job, partial(is_still_allowed, request))
    if not await following.resume(request.headers.get("last-event-id", "")[:_MAX_ID_LENGTH] or None):
        return Response(None, status_code=204)
    return await stream(following.frames(), MEDIA_TYPE, _UNBUFFERED)


@get("/stream", summary="Follow all jobs", media_type=MEDIA_TYPE, responses=problems(429))
async def follow_jobs(
    request: ApiRequest, system: SystemPart, tenant: TenantPart, streams: StreamsPart
) -> Response[Any]:
    """Server-sent events for the 50 newest jobs: `job` with a job as in the list, first all of them, then each that
    changed, every 1.5 seconds; `gone` with the id of a job that was deleted or has expired."""
    following = JobsStream(system, streams, tenant, partial(is_still_allowed, request))
    return await stream(following.frames(), MEDIA_TYPE, _UNBUFFERED)
