"""Counts rows of tasks, page by page, as the engines keep the counts of a run."""

from collections import Counter
from collections.abc import Iterable

from conveyor.model import Counts, Task, counts_by_status
from conveyor.states import TaskStatus


class RowCounts:
    """The rows that were added so far."""

    def __init__(self) -> None:
        self._statuses: Counter[TaskStatus] = Counter()
        self._unchanged = 0

    def add(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            self._statuses[task.status] += 1
            self._unchanged += task.is_unchanged

    @property
    def total(self) -> int:
        """All rows, those of pending tasks too."""
        return self._statuses.total()

    @property
    def counts(self) -> Counts:
        return counts_by_status(self._statuses, self._unchanged)
