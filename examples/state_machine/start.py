"""Run a job from a state machine and wait for it: python start.py NAME ROLE_ARN job.json

Creates the queues NAME-intake, NAME-reprocess and NAME-dead, and the state machine NAME, unless they exist.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from botocore.session import get_session

DEFINITION = Path(__file__).parents[2] / "deploy" / "stepfunctions" / "state-machine.asl.json"
QUEUES = {"IntakeQueueUrl": "intake", "ReprocessQueueUrl": "reprocess", "DeadLetterQueueUrl": "dead"}
FINISHED = ("SUCCEEDED", "FAILED", "TIMED_OUT", "ABORTED")


def create(name: str, role: str) -> str:
    """Create the queues and the state machine. Return its ARN."""
    session = get_session()
    queues, machines = session.create_client("sqs"), session.create_client("stepfunctions")
    definition = DEFINITION.read_text()
    for variable, queue in QUEUES.items():
        url = queues.create_queue(QueueName=f"{name}-{queue}")["QueueUrl"]
        definition = definition.replace(f"${{{variable}}}", url)
    machine = machines.create_state_machine(name=name, definition=definition, roleArn=role)
    arn: str = machine["stateMachineArn"]
    return arn


def run(machine: str, job: dict[str, Any]) -> dict[str, Any]:
    """Start an execution with the job, and wait until it finishes."""
    client = get_session().create_client("stepfunctions")
    started = client.start_execution(stateMachineArn=machine, input=json.dumps({"job": job}))
    while True:
        execution: dict[str, Any] = client.describe_execution(executionArn=started["executionArn"])
        if execution["status"] in FINISHED:
            return execution
        time.sleep(0.2)


def main(name: str, role: str, path: str) -> None:
    result = run(create(name, role), json.loads(Path(path).read_text()))
    print(result["status"])
    print(json.dumps(json.loads(result["output"]), indent=2) if "output" in result else result.get("cause", ""))
    sys.exit(0 if result["status"] == "SUCCEEDED" else 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
