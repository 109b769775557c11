"""API keys, idempotency claims and uploads on DynamoDB."""

from collections.abc import Sequence

import msgspec
from aiodynamo.expressions import HashKey, KeyCondition, RangeKey
from aiodynamo.operations import Operation

from conveyor.clock import CLOCK_SLACK, Clock
from conveyor.engines.dynamodb.items import (
    api_key_item,
    api_key_key,
    api_key_of,
    readable,
    request_address,
    request_item,
    request_key,
    request_of,
    upload_expiry,
    upload_item,
    upload_key,
    upload_of,
)
from conveyor.engines.dynamodb.schema import EXPIRING, LISTED
from conveyor.engines.dynamodb.spread import spread
from conveyor.engines.dynamodb.table import Key, ReadItem, Table, WritePlan
from conveyor.engines.records import Claimed, IdempotencyClaim
from conveyor.model import ApiKey, TenantId, UploadRecord

replace = msgspec.structs.replace

# An expired upload that is still referred to is checked again after this many seconds.
_KEPT_SECONDS = 86_400.0


class Requested(msgspec.Struct, frozen=True):
    """A claim, read together with the items that the request changes."""

    stored: ReadItem | None = None
    answer: IdempotencyClaim | None = None
    # The stored claim, if the caller has lost it.
    standing: IdempotencyClaim | None = None

    def writes(self, table: Table) -> list[Operation]:
        if self.stored is None or self.answer is None:
            return []
        answered = request_item(self.answer)
        return [table.save(self.stored, {name: answered[name] for name in ("status", "body", "expires_at", "ttl")})]

    @property
    def answered(self) -> IdempotencyClaim | None:
        """The stored claim, if another process has answered it."""
        row = self.standing
        return row if row is not None and row != self.answer and row.status != 0 else None


