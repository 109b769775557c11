"""API keys, idempotency claims and uploads on SQLite."""

from typing import Any

import apsw
import msgspec

from conveyor.clock import CLOCK_SLACK, Clock
from conveyor.engines.records import Claimed, IdempotencyClaim
from conveyor.engines.sqlite.database import SqliteDatabase, named_queries
from conveyor.engines.sqlite.held_claims import HeldClaims
from conveyor.model import ApiKey, TenantId, UploadRecord

SQL = named_queries("access.sql")


class SqliteAccess:
    """AccessRecords, and HoldsClaims."""

    def __init__(self, database: SqliteDatabase, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self.held = HeldClaims()

    async def claim(self, row: IdempotencyClaim) -> Claimed:
        now = self._clock.now()
        if self.held.find(row.tenant, row.route, row.key, now) is not None:
            claimed = self.held.hold(row, now)
            if not claimed.granted:
                return claimed
            row = claimed.row
            self.held.release(row)
        values = {**msgspec.structs.asdict(row), "now": now, "slack": CLOCK_SLACK}

        def work(db: apsw.Connection) -> Claimed:
            db.execute(SQL["claim"], values)
            granted = db.changes() > 0
            return Claimed(granted, standing_claim(db, row))

        return await self._database.write(work)

    async def hold_claim(self, row: IdempotencyClaim) -> Claimed:
        if self._stored(row.tenant, row.route, row.key) is not None:
            return await self.claim(row)
        return self.held.hold(row, self._clock.now())

    async def stored_claim(self, tenant: TenantId, route: str, key: str) -> IdempotencyClaim | None:
        now = self._clock.now()
        claim = self._stored(tenant, route, key)
        return claim if claim is not None and claim.expires_at > now else self.held.find(tenant, route, key, now)

    def _stored(self, tenant: TenantId, route: str, key: str) -> IdempotencyClaim | None:
        row = self._database.read_one(SQL["idempotency"], {"tenant": tenant, "route": route, "key": key})
        return IdempotencyClaim(*row) if row else None

    async def release_claim(self, row: IdempotencyClaim) -> None:
        if self.held.release(row):
            return
        await self._database.change(SQL["release_claim"], msgspec.structs.asdict(row))

    async def create_upload(self, upload: UploadRecord, answer: IdempotencyClaim | None) -> IdempotencyClaim | None:
        values = msgspec.structs.asdict(upload)

        def work(db: apsw.Connection) -> IdempotencyClaim | None:
            standing = answer_claim(db, answer)
            if standing is None:
                db.execute(SQL["insert_upload"], values)
            return standing

        return await self._database.write(work)

    async def upload(self, upload_id: str) -> UploadRecord | None:
        row = self._database.read_one(SQL["upload"], {"upload_id": upload_id, "now": self._clock.now()})
        return UploadRecord(*row) if row else None

    async def keep_upload(self, upload_id: str, until: float) -> None:
        await self._database.change(SQL["keep_upload"], {"upload_id": upload_id, "until": until})

    async def mark_stored(self, upload_id: str) -> bool:
        values = {"upload_id": upload_id, "now": self._clock.now()}
        return await self._database.change(SQL["mark_stored"], values) > 0

    async def expired_uploads(self, by: float, limit: int) -> list[UploadRecord]:
        rows = await self._database.rows(SQL["expired_uploads"], {"by": by, "limit": limit})
        return [UploadRecord(*row) for row in rows]

    async def purge_upload(self, upload_id: str) -> bool:
        values = {"upload_id": upload_id, "now": self._clock.now()}
        return await self._database.change(SQL["purge_upload"], values) > 0

    async def purge_expired(self, limit: int) -> int:
        values = {"now": self._clock.now(), "limit": limit}

        def work(db: apsw.Connection) -> int:
            gone = 0
            for query in ("purge_claims", "purge_documents"):
                db.execute(SQL[query], values)
                gone += db.changes()
            return gone

        # All writes share one thread: use it only if there is something to purge.
        stored = await self._database.row(SQL["any_expired"], values)
        return await self._database.write(work) if stored else 0

    async def create_key(self, key: ApiKey, answer: IdempotencyClaim | None = None) -> IdempotencyClaim | None:
        values = msgspec.structs.asdict(key)

        def work(db: apsw.Connection) -> IdempotencyClaim | None:
            standing = answer_claim(db, answer)
            if standing is None:
                db.execute(SQL["insert_key"], values)
            return standing

        return await self._database.write(work)

    async def key(self, key_id: str) -> ApiKey | None:
        row = self._database.read_one(SQL["key"], {"key_id": key_id})
        return _key(row) if row else None

    async def keys(self, tenant: TenantId | None) -> list[ApiKey]:
        return [_key(row) for row in await self._database.rows(SQL["keys"], {"tenant": tenant})]

    async def revoke_key(self, key_id: str, at: float) -> bool:
        def work(db: apsw.Connection) -> bool:
            known = db.execute(SQL["key"], {"key_id": key_id}).fetchone() is not None
            db.execute(SQL["revoke_key"], {"key_id": key_id, "at": at})
            return known

        return await self._database.write(work)


def release_upload(db: apsw.Connection, upload_id: str | None, now: float) -> None:
    """Part of a transaction: expire an upload that lost a reference, unless another reference remains."""
    if upload_id is not None:
        db.execute(SQL["release_upload"], {"upload_id": upload_id, "now": now})


def answer_claim(db: apsw.Connection, answer: IdempotencyClaim | None) -> IdempotencyClaim | None:
    """Part of a transaction: answer the claimed request. Returns the stored claim if the caller lost it."""
    if answer is None:
        return None
    db.execute(SQL["answer"], msgspec.structs.asdict(answer))
    return None if db.changes() else standing_claim(db, answer)


def _key(row: Any) -> ApiKey:
    *fields, admin = row
    return msgspec.structs.replace(ApiKey(*fields), admin=bool(admin))


def answered(db: apsw.Connection, answer: IdempotencyClaim | None) -> IdempotencyClaim | None:
    """The stored claim, if another process has answered it."""
    if answer is None:
        return None
    row = standing_claim(db, answer)
    return row if row != answer and row.status != 0 else None


def standing_claim(db: apsw.Connection, row: IdempotencyClaim) -> IdempotencyClaim:
    """The claim that is stored under the key of this one; this one if there is none."""
    values = {"tenant": row.tenant, "route": row.route, "key": row.key}
    stored: Any = db.execute(SQL["idempotency"], values).fetchone()
    return IdempotencyClaim(*stored) if stored else row
