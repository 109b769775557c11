"""Format numbers, times and sizes for people."""

from datetime import UTC, datetime

from conveyor.client.wording import count, duration, rate, size

__all__ = ["count", "duration", "latency", "moment", "rate", "size"]

_MOMENT = "%Y-%m-%d %H:%M:%SZ"


def latency(seconds: float | None) -> str:
    """340 ms, 4.2 s."""
    if seconds is None or seconds >= 1:
        return duration(seconds)
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.001 else "< 1 ms"


def moment(timestamp: float | str | None) -> str:
    """Format a time in UTC, to the second."""
    if timestamp is None:
        return "-"
    if isinstance(timestamp, str):
        return datetime.fromisoformat(timestamp).strftime(_MOMENT)
    return datetime.fromtimestamp(timestamp, UTC).strftime(_MOMENT)
