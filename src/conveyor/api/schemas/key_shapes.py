"""Responses about API keys and tenants."""

from conveyor.api.schemas.shape import Shape


class KeyShape(Shape, frozen=True):
    """An API key, without its secret."""

    key_id: str
    tenant: str
    name: str | None
    admin: bool
    created_at: str
    expires_at: str | None
    revoked_at: str | None


class NewKeyShape(Shape, frozen=True):
    """A new API key, with its secret."""

    # Null in the answer to a repeated Idempotency-Key: the secret is shown once.
    key: str | None
    key_id: str
    tenant: str


class TenantShape(Shape, frozen=True):
    """A tenant, as its keys tell."""

    tenant: str
    # Keys that are neither revoked nor expired.
    active_keys: int
    keys: int
    # When its first key was created.
    created_at: str


class TenantsPage(Shape, frozen=True):
    """Tenants, by name."""

    items: list[TenantShape]
    next_cursor: str | None


class KeysPage(Shape, frozen=True):
    """Keys, oldest first."""

    items: list[KeyShape]
    next_cursor: str | None
