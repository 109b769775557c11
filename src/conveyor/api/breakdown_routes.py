"""Why tasks of a run failed, and how its hosts are doing: without reading its tasks."""

from typing import Annotated

from litestar import Response, get
from litestar.params import FromPath, QueryParameter

from conveyor.api.dependencies import SystemPart, TenantPart, answer, find_job
from conveyor.api.response_specs import answers
from conveyor.api.schemas.breakdown_shapes import ErrorGroups, RunHosts
from conveyor.engines.records import Records
from conveyor.model import Job, Run
from conveyor.read.breakdown_views import errors_json, run_hosts_json
from conveyor.read.runs import LATEST, chosen_run

OneRun = Annotated[str, QueryParameter(name="run", description="The id or number of a run, or `latest`, the default.")]


@get(
    "/jobs/{job_id:str}/errors",
    summary="List errors by host",
    responses=answers(ErrorGroups, 400, 404),
)
async def list_errors(
    job_id: FromPath[str], system: SystemPart, tenant: TenantPart, run: OneRun = LATEST
) -> Response[bytes]:
    """The failed and the retried attempts of one run by error code and host, with up to three messages each; at most
    about 100 groups, those with the most failed tasks first. The failed tasks of each code are exact."""
    job = await find_job(system.records, tenant, job_id)
    return answer(await errors_json(system, job, await _run(system.records, job, run)))


@get(
    "/jobs/{job_id:str}/hosts",
    summary="List the hosts of a run",
    responses=answers(RunHosts, 400, 404),
)
async def list_run_hosts(
    job_id: FromPath[str], system: SystemPart, tenant: TenantPart, run: OneRun = LATEST
) -> Response[bytes]:
    """The hosts of one run with throughput, latency, errors, breaker and pace; at most 100, those with the most
    attempts first, and all others together."""
    job = await find_job(system.records, tenant, job_id)
    return answer(await run_hosts_json(system, job, await _run(system.records, job, run)))


async def _run(records: Records, job: Job, which: str) -> Run:
    return job.run if which == LATEST else await chosen_run(records, job, which)
