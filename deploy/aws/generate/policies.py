"""From the table of calls to the policies: one document of IAM for each role, with placeholders.

`${AWS::Partition}`, `${AWS::Region}` and `${AWS::AccountId}` are those of CloudFormation; the others are what the URLs
of the settings name.
"""

import json
from pathlib import Path
from typing import Any

from deploy.aws.generate.calls import CALLS, ROLES, On

FOLDER = Path(__file__).parents[1] / "policies"

_TABLE = "arn:${AWS::Partition}:dynamodb:${AWS::Region}:${AWS::AccountId}:table/${TablePrefix}"

RESOURCES = {
    On.RECORDS: f"{_TABLE}-records",
    On.INDEXES: f"{_TABLE}-records/index/*",
    On.TASKS: f"{_TABLE}-tasks",
    On.QUEUES: "arn:${AWS::Partition}:sqs:${AWS::Region}:${AWS::AccountId}:${QueuePrefix}-*",
    On.QUEUE_NAMES: "*",
    On.BUCKET: "arn:${AWS::Partition}:s3:::${Bucket}",
    On.OBJECTS: "arn:${AWS::Partition}:s3:::${Bucket}/${BlobPrefix}/*",
    On.TASK_TOKENS: "*",
    On.STATE_MACHINES: "${StateMachineArn}",
    On.EVENT_BUSES: "${EventBusArn}",
    On.SOURCES: "arn:${AWS::Partition}:s3:::${SourceBucket}/*",
}

# With a customer key on the tables or the bucket, each role needs this beside its own policy.
KMS = "kms"
_KMS_SERVICES = ("dynamodb", "s3")


def policy(role: str) -> dict[str, Any]:
    """The policy of a role."""
    statements = [_statement(on, actions) for on, actions in CALLS[role].items()]
    return {"Version": "2012-10-17", "Statement": statements}


def kms_policy() -> dict[str, Any]:
    services = [f"{service}.${{AWS::Region}}.${{AWS::URLSuffix}}" for service in _KMS_SERVICES]
    statement = {
        "Sid": "CustomerKey",
        "Effect": "Allow",
        "Action": ["kms:Decrypt", "kms:GenerateDataKey"],
        "Resource": "${KeyArn}",
        "Condition": {"StringEquals": {"kms:ViaService": services}},
    }
    return {"Version": "2012-10-17", "Statement": [statement]}


def files() -> dict[Path, str]:
    """Every file of the folder, and what it holds."""
    documents = {role: policy(role) for role in ROLES} | {KMS: kms_policy()}
    return {FOLDER / f"{name}.json": json.dumps(document, indent=2) + "\n" for name, document in documents.items()}


def _statement(on: On, actions: tuple[str, ...]) -> dict[str, Any]:
    return {"Sid": on.value, "Effect": "Allow", "Action": sorted(actions), "Resource": RESOURCES[on]}
