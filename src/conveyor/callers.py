"""Who calls an engine: a role, or somebody who waits for an answer. Engines keep readers apart for the two, so that
however much is asked for, roles go on; nothing else depends on it."""

from contextvars import ContextVar

_in_role: ContextVar[bool] = ContextVar("conveyor_in_role", default=False)


def enter_role() -> None:
    """From here on this task, and every task that it starts, calls for a role."""
    _in_role.set(True)


def in_role() -> bool:
    return _in_role.get()
