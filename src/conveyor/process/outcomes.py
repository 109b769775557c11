"""The JSON detail of an outcome. The process that made the attempt encodes it; the recorder adds the body's place.

A detail is bounded, whatever the target sends: it is in the task's row together with the input, and a row has a largest
size (400 KB on DynamoDB). A task whose end cannot be written would be done again and again.
"""

from collections.abc import Iterable

import msgspec

from conveyor.egress.target_guard import MAX_URL_LENGTH
from conveyor.model import BodyRef, Outcome, ResultDetail, StoredAs, TaskError

_json = msgspec.json.encode

# Bytes of JSON. A longer detail keeps the headers that fit into their share, in order.
_MAX_DETAIL = 64 * 1024
_MAX_HEADERS = 32 * 1024
# From so many seconds on, a row says how long the first byte took, and which worker made the attempt.
SLOW_SECONDS = 1.0
# Characters.
_MAX_TEXT = 4000
_MAX_CONTENT_TYPE = 1000


def detail_json(outcome: Outcome) -> str:
    """Encode the detail, without the place of the body."""
    if outcome.detail is not None:
        return outcome.detail
    detail = ResultDetail(
        error=outcome.error,
        content_type=outcome.content_type,
        final_url=outcome.final_url,
        headers=outcome.headers,
        # Microseconds. `round` would take longer than the encoder.
        elapsed=int(outcome.elapsed * 1e6 + 0.5) / 1e6,
        first_byte=round(outcome.first_byte, 3) if outcome.elapsed >= SLOW_SECONDS else 0.0,
    )
    text = _json(detail)
    return (text if len(text) <= _MAX_DETAIL else _json(_shortened(detail))).decode()


def _shortened(detail: ResultDetail) -> ResultDetail:
    headers: list[tuple[str, str]] = []
    room = _MAX_HEADERS
    for pair in detail.headers or ():
        size = len(_json(pair)) + 1
        if size <= room:
            headers.append(pair)
            room -= size
    error, url = detail.error, detail.final_url
    return msgspec.structs.replace(
        detail,
        headers=None if detail.headers is None else headers,
        content_type=detail.content_type and detail.content_type[:_MAX_CONTENT_TYPE],
        error=error and msgspec.structs.replace(error, message=error.message[:_MAX_TEXT]),
        final_url=url if url is None or len(url) <= MAX_URL_LENGTH else None,
    )


def with_dead_letter(detail: str) -> str:
    """Mark an encoded detail as that of a dead-lettered task."""
    comma = "" if detail == "{}" else ","
    return f'{detail[:-1]}{comma}"dead_lettered":true}}'


def with_worker(detail: str, worker: str) -> str:
    """Add the worker to an encoded detail."""
    comma = "" if detail == "{}" else ","
    return f'{detail[:-1]}{comma}"worker":{_json(worker).decode()}}}'


def with_error(detail: str, error: TaskError) -> str:
    """Add an error to an encoded detail that has none."""
    comma = "" if detail == "{}" else ","
    return f'{detail[:-1]}{comma}"error":{_json(error).decode()}}}'


def with_extracted(detail: str, extracted: BodyRef | None) -> str:
    """Add the place of what was extracted to an encoded detail."""
    if extracted is None:
        return detail
    comma = "" if detail == "{}" else ","
    return f'{detail[:-1]}{comma}"extracted":{_json(extracted).decode()}}}'


def with_body(detail: str, body: BodyRef | None) -> str:
    """Add the place of the body to an encoded detail."""
    if body is None:
        return detail
    comma = "" if detail == "{}" else ","
    return f'{detail[:-1]}{comma}"body":{_json(body).decode()}}}'


def with_pages(key: str, details: Iterable[str], places: Iterable[str]) -> list[str]:
    """As `with_body`, for bodies in one segment: the detail and the `page_place` of each. The JSON is made by hand: an
    encoder would need a BodyRef for each."""
    begin = f'"body":{{"key":{_json(key).decode()},'
    return [
        f"{detail[:-1]}{',' if len(detail) > 2 else ''}{begin}{place}}}"
        for detail, place in zip(details, places, strict=True)
    ]


def page_place(length: int, digest: str, offset: int, stored: StoredAs | None) -> str:
    """The end of the JSON of a BodyRef, after its key."""
    if stored is None:
        return f'"length":{length},"sha256":"{digest}","offset":{offset}}}'
    return (
        f'"length":{length},"sha256":"{digest}","offset":{offset},'
        f'"stored":["{stored.encoding}",{stored.length},{stored.crc},{stored.stored_crc}]}}'
    )
