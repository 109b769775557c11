"""DocumentRecords, over every engine behind it: versioned documents of many kinds."""

import asyncio

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conveyor.engines.records import Document, IdempotencyClaim, Records
from conveyor.model import (
    JobId,
    TenantId,
)
from tests.conformance.record_setup import (
    CALLERS,
    answered,
)
from tests.support.clocks import ManualClock
from tests.support.make_jobs import ACME, DAY, OTHER, make_job, make_notice

replace = msgspec.structs.replace


KIND = "schedule"


def make_row(name: str = "one", **fields: object) -> Document:
    given = {"kind": KIND, "tenant": ACME, "id": name, "body": b"body of " + name.encode()}
    return Document(**given | fields)  # type: ignore[arg-type]


def claim_of(clock: ManualClock, key: str = "k1") -> IdempotencyClaim:
    now = clock.now()
    return IdempotencyClaim(ACME, "POST /v1/schedules", key, "print", "one", now + 30, now + 60)


async def ids(records: Records, kind: str = KIND, tenant: TenantId = ACME, job_id: JobId | None = None) -> list[str]:
    page = await records.documents.documents(kind, tenant, None, 1000, job_id)
    assert page.next_cursor is None
    return [row.id for row in page.items]


async def walk(records: Records, limit: int, job_id: JobId | None = None) -> list[Document]:
    got: list[Document] = []
    cursor: str | None = None
    while True:
        page = await records.documents.documents(KIND, ACME, cursor, limit, job_id)
        got += page.items
        cursor = page.next_cursor
        if cursor is None:
            assert len(page.items) <= limit
            return got
        assert len(page.items) == limit


