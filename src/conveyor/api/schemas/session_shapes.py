"""Responses about sessions of the dashboard, and about health."""

from conveyor.api.schemas.shape import Shape


class SessionShape(Shape, frozen=True):
    """The current session."""

    tenant: str
    key_id: str
    key_name: str | None
    # Until when the session acts as an administrator; null if it does not.
    admin_until: str | None


class AdminSession(Shape, frozen=True):
    """A session that acts as an administrator."""

    admin_until: str


class LinkShape(Shape, frozen=True):
    """A path that opens the dashboard, once."""

    path: str
    expires_at: str


class HealthShape(Shape, frozen=True):
    """The status of the process."""

    status: str
