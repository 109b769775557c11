"""AccessRecords, over every engine behind it: idempotency claims, uploads and API keys."""

import asyncio

import msgspec
import pytest

from conveyor.engines.records import Document, Records
from conveyor.model import (
    Job,
    Source,
    TenantId,
)
from tests.conformance.record_setup import (
    CALLERS,
    LEASE,
    answered,
    created,
    key,
    make_claim,
    upload,
)
from tests.support.clocks import ManualClock
from tests.support.make_jobs import ACME, DAY, OTHER, make_job, make_notice


class TestClaims:
    async def test_the_first_gets_the_key(self, records: Records, clock: ManualClock) -> None:
        claim = make_claim(clock)
        claimed = await records.access.claim(claim)
        assert claimed.granted
        assert claimed.row == claim

    async def test_a_claim_can_be_read(self, records: Records, clock: ManualClock) -> None:
        job, claim = make_job(clock), make_claim(clock)
        asked = (claim.tenant, claim.route, claim.key)
        assert await records.access.stored_claim(*asked) is None
        await records.access.claim(claim)
        assert await records.access.stored_claim(*asked) == claim
        assert await records.access.stored_claim(OTHER, claim.route, claim.key) is None
        assert await records.access.stored_claim(claim.tenant, "another route", claim.key) is None
        await records.jobs.create_job(job, make_notice(clock, job), answered(claim))
        assert await records.access.stored_claim(*asked) == answered(claim)
        clock.advance(claim.expires_at - clock.now() + 1)
        assert await records.access.stored_claim(*asked) is None

    async def test_one_of_many_at_once_gets_it(self, records: Records, clock: ManualClock) -> None:
        claims = [make_claim(clock) for _ in range(CALLERS)]
        claimed = await asyncio.gather(*map(records.access.claim, claims))
        (winner,) = [claim for claim, got in zip(claims, claimed, strict=True) if got.granted]
        assert [got.row for got in claimed] == [winner] * CALLERS

    async def test_the_answer_is_written_with_the_job(self, records: Records, clock: ManualClock) -> None:
        job, claim = make_job(clock), make_claim(clock)
        await records.access.claim(claim)
        assert await records.jobs.create_job(job, make_notice(clock, job), answered(claim)) is None
        again = await records.access.claim(make_claim(clock))
        assert not again.granted
        assert again.row == answered(claim)

    async def test_an_answered_claim_writes_nothing_more(self, records: Records, clock: ManualClock) -> None:
        first, claim = make_job(clock), make_claim(clock)
        await records.access.claim(claim)
        await records.jobs.create_job(first, make_notice(clock, first), answered(claim))
        second = make_job(clock)
        late = answered(claim, b"another")
        assert await records.jobs.create_job(second, make_notice(clock, second), late) == answered(claim)
        assert await records.jobs.job(ACME, second.job_id) is None
        assert await records.jobs.run(second.job_id, second.run.run_id) is None
        assert (await records.outbox.events(ACME, second.job_id, None, 10)).items == []

    async def test_a_lapsed_claim_is_taken_over_with_its_subject(self, records: Records, clock: ManualClock) -> None:
        claim = make_claim(clock)
        await records.access.claim(claim)
        clock.advance(LEASE - 0.5)
        assert not (await records.access.claim(make_claim(clock))).granted
        clock.advance(1)
        taken = await records.access.claim(make_claim(clock))
        assert taken.granted
        assert taken.row.subject == claim.subject
        assert taken.row.lease_until == pytest.approx(clock.now() + LEASE)
        assert not (await records.access.claim(make_claim(clock))).granted

    async def test_a_claim_from_before_the_clock_was_set_back_is_taken_over(
        self, records: Records, clock: ManualClock
    ) -> None:
        claim = make_claim(clock)
        await records.access.claim(claim)
        clock.step(-7200)
        taken = await records.access.claim(make_claim(clock))
        assert taken.granted
        assert taken.row.subject == claim.subject
        assert not (await records.access.claim(make_claim(clock))).granted

    async def test_another_request_does_not_take_it_over(self, records: Records, clock: ManualClock) -> None:
        claim = make_claim(clock)
        await records.access.claim(claim)
        clock.advance(LEASE + 1)
        other = await records.access.claim(msgspec.structs.replace(make_claim(clock), fingerprint="another"))
        assert not other.granted
        assert other.row == claim

    async def test_who_was_overtaken_and_who_overtook_make_one(self, records: Records, clock: ManualClock) -> None:
        """Both carry the same subject: the first to write wins, whichever that is."""
        claim = make_claim(clock)
        await records.access.claim(claim)
        clock.advance(LEASE + 1)
        taken = (await records.access.claim(make_claim(clock))).row
        late, second = make_job(clock), make_job(clock)
        assert await records.jobs.create_job(late, make_notice(clock, late), answered(claim, b"late")) is None
        standing = await records.jobs.create_job(second, make_notice(clock, second), answered(taken, b"second"))
        assert standing is not None
        assert standing.body == b"late"
        assert await records.jobs.job(ACME, second.job_id) is None

    async def test_a_claim_that_is_given_back_is_free(self, records: Records, clock: ManualClock) -> None:
        claim = make_claim(clock)
        await records.access.claim(claim)
        await records.access.release_claim(claim)
        fresh = msgspec.structs.replace(make_claim(clock), fingerprint="another")
        assert (await records.access.claim(fresh)).granted

    async def test_only_ones_own_claim_is_given_back(self, records: Records, clock: ManualClock) -> None:
        claim = make_claim(clock)
        await records.access.claim(claim)
        clock.advance(LEASE + 1)
        taken = await records.access.claim(make_claim(clock))
        await records.access.release_claim(claim)
        assert not (await records.access.claim(make_claim(clock))).granted
        job = make_job(clock)
        await records.jobs.create_job(job, make_notice(clock, job), answered(taken.row))
        await records.access.release_claim(taken.row)
        assert (await records.access.claim(make_claim(clock))).row.status == 201

    async def test_an_expired_row_is_free(self, records: Records, clock: ManualClock) -> None:
        job, claim = make_job(clock), make_claim(clock, ttl=60)
        await records.access.claim(claim)
        await records.jobs.create_job(job, make_notice(clock, job), answered(claim))
        clock.advance(59)
        assert not (await records.access.claim(make_claim(clock))).granted
        clock.advance(1)
        fresh = msgspec.structs.replace(make_claim(clock), fingerprint="another")
        claimed = await records.access.claim(fresh)
        assert claimed.granted
        assert claimed.row == fresh

    async def test_a_key_is_of_one_tenant_and_one_route(self, records: Records, clock: ManualClock) -> None:
        rows = [
            make_claim(clock),
            make_claim(clock, tenant=OTHER),
            make_claim(clock, route="POST /v1/uploads"),
            make_claim(clock, key="k2"),
        ]
        for claim in rows:
            assert (await records.access.claim(claim)).granted

    async def test_expired_rows_are_swept(self, records: Records, clock: ManualClock) -> None:
        await records.access.claim(make_claim(clock, ttl=5))
        await records.access.claim(make_claim(clock, key="k2", ttl=50))
        clock.advance(6)
        await records.access.purge_expired(10)
        assert await records.access.purge_expired(10) == 0
        assert (await records.access.claim(make_claim(clock))).granted
        assert not (await records.access.claim(make_claim(clock, key="k2"))).granted


