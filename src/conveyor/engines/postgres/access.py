"""API keys, idempotency claims and uploads on Postgres."""

import msgspec

from conveyor.clock import CLOCK_SLACK, Clock
from conveyor.engines.postgres.database import PostgresDatabase, PostgresSession
from conveyor.engines.postgres.queries import named_queries
from conveyor.engines.records import Claimed, IdempotencyClaim
from conveyor.model import ApiKey, TenantId, UploadRecord

SQL = named_queries("access.sql")


class PostgresAccess:
    """AccessRecords."""

    def __init__(self, database: PostgresDatabase, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def claim(self, row: IdempotencyClaim) -> Claimed:
        values = {**msgspec.structs.asdict(row), "now": self._clock.now(), "slack": CLOCK_SLACK}

        async def work(db: PostgresSession) -> Claimed:
            stored = await db.row(SQL["claim"], values)
            # A claim that was stored after the statement began is in its way, and not among its rows.
            granted = stored is not None and stored["granted"]
            standing = await standing_claim(db, row) if stored is None else IdempotencyClaim(*stored[1:])
            # A claim with the same lease is our own, from an attempt whose commit was not answered.
            own = db.again and standing.status == 0 and standing.lease_until == row.lease_until
            return Claimed(granted or own, standing)

        return await self._database.step(work)

    async def stored_claim(self, tenant: TenantId, route: str, key: str) -> IdempotencyClaim | None:
        row = await self._database.row(SQL["idempotency"], {"tenant": tenant, "route": route, "key": key})
        claim = IdempotencyClaim(*row) if row else None
        return claim if claim is not None and claim.expires_at > self._clock.now() else None

    async def release_claim(self, row: IdempotencyClaim) -> None:
        await self._database.change(SQL["release_claim"], msgspec.structs.asdict(row))

    async def create_upload(self, upload: UploadRecord, answer: IdempotencyClaim | None) -> IdempotencyClaim | None:
        values = msgspec.structs.asdict(upload)

        async def work(db: PostgresSession) -> IdempotencyClaim | None:
            if db.again and await db.value(SQL["stored_upload"], values):
                return None
            standing = await answer_claim(db, answer)
            if standing is None:
                await db.change(SQL["insert_upload"], values)
            return standing

        return await self._database.write(work)

    async def upload(self, upload_id: str) -> UploadRecord | None:
        row = await self._database.row(SQL["upload"], {"upload_id": upload_id, "now": self._clock.now()})
        return UploadRecord(*row) if row else None

    async def keep_upload(self, upload_id: str, until: float) -> None:
        await self._database.change(SQL["keep_upload"], {"upload_id": upload_id, "until": until})

    async def mark_stored(self, upload_id: str) -> bool:
        values = {"upload_id": upload_id, "now": self._clock.now()}

        async def work(db: PostgresSession) -> bool:
            if await db.change(SQL["mark_stored"], values) > 0:
                return True
            return db.again and bool(await db.value(SQL["stored_at"], values) == values["now"])

        return await self._database.write(work)

    async def expired_uploads(self, by: float, limit: int) -> list[UploadRecord]:
        rows = await self._database.rows(SQL["expired_uploads"], {"by": by, "limit": limit})
        return [UploadRecord(*row) for row in rows]

    async def purge_upload(self, upload_id: str) -> bool:
        values = {"upload_id": upload_id, "now": self._clock.now()}

        async def work(db: PostgresSession) -> bool:
            if await db.change(SQL["purge_upload"], values):
                return True
            return db.again and await db.value(SQL["stored_upload"], values) is None

        return await self._database.write(work)

    async def purge_expired(self, limit: int) -> int:
        values = {"now": self._clock.now(), "limit": limit}
        # The two are independent: rows that an unanswered attempt removed are not counted, which does no harm.
        return sum([await self._database.change(SQL[query], values) for query in ("purge_claims", "purge_documents")])

    async def create_key(self, key: ApiKey, answer: IdempotencyClaim | None = None) -> IdempotencyClaim | None:
        values = msgspec.structs.asdict(key)

        async def work(db: PostgresSession) -> IdempotencyClaim | None:
            if db.again and (row := await db.row(SQL["key"], values)) and ApiKey(*row) == key:
                return None
            standing = await answer_claim(db, answer)
            if standing is None:
                await db.change(SQL["insert_key"], values)
            return standing

        return await self._database.write(work)

    async def key(self, key_id: str) -> ApiKey | None:
        row = await self._database.row(SQL["key"], {"key_id": key_id})
        return ApiKey(*row) if row else None

    async def keys(self, tenant: TenantId | None) -> list[ApiKey]:
        return [ApiKey(*row) for row in await self._database.rows(SQL["keys"], {"tenant": tenant})]

    async def revoke_key(self, key_id: str, at: float) -> bool:
        return await self._database.change(SQL["revoke_key"], {"key_id": key_id, "at": at}) > 0


async def release_upload(db: PostgresSession, upload_id: str | None, now: float) -> None:
    """Part of a transaction: expire an upload that lost a reference, unless another reference remains. It may miss a
    reference of a concurrent transaction, which does no harm: readers and retention look for references too."""
    if upload_id is not None:
        await db.change(SQL["release_upload"], {"upload_id": upload_id, "now": now})


async def answer_claim(db: PostgresSession, answer: IdempotencyClaim | None) -> IdempotencyClaim | None:
    """Part of a transaction: answer the claimed request. Returns the stored claim if the caller lost it."""
    if answer is None or await db.change(SQL["answer"], msgspec.structs.asdict(answer)):
        return None
    return await standing_claim(db, answer)


async def answered(db: PostgresSession, answer: IdempotencyClaim | None) -> IdempotencyClaim | None:
    """The stored claim, if another process has answered it."""
    if answer is None:
        return None
    row = await standing_claim(db, answer)
    return row if row != answer and row.status != 0 else None


async def standing_claim(db: PostgresSession, row: IdempotencyClaim) -> IdempotencyClaim:
    """The claim that is stored under the key of this one; this one if there is none."""
    stored = await db.row(SQL["idempotency"], {"tenant": row.tenant, "route": row.route, "key": row.key})
    return IdempotencyClaim(*stored) if stored else row
