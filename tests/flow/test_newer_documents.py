"""Exports and schedules that a newer Conveyor wrote: roles and listings skip them and them alone, and leave them as
they are. Reading one by its id says why it cannot be read."""

import msgspec
import pytest

from conveyor.accept.scheduler import Scheduler
from conveyor.accept.schedules import SCHEDULE, Schedules, ScheduleSpec, schedule_of
from conveyor.egress.outbound import Outbound
from conveyor.egress.target_guard import TargetGuard
from conveyor.engines.records import Document
from conveyor.errors import NewerRow
from conveyor.export import exporter as exporting
from conveyor.export.exports import Exports, ExportState
from conveyor.model import EXPORT, Job
from conveyor.system import System
from tests.support.clocks import ManualClock
from tests.support.export_jobs import asked, exporter, found, stored_job
from tests.support.make_jobs import ACME

# More than the failures of an engine that a role takes for the engine's.
NEWER = 12
DAY = 86_400.0


async def as_newer(system: System, kind: str, names: list[str]) -> list[Document]:
    """Rewrite documents as a newer version would have: each with a field that does not exist yet."""
    documents = system.records.documents
    rows = []
    for name in names:
        row = await documents.document(kind, ACME, name)
        assert row is not None
        body = {**msgspec.json.decode(row.body), "later": True}
        changed = await documents.replace_document(msgspec.structs.replace(row, body=msgspec.json.encode(body)))
        assert changed is not None
        rows.append(changed)
    return rows


async def bodies_of(system: System, kind: str, names: list[str]) -> list[bytes]:
    rows = [await system.records.documents.document(kind, ACME, name) for name in names]
    return [row.body for row in rows if row is not None]


class TestExports:
    async def made(self, system: System, job: Job) -> tuple[list[str], str]:
        """Exports of a newer version, and one of this after them."""
        newer = [await asked(system, job, format="jsonl") for _ in range(NEWER)]
        return newer, await asked(system, job, format="jsonl")

    async def test_the_exporter_makes_all_others(
        self, system: System, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # They are the first that it reads.
        monkeypatch.setattr(exporting, "_CANDIDATES", NEWER)
        newer, own = await self.made(system, await stored_job(system, 3))
        written = await as_newer(system, EXPORT, newer)
        role = exporter(system)
        for _ in range(5):
            await role.tick()
            clock.advance(1.0)
        assert (await found(system, own)).state is ExportState.READY
        assert await bodies_of(system, EXPORT, newer) == [row.body for row in written]

    async def test_the_listing_has_all_others(self, system: System) -> None:
        job = await stored_job(system, 3)
        newer, own = await self.made(system, job)
        await as_newer(system, EXPORT, newer)
        listed, cursor = [], None
        for _ in range(NEWER + 1):
            page = await Exports(system).page(job, cursor, 1)
            listed += [each.row.id for each in page.items]
            cursor = page.next_cursor
        assert (listed, cursor) == ([own], None)
        with pytest.raises(NewerRow, match="written by a newer Conveyor"):
            await found(system, newer[0])


class TestSchedules:
    async def made(self, system: System) -> tuple[list[str], str]:
        job = msgspec.Raw(b'{"tasks": ["http://target.example/"]}')
        spec = ScheduleSpec("0 0 * * *", job)
        names = [(await Schedules(system).create(ACME, spec)).subject for _ in range(NEWER + 1)]
        return names[:-1], names[-1]

    async def test_the_scheduler_fires_all_others(self, system: System, clock: ManualClock) -> None:
        newer, own = await self.made(system)
        written = await as_newer(system, SCHEDULE, newer)
        clock.advance(DAY)
        guard = TargetGuard(allow_private=True, clock=clock)
        role = Scheduler(system, Outbound(guard), "scheduler")
        for _ in range(5):
            await role.tick()
            await role.close()
            clock.advance(1.0)
        row = await system.records.documents.document(SCHEDULE, ACME, own)
        assert row is not None
        assert [fire.error for fire in schedule_of(row).fires] == [None]
        assert await bodies_of(system, SCHEDULE, newer) == [each.body for each in written]

    async def test_the_listing_has_all_others(self, system: System) -> None:
        newer, own = await self.made(system)
        await as_newer(system, SCHEDULE, newer)
        page = await Schedules(system).page(ACME, None, 100)
        assert [row.id for row in page.items] == [own]
