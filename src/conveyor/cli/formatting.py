"""Format numbers, times and sizes for people."""

from datetime import UTC, datetime

from conveyor.client.wording import count, duration, rate, size

__all__ = ["count", "duration", "moment", "rate", "size"]

_MOMENT = "%Y-%m-%d %H:%M:%SZ"


def moment(timestamp: float | str | None) -> str:
    """Format a time in UTC, to the second."""
    if timestamp is None:
        return "-"
    if isinstance(timestamp, str):
        return datetime.fromisoformat(timestamp).strftime(_MOMENT)
    return datetime.fromtimestamp(timestamp, UTC).strftime(_MOMENT)
