"""IAM between a role and the emulator: a request needs permissions on resources, and is denied if a policy lacks one.

A request is read as AWS reads it: a transaction needs the permission of each part, a query of an index one on the
index, CreateQueue with tags `sqs:TagQueue` too, and who may not list a bucket is not told that an object is missing.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from tests.faults.shim import Answer, Call, Forward, json_answer
from tests.servers.aws import REGION

ACCOUNT = "000000000000"

_TABLE = f"arn:aws:dynamodb:{REGION}:{ACCOUNT}:table/"
_QUEUE = f"arn:aws:sqs:{REGION}:{ACCOUNT}:"
_BATCHES = {
    "SendMessageBatch": "SendMessage",
    "DeleteMessageBatch": "DeleteMessage",
    "ChangeMessageVisibilityBatch": "ChangeMessageVisibility",
}
_PARTS = {"Put": "PutItem", "Update": "UpdateItem", "Delete": "DeleteItem", "ConditionCheck": "ConditionCheckItem"}
_STATEMENT = re.compile(r'(INSERT INTO|UPDATE|DELETE FROM|SELECT\b.*?\bFROM)\s+"([^"]+)"', re.DOTALL)
_PARTIQL = {"INSERT": "PartiQLInsert", "UPDATE": "PartiQLUpdate", "DELETE": "PartiQLDelete", "SELECT": "PartiQLSelect"}
_DELETED_KEY = re.compile(rb"<Key>([^<]+)</Key>")


class Need(NamedTuple):
    """A permission that a request needs."""

    action: str
    resource: str


class Policy:
    """A document of IAM that only allows."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._allowed = list(_statements(document))

    def allows(self, need: Need) -> bool:
        return any(
            fnmatchcase(need.action.lower(), action) and fnmatchcase(need.resource, resource)
            for action, resource in self._allowed
        )