class TestCreate:
    async def test_a_row_is_read_back_as_it_was_written(self, records: Records, clock: ManualClock) -> None:
        now = clock.now()
        plain = make_row("plain", body=b"")
        full = make_row(
            "full/é:1#",
            body=b"\0\xff{}",
            version=3,
            due_at=now + 5.25,
            expires_at=now + DAY,
            job_id=JobId("job_1"),
        )
        assert await records.documents.create_documents([plain, full]) is None
        for row in (plain, full):
            assert await records.documents.document(KIND, ACME, row.id) == row
        assert await records.documents.document(KIND, ACME, "nothing") is None
        assert await records.documents.document("endpoint", ACME, "plain") is None

    async def test_nothing_is_created(self, records: Records) -> None:
        assert await records.documents.create_documents([]) is None
        assert await ids(records) == []

    async def test_as_many_as_go_in_one_step(self, records: Records, clock: ManualClock) -> None:
        job = make_job(clock)
        rows = [make_row(f"row {number:02d}", body=b"x" * 4000) for number in range(25)]
        claim = claim_of(clock)
        await records.access.claim(claim)
        assert (
            await records.documents.create_documents(rows, make_notice(clock, job, "rows.made"), answered(claim))
            is None
        )
        assert await walk(records, 1000) == rows

    async def test_one_that_is_there_is_left_as_it_is(self, records: Records, clock: ManualClock) -> None:
        first = make_row()
        await records.documents.create_documents([first])
        changed = await records.documents.replace_document(replace(first, body=b"changed"))
        again = [make_row("zero"), replace(first, body=b"again"), make_row("two")]
        for _ in range(2):
            assert await records.documents.create_documents(again) is None
            assert await records.documents.document(KIND, ACME, "one") == changed
            assert await ids(records) == ["one", "two", "zero"]

    async def test_one_of_many_at_once_makes_it(self, records: Records) -> None:
        rows = [make_row(body=b"%d" % number) for number in range(CALLERS)]
        await asyncio.gather(*(records.documents.create_documents([row]) for row in rows))
        assert await records.documents.document(KIND, ACME, "one") in rows
        assert await ids(records) == ["one"]

    async def test_one_that_expired_is_made_anew(self, records: Records, clock: ManualClock) -> None:
        old = make_row(expires_at=clock.now() + 10, due_at=clock.now() + 5, job_id=JobId("job_1"))
        await records.documents.create_documents([old])
        clock.advance(10)
        new = make_row(body=b"new")
        await records.documents.create_documents([new])
        assert await records.documents.document(KIND, ACME, "one") == new
        assert await records.documents.due_documents(KIND, clock.now(), 10) == []
        assert await ids(records, job_id=JobId("job_1")) == []

    async def test_the_answer_and_the_notice_are_written_with_it(self, records: Records, clock: ManualClock) -> None:
        job, claim = make_job(clock), claim_of(clock)
        await records.access.claim(claim)
        notice = make_notice(clock, job, "rows.made", n=1)
        assert await records.documents.create_documents([make_row()], notice, answered(claim)) is None
        assert (await records.access.claim(claim_of(clock))).row == answered(claim)
        assert [event.event for event in (await records.outbox.events(ACME, job.job_id, None, 10)).items] == [
            "rows.made"
        ]

    async def test_a_lost_claim_writes_nothing(self, records: Records, clock: ManualClock) -> None:
        job, claim = make_job(clock), claim_of(clock)
        await records.access.claim(claim)
        await records.documents.create_documents([make_row()], None, answered(claim))
        late = [make_row("late"), make_row("later")]
        notice = make_notice(clock, job, "rows.never")
        assert await records.documents.create_documents(late, notice, answered(claim, b"late")) == answered(claim)
        assert await ids(records) == ["one"]
        assert (await records.outbox.events(ACME, job.job_id, None, 10)).items == []
        assert await records.outbox.undispatched(10) == []

    async def test_one_of_many_with_one_claim_writes(self, records: Records, clock: ManualClock) -> None:
        job, claim = make_job(clock), claim_of(clock)
        await records.access.claim(claim)
        standing = await asyncio.gather(
            *(
                records.documents.create_documents(
                    [make_row(f"row {number}")],
                    make_notice(clock, job, "rows.made", number=number),
                    answered(claim, b"%d" % number),
                )
                for number in range(CALLERS)
            )
        )
        assert standing.count(None) == 1
        winner = standing.index(None)
        assert {row.body for row in standing if row is not None} == {b"%d" % winner}
        assert await ids(records) == [f"row {winner}"]
        assert [notice.data for notice in await records.outbox.undispatched(100)] == [{"number": winner}]


class TestReplace:
    async def test_each_write_raises_the_version(self, records: Records, clock: ManualClock) -> None:
        row: Document | None = make_row(due_at=clock.now())
        assert row is not None
        await records.documents.create_documents([row])
        for number in range(2, 5):
            row = await records.documents.replace_document(
                replace(row, body=b"%d" % number, due_at=clock.now() + number, job_id=JobId("job_1"))
            )
            assert row is not None
            assert (row.version, row.body) == (number, b"%d" % number)
            assert await records.documents.document(KIND, ACME, "one") == row
        cleared = await records.documents.replace_document(replace(row, due_at=None, expires_at=None, job_id=None))
        assert cleared == await records.documents.document(KIND, ACME, "one")
        assert await records.documents.due_documents(KIND, clock.now() + DAY, 10) == []
        assert await ids(records, job_id=JobId("job_1")) == []

    async def test_a_stale_version_writes_nothing(self, records: Records, clock: ManualClock) -> None:
        first = make_row()
        await records.documents.create_documents([first])
        second = await records.documents.replace_document(replace(first, body=b"second"))
        notice = make_notice(clock, make_job(clock), "row.never")
        for stale in (first, replace(first, version=3), replace(first, version=0)):
            assert await records.documents.replace_document(replace(stale, body=b"stale"), notice) is None
        assert await records.documents.document(KIND, ACME, "one") == second
        assert await records.outbox.undispatched(10) == []

    async def test_one_that_is_not_there_is_not_made(self, records: Records) -> None:
        assert await records.documents.replace_document(make_row()) is None
        assert await ids(records) == []

    async def test_one_of_many_replaces_and_its_notice_is_written(self, records: Records, clock: ManualClock) -> None:
        job, first = make_job(clock), make_row()
        await records.documents.create_documents([first])
        replaced = await asyncio.gather(
            *(
                records.documents.replace_document(
                    replace(first, body=b"%d" % caller), make_notice(clock, job, "row.changed", caller=caller)
                )
                for caller in range(CALLERS)
            )
        )
        (winner,) = [caller for caller, row in enumerate(replaced) if row is not None]
        assert await records.documents.document(KIND, ACME, "one") == replace(first, body=b"%d" % winner, version=2)
        assert [notice.data for notice in await records.outbox.undispatched(100)] == [{"caller": winner}]

    async def test_an_expired_one_is_not_replaced(self, records: Records, clock: ManualClock) -> None:
        row = make_row(expires_at=clock.now() + 10)
        await records.documents.create_documents([row])
        clock.advance(10)
        assert await records.documents.replace_document(replace(row, expires_at=clock.now() + 10)) is None
        assert await records.documents.document(KIND, ACME, "one") is None


