"""Turn an error response into the exception that the server raised."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from conveyor import errors
from conveyor.errors import BadInput, Conflict, ConveyorError, Forbidden, NotFound, Unauthorized, Unavailable

# Fields of a problem document that are attributes of the exception.
_OWN = {"type", "title", "status", "detail", "code", "instance"}
# The class for an unknown code, by HTTP status.
_FAMILIES = {400: BadInput, 401: Unauthorized, 403: Forbidden, 404: NotFound, 409: Conflict, 503: Unavailable}


def _tree(kind: type[ConveyorError]) -> Iterator[type[ConveyorError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _tree(child)


# Only the classes in errors.py; subclasses of callers never come from the server.
BY_CODE = {kind.code: kind for kind in _tree(ConveyorError) if kind.__module__ == errors.__name__}


def error_from_problem(status: int, body: bytes, headers: Mapping[str, str] | None = None) -> ConveyorError:
    """Make the exception for a problem+json body. An unknown code gets the family of its status. `details` has
    `retry_after`, in seconds."""
    document = _document(body)
    code, detail = document.get("code"), document.get("detail") or document.get("title")
    if not isinstance(code, str):
        return _with_retry_after(unexpected_answer(status), headers)
    details = {name: value for name, value in document.items() if name not in _OWN and name.isidentifier()}
    details.pop("message", None)
    message = str(detail) if detail else None
    if code in BY_CODE:
        return _with_retry_after(BY_CODE[code](message, **details), headers)
    return _with_retry_after(
        _with_code(_FAMILIES.get(status, ConveyorError)(message, **details), code, status), headers
    )


def unexpected_answer(status: int) -> ConveyorError:
    """The error for an answer that is not from a Conveyor server."""
    error = ConveyorError(f"Unexpected answer with status {status}: this is not a Conveyor server. Check CONVEYOR_URL.")
    return _with_code(error, "unexpected_answer", status)


def retry_after_of(error: ConveyorError) -> float | None:
    """How long the server asked to wait, in seconds; None if it did not ask."""
    wait = error.details.get("retry_after")
    return float(wait) if isinstance(wait, int | float) and wait >= 0 else None


def _document(body: bytes) -> dict[str, Any]:
    try:
        document = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return {}
    return document if isinstance(document, dict) else {}


def _with_code(error: ConveyorError, code: str, status: int) -> ConveyorError:
    """Set a code and status other than those of the class."""
    vars(error).update(code=code, status=status)
    return error


def _with_retry_after(error: ConveyorError, headers: Mapping[str, str] | None) -> ConveyorError:
    value = (headers or {}).get("retry-after", "")
    if value.isascii() and value.isdigit():
        error.details.setdefault("retry_after", int(value))
    return error
