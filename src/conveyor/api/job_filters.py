"""The filters of the listing of jobs, from the query parameters of a request."""

import re
from datetime import datetime
from typing import Annotated

from litestar.params import QueryParameter

from conveyor.errors import InvalidField
from conveyor.model import JobKind
from conveyor.read.job_search import JobFilter
from conveyor.states import ENDED, RunState

# All states of a job that has not finished.
ACTIVE = "active"
STATES = (ACTIVE, *RunState)
KINDS = tuple(JobKind)

_TIME = r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?(Z|[+-][0-9]{2}:[0-9]{2})"
_SCHEDULE_ID = re.compile(r"schedule_[0-9a-z]{26}")
_TIME_TEXT = re.compile(_TIME, re.ASCII)

JobText = Annotated[
    str | None,
    QueryParameter(min_length=1, max_length=200, description="Text in the name, ignoring case, or in the id."),
]
State = Annotated[
    str | None,
    QueryParameter(name="state", description=f"One of {', '.join(STATES)}; `{ACTIVE}` is any unfinished state."),
]
Kind = Annotated[str | None, QueryParameter(description=f"One of {', '.join(KINDS)}.")]
MadeBy = Annotated[str | None, QueryParameter(description="The id of the schedule that made the job.")]
CreatedAfter = Annotated[
    str | None, QueryParameter(description="Only jobs created at this time or later: ISO 8601 with a time zone.")
]
CreatedBefore = Annotated[
    str | None, QueryParameter(description="Only jobs created before this time: ISO 8601 with a time zone.")
]


def job_filter(
    text: str | None,
    state: str | None,
    kind: str | None,
    schedule_id: str | None,
    created_after: str | None,
    created_before: str | None,
) -> JobFilter:
    """The filter that the query parameters describe. Raises InvalidField."""
    if kind is not None and kind not in KINDS:
        raise InvalidField(f"`kind` must be one of {', '.join(KINDS)}.", field="kind")
    if schedule_id is not None and not _SCHEDULE_ID.fullmatch(schedule_id):
        raise InvalidField("`schedule_id` must be the id of a schedule.", field="schedule_id")
    return JobFilter(
        text,
        _states(state),
        None if kind is None else JobKind(kind),
        schedule_id,
        _time("created_after", created_after),
        _time("created_before", created_before),
    )


def _states(state: str | None) -> frozenset[RunState] | None:
    if state is None:
        return None
    if state not in STATES:
        raise InvalidField(f"`state` must be one of {', '.join(STATES)}.", field="state")
    return frozenset(RunState) - ENDED if state == ACTIVE else frozenset({RunState(state)})


def _time(name: str, text: str | None) -> float | None:
    try:
        if text is None:
            return None
        if _TIME_TEXT.fullmatch(text):
            return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        pass
    raise InvalidField(
        f"`{name}` must be a time in ISO 8601 with a time zone, such as 2026-11-02T08:00:00Z.", field=name
    )
