"""Format numbers, durations and sizes for people."""

import html


def count(number: int) -> str:
    return f"{number:,}"


def rate(per_second: float | None) -> str:
    if per_second is None:
        return "-"
    if per_second >= 10:
        return f"{per_second:,.0f}/s"
    # A decimal of a second would say nothing of a file every minute.
    if per_second >= 0.1 or per_second == 0:
        return f"{per_second:.1f}/s"
    return f"{60 * per_second:.1f}/min" if per_second >= 0.1 / 60 else f"{3600 * per_second:.1f}/h"


def duration(seconds: float | None) -> str:
    """4 s, 1 min 05 s, 3 h 12 min, 2 d 4 h."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour} h"
    if hours:
        return f"{hours} h {minute:02} min"
    return f"{minutes} min {second:02} s" if minutes else f"{second} s"


def size(number: int | None) -> str:
    if number is None:
        return "-"
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def printable(text: str) -> str:
    """Replace control characters, which a terminal would obey: names and answers are untrusted."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def escaped(text: str) -> str:
    """Escape text for HTML."""
    return html.escape(printable(text))
