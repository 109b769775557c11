"""The states of tasks, runs and jobs, and the table of transitions between them.

The store checks each transition against this table, only `lifecycle` makes one, and the drawing in SPEC §4 is generated
from it.
"""

from enum import IntEnum, StrEnum


class TaskStatus(IntEnum):
    """A task has one terminal transition. `running` is not stored: it is the number of tasks that workers run now."""

    PENDING = 0
    SUCCEEDED = 1
    FAILED = 2
    CANCELLED = 3

    # Its name for users.
    label: str


for _status in TaskStatus:
    # Attributes, because a property would cost an export a part of its time.
    _status.label = _status.name.lower()


TERMINAL = frozenset({TaskStatus.SUCCEEDED, TaskStatus.FAILED, TaskStatus.CANCELLED})


class RunState(StrEnum):
    """The state of a run. A job shows the state of its latest run."""

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
    # Only a run that failed before its latch: its ingest can be resumed.
    RunState.FAILED: frozenset({RunState.INGESTING}),
    RunState.CANCELLED: frozenset(),
}


class ReasonCode(StrEnum):
    """Why a run is in its state, for programs. `reason` says the same for people, and its text may change."""

    # The run's list, or the list of tasks to rerun, could not be ingested in several attempts.
    INGEST_FAILED = "ingest_failed"
    # The list itself is at fault.
    LIST_UNREADABLE = "list_unreadable"
    LIST_MISSING = "list_missing"
    LIST_CHANGED = "list_changed"
    LIST_REJECTED = "list_rejected"
    LIST_TOO_SPARSE = "list_too_sparse"
    NO_TASKS = "no_tasks"
    FAILURE_THRESHOLD = "failure_threshold"
    DEADLINE = "deadline"
    # The run reached its maximum lifetime unfinished.
    MAX_LIFETIME = "max_lifetime"
    CANCELLED = "cancelled"
    PAUSED = "paused"
    # Another job replaces it.
    REPLACED = "replaced"
    # An open job was closed because nobody added to it. It then completes, or fails with NO_TASKS.
    IDLE_TIMEOUT = "idle_timeout"


LIST_CODES = frozenset(
    {
        ReasonCode.LIST_UNREADABLE,
        ReasonCode.LIST_MISSING,
        ReasonCode.LIST_CHANGED,
        ReasonCode.LIST_REJECTED,
        ReasonCode.LIST_TOO_SPARSE,
    }
)
# The ingest failed. It can be resumed from its checkpoint.
INGEST_CODES = LIST_CODES | {ReasonCode.INGEST_FAILED}

ENDED = frozenset({RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED})
# Workers take references of runs in these states: tasks start while the ingest is in progress.
WORKABLE = frozenset({RunState.INGESTING, RunState.RUNNING})


def sources_of(target: RunState) -> frozenset[RunState]:
    """The states from which a run may move to `target`."""
    return frozenset(state for state, moves in MOVES.items() if target in moves)