class TestRemove:
    async def test_only_the_version_that_stands(self, records: Records) -> None:
        first = make_row()
        await records.documents.create_documents([first])
        second = await records.documents.replace_document(first)
        assert second is not None
        assert not await records.documents.remove_document(first)
        assert await records.documents.document(KIND, ACME, "one") == second
        removed = await asyncio.gather(*(records.documents.remove_document(second) for _ in range(CALLERS)))
        assert sum(removed) == 1
        assert await records.documents.document(KIND, ACME, "one") is None
        assert not await records.documents.remove_document(second)
        await records.documents.create_documents([first])
        assert await ids(records) == ["one"]

    async def test_replacing_and_removing_at_once_has_one_winner(self, records: Records) -> None:
        rows = [make_row(f"row {number}") for number in range(CALLERS)]
        await records.documents.create_documents(rows)
        outcomes = await asyncio.gather(
            *(
                step(row)
                for row in rows
                for step in (records.documents.replace_document, records.documents.remove_document)
            )
        )
        for number in range(CALLERS):
            replaced, removed = outcomes[2 * number : 2 * number + 2]
            assert (replaced is not None) != removed
            assert await records.documents.document(KIND, ACME, f"row {number}") == replaced

    async def test_an_expired_one_can_be_removed(self, records: Records, clock: ManualClock) -> None:
        row = make_row(expires_at=clock.now() + 10, due_at=clock.now())
        await records.documents.create_documents([row])
        clock.advance(10)
        assert await records.documents.remove_document(row)
        assert await records.documents.due_documents(KIND, clock.now(), 10) == []


