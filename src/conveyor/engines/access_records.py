"""The access part of Records: API keys, idempotency claims and uploads."""

from typing import Protocol, runtime_checkable

import msgspec

from conveyor.model import UPLOADS, ApiKey, TenantId, UploadRecord


class IdempotencyClaim(msgspec.Struct, frozen=True):
    """A request under a client's idempotency key: claimed (status 0), then answered, then replayed verbatim."""

    tenant: TenantId
    route: str
    key: str
    fingerprint: str
    # The id of the job, upload or document that the request creates. It is reserved with the claim, so that a process
    # that takes over an expired claim creates the same one.
    subject: str
    # After this time another process may take over an unanswered claim.
    lease_until: float
    expires_at: float
    status: int = 0
    body: bytes = b""


class Claimed(msgspec.Struct, frozen=True):
    """The claim that is stored under the key, and whether the caller owns it now."""

    granted: bool
    row: IdempotencyClaim


def upload_of(source_key: str | None) -> str | None:
    """The id of the upload that a job with this source key was made from, if it was made from one."""
    if source_key is None or not source_key.startswith(UPLOADS):
        return None
    return source_key.rpartition("/")[2] or None


class AccessRecords(Protocol):
    """Stores API keys, idempotency claims and uploads."""

    async def claim(self, row: IdempotencyClaim) -> Claimed:
        """Claim the idempotency key if it is free or expired, or if the same request claimed it and the lease of that
        claim has expired. A claim that is taken over keeps its subject."""

    async def stored_claim(self, tenant: TenantId, route: str, key: str) -> IdempotencyClaim | None:
        """The claim under an idempotency key that has not expired, answered or not."""

    async def release_claim(self, row: IdempotencyClaim) -> None:
        """Release an unanswered claim, if the caller still owns it."""

    async def create_upload(self, upload: UploadRecord, answer: IdempotencyClaim | None) -> IdempotencyClaim | None:
        """Store a new upload and the answer to the claimed request in one transaction. If the caller lost the claim,
        write nothing and return the stored claim."""

    async def upload(self, upload_id: str) -> UploadRecord | None:
        """An upload that has not expired, or that a job or a document refers to."""

    async def keep_upload(self, upload_id: str, until: float) -> None:
        """Extend the expiry of an upload to at least `until`."""

    async def mark_stored(self, upload_id: str) -> bool:
        """Mark the list of an upload as stored. True for the first caller only: an upload is filled once."""

    async def expired_uploads(self, by: float, limit: int) -> list[UploadRecord]:
        """Uploads that expired by `by` and that no job and no document refers to. An upload is listed until it is
        purged: the caller removes its object first."""

    async def purge_upload(self, upload_id: str) -> bool:
        """Purge an upload that `expired_uploads` listed. False if its expiry was extended or something refers to it by
        now."""

    async def purge_expired(self, limit: int) -> int:
        """Purge up to `limit` expired claims and up to `limit` expired documents that are not due. Returns how many;
        call again until it is 0."""

    async def create_key(self, key: ApiKey, answer: IdempotencyClaim | None = None) -> IdempotencyClaim | None:
        """Store a new API key and the answer to the claimed request in one transaction. If the caller lost the claim,
        write nothing and return the stored claim."""

    async def key(self, key_id: str) -> ApiKey | None:
        """An API key by its public part."""

    async def keys(self, tenant: TenantId | None) -> list[ApiKey]:
        """The API keys of one tenant, or of all tenants."""

    async def revoke_key(self, key_id: str, at: float) -> bool:
        """Revoke an API key. False if the key is unknown."""


@runtime_checkable
class HoldsClaims(Protocol):
    """A capability: one process owns the database, so that it can hold claims in memory until their answers are
    written by `accept_atomically`. A crash leaves nothing of the request, not even its claim."""

    async def hold_claim(self, row: IdempotencyClaim) -> Claimed:
        """As `claim`, but nothing is stored. `stored_claim` and `release_claim` know of it, and other claims respect
        it."""
