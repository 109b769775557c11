"""The lists of schedules: copies a list when its schedule fires, and returns the source for the job."""

from collections.abc import AsyncIterator, Callable, Sequence
from hashlib import sha256
from itertools import islice

from conveyor.accept.schedules import ListSource
from conveyor.egress.decoding import BodyDecoder, codings_of
from conveyor.egress.failures import Failure
from conveyor.egress.outbound import Outbound, OutboundFailed
from conveyor.egress.responses import decode_pieces, raw_pieces
from conveyor.errors import BadInput, ListUnreadable, NotFound, UploadConflict
from conveyor.faults import crashpoint
from conveyor.jobs.orphans import note_submit
from conveyor.lists.reader import detect_compression
from conveyor.model import Compression, JobId, Source, TenantId
from conveyor.system import System

MAX_REDIRECTS = 5

# How many empty pieces may precede the first bytes of a list.
_MAX_EMPTY_PIECES = 16

# Transient failures: the same request may succeed later.
_TRANSIENT_CODES = frozenset({"timeout", "dns_failed", "connect_failed", "tls_failed", "read_failed"})
_TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})


class SourceUnavailable(Exception):
    """The list of the schedule cannot be read now."""


class Sources:
    """Stages lists of schedules."""

    def __init__(self, system: System, outbound: Outbound) -> None:
        self._system = system
        self._outbound = outbound

    async def stage(self, tenant: TenantId, job_id: JobId, source: ListSource) -> Source:
        """Copy the list for this job; the copy is removed with the job. Raises BadInput for a list that cannot be read,
        SourceUnavailable for one that cannot be read now."""
        pieces = self._uploaded(tenant, source.upload_id) if source.upload_id is not None else self._fetched(source)
        await note_submit(self._system, tenant, job_id, is_repeated=True)
        # Each attempt has a key of its own: a slow earlier one never overwrites the list of the accepted job.
        key = f"{staged_prefix(tenant, job_id)}/{self._system.clock.new_id('list')}"
        digest = sha256()
        crashpoint("schedule.stage.before")
        size = await self._system.blobs.put_stream(key, self._counted(pieces, digest.update))
        crashpoint("schedule.stage.after")
        return Source(key, size, digest.hexdigest(), source.format, source.compression)

    async def drop(self, source: Source) -> None:
        """Remove a copy that no job uses."""
        await self._system.blobs.delete([source.key])

    async def discard(self, tenant: TenantId, job_id: JobId) -> None:
        """Remove all copies for a job that was not made."""
        while await self._system.blobs.delete_prefix(f"{staged_prefix(tenant, job_id)}/", 1000):
            pass

    async def _uploaded(self, tenant: TenantId, upload_id: str) -> AsyncIterator[bytes]:
        upload = await self._system.records.access.upload(upload_id)
        if upload is None or upload.tenant != tenant:
            raise NotFound("The upload of the schedule has expired.")
        if await self._system.blobs.size(upload.key) != upload.size:
            raise UploadConflict("The upload of the schedule was not stored yet.")
        async for piece in self._system.blobs.stream(upload.key):
            yield piece

    async def _fetched(self, source: ListSource) -> AsyncIterator[bytes]:
        assert source.url is not None
        timeout = self._system.settings.schedule_fetch_seconds
        try:
            headers, max_bytes = list(source.headers.items()), self._system.settings.max_list_bytes
            async with self._outbound.get(source.url, headers, timeout, MAX_REDIRECTS) as (response, head):
                _check_status(response.status)
                async for piece in _list_pieces(raw_pieces(response), codings_of(head), source.compression, max_bytes):
                    yield piece
        except OutboundFailed as failed:
            message = f"The list of the schedule cannot be read: {failed.message} ({failed.code})."
            if failed.code in _TRANSIENT_CODES:
                raise SourceUnavailable(message) from None
            raise ListUnreadable(message) from None

    async def _counted(self, pieces: AsyncIterator[bytes], update: Callable[[bytes], None]) -> AsyncIterator[bytes]:
        max_bytes = self._system.settings.max_list_bytes
        size = 0
        async for piece in pieces:
            size += len(piece)
            if size > max_bytes:
                raise ListUnreadable(f"The list of the schedule is larger than {max_bytes} bytes.")
            update(piece)
            yield piece


def staged_prefix(tenant: TenantId, job_id: JobId) -> str:
    return f"lists/{tenant}/{job_id}"


async def _list_pieces(
    pieces: AsyncIterator[bytes], codings: Sequence[str], compression: Compression | None, max_bytes: int
) -> AsyncIterator[bytes]:
    """The list, without the content codings of the response. Servers also declare the compression of a file itself as
    a coding; such a list stays compressed, as its schedule says."""
    first = await anext(pieces, b"")

    async def all_pieces() -> AsyncIterator[bytes]:
        yield first
        async for piece in pieces:
            yield piece

    is_plain = compression in {None, Compression.NONE}
    decodes = bool(codings) and (is_plain or detect_compression(_first_bytes(first, codings)) is compression)
    async for piece in decode_pieces(all_pieces(), codings, max_bytes) if decodes else all_pieces():
        yield piece


def _first_bytes(piece: bytes, codings: Sequence[str]) -> bytes:
    """The first decoded bytes of a body; none if it cannot be decoded."""
    try:
        pieces = islice(BodyDecoder(codings, len(piece)).decode(piece), _MAX_EMPTY_PIECES)
        return next(filter(None, pieces), b"")
    except Failure:
        return b""


def _check_status(status: int) -> None:
    if status == 200:
        return
    message = f"The URL of the schedule's list answered {status}."
    raise SourceUnavailable(message) if status in _TRANSIENT_STATUSES else BadInput(message)
