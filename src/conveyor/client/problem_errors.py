"""From an answer that is not a success to the exception that the server raised."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from conveyor import errors
from conveyor.errors import BadInput, Conflict, ConveyorError, Forbidden, NotFound, Unauthorized, Unavailable

# Members of a problem document that the exception itself carries.
_OWN = {"type", "title", "status", "detail", "code", "instance"}
# What an error with a code that is not known here is a case of.
_FAMILIES = {400: BadInput, 401: Unauthorized, 403: Forbidden, 404: NotFound, 409: Conflict, 503: Unavailable}


def _tree(kind: type[ConveyorError]) -> Iterator[type[ConveyorError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _tree(child)


# Only the classes of errors.py: what a caller derives for itself is not on the wire.
BY_CODE = {kind.code: kind for kind in _tree(ConveyorError) if kind.__module__ == errors.__name__}


def problem(status: int, body: bytes, headers: Mapping[str, str] | None = None) -> ConveyorError:
    """The error that a problem+json body names; for a code that this client does not know, the family of its status,
    with that code. `retry_after` among its details is in seconds."""
    document = _document(body)
    code, detail = document.get("code"), document.get("detail") or document.get("title")
    if not isinstance(code, str):
        return _with_wait(not_conveyor(status), headers)
    details = {name: value for name, value in document.items() if name not in _OWN and name.isidentifier()}
    details.pop("message", None)
    message = str(detail) if detail else None
    if code in BY_CODE:
        return _with_wait(BY_CODE[code](message, **details), headers)
    return _with_wait(_named(_FAMILIES.get(status, ConveyorError)(message, **details), code, status), headers)


def not_conveyor(status: int) -> ConveyorError:
    """The error for an answer that no Conveyor server gives."""
    error = ConveyorError(f"The server answered {status} in a way that Conveyor does not. Is CONVEYOR_URL right?")
    return _named(error, "unexpected_answer", status)


def wait_of(error: ConveyorError) -> float | None:
    """How many seconds the server asked to wait, if it did."""
    wait = error.details.get("retry_after")
    return float(wait) if isinstance(wait, int | float) and wait >= 0 else None


def _document(body: bytes) -> dict[str, Any]:
    try:
        document = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return {}
    return document if isinstance(document, dict) else {}


def _named(error: ConveyorError, code: str, status: int) -> ConveyorError:
    """The same error with another code and status than its class has."""
    vars(error).update(code=code, status=status)
    return error


def _with_wait(error: ConveyorError, headers: Mapping[str, str] | None) -> ConveyorError:
    asked = (headers or {}).get("retry-after", "")
    if asked.isascii() and asked.isdigit():
        error.details.setdefault("retry_after", int(asked))
    return error
