"""When items go by themselves: TTL as a backstop.

Retention deletes what has expired. TTL removes what it never finds: rows that a late writer left behind a purge, or all
rows of an installation whose retention does not run. So an item outlives every promise that was made about it:

- `until_purged`: what expires at a known time stays for another year, in which retention removes the objects that only
  this item names.
- `while_in_use`: what belongs to a job stays for five years after it was written last. A job does not expire before its
  latest run has ended, which nobody knows when its rows are written.
"""

_DAY = 86_400
_PURGED_WITHIN = 365 * _DAY
_LONGEST_USE = 5 * 365 * _DAY
# DynamoDB uses its own clock; a minute of margin covers the difference.
_MARGIN = 60


def at_expiry(expires_at: float) -> int:
    """The TTL of an item that nothing depends on once it has expired."""
    return int(expires_at) + _MARGIN


def until_purged(expires_at: float) -> int:
    """The TTL of an item that retention removes after it has expired."""
    return int(expires_at) + _PURGED_WITHIN


def while_in_use(now: float) -> int:
    """The TTL of an item of a job that is written now."""
    return int(now) + _LONGEST_USE