class TestListing:
    async def test_pages_are_in_order_of_id(self, records: Records) -> None:
        names = [f"id_{number:03d}" for number in range(53)] + ["A", "Z", "a", "é", "~", "00"]
        for start in range(0, len(names), 20):
            await records.documents.create_documents([make_row(name) for name in names[start : start + 20]])
        await records.documents.create_documents(
            [make_row("other kind", kind="endpoint"), make_row("other tenant", tenant=OTHER)]
        )
        for limit in (1, 7, len(names), len(names) + 1):
            assert [row.id for row in await walk(records, limit)] == sorted(names)

    async def test_those_of_one_job(self, records: Records) -> None:
        one, two = JobId("job_1"), JobId("job_2")
        rows = [make_row(f"id_{number}", job_id=(one, two, None)[number % 3]) for number in range(20)]
        await records.documents.create_documents(rows)
        await records.documents.create_documents([make_row("id_x", kind="endpoint", job_id=one)])
        for limit in (1, 3, 100):
            expected = sorted((row for row in rows if row.job_id == one), key=lambda row: row.id)
            assert await walk(records, limit, one) == expected
        assert await ids(records, job_id=JobId("job_")) == []
        assert await ids(records, tenant=OTHER, job_id=one) == []

    async def test_what_goes_meanwhile_does_not_shift_the_pages(self, records: Records) -> None:
        rows = [make_row(f"id_{number}") for number in range(9)]
        await records.documents.create_documents(rows)
        first = await records.documents.documents(KIND, ACME, None, 3)
        for row in first.items:
            await records.documents.remove_document(row)
        await records.documents.create_documents([make_row("id_00")])
        second = await records.documents.documents(KIND, ACME, first.next_cursor, 3)
        assert second.items == rows[3:6]

    async def test_expired_ones_are_in_no_page_and_pages_are_full(self, records: Records, clock: ManualClock) -> None:
        soon, later = clock.now() + 10, clock.now() + 20
        job = JobId("job_1")
        rows = [make_row(f"id_{number:02d}", expires_at=(soon, later)[number % 2], job_id=job) for number in range(20)]
        await records.documents.create_documents(rows)
        clock.advance(9)
        assert await ids(records) == [row.id for row in rows]
        clock.advance(1)
        assert await records.documents.document(KIND, ACME, "id_00") is None
        assert await records.documents.document(KIND, ACME, "id_01") is not None
        for of in (None, job):
            assert await walk(records, 4, of) == rows[1::2]

    async def test_nothing_of_a_tenant_is_seen_by_another(self, records: Records) -> None:
        mine, theirs = make_row(), make_row(tenant=OTHER, body=b"theirs")
        await records.documents.create_documents([mine, theirs])
        assert await records.documents.document(KIND, ACME, "one") == mine
        assert await records.documents.document(KIND, OTHER, "one") == theirs
        assert await records.documents.remove_document(mine)
        assert await records.documents.document(KIND, OTHER, "one") == theirs
        assert await records.documents.replace_document(mine) is None
        assert await ids(records) == []
        assert await ids(records, tenant=OTHER) == ["one"]

    async def test_names_that_begin_others_are_others(self, records: Records) -> None:
        await records.documents.create_documents([make_row(tenant=TenantId("acme2")), make_row(kind="schedules")])
        assert await ids(records) == []
        assert await records.documents.due_documents(KIND, 1e12, 10) == []


