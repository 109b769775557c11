"""What one pass of the monitor found and did."""

import msgspec


class Monitored(msgspec.Struct):
    """Counts; `others` are those of parts that were hung in."""

    # Rows of long tasks that were due, or of workers that are gone.
    looked: int = 0
    # Stuck tasks that were sent again, and those that were given up.
    requeued: int = 0
    failed: int = 0
    # Workers that are gone, and tasks of theirs that were sent again.
    workers: int = 0
    orphans: int = 0
    # Rows of tasks that had ended meanwhile, or are not to run now.
    settled: int = 0
    # Runs past their deadline that were queued again, and those that were given up.
    overdue: int = 0
    expired: int = 0
    others: dict[str, int] = {}
