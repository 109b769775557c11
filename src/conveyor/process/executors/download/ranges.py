"""Going on with a file. Gets what is known of a file of which a part is there, and the answer to a request for the
rest; says whether the answer is that rest. Nothing here connects or writes.

A rest is taken only if it can be nothing else: the answer is 206, begins exactly where the part ends, names the size
that is known, carries the same validator, and is not encoded. Everything else starts the file over or fails.
"""

import re
from email.utils import parsedate_to_datetime
from enum import Enum, auto

import msgspec

from conveyor.egress.failures import Failure
from conveyor.egress.responses import ResponseHead, phrase

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})", re.IGNORECASE)
# A date says so much about a file only if the file is older than the moment by more than clocks differ.
_SETTLED_SECONDS = 60.0


class RemoteFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """One version of a file, as its first answer described it, and where its pieces are kept."""

    key: str
    piece: int
    # A strong ETag, or a Last-Modified that is as good as one; None: it can not be gone on with.
    validator: str | None = None
    total: int | None = None
    content_type: str | None = None
    final_url: str | None = None
    headers: list[tuple[str, str]] | None = None


class ResumeDecision(Enum):
    """What an answer to a request for the rest is."""

    REST = auto()
    # It is the file from its beginning: another version, or the target knows no ranges.
    WHOLE = auto()
    # It is neither, and nothing that is there can be trusted to fit: ask for the file again.
    USELESS = auto()


def rest_headers(file: RemoteFile, offset: int) -> tuple[tuple[str, str], ...]:
    """What to send to get the rest of this version, and the whole of any other."""
    assert file.validator is not None
    return (("range", f"bytes={offset}-"), ("if-range", file.validator))


def check_identity(head: ResponseHead) -> None:
    """Raise Failure for a body that is encoded although it was asked not to be: its bytes are not the file's."""
    if head.fields.get("content-encoding", "identity").strip().lower() not in {"", "identity"}:
        raise Failure("content_encoded", "the target sends the file encoded, although asked not to", head.status)


def judge(file: RemoteFile, offset: int, head: ResponseHead) -> ResumeDecision:
    """What this answer to a request for the rest from `offset` is. Raises Failure for one that is an error."""
    if head.status == 200:
        check_identity(head)
        return ResumeDecision.WHOLE
    if head.status == 416:
        return ResumeDecision.USELESS
    if head.status != 206:
        raise unexpected(head)
    found = content_range(head)
    if found is None or found[0] != offset or (file.total is not None and found[2] != file.total):
        return ResumeDecision.USELESS
    changed = validator_of(head) not in {None, file.validator}
    encoded = head.fields.get("content-encoding", "identity").strip().lower() not in {"", "identity"}
    return ResumeDecision.USELESS if changed or encoded else ResumeDecision.REST


def content_range(head: ResponseHead) -> tuple[int, int, int] | None:
    """First and last byte of an answer and the size of the whole, if it says all three and they fit."""
    match = _CONTENT_RANGE.fullmatch(head.fields.get("content-range", "").strip())
    if match is None:
        return None
    first, last, total = (int(group) for group in match.groups())
    return (first, last, total) if first <= last < total else None


def unexpected(head: ResponseHead) -> Failure:
    """A status that brings no file."""
    return Failure(f"http_{head.status}", f"the target answered {phrase(head.status)}", head.status)


def validator_of(head: ResponseHead) -> str | None:
    """What is sent back in If-Range. A weak ETag promises meaning, not bytes."""
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
