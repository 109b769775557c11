"""State machines and event buses on an emulator; what arrives on a bus is read from a queue."""

import json
import os
from functools import cache
from typing import Any

import botocore.session

from tests.servers.aws import CREDENTIALS, REGION, aws

_ROLE = "arn:aws:iam::000000000000:role/conveyor"
_PASS = {"StartAt": "Done", "States": {"Done": {"Type": "Pass", "End": True}}}


class EventTargetServer:
    """A state machine that ends at once, and a bus."""

    def __init__(self, endpoint: str, name: str, *, bus: bool = True) -> None:
        os.environ.update(CREDENTIALS)
        self.endpoint = endpoint
        made = self._steps.create_state_machine(name=name, definition=json.dumps(_PASS), roleArn=_ROLE)
        self.machine: str = made["stateMachineArn"]
        self.bus = ""
        if bus:
            self._make_bus(name)

    def listed(self, tenant: str = "acme", endpoint: str | None = None) -> str:
        """The entries of CONVEYOR_EVENT_TARGETS."""
        arns = [self.machine, self.bus] if self.bus else [self.machine]
        return " ".join(f"{tenant}={arn}?endpoint={endpoint or self.endpoint}" for arn in arns)

    def executions(self) -> dict[str, Any]:
        """The inputs of the executions, by name."""
        listed = self._steps.list_executions(stateMachineArn=self.machine)["executions"]
        return {
            each["name"]: json.loads(self._steps.describe_execution(executionArn=each["executionArn"])["input"])
            for each in listed
        }

    def put(self) -> list[dict[str, Any]]:
        """The events that arrived on the bus since the last call."""
        events = []
        while found := self._queues.receive_message(QueueUrl=self._queue, MaxNumberOfMessages=10).get("Messages"):
            for message in found:
                events.append(json.loads(message["Body"]))
                self._queues.delete_message(QueueUrl=self._queue, ReceiptHandle=message["ReceiptHandle"])
        return events

    @property
    def _steps(self) -> Any:
        return _client("stepfunctions", self.endpoint)

    @property
    def _queues(self) -> Any:
        return _client("sqs", self.endpoint)

    def _make_bus(self, name: str) -> None:
        events = _client("events", self.endpoint)
        self.bus = events.create_event_bus(Name=name)["EventBusArn"]
        self._queue = self._queues.create_queue(QueueName=f"{name}-bus")["QueueUrl"]
        asked = self._queues.get_queue_attributes(QueueUrl=self._queue, AttributeNames=["QueueArn"])
        events.put_rule(Name=name, EventBusName=name, EventPattern=json.dumps({"source": ["conveyor"]}))
        arn = asked["Attributes"]["QueueArn"]
        events.put_targets(Rule=name, EventBusName=name, Targets=[{"Id": "queue", "Arn": arn}])


@cache
def shared_targets() -> EventTargetServer:
    """One for all tests of this process."""
    return EventTargetServer(aws(), "shared-targets")


@cache
def _client(service: str, endpoint: str) -> Any:
    return botocore.session.get_session().create_client(service, region_name=REGION, endpoint_url=endpoint)
