"""Uploads: create a signed link for a list, store the list once, and then make a job of it.

The link is bound to the size and the sha256 that the client announced, to one object that the server names, and to a
time. Where the blob store signs links, clients send the bytes to the store; the upload is complete as soon as the
object exists, without a message to the server.
"""

import hmac
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from hashlib import sha256

import msgspec

from conveyor.clock import iso_text
from conveyor.engines.blobs import Blobs, Presigned, StoresParts
from conveyor.errors import InvalidField, NotFound, SignatureRefused, UploadConflict, UploadRefused
from conveyor.faults import crashpoint
from conveyor.jobs.idempotency import Accepted, Claim, Idempotency, IdempotentRequest
from conveyor.model import UPLOADS, TenantId, UploadRecord
from conveyor.system import System

CREATED = 201

_DIGEST = re.compile(r"[0-9a-f]{64}")
_UPLOAD_ID = re.compile(r"upload_[0-9a-z]{26}")

# Raises if the tenant may not stage this many bytes.
Admit = Callable[[TenantId, int], Awaitable[None]]
# Makes the link of an upload's id and signature.
Link = Callable[[str, str], str]


class UploadSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A list that a client announces: its size in bytes and its sha256 in hex."""

    size: int
    sha256: str


class UploadView(msgspec.Struct, frozen=True):
    """The answer to the client: where to send the list, and with which headers."""

    upload_id: str
    url: str
    method: str
    headers: dict[str, str]
    expires_at: str
    # Of a list that may be sent in parts, straight to the store; None: it is one request.
    part_bytes: int | None = None


def signature(secret: bytes, upload: UploadRecord) -> str:
    """The signature over all properties of the upload but its expiry, which a job made of it extends."""
    text = f"PUT\n{upload.tenant}\n{upload.upload_id}\n{upload.size}\n{upload.sha256}\n{upload.created_at!r}"
    return hmac.new(secret, text.encode(), sha256).hexdigest()


class Uploads:
    """Creates uploads, and stores their lists."""

    def __init__(self, system: System, admit: Admit | None = None) -> None:
        self._system = system
        self._admit = admit
        self._idempotency = Idempotency(system.settings, system.clock, system.records)

    async def promise(
        self, tenant: TenantId, spec: UploadSpec, link: Link, request: IdempotentRequest | None = None
    ) -> Accepted:
        """Create an upload. A replayed request gets its first answer."""
        create = partial(self._create, tenant, spec, link)
        return await self._idempotency.once(tenant, request, self._system.clock.new_id("upload"), create)

    async def find(self, tenant: TenantId, upload_id: str) -> UploadRecord:
        """The tenant's upload. Raises NotFound alike for one that is unknown, expired or another tenant's."""
        upload = await self._known(upload_id)
        if upload is None or upload.tenant != tenant:
            raise NotFound
        return upload

    async def state(self, upload: UploadRecord) -> tuple[bool, Presigned | None]:
        """Whether the list is stored; if not, a new link to send it to, where the store signs one. The first link may
        have expired before the upload, with the credentials that signed it."""
        if upload.stored_at is not None:
            return True, None
        signed = await self._signed(upload)
        stored = signed is not None and await self._system.blobs.size(upload.key) == upload.size
        return stored, None if stored else signed

    async def fill(
        self, upload_id: str, signed_with: str, size: int | None, digest: str | None, pieces: AsyncIterator[bytes]
    ) -> None:
        """Store the list, up to its announced size. Raises before a byte is read if the link is invalid or the request
        announces another list; removes what it stored if the bytes are another list's."""
        upload = await self._known(upload_id)
        # As bytes: the signature may be any text.
        if upload is None or not hmac.compare_digest(self._sign(upload).encode(), signed_with.encode(errors="replace")):
            raise SignatureRefused
        if upload.stored_at is not None:
            raise _stored_before()
        if size is not None and size != upload.size:
            raise UploadRefused(f"The upload was announced with {upload.size} bytes, not {size}.")
        if digest is not None and digest.lower() != upload.sha256:
            raise UploadRefused("The list's sha256 is not the one that was announced.")
        await self._system.blobs.put_stream(upload.key, _announced(pieces, upload))
        crashpoint("upload.stored.before")
        if not await self._system.records.access.mark_stored(upload_id):
            await self._raise_not_stored(upload)
        crashpoint("upload.stored.after")

    async def _create(self, tenant: TenantId, spec: UploadSpec, link: Link, claim: Claim) -> Accepted:
        settings, now = self._system.settings, self._system.clock.now()
        digest = spec.sha256.lower()
        _check(spec.size, digest, settings.max_list_bytes)
        if self._admit is not None:
            await self._admit(tenant, spec.size)
        upload = UploadRecord(
            tenant=tenant,
            upload_id=claim.subject,
            # No part of the key comes from the client.
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
            part_bytes=await part_bytes(self._system.blobs, upload.size),
        )
        body = msgspec.json.encode(view)
        answer = claim.answer(CREATED, body)
        crashpoint("upload.promise.before")
        existing = await self._system.records.access.create_upload(upload, answer.row)
        crashpoint("upload.promise.after")
        return answer.unless_lost(existing)

    async def _known(self, upload_id: str) -> UploadRecord | None:
        return await self._system.records.access.upload(upload_id) if _UPLOAD_ID.fullmatch(upload_id) else None

    async def _raise_not_stored(self, upload: UploadRecord) -> None:
        """Another request stored the same bytes first, or the upload expired meanwhile."""
        if await self._system.records.access.upload(upload.upload_id) is None:
            await self._system.blobs.delete([upload.key])
            raise SignatureRefused
        raise _stored_before()

    async def _signed(self, upload: UploadRecord) -> Presigned | None:
        """A link that the store signs, valid until the upload expires; None if the store signs none."""
        left = upload.expires_at - self._system.clock.now()
        return await self._system.blobs.presigned_put(upload.key, upload.size, upload.sha256, left)

    def _sign(self, upload: UploadRecord) -> str:
        return signature(self._system.signing_key, upload)


async def part_bytes(blobs: Blobs, size: int) -> int | None:
    """The size of the parts of a list that is too large for one request to the store; None if it is not."""
    return await blobs.part_bytes(size) if isinstance(blobs, StoresParts) else None


def _check(size: int, digest: str, maximum: int) -> None:
    if not 1 <= size <= maximum:
        raise InvalidField(f"`size` must be between 1 and {maximum}.", field="size", limit=maximum)
    if not _DIGEST.fullmatch(digest):
        raise InvalidField("`sha256` must be 64 hexadecimal digits.", field="sha256")


def _stored_before() -> UploadConflict:
    return UploadConflict("The upload is already stored. A link can be used once.")


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