def _statements(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for statement in document["Statement"]:
        assert statement["Effect"] == "Allow"
        assert statement.keys() <= {"Sid", "Effect", "Action", "Resource"}, "the gate knows no conditions"
        for action in _listed(statement["Action"]):
            for resource in _listed(statement["Resource"]):
                assert "${" not in resource, resource
                # fnmatch would read a bracket as a set.
                assert "[" not in resource
                yield action.lower(), resource


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


@dataclass
class Ledger:
    """What each role needed, and what it was denied, by the flow in which that was."""

    flow: str = "start"
    needed: Counter[tuple[str, str, Need]] = field(default_factory=Counter)
    denied: Counter[tuple[str, str, Need]] = field(default_factory=Counter)

    def table(self) -> str:
        """Flow by flow: the calls that were allowed, and those that were denied."""
        flows = list(dict.fromkeys(flow for flow, _, _ in [*self.needed, *self.denied]))
        rows = ["| flow | calls | permissions used | roles | denied |", "|---|---|---|---|---|"]
        for flow in flows:
            used = {need.action for name, _, need in self.needed if name == flow}
            roles = sorted({role for name, role, _ in self.needed if name == flow})
            calls, denied = (
                sum(count for (name, _, _), count in counted.items() if name == flow)
                for counted in (self.needed, self.denied)
            )
            rows.append(f"| {flow} | {calls} | {len(used)} | {', '.join(roles)} | {denied} |")
        return "\n".join(rows)


class PolicyGate:
    """An interceptor of the shim (tests/faults/shim.py): the calls of one role, under its policy."""

    def __init__(self, role: str, policy: Policy, ledger: Ledger) -> None:
        self._role = role
        self._policy = policy
        self._ledger = ledger

    async def __call__(self, call: Call, forward: Forward) -> Answer:
        needs = list(needs_of(call))
        denied = [need for need in needs if not self._policy.allows(need)]
        for need in denied:
            self._ledger.denied[self._ledger.flow, self._role, need] += 1
        if denied:
            return _refusal(call, denied[0])
        for need in needs:
            self._ledger.needed[self._ledger.flow, self._role, need] += 1
        answer = await forward(call)
        if answer.status == 404 and needs and needs[0].action == "s3:GetObject":
            listing = Need("s3:ListBucket", needs[0].resource.partition("/")[0])
            if not self._policy.allows(listing):
                self._ledger.denied[self._ledger.flow, self._role, listing] += 1
                return _refusal(call, listing)
            self._ledger.needed[self._ledger.flow, self._role, listing] += 1
        return answer


def needs_of(call: Call) -> Iterator[Need]:
    """The permissions that a request needs."""
    service, _, action = call.headers.get("X-Amz-Target", "").partition(".")
    if service == "DynamoDB_20120810":
        return (Need(f"dynamodb:{name}", _TABLE + table) for name, table in _of_dynamodb(action, call.payload))
    if service == "AmazonSQS":
        return _of_sqs(action, call.payload)
    if service == "AWSStepFunctions":
        return iter([Need(f"states:{action}", call.payload.get("stateMachineArn", "*"))])
    if service == "AWSEvents":
        return (Need(f"events:{action}", entry["EventBusName"]) for entry in call.payload["Entries"])
    return _of_s3(call)


def _of_dynamodb(action: str, payload: dict[str, Any]) -> Iterable[tuple[str, str]]:
    if action == "":
        return []
    if action.startswith("Transact"):
        parts = [next(iter(each.items())) for each in payload["TransactItems"]]
        return [(_PARTS[kind], part["TableName"]) for kind, part in parts]
    if action in ("BatchGetItem", "BatchWriteItem"):
        return [(action, table) for table in payload["RequestItems"]]
    if action == "BatchExecuteStatement":
        found = [_STATEMENT.match(each["Statement"]) for each in payload["Statements"]]
        assert all(found), payload
        return [(_PARTIQL[each[1].split()[0]], each[2]) for each in found if each is not None]
    if "IndexName" in payload:
        return [(action, f"{payload['TableName']}/index/{payload['IndexName']}")]
    return [(action, payload["TableName"])]


def _of_sqs(action: str, payload: dict[str, Any]) -> Iterator[Need]:
    if action == "ListQueues":
        yield Need("sqs:ListQueues", "*")
        return
    name = payload.get("QueueName") or payload["QueueUrl"].rpartition("/")[2]
    yield Need(f"sqs:{_BATCHES.get(action, action)}", _QUEUE + name)
    if payload.get("tags"):
        yield Need("sqs:TagQueue", _QUEUE + name)


_OF_OBJECT = {
    "GET": ("s3:GetObject", "s3:ListMultipartUploadParts"),
    "HEAD": ("s3:GetObject", "s3:GetObject"),
    "PUT": ("s3:PutObject", "s3:PutObject"),
    "POST": ("s3:PutObject", "s3:PutObject"),
    "DELETE": ("s3:DeleteObject", "s3:AbortMultipartUpload"),
}
_OF_BUCKET = {
    ("GET", "list-type"): "s3:ListBucket",
    ("HEAD", ""): "s3:ListBucket",
    ("PUT", ""): "s3:CreateBucket",
    ("GET", "lifecycle"): "s3:GetLifecycleConfiguration",
    ("PUT", "lifecycle"): "s3:PutLifecycleConfiguration",
}


def _of_s3(call: Call) -> Iterator[Need]:
    parts = urlsplit(call.path)
    bucket, _, key = unquote(parts.path).removeprefix("/").partition("/")
    arn = f"arn:aws:s3:::{bucket}"
    query = parse_qs(parts.query, keep_blank_values=True)
    if not bucket:
        # Whether DynamoDB answers, and what time it is there: unsigned.
        return
    if key:
        plain, of_parts = _OF_OBJECT[call.method]
        action = of_parts if "uploadId" in query else plain
        yield Need("s3:GetObjectVersion" if "versionId" in query else action, f"{arn}/{key}")
    elif "delete" in query:
        for match in _DELETED_KEY.finditer(call.body):
            yield Need("s3:DeleteObject", f"{arn}/{match[1].decode()}")
    else:
        asked = next((name for name in ("list-type", "lifecycle") if name in query), "")
        yield Need(_OF_BUCKET[call.method, asked], arn)


def _refusal(call: Call, need: Need) -> Answer:
    """As each service puts it."""
    said = f"User is not authorized to perform: {need.action} on resource: {need.resource}"
    service = call.headers.get("X-Amz-Target", "").partition(".")[0]
    if service == "AmazonSQS":
        code = "AccessDenied"
        headers = {"x-amzn-query-error": f"{code};Sender", "Content-Type": "application/x-amz-json-1.0"}
        return Answer(403, json.dumps({"__type": code, "message": said}).encode(), headers)
    if service:
        return json_answer(400, {"__type": "com.amazon.coral.service#AccessDeniedException", "Message": said})
    body = f'<?xml version="1.0"?><Error><Code>AccessDenied</Code><Message>{said}</Message></Error>'
    return Answer(403, b"" if call.method == "HEAD" else body.encode(), {"Content-Type": "application/xml"})