class TestUploads:
    async def test_it_is_read_back_until_it_expires(self, records: Records, clock: ManualClock) -> None:
        one = upload(clock)
        assert await records.access.create_upload(one, None) is None
        assert await records.access.upload(one.upload_id) == one
        assert await records.access.upload("upload_nothing") is None
        clock.advance(60)
        assert await records.access.upload(one.upload_id) is None
        assert not await records.access.mark_stored(one.upload_id)

    async def test_it_is_stored_once(self, records: Records, clock: ManualClock) -> None:
        await records.access.create_upload(upload(clock), None)
        stored_by = await asyncio.gather(*(records.access.mark_stored("upload_1") for _ in range(CALLERS)))
        assert sum(stored_by) == 1
        found = await records.access.upload("upload_1")
        assert found is not None
        assert found.stored_at == pytest.approx(clock.now())

    async def test_its_answer_is_written_with_it(self, records: Records, clock: ManualClock) -> None:
        claim = make_claim(clock)
        await records.access.claim(claim)
        assert await records.access.create_upload(upload(clock), answered(claim)) is None
        late = upload(clock, "upload_2")
        assert await records.access.create_upload(late, answered(claim, b"late")) == answered(claim)
        assert await records.access.upload("upload_2") is None

    async def test_it_is_kept_longer_never_shorter(self, records: Records, clock: ManualClock) -> None:
        await records.access.create_upload(upload(clock), None)
        await records.access.keep_upload("upload_1", clock.now() + 10)
        clock.advance(59)
        assert await records.access.upload("upload_1") is not None
        await records.access.keep_upload("upload_1", clock.now() + 100)
        clock.advance(99)
        assert await records.access.upload("upload_1") is not None

    async def test_an_expired_one_is_found_until_it_is_forgotten(self, records: Records, clock: ManualClock) -> None:
        """Its object is removed in between: were the row first to go, nobody would know of it after a crash."""
        for number in range(5):
            await records.access.create_upload(
                upload(clock, f"upload_{number}", ttl=60 + number if number < 3 else 600), None
            )
        assert await records.access.expired_uploads(clock.now(), 10) == []
        assert not await records.access.purge_upload("upload_0")
        clock.advance(65)
        assert await records.access.expired_uploads(clock.now() - 30, 10) == []
        for _ in range(2):
            found = await records.access.expired_uploads(clock.now(), 2)
            assert [each.upload_id for each in found] == ["upload_0", "upload_1"]
        assert [await records.access.purge_upload(each.upload_id) for each in found] == [True, True]
        assert [each.upload_id for each in await records.access.expired_uploads(clock.now(), 2)] == ["upload_2"]
        assert not await records.access.purge_upload("upload_0")
        await records.access.keep_upload("upload_2", clock.now() + 60)
        assert not await records.access.purge_upload("upload_2"), "kept meanwhile"
        assert await records.access.upload("upload_3") is not None


