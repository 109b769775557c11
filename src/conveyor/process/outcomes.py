"""An outcome as it is kept: the JSON of its detail, made where the outcome was, and completed where its body is."""

import msgspec

from conveyor.model import BodyRef, Outcome, ResultDetail

_json = msgspec.json.encode


def detail_json(outcome: Outcome) -> str:
    """The detail, all but where the body is."""
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


def with_body(detail: str, body: BodyRef | None) -> str:
    """The detail with the place of its body."""
    if body is None:
        return detail
    comma = "" if detail == "{}" else ","
    return f'{detail[:-1]}{comma}"body":{_json(body).decode()}}}'
