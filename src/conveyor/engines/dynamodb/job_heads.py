"""The head of a job: what nearly every change of it reads first."""

from typing import NamedTuple

from aiodynamo.expressions import HashKey, KeyCondition, RangeKey

from conveyor.engines.dynamodb.items import JobRow, job_key, job_partition, job_row, notices_key
from conveyor.engines.dynamodb.table import ReadItem, Table
from conveyor.model import JobId, TenantId


class JobHead(NamedTuple):
    """A job and the number of its outbox events, read together."""

    job: ReadItem
    notices: ReadItem
    row: JobRow | None


async def read_head(table: Table, job_id: JobId, tenant: TenantId | None = None) -> JobHead:
    """A job and the number of its outbox events: the first two items of its partition."""
    pk = HashKey("pk", job_partition(job_id))
    where: KeyCondition = pk if tenant is None else pk & RangeKey("sk").begins_with(f"{tenant}#job")
    items = {item["sk"]: item for item in await table.query(where, limit=2)}
    job = next((item for sk, item in items.items() if sk.endswith("#job")), None)
    owner = TenantId("" if job is None else job["tenant"]) if tenant is None else tenant
    counter = notices_key(owner, job_id)
    return JobHead(
        ReadItem(job_key(owner, job_id), job),
        ReadItem(counter, items.get(counter.sk)),
        None if job is None else job_row(job),
    )
