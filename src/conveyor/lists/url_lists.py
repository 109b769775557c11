"""Lists behind URLs: read through the target guard, whole or by range.

A range is read with If-Match or If-Unmodified-Since; the validator of the answer is compared too, because many servers
ignore the condition. Messages never have the URL: it may carry a signature.
"""

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC
from email.utils import parsedate_to_datetime
from itertools import islice

import msgspec
from pyreqwest.response import Response

from conveyor.egress.decoding import BodyDecoder, codings_of
from conveyor.egress.failures import Failure
from conveyor.egress.heads import ResponseHead
from conveyor.egress.outbound import Outbound, OutboundFailed
from conveyor.egress.responses import decode_pieces, raw_pieces
from conveyor.errors import ListChanged, ListMissing, ListUnreadable, SourceUnavailable
from conveyor.lists.reader import detect_compression
from conveyor.model import Compression, RemoteSource

MAX_REDIRECTS = 5

_PIECE = 256 * 1024
# How many empty pieces may precede the first bytes of a list.
_MAX_EMPTY_PIECES = 16
_BLOCK = 8 * 1024 * 1024
_BLOCK_SECONDS = 120.0
# A modification time identifies the bytes only if it was this many seconds ago (RFC 9110, 8.8.2.2).
_STRONG_SECONDS = 60.0
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
# Transient failures: the same request may succeed later.
_TRANSIENT_CODES = frozenset({"timeout", "dns_failed", "connect_failed", "tls_failed", "read_failed"})
_TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
_CHANGED = "The list at the URL has changed since the ingest began. Submit it again."
# A list is stored and read as it is: a range of an encoded response would be a range of other bytes.
_IDENTITY = ("Accept-Encoding", "identity")


class PinnedUrl(msgspec.Struct, frozen=True):
    """One version of a list."""

    size: int
    etag: str | None
    last_modified: str | None


class UrlLists:
    """Reads lists. `whole_seconds` limits a response that is the whole list."""

    def __init__(self, outbound: Outbound, whole_seconds: float) -> None:
        self._outbound = outbound
        self._whole_seconds = whole_seconds

    async def close(self) -> None:
        await self._outbound.close()

    async def pin(self, remote: RemoteSource) -> PinnedUrl | None:
        """Size and validator; None if the server offers no ranges or no validator, or encodes what it sends. Raises as
        `whole` does."""
        # Not HEAD: a signed URL is valid for one method.
        async with self._answer(remote, (("Range", "bytes=0-0"),), _BLOCK_SECONDS) as (_, head):
            if head.status == 416:
                return None
            _check_status(head.status)
            _check_named(remote, head)
        found = _RANGE.fullmatch(head.fields.get("content-range", ""))
        etag, modified = _strong_etag(head), _strong_time(head)
        if head.status != 206 or found is None or (etag or modified) is None or codings_of(head):
            return None
        return PinnedUrl(int(found[3]), etag, None if etag else modified)

    async def whole(
        self, remote: RemoteSource, max_bytes: int, compression: Compression | None
    ) -> AsyncIterator[bytes]:
        """All bytes of one response, decoded unless the list itself has the compression. Raises ListMissing,
        ListChanged if it is not the named version, ListUnreadable, and SourceUnavailable if a retry may help."""
        size = 0
        async with self._answer(remote, (), self._whole_seconds) as (response, head):
            _check_status(head.status)
            if head.status != 200:
                raise ListUnreadable(f"The URL of the list answered {head.status}.")
            _check_named(remote, head)
            async for piece in _list_pieces(raw_pieces(response, head), codings_of(head), compression, max_bytes):
                size += len(piece)
                if size > max_bytes:
                    raise ListUnreadable(f"The list is larger than {max_bytes} bytes.")
                yield piece

    async def stream(self, remote: RemoteSource, size: int, start: int, end: int) -> AsyncIterator[bytes]:
        """The bytes between `start` and `end` of the pinned version, which has `size` bytes. Raises as `whole` does."""
        while start < end:
            stop = min(start + _BLOCK, end)
            headers = (("Range", f"bytes={start}-{stop - 1}"), *_conditions(remote))
            async with self._answer(remote, headers, _BLOCK_SECONDS) as (response, head):
                _check_status(head.status)
                _check_pinned(remote, head, start, stop, size)
                left = stop - start
                while (piece := await response.body_reader.read(_PIECE)) is not None:
                    left -= len(piece)
                    yield bytes(piece)
                if left:
                    raise SourceUnavailable("The response with a part of the list has another length than declared.")
            start = stop

    @asynccontextmanager
    async def _answer(
        self, remote: RemoteSource, headers: tuple[tuple[str, str], ...], timeout: float
    ) -> AsyncIterator[tuple[Response, ResponseHead]]:
        own = list(remote.headers.items())
        try:
            async with self._outbound.get(remote.url, own, timeout, MAX_REDIRECTS, (_IDENTITY, *headers)) as answer:
                yield answer
        except OutboundFailed as failed:
            message = f"The list cannot be read from its URL: {failed.message} ({failed.code})."
            if failed.code in _TRANSIENT_CODES:
                raise SourceUnavailable(message) from None
            raise ListUnreadable(message) from None


async def _list_pieces(
    pieces: AsyncIterator[bytes], codings: Sequence[str], compression: Compression | None, max_bytes: int
) -> AsyncIterator[bytes]:
    """The list, without the content codings of the response. Servers also declare the compression of a file itself as
    a coding; such a list stays compressed, as its source says."""
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
    if status in (200, 206):
        return
    message = f"The URL of the list answered {status}."
    if status == 412:
        raise ListChanged(_CHANGED)
    if status in (404, 410):
        raise ListMissing(message)
    raise SourceUnavailable(message) if status in _TRANSIENT_STATUSES else ListUnreadable(message)


def _check_named(remote: RemoteSource, head: ResponseHead) -> None:
    """Whether it is the version that the client named."""
    if remote.etag is not None and _plain(head.fields.get("etag", "")) != _plain(remote.etag):
        raise ListChanged("The list at the URL has another ETag than the job named.")


def _check_pinned(remote: RemoteSource, head: ResponseHead, start: int, stop: int, size: int) -> None:
    if remote.etag is not None:
        same = head.fields.get("etag") == remote.etag
    else:
        same = head.fields.get("last-modified") == remote.last_modified
    found = _RANGE.fullmatch(head.fields.get("content-range", ""))
    if not same or (found is not None and int(found[3]) != size):
        raise ListChanged(_CHANGED)
    if head.status != 206 or found is None or (int(found[1]), int(found[2])) != (start, stop - 1):
        raise SourceUnavailable("The URL of the list did not answer with the requested range.")


def _conditions(remote: RemoteSource) -> tuple[tuple[str, str], ...]:
    if remote.etag is not None:
        return (("If-Match", remote.etag),)
    return (("If-Unmodified-Since", remote.last_modified or ""),)


def _strong_etag(head: ResponseHead) -> str | None:
    etag = head.fields.get("etag", "")
    return etag if etag.startswith('"') else None


def _strong_time(head: ResponseHead) -> str | None:
    modified, date = head.fields.get("last-modified"), head.fields.get("date")
    if modified is None or date is None:
        return None
    try:
        age = _seconds(date) - _seconds(modified)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return modified if age >= _STRONG_SECONDS else None


def _seconds(text: str) -> float:
    at = parsedate_to_datetime(text)
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _plain(etag: str) -> str:
    return etag.removeprefix("W/").strip('"')
