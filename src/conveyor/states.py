"""The states of tasks, runs and jobs, and the one table of moves between them.

The store checks a move against this table, `lifecycle` is the only code that makes one, and the drawing in SPEC §4
is made from it.
"""

from enum import IntEnum, StrEnum


class TaskStatus(IntEnum):
    """A task has one terminal transition. `running` is not stored: it is what workers hold at this moment."""

    PENDING = 0
    SUCCEEDED = 1
    FAILED = 2
    CANCELLED = 3

    @property
    def label(self) -> str:
        return self.name.lower()


TERMINAL = frozenset({TaskStatus.SUCCEEDED, TaskStatus.FAILED, TaskStatus.CANCELLED})


class RunState(StrEnum):
    """The state of a run; a job shows that of its latest run."""

    INGESTING = "ingesting"
    RUNNING = "running"
    PAUSED = "paused"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


MOVES: dict[RunState, frozenset[RunState]] = {
    RunState.INGESTING: frozenset({RunState.RUNNING, RunState.PAUSED, RunState.FAILED, RunState.CANCELLED}),
    RunState.RUNNING: frozenset({RunState.PAUSED, RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED}),
    RunState.PAUSED: frozenset({RunState.INGESTING, RunState.RUNNING, RunState.FAILED, RunState.CANCELLED}),
    RunState.COMPLETED: frozenset(),
    # Only a run that failed before its latch: its ingest is resumed.
    RunState.FAILED: frozenset({RunState.INGESTING}),
    RunState.CANCELLED: frozenset(),
}

ENDED = frozenset({RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED})
# Runs that workers take references from: tasks start while ingest goes on.
WORKABLE = frozenset({RunState.INGESTING, RunState.RUNNING})


def sources_of(target: RunState) -> frozenset[RunState]:
    """The states from which a run may move to `target`."""
    return frozenset(state for state, moves in MOVES.items() if target in moves)
