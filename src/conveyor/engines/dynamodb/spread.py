"""Reading an index that is spread over a few partitions."""

import asyncio
import heapq

from aiodynamo.expressions import Condition, HashKey, KeyCondition

from conveyor.engines.dynamodb.schema import BUCKETS
from conveyor.engines.dynamodb.table import Item, Table


async def spread(
    table: Table,
    pk: str,
    name: str,
    within: Condition | None = None,
    *,
    index: str,
    keep: Condition | None = None,
    limit: int | None = None,
) -> list[Item]:
    """The entries of a name over all partitions of an index, in order of the sort key."""

    async def part(number: int) -> list[Item]:
        where = HashKey(pk, f"{name}#{number}")
        condition: KeyCondition = where if within is None else where & within
        return await table.query(condition, limit=limit, index=index, keep=keep)

    parts = await asyncio.gather(*(part(number) for number in range(BUCKETS)))
    sk = f"{pk[0]}s"
    return list(heapq.merge(*parts, key=lambda item: item[sk]))[:limit]
