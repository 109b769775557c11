"""Records and Tasks on DynamoDB, in two tables: `<prefix>-records` and `<prefix>-tasks`.

`conveyor migrate` creates them. schema.py, items.py, table.py and tasks.py describe the layout and the reasons for it.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from typing import Self

from aiodynamo.expressions import F
from aiodynamo.operations import ConditionCheck

from conveyor.clock import Clock
from conveyor.engines.dynamodb import schema
from conveyor.engines.dynamodb.access import DynamoAccess
from conveyor.engines.dynamodb.address import DynamoAddress, parse_address
from conveyor.engines.dynamodb.documents import DynamoDocuments
from conveyor.engines.dynamodb.ingests import DynamoIngests
from conveyor.engines.dynamodb.jobs import DynamoJobs
from conveyor.engines.dynamodb.outbox import DynamoOutbox
from conveyor.engines.dynamodb.table import Key, ReadItem, Table
from conveyor.engines.dynamodb.tasks import DynamoTasks
from conveyor.engines.dynamodb.wire import DynamoRefused, Patience, Wire, make_session
from conveyor.engines.records import Records
from conveyor.errors import EngineFailed
from conveyor.model import InputJson, JobId, RunId, RunKey, TaskEnd, TaskSeed, TenantId
from conveyor.states import TaskStatus

# AWS refuses requests whose time is off by five minutes.
_MAX_SKEW = 60.0


class DynamoEngine:
    """Both seams over one client."""

    def __init__(self, wire: Wire, address: DynamoAddress, clock: Clock) -> None:
        self._wire = wire
        self._address = address
        self._clock = clock
        self._records_table = Table(wire, address.records, clock)
        self._tasks_table = Table(wire, address.tasks, clock)
        self.records = Records(
            jobs=DynamoJobs(self._records_table, clock),
            ingests=DynamoIngests(self._records_table, clock),
            access=DynamoAccess(self._records_table, clock),
            documents=DynamoDocuments(self._records_table, clock),
            outbox=DynamoOutbox(self._records_table, clock),
        )
        self.tasks = DynamoTasks(self._tasks_table, clock)

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, clock: Clock, patience: Patience | None = None) -> AsyncIterator[Self]:
        """Connect to the tables of a URL. It creates and checks nothing."""
        address = parse_address(url)
        async with make_session() as session:
            yield cls(Wire(session, address, clock, patience or Patience()), address, clock)

    async def migrate(self) -> None:
        """Create the tables, their indexes and TTL, and wait until they are active."""
        await schema.migrate(self._wire, self._address)

    async def checks(self) -> list[tuple[str, str | None]]:
        """The name of each check, and what to fix, or None."""
        try:
            skew = await self._skew()
            problems = await schema.problems(self._wire, self._address)
        except EngineFailed as failure:
            return [("DynamoDB: reachable", failure.message)]
        checks: list[tuple[str, str | None]] = [("DynamoDB: reachable", None), ("DynamoDB: clock", skew)]
        for table, probe in ((self._records_table, self._change), (self._tasks_table, self._run)):
            checks.append((f"DynamoDB: table {table.name}", problems[table.name]))
            if problems[table.name] is None:
                checks.append((f"DynamoDB: writes to {table.name}", await _wrong(probe)))
        return checks

    async def _change(self) -> bool:
        """Write an item, try a transaction whose condition does not hold, and delete the item."""
        table = self._records_table
        probe = ReadItem(Key(f"Check#{self._clock.new_id('check')}", "check"), None)
        await table.write([table.save(probe, {"ttl": int(self._clock.now()) + 3600})])
        try:
            await table.write([ConditionCheck(table.name, probe.key._asdict(), F("pk").does_not_exist())])
        except DynamoRefused:
            return True
        finally:
            await table.delete([probe.key])
        return False

    async def _run(self) -> bool:
        """Put a task, finish it twice, of which only the first may count, and delete it."""
        run = RunKey(TenantId("check"), JobId(self._clock.new_id("check")), RunId(self._clock.new_id("check")))
        ends = [TaskEnd(0, TaskStatus.SUCCEEDED, 1, None, None, "{}", self._clock.now())]
        try:
            await self.tasks.put(run, [TaskSeed(0, InputJson("null"))])
            moved = [len((await self.tasks.finish(run, ends)).moved) for _ in range(2)]
        finally:
            while await self.tasks.delete(run, 100):
                pass
        return moved == [1, 0]

    async def _skew(self) -> str | None:
        date = await self._wire.server_date()
        if date is None:
            return None
        skew = self._clock.now() - parsedate_to_datetime(date).timestamp()
        if abs(skew) <= _MAX_SKEW:
            return None
        return f"this machine's clock is {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}: set it by NTP"


async def _wrong(probe: Callable[[], Awaitable[bool]]) -> str | None:
    try:
        held = await probe()
    except EngineFailed as failure:
        return f"{failure.message} The role must be allowed to read and write items, and to run PartiQL statements."
    return None if held else "a write succeeded although its condition did not hold"
