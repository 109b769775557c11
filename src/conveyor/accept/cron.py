"""When a schedule fires: cron expressions in a time zone.

Five fields, as Debian's cron reads them. A time of day that the clocks skip in spring fires at the first moment after
the gap; one that they repeat in autumn fires the first time only; expressions whose minute or hour begins with * follow
elapsed time, through both.
"""

import re
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from conveyor.errors import InvalidField

MAX_CRON = 200

_FIELDS = 5
_ZONE = re.compile(r"[A-Za-z][A-Za-z0-9_+/-]{0,63}")
_FIRST_SPAN = 3 * 3600.0
# Words do not depend on it.
_ANY_TIME = datetime.fromtimestamp(0, ZoneInfo("UTC"))


def check_cron(cron: str, zone: str) -> None:
    """Raise InvalidField for an invalid expression, one that never fires, or an unknown time zone."""
    try:
        if not _ZONE.fullmatch(zone):
            raise ValueError
        ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise InvalidField(
            "`timezone` must be a name of the time zone database, such as Europe/Berlin.", field="timezone"
        ) from None
    if len(cron) > MAX_CRON or len(cron.split()) != _FIELDS:
        raise InvalidField(
            "`cron` must have five fields: minute, hour, day of the month, month, day of the week.", field="cron"
        )
    try:
        if not next_fires(cron, zone, 0.0, 1):
            raise InvalidField("`cron` never fires.", field="cron")
    except CronSimError as error:
        raise InvalidField(f"`cron`: {error}.", field="cron") from None


def cron_text(cron: str) -> str:
    """A valid expression in words: "At 06:00 on Monday through Friday"."""
    return CronSim(cron, _ANY_TIME).explain()


def next_fires(cron: str, zone: str, after: float, count: int) -> list[float]:
    """The first fires after a time."""
    return list(islice(_fires(cron, zone, after), count))


def missed_fires(cron: str, zone: str, first: float, until: float, limit: int) -> list[float]:
    """The last fires from `first` to `until`, at most `limit`, oldest first. Earlier ones are not computed: a schedule
    of every minute may have been late for a year."""
    span = _FIRST_SPAN
    while True:
        start = max(first, until - span)
        fires = []
        for at in _fires(cron, zone, start - 1):
            if at > until:
                break
            fires.append(at)
        if len(fires) >= limit or start <= first:
            return fires[-limit:]
        span *= 2


def _fires(cron: str, zone: str, after: float) -> Iterator[float]:
    last = after
    for moment in CronSim(cron, datetime.fromtimestamp(after, ZoneInfo(zone))):
        at = moment.timestamp()
        # Inside a repeated hour, the library continues from its first pass.
        if at > last:
            last = at
            yield at
