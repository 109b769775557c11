"""Uploads: a place for a list is promised under a signed link, filled once, and then a job is made of it.

The link is bound to the size and the sha256 that the client announced, to one object that we named, and to the time
that the promise holds. Where the blob store signs links of its own, the bytes never pass through here, and the list is
there as soon as its object is: nobody tells us.
"""

import hmac
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from hashlib import sha256

import msgspec

from conveyor.clock import iso_text
from conveyor.engines.blobs import Presigned
from conveyor.errors import InvalidField, NotFound, SignatureRefused, UploadConflict, UploadRefused
from conveyor.faults import crashpoint
from conveyor.jobs.idempotency import Accepted, Claim, Idempotency, IdempotentRequest
from conveyor.model import UPLOADS, TenantId, UploadRecord
from conveyor.system import System

CREATED = 201

_DIGEST = re.compile(r"[0-9a-f]{64}")
_UPLOAD_ID = re.compile(r"upload_[0-9a-z]{26}")

# Asked whether a tenant may have a place for so many bytes; raises if not.
Admit = Callable[[TenantId, int], Awaitable[None]]
# From an upload's id and signature to the link to it.
Link = Callable[[str, str], str]


class UploadSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A list that a client is about to send: its size in bytes and its sha256 in hex."""

    size: int
    sha256: str


class UploadView(msgspec.Struct, frozen=True):
    """What a client is told: send the list there, with these headers."""

    upload_id: str
    url: str
    method: str
    headers: dict[str, str]
    expires_at: str


def signature(secret: bytes, upload: UploadRecord) -> str:
    """Over all that the link promises. Until when it holds is in the upload's row, and grows with a job made of it."""
    text = f"PUT\n{upload.tenant}\n{upload.upload_id}\n{upload.size}\n{upload.sha256}\n{upload.created_at!r}"
    return hmac.new(secret, text.encode(), sha256).hexdigest()


class Uploads:
    """Keeps promises of places, and fills them."""

    def __init__(self, system: System, admit: Admit | None = None) -> None:
        self._system = system
        self._admit = admit
        self._idempotency = Idempotency(system.settings, system.clock, system.records)

    async def promise(
        self, tenant: TenantId, spec: UploadSpec, link: Link, request: IdempotentRequest | None = None
    ) -> Accepted:
        """Promise a place. A request that was answered before gets that answer again."""
        carry_out = partial(self._promised, tenant, spec, link)
        return await self._idempotency.once(tenant, request, self._system.clock.new_id("upload"), carry_out)

    async def find(self, tenant: TenantId, upload_id: str) -> UploadRecord:
        """The tenant's upload. One that never was, one that expired and another's are the same NotFound."""
        upload = await self._known(upload_id)
        if upload is None or upload.tenant != tenant:
            raise NotFound
        return upload

    async def state(self, upload: UploadRecord) -> tuple[bool, Presigned | None]:
        """Whether the list is there; if not, a new link to send it to, where the store signs one. An old one may have
        ended before the promise did, with the credentials that it was signed with."""
        if upload.stored_at is not None:
            return True, None
        signed = await self._signed(upload)
        stored = signed is not None and await self._system.blobs.size(upload.key) == upload.size
        return stored, None if stored else signed

    async def fill(
        self, upload_id: str, given: str, size: int | None, digest: str | None, pieces: AsyncIterator[bytes]
    ) -> None:
        """Take the list in, to disk and no further than its announced size. Raises before a byte is read if the link
        is not good or the sender says that it has another list, and leaves nothing if it turns out to be another."""
        upload = await self._known(upload_id)
        # As bytes: a signature from outside may be any text.
        if upload is None or not hmac.compare_digest(self._sign(upload).encode(), given.encode(errors="replace")):
            raise SignatureRefused
        if upload.stored_at is not None:
            raise _stored_before()
        if size is not None and size != upload.size:
            raise UploadRefused(f"The upload was announced with {upload.size} bytes, not {size}.")
        if digest is not None and digest.lower() != upload.sha256:
            raise UploadRefused("The list's sha256 is not the one that was announced.")
        await self._system.blobs.put_stream(upload.key, _announced(pieces, upload))
        crashpoint("upload.stored.before")
        if not await self._system.records.mark_stored(upload_id):
            await self._lost(upload)
        crashpoint("upload.stored.after")

    async def _promised(self, tenant: TenantId, spec: UploadSpec, link: Link, claim: Claim) -> Accepted:
        settings, now = self._system.settings, self._system.clock.now()
        digest = spec.sha256.lower()
        _check(spec.size, digest, settings.max_list_bytes)
        if self._admit is not None:
            await self._admit(tenant, spec.size)
        upload = UploadRecord(
            tenant=tenant,
            upload_id=claim.subject,
            # The key is ours: nothing of it comes from the client.
            key=f"{UPLOADS}{tenant}/{claim.subject}",
            size=spec.size,
            sha256=digest,
            created_at=now,
            expires_at=now + settings.upload_seconds,
        )
        signed = await self._signed(upload) or Presigned(
            link(upload.upload_id, self._sign(upload)),
            "PUT",
            {"Content-Type": "application/octet-stream", "X-Content-Sha256": digest},
        )
        view = UploadView(
            upload_id=upload.upload_id,
            url=signed.url,
            method=signed.method,
            headers=dict(signed.headers),
            expires_at=iso_text(upload.expires_at),
        )
        body = msgspec.json.encode(view)
        answer = claim.answer(CREATED, body)
        crashpoint("upload.promise.before")
        existing = await self._system.records.create_upload(upload, answer.row)
        crashpoint("upload.promise.after")
        return answer.unless_lost(existing)

    async def _known(self, upload_id: str) -> UploadRecord | None:
        return await self._system.records.upload(upload_id) if _UPLOAD_ID.fullmatch(upload_id) else None

    async def _lost(self, upload: UploadRecord) -> None:
        """Somebody else stored the same bytes first, or the promise ended while they came."""
        if await self._system.records.upload(upload.upload_id) is None:
            await self._system.blobs.delete([upload.key])
            raise SignatureRefused
        raise _stored_before()

    async def _signed(self, upload: UploadRecord) -> Presigned | None:
        """The store's own link, good for as long as the promise holds."""
        left = upload.expires_at - self._system.clock.now()
        return await self._system.blobs.presigned_put(upload.key, upload.size, upload.sha256, left)

    def _sign(self, upload: UploadRecord) -> str:
        return signature(self._system.signing_key, upload)


def _check(size: int, digest: str, most: int) -> None:
    if not 1 <= size <= most:
        raise InvalidField(f"`size` must be between 1 and {most}, the most that is taken.", field="size", limit=most)
    if not _DIGEST.fullmatch(digest):
        raise InvalidField("`sha256` must be 64 hexadecimal digits.", field="sha256")


def _stored_before() -> UploadConflict:
    return UploadConflict("The upload was stored already; a link is good for one time.")


async def _announced(pieces: AsyncIterator[bytes], upload: UploadRecord) -> AsyncIterator[bytes]:
    digest = sha256()
    size = 0
    async for piece in pieces:
        size += len(piece)
        if size > upload.size:
            raise UploadRefused(f"The list is larger than the {upload.size} bytes that were announced.")
        digest.update(piece)
        yield piece
    if size != upload.size:
        raise UploadRefused(f"The list has {size} bytes; {upload.size} were announced.")
    if digest.hexdigest() != upload.sha256:
        raise UploadRefused("The list's sha256 is not the one that was announced.")