class TestDue:
    async def test_those_of_all_tenants_soonest_first(self, records: Records, clock: ManualClock) -> None:
        now = clock.now()
        ages = [5, -1, 3, 0, 8, 0.5, 100, -0.25]
        rows = [
            make_row(f"id_{number}", tenant=(ACME, OTHER)[number % 2], due_at=now - age)
            for number, age in enumerate(ages)
        ]
        await records.documents.create_documents([*rows, make_row("never"), make_row("x", kind="endpoint", due_at=now)])
        due = sorted((row for row in rows if row.due_at is not None and row.due_at <= now), key=lambda row: row.due_at)
        assert await records.documents.due_documents(KIND, now, 100) == due
        assert await records.documents.due_documents(KIND, now, 3) == due[:3]
        assert [row.id for row in await records.documents.due_documents(KIND, now + 0.5, 100)][-1] == "id_7"
        assert await records.documents.due_documents("delivery", now, 100) == []

    async def test_those_after_a_time(self, records: Records, clock: ManualClock) -> None:
        now = clock.now()
        rows = [make_row(f"id_{number}", due_at=now + number * 100) for number in range(8)]
        await records.documents.create_documents(rows)
        assert await records.documents.due_documents(KIND, 1e11, 100, now + 250) == rows[3:]
        assert await records.documents.due_documents(KIND, 1e11, 2, now + 300) == rows[3:5]
        assert await records.documents.due_documents(KIND, now + 400, 100, now + 250) == rows[3:5]
        assert await records.documents.due_documents(KIND, 1e11, 100, now + 701) == []

    async def test_one_that_was_moved_is_due_later(self, records: Records, clock: ManualClock) -> None:
        now = clock.now()
        rows = [make_row(f"id_{number}", due_at=now + number) for number in range(3)]
        await records.documents.create_documents(rows)
        assert await records.documents.replace_document(replace(rows[0], due_at=now + 60))
        assert await records.documents.replace_document(replace(rows[1], due_at=None))
        assert [row.id for row in await records.documents.due_documents(KIND, now + 59, 10)] == ["id_2"]
        assert [row.id for row in await records.documents.due_documents(KIND, now + 60, 10)] == ["id_2", "id_0"]

    async def test_many_that_are_due_at_once_come_in_bounded_steps(self, records: Records, clock: ManualClock) -> None:
        now = clock.now()
        for start in range(0, 60, 20):
            await records.documents.create_documents([make_row(f"id_{start + each}", due_at=now) for each in range(20)])
        seen: set[str] = set()
        while due := await records.documents.due_documents(KIND, now, 7):
            assert len(due) <= 7
            for row in due:
                assert row.id not in seen
                assert await records.documents.replace_document(replace(row, due_at=None))
                seen.add(row.id)
        assert len(seen) == 60

    async def test_an_expired_one_is_still_due(self, records: Records, clock: ManualClock) -> None:
        row = make_row(due_at=clock.now() + 20, expires_at=clock.now() + 10)
        await records.documents.create_documents([row])
        clock.advance(30)
        assert await records.documents.document(KIND, ACME, "one") is None
        assert await records.documents.due_documents(KIND, clock.now(), 10) == [row]
        await records.access.purge_expired(10)
        assert await records.documents.due_documents(KIND, clock.now(), 10) == [row], "its owner removes it"
        assert await records.documents.remove_document(row)
        assert await records.documents.due_documents(KIND, clock.now(), 10) == []

    async def test_one_claims_a_due_row(self, records: Records, clock: ManualClock) -> None:
        """What every owner does: read what is due, and push the time on; of two that read it, one goes on."""
        now = clock.now()
        await records.documents.create_documents([make_row(f"id_{number}", due_at=now) for number in range(10)])

        async def take() -> list[str]:
            taken = [
                await records.documents.replace_document(replace(row, due_at=now + 60))
                for row in await records.documents.due_documents(KIND, now, 4)
            ]
            return [row.id for row in taken if row is not None]

        taken = await asyncio.gather(*(take() for _ in range(5)))
        flat = [name for each in taken for name in each]
        assert len(flat) == len(set(flat)) >= 4
        assert len(await records.documents.due_documents(KIND, now, 100)) == 10 - len(flat)


class TestWithJobs:
    async def test_rows_are_written_with_the_job(self, records: Records, clock: ManualClock) -> None:
        job = make_job(clock)
        rows = [make_row(f"id_{number}", job_id=job.job_id, due_at=clock.now()) for number in range(3)]
        assert await records.jobs.create_job(job, make_notice(clock, job), None, rows) is None
        assert await walk(records, 10, job.job_id) == rows

    async def test_a_lost_claim_writes_neither(self, records: Records, clock: ManualClock) -> None:
        first, second, claim = make_job(clock), make_job(clock), claim_of(clock)
        await records.access.claim(claim)
        await records.jobs.create_job(first, make_notice(clock, first), answered(claim), [make_row("first")])
        standing = await records.jobs.create_job(
            second, make_notice(clock, second), answered(claim, b"late"), [make_row("second")]
        )
        assert standing == answered(claim)
        assert await ids(records) == ["first"]

    async def test_they_are_forgotten_with_the_job(self, records: Records, clock: ManualClock) -> None:
        job, other = make_job(clock), make_job(clock)
        for each in (job, other):
            await records.jobs.create_job(each, make_notice(clock, each), None)
        for start in range(0, 60, 20):
            await records.documents.create_documents(
                [make_row(f"id_{start + each}", job_id=job.job_id) for each in range(20)]
            )
        await records.documents.create_documents(
            [
                make_row("due", kind="delivery", job_id=job.job_id, due_at=clock.now()),
                make_row("expired", kind="export", job_id=job.job_id, expires_at=clock.now()),
                make_row("other", job_id=other.job_id),
                make_row("free"),
            ]
        )
        await records.jobs.purge_job(job.job_id)
        assert len(await ids(records)) == 62, "a job that is not hidden stays, and its rows"
        await records.jobs.mark_deleted(ACME, job.job_id)
        await records.jobs.purge_job(job.job_id)
        assert await ids(records) == ["free", "other"]
        assert await records.documents.due_documents("delivery", clock.now(), 10) == []

    async def test_one_that_left_its_job_stays(self, records: Records, clock: ManualClock) -> None:
        job = make_job(clock)
        row = make_row(job_id=job.job_id)
        await records.jobs.create_job(job, make_notice(clock, job), None, [row])
        assert await records.documents.replace_document(replace(row, job_id=None))
        await records.jobs.mark_deleted(ACME, job.job_id)
        await records.jobs.purge_job(job.job_id)
        assert await ids(records) == ["one"]


