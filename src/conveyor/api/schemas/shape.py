"""What every response schema is. Responses are built elsewhere; a test compares them with the schemas here."""

import msgspec


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A response with exactly these fields."""
