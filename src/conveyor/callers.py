"""Whether a role or a request calls an engine. Engines keep separate readers for the two, so that a flood of requests
does not stop the roles. Nothing else depends on it."""

from contextvars import ContextVar

_in_role: ContextVar[bool] = ContextVar("conveyor_in_role", default=False)


def enter_role() -> None:
    """Mark this asyncio task, and every task that it starts, as part of a role."""
    _in_role.set(True)


def is_in_role() -> bool:
    return _in_role.get()