class TestSweep:
    async def test_expired_rows_go(self, records: Records, clock: ManualClock) -> None:
        now = clock.now()
        await records.documents.create_documents(
            [make_row("gone", expires_at=now + 10), make_row("later", expires_at=now + 20), make_row("free")]
        )
        clock.advance(10)
        await purge(records)
        assert await ids(records) == ["free", "later"]
        await records.documents.create_documents([make_row("gone", body=b"again")])
        again = await records.documents.document(KIND, ACME, "gone")
        assert again is not None
        assert again.body == b"again"


async def purge(records: Records) -> None:
    """All that there is, in steps of two of each kind."""
    while gone := await records.access.purge_expired(2):
        assert gone <= 4


@pytest.mark.parametrize("limit", [1, 3])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["create", "replace", "stale", "remove", "pass"]),
            st.sampled_from("abc"),
            st.sampled_from([None, 2.0, 5.0]),
            st.sampled_from([None, 3.0]),
        ),
        max_size=20,
    )
)
async def test_whatever_is_done_the_rows_are_those_of_the_model(
    records: Records,
    clock: ManualClock,
    limit: int,
    steps: list[tuple[str, str, float | None, float | None]],
) -> None:
    kind = clock.new_id("kind")
    model: dict[str, Document] = {}

    def live(name: str) -> Document | None:
        row = model.get(name)
        return row if row is not None and (row.expires_at is None or row.expires_at > clock.now()) else None

    for number, (step, name, due, expires) in enumerate(steps):
        now = clock.now()
        row = Document(
            kind,
            ACME,
            name,
            b"%d" % number,
            due_at=None if due is None else now + due,
            expires_at=None if expires is None else now + expires,
        )
        known = model.get(name)
        if step == "pass":
            clock.advance(due or 1.0)
        elif step == "create":
            await records.documents.create_documents([row])
            if live(name) is None:
                model[name] = row
        elif step == "remove":
            assert await records.documents.remove_document(known or row) == (known is not None)
            model.pop(name, None)
        elif known is not None:
            version = known.version - (step == "stale")
            written = await records.documents.replace_document(replace(row, version=version))
            if live(name) is not None and step == "replace":
                assert written == replace(row, version=version + 1)
                model[name] = written
            else:
                assert written is None
        got, cursor = [], None
        while True:
            page = await records.documents.documents(kind, ACME, cursor, limit)
            got += page.items
            cursor = page.next_cursor
            if cursor is None:
                break
        assert got == [model[name] for name in sorted(model) if live(name) is not None]
        due_now = [row for row in model.values() if row.due_at is not None and row.due_at <= clock.now()]
        found = await records.documents.due_documents(kind, clock.now(), 10)
        assert sorted(found, key=lambda row: row.id) == sorted(due_now, key=lambda row: row.id)
        assert [row.due_at for row in found] == sorted(row.due_at for row in found if row.due_at is not None)
