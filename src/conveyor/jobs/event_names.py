"""What is told of jobs: the names of events, and whom a job asked to tell of its own.

A notice is written in one step with the change that it tells of. From there it is passed on: to the endpoints of its
tenant and to whom its job named, under the id that `/events` and the stream show too.
"""

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from conveyor.egress.target_guard import BadUrl, TargetRefused, host_refusal, parse_url
from conveyor.engines.records import Document
from conveyor.errors import InvalidField
from conveyor.model import Job, JobId

# The last thing that is told of a run, unless it is resumed.
ENDS = frozenset({"run.completed", "run.failed", "run.cancelled"})
EVENTS = frozenset(
    {
        "job.accepted",
        "job.ingested",
        "job.changed",
        "run.added",
        "run.progress",
        "run.overdue",
        "run.paused",
        "run.resumed",
        *ENDS,
        "tasks.failed",
        "export.ready",
        "export.failed",
    }
)

# The kind of the rows of a tenant's endpoints, and of those that say whom a job wants told.
WEBHOOK = "webhook"
NOTIFY = "notify"
MAX_NOTIFY = 10


class WebhookNotify(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="webhook", tag_field="type"
):
    """A POST for each event of the job: to a URL, or to an endpoint of the tenant. Without `events`, for all of
    them."""

    url: str | None = None
    endpoint_id: str | None = None
    events: Sequence[str] | None = None


class StepFunctionsNotify(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="step_functions", tag_field="type"
):
    """The end of the job as the answer to a state machine that waits with a task token, and heartbeats until then. The
    token is kept sealed, in a row of another kind (callbacks.py)."""

    task_token: str
    # HeartbeatSeconds of the state that waits; None: as the operator has set it.
    heartbeat_seconds: float | None = None
    # Seconds without progress after which it is told that we are stuck; None: as the operator has set it.
    stuck_after: float | None = None
    # The format of an export that is made at the end; the answer then has a link to it.
    export: str | None = None


# What an entry of a job's `notify` may be; another way of telling is one more struct with a tag of its own.
Notify: TypeAlias = WebhookNotify | StepFunctionsNotify

_notify = msgspec.json.Decoder(WebhookNotify)


def wanted(events: Sequence[str] | None, event: str) -> bool:
    """Whether a filter lets an event pass. None lets all, an empty one none."""
    return events is None or event in events


def notify_id(job_id: JobId, number: int) -> str:
    return f"{job_id}.{number}"


def notify_rows(job: Job, entries: Sequence[Notify]) -> list[Document]:
    """The rows of webhooks that are written, and go, with the job."""
    return [
        Document(NOTIFY, job.tenant, notify_id(job.job_id, number), msgspec.json.encode(entry), job_id=job.job_id)
        for number, entry in enumerate(entries)
        if isinstance(entry, WebhookNotify)
    ]


def notify_of(row: Document) -> WebhookNotify:
    return _notify.decode(row.body)


def check_target(url: str, allow_private: bool, field: str = "url") -> None:
    """Raise for a URL that no webhook can go to. What its name leads to is checked by each try."""
    try:
        parsed = parse_url(url)
        reason = None if allow_private else host_refusal(parsed.host_str or "")
    except BadUrl as error:
        raise InvalidField(f"`{field}`: {error.message}.", field=field) from None
    if reason is not None:
        raise TargetRefused(f"`{field}`: the target is not public ({reason}); CONVEYOR_ALLOW_PRIVATE_TARGETS allows it")


def check_events(events: Sequence[str] | None, field: str = "events") -> None:
    """Raise for an event that there is not."""
    unknown = [name for name in events or () if name not in EVENTS]
    if unknown:
        raise InvalidField(
            f"`{field}`: there is no event `{unknown[0][:100]}`; there are {', '.join(sorted(EVENTS))}.", field=field
        )
