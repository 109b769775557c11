"""The JSON detail of an outcome. The process that made the attempt encodes it; the recorder adds the body's place."""

import msgspec

from conveyor.model import BodyRef, Outcome, ResultDetail

_json = msgspec.json.encode


def detail_json(outcome: Outcome) -> str:
    """Encode the detail, without the place of the body."""
    if outcome.detail is not None:
        return outcome.detail
    detail = ResultDetail(
        error=outcome.error,
        content_type=outcome.content_type,
        final_url=outcome.final_url,
        headers=outcome.headers,
        elapsed=round(outcome.elapsed, 6),
    )
    return _json(detail).decode()


def with_dead_letter(detail: str) -> str:
    """Mark an encoded detail as that of a dead-lettered task."""
    comma = "" if detail == "{}" else ","
    return f'{detail[:-1]}{comma}"dead_lettered":true}}'


def with_body(detail: str, body: BodyRef | None) -> str:
    """Add the place of the body to an encoded detail."""
    if body is None:
        return detail
    comma = "" if detail == "{}" else ","
    return f'{detail[:-1]}{comma}"body":{_json(body).decode()}}}'
