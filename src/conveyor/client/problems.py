"""From an answer that is not a success to the exception that the server raised."""

from collections.abc import Iterator
from typing import Any

import msgspec

from conveyor import errors
from conveyor.errors import ConveyorError

# Members of a problem document that the exception itself carries.
_OWN = {"type", "title", "status", "detail", "code", "instance"}


def _tree(kind: type[ConveyorError]) -> Iterator[type[ConveyorError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _tree(child)


# Only the classes of errors.py: what a caller derives for itself is not on the wire.
BY_CODE = {kind.code: kind for kind in _tree(ConveyorError) if kind.__module__ == errors.__name__}


def problem(status: int, body: bytes) -> ConveyorError:
    """The error that a problem+json body names; one with that code and status if this client knows none."""
    document = _document(body)
    code, detail = document.get("code"), document.get("detail") or document.get("title")
    details = {name: value for name, value in document.items() if name not in _OWN and name.isidentifier()}
    details.pop("message", None)
    if not isinstance(code, str):
        return not_conveyor(status)
    kind = BY_CODE.get(code) or _unknown(code, status)
    return kind(str(detail) if detail else None, **details)


def _document(body: bytes) -> dict[str, Any]:
    try:
        document = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return {}
    return document if isinstance(document, dict) else {}


def _unknown(code: str, status: int) -> type[ConveyorError]:
    """A newer server has errors that this client does not know: they keep their code and status."""
    return type("ConveyorError", (ConveyorError,), {"code": code, "status": status, "__doc__": ConveyorError.__doc__})


def not_conveyor(status: int) -> ConveyorError:
    """The error for an answer that no Conveyor server gives."""
    kind = _unknown("unexpected_answer", status)
    return kind(f"The server answered {status} in a way that Conveyor does not. Is CONVEYOR_URL right?")
