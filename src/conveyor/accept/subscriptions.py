"""The `notify` entries of a job: their checks, and the documents that store them."""

from collections.abc import Sequence

from conveyor.engines.event_targets import EVENT_BUS, STATE_MACHINE
from conveyor.engines.records import Document
from conveyor.errors import EventTargetRefused, InvalidField
from conveyor.jobs.callbacks import callback_documents
from conveyor.jobs.event_names import (
    MAX_NOTIFY,
    WEBHOOK,
    EventBridgeNotify,
    Notify,
    StartExecutionNotify,
    StepFunctionsNotify,
    WebhookNotify,
    check_events,
    check_target,
    notify_documents,
    target_arn,
)
from conveyor.model import Job, TenantId
from conveyor.system import System

# The maximum length of a task token of Step Functions.
MAX_TOKEN = 2048
EXPORTS = ("zip", "jsonl", "csv", "parquet")

_SECONDS = {"heartbeat_seconds": (1, 365 * 86_400), "stuck_after": (1, 365 * 86_400)}


async def check_notify(system: System, tenant: TenantId, entries: Sequence[Notify]) -> None:
    """Raise InvalidField, TargetRefused or EventTargetRefused, with the number of the invalid entry."""
    if len(entries) > MAX_NOTIFY:
        raise InvalidField(f"`notify` can have at most {MAX_NOTIFY} entries.", field="notify")
    for number, entry in enumerate(entries):
        field = f"notify[{number}]"
        if isinstance(entry, WebhookNotify):
            await _check_webhook(system, tenant, entry, field)
        elif isinstance(entry, StepFunctionsNotify):
            _check_callback(system, entry, field)
        else:
            _check_event_target(system, tenant, entry, field)


def refuse_tokens(entries: Sequence[Notify]) -> None:
    """Raise InvalidField for a task token in a schedule: a token is valid for one job."""
    for number, entry in enumerate(entries):
        if isinstance(entry, StepFunctionsNotify):
            raise InvalidField("A schedule cannot have a task token.", field=f"notify[{number}]")


def subscription_documents(system: System, job: Job, entries: Sequence[Notify]) -> list[Document]:
    """The documents to write with the job."""
    return [
        *notify_documents(job, entries),
        *callback_documents(job, entries, system.step_functions, system.settings),
    ]


async def _check_webhook(system: System, tenant: TenantId, entry: WebhookNotify, field: str) -> None:
    if (entry.url is None) == (entry.endpoint_id is None):
        raise InvalidField(f"`{field}` must have `url` or `endpoint_id`, and not both.", field=field)
    check_events(entry.events, f"{field}.events")
    if entry.url is not None:
        check_target(entry.url, system.settings.allow_private_targets, f"{field}.url")
    elif await system.records.documents.document(WEBHOOK, tenant, entry.endpoint_id or "") is None:
        raise InvalidField(f"`{field}.endpoint_id`: the endpoint was not found.", field=f"{field}.endpoint_id")


def _check_event_target(
    system: System, tenant: TenantId, entry: StartExecutionNotify | EventBridgeNotify, field: str
) -> None:
    if isinstance(entry, StartExecutionNotify):
        name, form, noun = "state_machine_arn", STATE_MACHINE, "a state machine"
    else:
        name, form, noun = "event_bus_arn", EVENT_BUS, "an event bus"
    arn = target_arn(entry)
    if not form.fullmatch(arn):
        raise InvalidField(f"`{field}.{name}` must be the ARN of {noun}.", field=f"{field}.{name}")
    check_events(entry.events, f"{field}.events")
    try:
        system.event_targets.check(tenant, arn)
    except EventTargetRefused as error:
        raise EventTargetRefused(f"`{field}.{name}`: {error.message}", field=f"{field}.{name}") from None


def _check_callback(system: System, entry: StepFunctionsNotify, field: str) -> None:
    if system.step_functions is None:
        raise InvalidField(
            f"`{field}`: this server has no access to Step Functions. Set CONVEYOR_STEP_FUNCTIONS.", field=field
        )
    if not 0 < len(entry.task_token) <= MAX_TOKEN or not entry.task_token.isascii():
        raise InvalidField(f"`{field}.task_token` is not a valid task token.", field=f"{field}.task_token")
    for name, (lowest, highest) in _SECONDS.items():
        value = getattr(entry, name)
        if value is not None and not lowest <= value <= highest:
            raise InvalidField(f"`{field}.{name}` must be between {lowest} and {highest}.", field=f"{field}.{name}")
    if entry.export is not None and entry.export not in EXPORTS:
        raise InvalidField(f"`{field}.export` must be one of {', '.join(EXPORTS)}.", field=f"{field}.export")