def referring(id: str, upload_id: str) -> Document:
    """A row that refers to an upload, as that of a schedule does."""
    return Document("schedule", ACME, id, b"every day", upload_id=upload_id)


async def forgotten(records: Records, job: Job) -> None:
    assert await records.jobs.mark_deleted(job.tenant, job.job_id)
    await records.jobs.purge_job(job.job_id)


async def row_keeps_an_upload(records: Records, clock: ManualClock) -> None:
    one = upload(clock)
    await records.access.create_upload(one, None)
    schedule = referring("schedule_1", one.upload_id)
    await records.documents.create_documents([schedule])
    assert await records.documents.document("schedule", ACME, "schedule_1") == schedule
    await forgotten(records, await created(records, clock, source=Source(one.key, one.size, one.sha256)))
    assert await records.access.upload(one.upload_id) == one
    assert await records.access.expired_uploads(clock.now(), 10) == []
    assert await records.documents.remove_document(schedule)
    assert await records.access.upload(one.upload_id) is None
    assert [each.upload_id for each in await records.access.expired_uploads(clock.now(), 10)] == [one.upload_id]


class TestReferences:
    """An upload is kept while a job or a row refers to it."""

    async def test_a_row_keeps_it_when_the_last_job_goes(self, records: Records, clock: ManualClock) -> None:
        await row_keeps_an_upload(records, clock)

    async def test_a_job_keeps_it_when_the_last_row_goes(self, records: Records, clock: ManualClock) -> None:
        one = upload(clock)
        await records.access.create_upload(one, None)
        job = await created(records, clock, source=Source(one.key, one.size, one.sha256))
        schedule = referring("schedule_1", one.upload_id)
        await records.documents.create_documents([schedule])
        assert await records.documents.remove_document(schedule)
        assert await records.access.upload(one.upload_id) == one
        await forgotten(records, job)
        assert await records.access.upload(one.upload_id) is None

    async def test_the_last_of_several_rows_lets_go_of_it(self, records: Records, clock: ManualClock) -> None:
        one = upload(clock)
        await records.access.create_upload(one, None)
        rows = [referring(f"schedule_{number}", one.upload_id) for number in range(3)]
        await records.documents.create_documents(rows)
        for each in rows:
            assert await records.access.upload(one.upload_id) == one
            assert await records.documents.remove_document(each)
            assert not await records.documents.remove_document(each)
        assert await records.access.upload(one.upload_id) is None

    async def test_a_row_that_turns_to_another_lets_go_of_the_first(self, records: Records, clock: ManualClock) -> None:
        first, second = upload(clock), upload(clock, "upload_2")
        for each in (first, second):
            await records.access.create_upload(each, None)
        standing = referring("schedule_1", first.upload_id)
        await records.documents.create_documents([standing])
        again = await records.documents.replace_document(msgspec.structs.replace(standing, body=b"other times"))
        assert again is not None
        assert await records.access.upload(first.upload_id) == first, "it still refers to it"
        stale = msgspec.structs.replace(standing, upload_id=second.upload_id)
        assert await records.documents.replace_document(stale) is None
        assert await records.access.upload(first.upload_id) == first, "nothing was written"
        other = await records.documents.replace_document(msgspec.structs.replace(again, upload_id=second.upload_id))
        assert other is not None
        assert await records.documents.document("schedule", ACME, "schedule_1") == other
        assert await records.access.upload(first.upload_id) is None
        clock.advance(600)
        assert await records.access.upload(second.upload_id) == second
        none = await records.documents.replace_document(msgspec.structs.replace(other, upload_id=None))
        assert none is not None
        assert await records.access.upload(second.upload_id) is None

    async def test_time_does_not_take_one_that_is_referred_to(self, records: Records, clock: ManualClock) -> None:
        """A scheduler may be away for as long as it likes, and a run may take as long."""
        for name in ("upload_1", "upload_2", "upload_3"):
            await records.access.create_upload(upload(clock, name), None)
        schedule = referring("schedule_1", "upload_1")
        await records.documents.create_documents([schedule])
        second = upload(clock, "upload_2")
        job = await created(records, clock, source=Source(second.key, second.size, second.sha256))
        clock.advance(60 * DAY)
        for _ in range(2):
            assert [each.upload_id for each in await records.access.expired_uploads(clock.now(), 10)] == ["upload_3"]
        for name in ("upload_1", "upload_2"):
            assert not await records.access.purge_upload(name)
            assert await records.access.upload(name) is not None
        assert await records.documents.remove_document(schedule)
        await forgotten(records, job)
        found = await records.access.expired_uploads(clock.now(), 10)
        assert {each.upload_id for each in found} == {"upload_1", "upload_2", "upload_3"}


