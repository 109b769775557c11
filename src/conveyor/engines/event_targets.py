"""The EventTargets seam: state machines and event buses on AWS that get the events of jobs. The operator names those
that each tenant may use, and the server calls no other, so that no tenant borrows the server's permissions."""

import re
from typing import Protocol

import msgspec

from conveyor.errors import EventTargetRefused
from conveyor.model import TenantId

# The group is the region. A state machine may have a version or an alias.
STATE_MACHINE = re.compile(r"arn:aws[a-z-]*:states:([a-z0-9-]{1,32}):[0-9]{12}:stateMachine:[\w.:+-]{1,200}", re.ASCII)
EVENT_BUS = re.compile(r"arn:aws[a-z-]*:events:([a-z0-9-]{1,32}):[0-9]{12}:event-bus/[\w./-]{1,256}", re.ASCII)


class EventMessage(msgspec.Struct, frozen=True):
    """An event to send. Every attempt sends the same one."""

    event_id: str
    # Its name, such as run.completed.
    event: str
    # When it happened, in ISO 8601.
    at: str
    # The payload of webhooks, JSON.
    payload: str


class SendOutcome(msgspec.Struct, frozen=True):
    """The outcome of an attempt: the HTTP status, if there was an answer, and an error code, unless it was accepted."""

    status: int | None = None
    error: str | None = None


class EventTargets(Protocol):
    """Sends events. Every method raises EventTargetRefused for a target that is not listed for the tenant."""

    def check(self, tenant: TenantId, arn: str) -> None:
        """Raise unless the tenant may use this target. It sends no request."""

    async def send(self, tenant: TenantId, arn: str, message: EventMessage) -> SendOutcome:
        """Start an execution of a state machine, or put an event on a bus; one attempt. An execution that exists
        already counts as started."""


class NoEventTargets:
    """The default: no target is listed."""

    def check(self, tenant: TenantId, arn: str) -> None:
        raise EventTargetRefused

    async def send(self, tenant: TenantId, arn: str, message: EventMessage) -> SendOutcome:
        raise EventTargetRefused
