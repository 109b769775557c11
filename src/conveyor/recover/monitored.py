"""The counts of one pass of the monitor."""

import msgspec


class Monitored(msgspec.Struct):
    """What one pass found and did; `others` are the counts of additional steps."""

    # Documents of long tasks that were due, and of dead workers.
    checked: int = 0
    # Stuck tasks that were requeued, and those that failed.
    requeued: int = 0
    failed: int = 0
    # Dead workers, and their tasks that were requeued.
    workers: int = 0
    orphans: int = 0
    # Documents of tasks that had finished, or must not run now.
    settled: int = 0
    # Overdue runs whose tasks were requeued, and those that failed.
    overdue: int = 0
    expired: int = 0
    others: dict[str, int] = {}
