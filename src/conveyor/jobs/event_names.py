"""The names of events, and the receivers that a job names in `notify`.

An outbox event is written in one step with the change that it reports. The dispatcher sends it to the endpoints of its
tenant and to the receivers of its job, under the id that `/events` and the stream show too.
"""

from collections.abc import Collection, Sequence
from typing import TypeAlias

import msgspec

from conveyor.egress.target_guard import BadUrl, TargetRefused, host_refusal, parse_url
from conveyor.engines.records import Document
from conveyor.errors import InvalidField
from conveyor.jobs.secrets import HIDDEN
from conveyor.model import Job, JobId

# The last event of a run, unless it is resumed.
FINAL_EVENTS = frozenset({"run.completed", "run.failed", "run.cancelled"})
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
        *FINAL_EVENTS,
        "tasks.failed",
        "export.ready",
        "export.failed",
    }
)

# The kinds of the documents of a tenant's endpoints, and of the `notify` entries of a job.
WEBHOOK = "webhook"
NOTIFY = "notify"
MAX_NOTIFY = 10


class WebhookNotify(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="webhook", tag_field="type"
):
    """Send each event of the job as a POST, to a URL or to an endpoint of the tenant. Without `events`, all events."""

    url: str | None = None
    endpoint_id: str | None = None
    events: Sequence[str] | None = None


class StepFunctionsNotify(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="step_functions", tag_field="type"
):
    """Answer a state machine that waits with a task token when the job finishes, and send heartbeats until then. The
    token is stored sealed, in a document of another kind (callbacks.py)."""

    task_token: str
    # HeartbeatSeconds of the waiting state; None: the default of the server.
    heartbeat_seconds: float | None = None
    # Seconds without progress after which it is answered WORKER_STUCK; None: the default of the server.
    stuck_after: float | None = None
    # The format of an export to make when the job has finished; the answer then has a link to it.
    export: str | None = None


class StartExecutionNotify(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="start_execution", tag_field="type"
):
    """Start an execution of a state machine for each event. Without `events`, when a run finishes."""

    state_machine_arn: str
    events: Sequence[str] | None = None


class EventBridgeNotify(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="eventbridge", tag_field="type"
):
    """Put each event on a bus of EventBridge. Without `events`, when a run finishes."""

    event_bus_arn: str
    events: Sequence[str] | None = None


# An entry of a job's `notify`. A new way to notify is one more struct with a tag of its own.
Notify: TypeAlias = WebhookNotify | StepFunctionsNotify | StartExecutionNotify | EventBridgeNotify
# The entries that get deliveries.
DeliveredNotify: TypeAlias = WebhookNotify | StartExecutionNotify | EventBridgeNotify

_notify: msgspec.json.Decoder[DeliveredNotify] = msgspec.json.Decoder(DeliveredNotify)


def is_wanted(events: Collection[str] | None, event: str) -> bool:
    """Whether a filter lets an event pass. None passes all events, an empty filter none."""
    return events is None or event in events


def notify_id(job_id: JobId, number: int) -> str:
    return f"{job_id}.{number}"


def notify_documents(job: Job, entries: Sequence[Notify]) -> list[Document]:
    """The documents of receivers that are written, and removed, with the job."""
    return [
        Document(NOTIFY, job.tenant, notify_id(job.job_id, number), msgspec.json.encode(entry), job_id=job.job_id)
        for number, entry in enumerate(entries)
        if not isinstance(entry, StepFunctionsNotify)
    ]


def notify_of(row: Document) -> DeliveredNotify:
    return _notify.decode(row.body)


def wanted_events(entry: DeliveredNotify) -> Collection[str] | None:
    """The filter of an entry: an execution or an entry on a bus reports the end of a run, unless it says otherwise."""
    if entry.events is None and not isinstance(entry, WebhookNotify):
        return FINAL_EVENTS
    return entry.events


def target_arn(entry: StartExecutionNotify | EventBridgeNotify) -> str:
    return entry.state_machine_arn if isinstance(entry, StartExecutionNotify) else entry.event_bus_arn


def check_target(url: str, allow_private: bool, field: str = "url") -> None:
    """Raise for a URL that no webhook can be sent to. Each attempt checks the addresses of its host."""
    if HIDDEN in url:
        raise InvalidField(f"`{field}` was copied from an answer, which hides a part of it. Send the URL.", field=field)
    try:
        parsed = parse_url(url)
        reason = None if allow_private else host_refusal(parsed.host_str or "")
    except BadUrl as error:
        raise InvalidField(f"`{field}`: {error.message}.", field=field) from None
    if reason is not None:
        raise TargetRefused(f"`{field}`: the target is not public ({reason}); CONVEYOR_ALLOW_PRIVATE_TARGETS allows it")


def check_events(events: Sequence[str] | None, field: str = "events") -> None:
    """Raise InvalidField for an unknown event."""
    unknown = [name for name in events or () if name not in EVENTS]
    if unknown:
        raise InvalidField(
            f"`{field}`: unknown event `{unknown[0][:100]}`. Use some of {', '.join(sorted(EVENTS))}.", field=field
        )