class DynamoAccess:
    """AccessRecords. TTL removes expired claims: a new claim ignores them."""

    def __init__(self, table: Table, clock: Clock) -> None:
        self._table = table
        self._clock = clock

    async def claim(self, row: IdempotencyClaim) -> Claimed:
        async def plan() -> WritePlan[Claimed]:
            (stored,) = await self._table.read(request_key(row))
            standing = None if stored.item is None else request_of(stored.item)
            now = self._clock.now()
            claimed = replace(row, status=0, body=b"")
            if standing is not None and standing.expires_at > now:
                # A lease that lasts longer than a new one would was set by a clock that was ahead.
                leased = now < standing.lease_until <= row.lease_until + CLOCK_SLACK
                lapsed = standing.status == 0 and not leased
                if not lapsed or standing.fingerprint != row.fingerprint:
                    return WritePlan(Claimed(False, standing))
                claimed = replace(claimed, subject=standing.subject)
            return WritePlan(Claimed(True, claimed), [self._table.save(stored, request_item(claimed))])

        return await self._table.change(plan)

    async def stored_claim(self, tenant: TenantId, route: str, key: str) -> IdempotencyClaim | None:
        item = await self._table.get(request_address(tenant, route, key))
        claim = None if item is None else request_of(item)
        return claim if claim is not None and claim.expires_at > self._clock.now() else None

    async def release_claim(self, row: IdempotencyClaim) -> None:
        async def plan() -> WritePlan[None]:
            (stored,) = await self._table.read(request_key(row))
            if stored.item is None:
                return WritePlan(None)
            standing = request_of(stored.item)
            own = (standing.status, standing.subject, standing.lease_until) == (0, row.subject, row.lease_until)
            return WritePlan(None, [self._table.drop(stored)] if own else [])

        await self._table.change(plan)

    async def create_upload(self, upload: UploadRecord, answer: IdempotencyClaim | None) -> IdempotencyClaim | None:
        async def plan() -> WritePlan[IdempotencyClaim | None]:
            there, *rest = await self._table.read(upload_key(upload.upload_id), *request_keys(answer))
            request = read_request(rest, answer)
            if request.standing is not None or there.item is not None:
                return WritePlan(request.standing)
            return WritePlan(None, [self._table.save(there, upload_item(upload)), *request.writes(self._table)])

        return await self._table.change(plan)

    async def upload(self, upload_id: str) -> UploadRecord | None:
        item = await self._table.get(upload_key(upload_id))
        if item is None:
            return None
        upload = upload_of(item)
        live = upload.expires_at > self._clock.now() or await _is_used(self._table, upload_id)
        return upload if live else None

    async def keep_upload(self, upload_id: str, until: float) -> None:
        async def plan() -> WritePlan[None]:
            (stored,) = await self._table.read(upload_key(upload_id))
            if stored.item is None or upload_of(stored.item).expires_at >= until:
                return WritePlan(None)
            return WritePlan(None, [self._table.save(stored, upload_expiry(until))])

        await self._table.change(plan)

    async def mark_stored(self, upload_id: str) -> bool:
        async def plan() -> WritePlan[bool]:
            (stored,) = await self._table.read(upload_key(upload_id))
            upload = None if stored.item is None else upload_of(stored.item)
            now = self._clock.now()
            if upload is None or upload.stored_at is not None or upload.expires_at <= now:
                return WritePlan(False)
            return WritePlan(True, [self._table.save(stored, {"stored_at": now})])

        return await self._table.change(plan)

    async def expired_uploads(self, by: float, limit: int) -> list[UploadRecord]:
        within = RangeKey("es").lte(by)
        stored = await spread(self._table, "ep", "Uploads", within, index=EXPIRING, limit=limit)
        uploads = readable(stored, upload_of)
        used = [await _is_used(self._table, upload.upload_id) for upload in uploads]
        for upload, kept in zip(uploads, used, strict=True):
            if kept:
                # Move it back, so that it does not block the uploads after it.
                await self.keep_upload(upload.upload_id, self._clock.now() + _KEPT_SECONDS)
        return [upload for upload, kept in zip(uploads, used, strict=True) if not kept]

    async def purge_upload(self, upload_id: str) -> bool:
        async def plan() -> WritePlan[bool]:
            (stored,) = await self._table.read(upload_key(upload_id))
            if stored.item is None or upload_of(stored.item).expires_at > self._clock.now():
                return WritePlan(False)
            if await _is_used(self._table, upload_id):
                return WritePlan(False)
            return WritePlan(True, [self._table.drop(stored)])

        return await self._table.change(plan)

    async def purge_expired(self, limit: int) -> int:
        """Nothing to do: TTL removes expired items."""
        return 0

    async def create_key(self, key: ApiKey, answer: IdempotencyClaim | None = None) -> IdempotencyClaim | None:
        async def plan() -> WritePlan[IdempotencyClaim | None]:
            there, *rest = await self._table.read(api_key_key(key.key_id), *request_keys(answer))
            request = read_request(rest, answer)
            if request.standing is not None or there.item is not None:
                return WritePlan(request.standing)
            return WritePlan(None, [self._table.save(there, api_key_item(key)), *request.writes(self._table)])

        return await self._table.change(plan)

    async def key(self, key_id: str) -> ApiKey | None:
        item = await self._table.get(api_key_key(key_id))
        return None if item is None else api_key_of(item)

    async def keys(self, tenant: TenantId | None) -> list[ApiKey]:
        everyone = HashKey("lp", "Keys")
        where: KeyCondition = everyone if tenant is None else everyone & RangeKey("ls").begins_with(f"{tenant}#")
        stored = await self._table.query(where, index=LISTED)
        return sorted(readable(stored, api_key_of), key=lambda key: (key.created_at, key.key_id))

    async def revoke_key(self, key_id: str, at: float) -> bool:
        async def plan() -> WritePlan[bool]:
            (stored,) = await self._table.read(api_key_key(key_id))
            if stored.item is None:
                return WritePlan(False)
            return WritePlan(
                True, [] if "revoked_at" in stored.item else [self._table.save(stored, {"revoked_at": at})]
            )

        return await self._table.change(plan)


async def release_upload(table: Table, upload_id: str, now: float) -> None:
    """Expire an upload that lost a reference, unless another reference remains. It may miss a concurrent reference,
    which does no harm: readers and retention look for references too."""

    async def plan() -> WritePlan[None]:
        (stored,) = await table.read(upload_key(upload_id))
        if stored.item is None or stored.item["expires_at"] <= now or await _is_used(table, upload_id):
            return WritePlan(None)
        return WritePlan(None, [table.save(stored, upload_expiry(now))])

    await table.change(plan)


async def _is_used(table: Table, upload_id: str) -> bool:
    """Whether a job or a document refers to the upload: their items sort before its own."""
    own = upload_key(upload_id)
    return bool(await table.query(HashKey("pk", own.pk) & RangeKey("sk").lt(own.sk), limit=1))


def request_keys(answer: IdempotencyClaim | None) -> list[Key]:
    """The key of the claim to read; none without an idempotency key."""
    return [] if answer is None else [request_key(answer)]


def read_request(stored: Sequence[ReadItem], answer: IdempotencyClaim | None) -> Requested:
    """The claim, which is the first of the items that were read if there is an answer to write."""
    if answer is None:
        return Requested()
    (request, *_) = stored
    row = answer if request.item is None else request_of(request.item)
    own = request.item is not None and row.status == 0
    if own and (row.subject, row.fingerprint) == (answer.subject, answer.fingerprint):
        return Requested(request, answer)
    return Requested(request, answer, row)