class TestKeys:
    async def test_one_answer_one_key(self, records: Records, clock: ManualClock) -> None:
        claim = make_claim(clock)
        assert (await records.access.claim(claim)).granted
        rivals = [
            msgspec.structs.replace(key(clock, claim.subject), secret_sha256=f"{number}" * 64)
            for number in range(CALLERS)
        ]
        outcomes = await asyncio.gather(
            *(records.access.create_key(rival, answered(claim, rival.secret_sha256.encode())) for rival in rivals)
        )
        (winner,) = [rival for rival, outcome in zip(rivals, outcomes, strict=True) if outcome is None]
        assert await records.access.keys(ACME) == [winner]
        assert await records.access.key(claim.subject) == winner
        stored = answered(claim, winner.secret_sha256.encode())
        assert [outcome for outcome in outcomes if outcome is not None] == [stored] * (CALLERS - 1)

    async def test_a_lost_claim_stores_no_key(self, records: Records, clock: ManualClock) -> None:
        claim = make_claim(clock)
        await records.access.claim(claim)
        assert await records.access.create_key(key(clock, "k1"), answered(claim)) is None
        assert await records.access.create_key(key(clock, "k2"), answered(claim, b"other")) == answered(claim)
        assert [each.key_id for each in await records.access.keys(ACME)] == ["k1"]

    async def test_a_key_is_read_back(self, records: Records, clock: ManualClock) -> None:
        plain = key(clock, "k1")
        full = key(clock, "k2", revoked_at=5.0, expires_at=clock.now() + 9, admin=True)
        unnamed = msgspec.structs.replace(key(clock, "k3"), name=None)
        for made in (plain, full, unnamed):
            await records.access.create_key(made)
            assert await records.access.key(made.key_id) == made
        assert await records.access.key("nothing") is None
        assert await records.access.key("k") is None

    async def test_keys_of_one_tenant_or_of_all(self, records: Records, clock: ManualClock) -> None:
        for key_id, tenant in (("k1", ACME), ("k2", OTHER), ("k3", ACME)):
            await records.access.create_key(key(clock, key_id, tenant))
        assert {each.key_id for each in await records.access.keys(ACME)} == {"k1", "k3"}
        assert {each.key_id for each in await records.access.keys(OTHER)} == {"k2"}
        assert {each.key_id for each in await records.access.keys(None)} == {"k1", "k2", "k3"}
        assert await records.access.keys(TenantId("third")) == []

    async def test_a_key_is_revoked_once(self, records: Records, clock: ManualClock) -> None:
        await records.access.create_key(key(clock, "k1"))
        await records.access.create_key(key(clock, "k2"))
        assert await records.access.revoke_key("k1", 100.0)
        await records.access.revoke_key("k1", 200.0)
        revoked = await records.access.key("k1")
        assert revoked is not None
        assert revoked.revoked_at == 100.0
        other = await records.access.key("k2")
        assert other is not None
        assert other.revoked_at is None
        assert not await records.access.revoke_key("nothing", 100.0)

    async def test_the_engine_does_not_judge_expiry_of_keys(self, records: Records, clock: ManualClock) -> None:
        """Auth answers an expired key as it answers a revoked one; it needs the row for that."""
        await records.access.create_key(key(clock, "k1", expires_at=clock.now() + 1))
        clock.advance(2)
        assert await records.access.key("k1") is not None
