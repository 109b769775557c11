"""Resuming a file by range: decides whether the response to a request for the rest is that rest. Pure.

It is accepted only if it can be nothing else: status 206, beginning exactly where the stored part ends, with the known
size and the same validator, and not encoded. Everything else restarts the file or fails.
"""

import re
from email.utils import parsedate_to_datetime
from enum import Enum, auto

import msgspec

from conveyor.egress.decoding import codings_of
from conveyor.egress.failures import Failure
from conveyor.egress.heads import ResponseHead
from conveyor.egress.responses import phrase

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})", re.IGNORECASE)
# Last-Modified identifies a version only if the file is older than this: it could change again within a second.
_SETTLED_SECONDS = 60.0


class RemoteFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """One version of a file, as its first response described it, and where its pieces are stored."""

    key: str
    piece: int
    # A strong ETag, or a Last-Modified that is as good as one; None: the file cannot be resumed.
    validator: str | None = None
    total: int | None = None
    content_type: str | None = None
    final_url: str | None = None
    headers: list[tuple[str, str]] | None = None


class ResumeDecision(Enum):
    """What a response to a request for the rest is."""

    REST = auto()
    # The whole file: another version, or the target has no ranges.
    WHOLE = auto()
    # Neither. The stored part cannot be trusted: request the whole file.
    USELESS = auto()


def rest_headers(file: RemoteFile, offset: int) -> tuple[tuple[str, str], ...]:
    """Return the headers that request the rest of this version, or all of any other."""
    assert file.validator is not None
    return (("range", f"bytes={offset}-"), ("if-range", file.validator))


def judge(file: RemoteFile, offset: int, head: ResponseHead) -> ResumeDecision:
    """Decide what the response to a request from `offset` on is. Raises Failure for an error status."""
    if head.status == 200:
        return ResumeDecision.WHOLE
    if head.status == 416:
        return ResumeDecision.USELESS
    if head.status != 206:
        raise unexpected(head)
    parts = content_range(head)
    if parts is None or parts[0] != offset or (file.total is not None and parts[2] != file.total):
        return ResumeDecision.USELESS
    changed = validator_of(head) not in {None, file.validator}
    return ResumeDecision.USELESS if changed or codings_of(head) else ResumeDecision.REST


def content_range(head: ResponseHead) -> tuple[int, int, int] | None:
    """Return first byte, last byte and total size from Content-Range; None if it lacks one or they do not fit."""
    match = _CONTENT_RANGE.fullmatch(head.fields.get("content-range", "").strip())
    if match is None:
        return None
    first, last, total = (int(group) for group in match.groups())
    return (first, last, total) if first <= last < total else None


def unexpected(head: ResponseHead) -> Failure:
    """Return the failure for a status that brings no file."""
    return Failure(f"http_{head.status}", f"the target answered {phrase(head.status)}", head.status)


def validator_of(head: ResponseHead) -> str | None:
    """Return the validator for If-Range. A weak ETag does not promise equal bytes."""
    etag = head.fields.get("etag", "").strip()
    if etag:
        return etag if re.fullmatch(r'"[\x21\x23-\x7e]*"', etag) else None
    modified = head.fields.get("last-modified", "").strip()
    return modified if modified and _is_settled(modified, head.fields.get("date", "")) else None


def _is_settled(modified: str, date: str) -> bool:
    try:
        return (parsedate_to_datetime(date) - parsedate_to_datetime(modified)).total_seconds() >= _SETTLED_SECONDS
    except (ValueError, TypeError, OverflowError):
        return False
