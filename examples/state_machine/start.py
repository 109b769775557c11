"""Have a state machine run a job and wait for it: python start.py NAME ROLE_ARN job.json

Makes the queues NAME-intake, NAME-reprocess and NAME-dead, and the state machine NAME, unless they are there.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from botocore.session import get_session

DEFINITION = Path(__file__).parents[2] / "deploy" / "stepfunctions" / "state-machine.asl.json"
QUEUES = {"IntakeQueueUrl": "intake", "ReprocessQueueUrl": "reprocess", "DeadLetterQueueUrl": "dead"}
ENDED = ("SUCCEEDED", "FAILED", "TIMED_OUT", "ABORTED")


def make(name: str, role: str) -> str:
    """The ARN of the state machine."""
    session = get_session()
    queues, machines = session.create_client("sqs"), session.create_client("stepfunctions")
    definition = DEFINITION.read_text()
    for variable, queue in QUEUES.items():
        url = queues.create_queue(QueueName=f"{name}-{queue}")["QueueUrl"]
        definition = definition.replace(f"${{{variable}}}", url)
    made = machines.create_state_machine(name=name, definition=definition, roleArn=role)
    arn: str = made["stateMachineArn"]
    return arn


def run(machine: str, job: dict[str, Any]) -> dict[str, Any]:
    """Start an execution with the job, and wait for its end."""
    client = get_session().create_client("stepfunctions")
    started = client.start_execution(stateMachineArn=machine, input=json.dumps({"job": job}))
    while True:
        seen: dict[str, Any] = client.describe_execution(executionArn=started["executionArn"])
        if seen["status"] in ENDED:
            return seen
        time.sleep(0.2)


def main(name: str, role: str, path: str) -> None:
    ended = run(make(name, role), json.loads(Path(path).read_text()))
    print(ended["status"])
    print(json.dumps(json.loads(ended["output"]), indent=2) if "output" in ended else ended.get("cause", ""))
    sys.exit(0 if ended["status"] == "SUCCEEDED" else 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
