"""OutboxRecords, over every engine behind it: events of jobs, and those that are not dispatched yet."""

import msgspec
import pytest

from conveyor.engines.records import Records
from conveyor.errors import BadCursor
from conveyor.model import (
    JobId,
    OutboxEvent,
)
from conveyor.states import RunState
from tests.conformance.record_setup import (
    created,
    events,
)
from tests.support.clocks import ManualClock
from tests.support.make_jobs import ACME, OTHER, make_job, make_notice


class TestEvents:
    async def test_an_event_is_written_with_its_job(self, records: Records, clock: ManualClock) -> None:
        job = make_job(clock)
        notice = make_notice(clock, job, total=7, note="ü")
        await records.jobs.create_job(job, notice, None)
        page = await records.outbox.events(ACME, job.job_id, None, 10)
        (event,) = page.items
        assert event.id == notice.notice_id
        assert (event.event, event.run_id, event.index, event.data) == (
            "job.accepted",
            job.run.run_id,
            None,
            {"total": 7, "note": "ü"},
        )
        assert event.at == pytest.approx(clock.now())
        assert page.next_cursor is None

    async def test_they_come_oldest_first_in_pages(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock)
        for number in range(10):
            pair = (RunState.PAUSED, RunState.RUNNING)
            target, source = pair if number % 2 == 0 else pair[::-1]
            notice = make_notice(clock, job, "run.moved", number=number)
            clock.advance(1)
            assert await records.jobs.move_run(job.job_id, job.run.run_id, {source}, target, None, notice)
        got, cursor = [], None
        while True:
            page = await records.outbox.events(ACME, job.job_id, cursor, 3)
            got += page.items
            cursor = page.next_cursor
            if cursor is None:
                break
            assert len(page.items) == 3
        assert [event.data.get("number") for event in got] == [None, *range(10)]
        assert [event.seq for event in got] == sorted({event.seq for event in got})
        assert [event.at for event in got] == sorted(event.at for event in got)

    @pytest.mark.parametrize("cursor", ["", "x", "-1", "1.5", "٣", "9" * 40, "1 OR 1=1"])
    async def test_a_cursor_of_somebody_else_is_refused(
        self, records: Records, clock: ManualClock, cursor: str
    ) -> None:
        job = await created(records, clock)
        with pytest.raises(BadCursor):
            await records.outbox.events(ACME, job.job_id, cursor, 10)

    async def test_an_unknown_job_has_none(self, records: Records) -> None:
        assert (await records.outbox.events(ACME, JobId("job_nothing"), None, 10)).items == []


class TestUndispatched:
    async def test_all_that_was_not_passed_on_oldest_first(self, records: Records, clock: ManualClock) -> None:
        made: list[OutboxEvent] = []
        for number in range(12):
            job = make_job(clock, tenant=(ACME, OTHER)[number % 2])
            notice = make_notice(clock, job, "job.accepted", number=number, text="ü", deep={"a": [1, None]})
            await records.jobs.create_job(job, notice, None)
            made.append(notice)
            clock.advance(1)
        assert await records.outbox.undispatched(100) == made
        assert await records.outbox.undispatched(5) == made[:5]
        await records.outbox.mark_dispatched([made[0], made[2], made[3]])
        assert await records.outbox.undispatched(3) == [made[1], made[4], made[5]]
        await records.outbox.mark_dispatched([*made, *made])
        await records.outbox.mark_dispatched([])
        assert await records.outbox.undispatched(100) == []

    async def test_those_of_a_job_are_in_their_order_whatever_the_clocks_say(
        self, records: Records, clock: ManualClock
    ) -> None:
        jobs = [make_job(clock) for _ in range(2)]
        stored: list[OutboxEvent] = []
        for number in range(6):
            job, late = jobs[number % 2], clock.now() - 10.0 * number
            notice = msgspec.structs.replace(make_notice(clock, job, "run.progress", number=number), at=late)
            await records.documents.create_documents([], notice)
            stored.append(notice)
        found = await records.outbox.undispatched(100)
        for job in jobs:
            own = [[notice for notice in notices if notice.job_id == job.job_id] for notices in (found, stored)]
            assert own[0] == own[1]

    async def test_told_ones_stay_in_the_trail(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock)
        await records.outbox.mark_dispatched(await records.outbox.undispatched(10))
        assert await events(records, job) == ["job.accepted"]
        clock.advance(1)
        await records.jobs.move_run(
            job.job_id, job.run.run_id, {RunState.RUNNING}, RunState.PAUSED, None, make_notice(clock, job, "run.paused")
        )
        assert [notice.event for notice in await records.outbox.undispatched(10)] == ["run.paused"]
        assert await events(records, job) == ["job.accepted", "run.paused"]

    async def test_marking_what_is_not_there(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock)
        (notice,) = await records.outbox.undispatched(10)
        await records.outbox.mark_dispatched([make_notice(clock, job, "never written")])
        assert await records.outbox.undispatched(10) == [notice]
        await records.jobs.mark_deleted(ACME, job.job_id)
        await records.jobs.purge_job(job.job_id)
        await records.outbox.mark_dispatched([notice])
        assert await records.outbox.undispatched(10) == []
        assert (await records.outbox.events(ACME, job.job_id, None, 10)).items == [], (
            "telling of it brings nothing back"
        )
