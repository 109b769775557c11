"""The policies under deploy/aws are enough for every flow, and all of their actions are needed.

`pytest -rP tests/stacks/test_policies.py` prints the table of flows.
"""

import copy
from pathlib import Path
from typing import Any

import pytest

from conveyor.clock import SystemClock
from conveyor.errors import EngineFailed
from conveyor.system import engine_findings
from deploy.aws.generate.calls import CALLS, ROLES
from tests.stacks import policy_flows
from tests.stacks.policy_flows import FLOWS
from tests.stacks.policy_routes import every_route
from tests.support.gated_fleet import GatedFleet, Policies, checked_in, filled, gated_fleet, values_of
from tests.support.policy_gate import Need
from tests.support.target_site import Site

pytestmark = [pytest.mark.timeout(600), pytest.mark.server]

# So that the last jobs of a flow share a queue.
QUEUES = 3
# What no flow brings about, or only some runs of one.
RARE = {
    "dynamodb:UpdateContinuousBackups": "with pitr=true",
    "dynamodb:UpdateTable": "an index of a newer version, or a warm throughput",
    "s3:GetObjectVersion": "a list that names its version",
    "sqs:ChangeMessageVisibility": "a lease that is renewed, or a message that is given back",
    "sqs:SetQueueAttributes": "a control queue that somebody else made",
}


CHANGES = {
    "dynamodb:CreateTable",
    "dynamodb:UpdateTable",
    "dynamodb:UpdateTimeToLive",
    "s3:CreateBucket",
    "s3:PutLifecycleConfiguration",
    "sqs:CreateQueue",
    "sqs:SetQueueAttributes",
}


async def run_every_flow(fleet: GatedFleet) -> None:
    fleet.ledger.flow = "migrate"
    await fleet.migrate()
    fleet.ledger.flow = "doctor"
    await policy_flows.doctor(fleet)
    async with Site() as site, fleet.running() as running:
        for flow, roles in ((every_route, ("sweep", "schedule")), *FLOWS):
            fleet.ledger.flow = flow.__name__
            async with running.with_roles(roles):
                await flow(running, site)


async def test_every_flow_is_allowed(tmp_path: Path) -> None:
    async with gated_fleet(tmp_path, checked_in(), run_queue_limit=QUEUES) as fleet:
        try:
            await run_every_flow(fleet)
        finally:
            print(fleet.ledger.table())
        assert fleet.ledger.denied == {}
        assert idle_actions(fleet) == set()


def idle_actions(fleet: GatedFleet) -> set[str]:
    """Actions of the policies that no flow needed of any role."""
    allowed = {action for calls in CALLS.values() for actions in calls.values() for action in actions}
    return allowed - {need.action for _, _, need in fleet.ledger.needed} - RARE.keys()


def without(actions: set[str], *roles: str) -> Policies:
    """The policies, of which some lack these actions."""
    policies: dict[str, Any] = copy.deepcopy(dict(checked_in()))
    for role in roles:
        for statement in policies[role]["Statement"]:
            statement["Action"] = [each for each in statement["Action"] if each not in actions]
    return policies


def denied(fleet: GatedFleet) -> set[tuple[str, str]]:
    return {(role, need.action) for _, role, need in fleet.ledger.denied}


async def test_without_tag_queue_nothing_is_made(tmp_path: Path) -> None:
    """Every CreateQueue has tags."""
    async with gated_fleet(tmp_path, without({"sqs:TagQueue"}, "operator")) as fleet:
        with pytest.raises(EngineFailed, match="sqs:TagQueue"):
            await fleet.migrate()
        assert denied(fleet) == {("operator", "sqs:TagQueue")}


async def test_what_is_made_is_left_alone(tmp_path: Path) -> None:
    """A second `migrate`, as after the template: an operator who may change nothing is enough."""
    async with gated_fleet(tmp_path, checked_in()) as fleet:
        await fleet.migrate()
    async with gated_fleet(tmp_path, without(CHANGES, "operator")) as fleet:
        await fleet.migrate()
        assert fleet.ledger.denied == {}


async def test_without_list_queues_the_doctor_says_so(tmp_path: Path) -> None:
    """Jobs run all the same: tests/flow/test_shared_queue.py."""
    async with gated_fleet(tmp_path, without({"sqs:ListQueues"}, *ROLES)) as fleet:
        await fleet.migrate()
        findings = dict(await engine_findings(fleet.settings["operator"], SystemClock()))
        assert denied(fleet) == {("operator", "sqs:ListQueues")}
    (said,) = [problem for problem in findings.values() if problem is not None]
    assert "sqs:ListQueues is denied" in said
    assert "on the resource `*`" in said


def test_a_policy_is_for_this_installation_alone(tmp_path: Path) -> None:
    """Tables, queues and objects with another prefix are denied to every role."""
    values = values_of(tmp_path)
    tables = f"arn:aws:dynamodb:{values['AWS::Region']}:{values['AWS::AccountId']}:table"
    queues = f"arn:aws:sqs:{values['AWS::Region']}:{values['AWS::AccountId']}"
    for role, document in checked_in().items():
        policy = filled(document, values)
        assert policy.allows(Need("dynamodb:Query", f"{tables}/{values['TablePrefix']}-records"))
        for need in (
            Need("dynamodb:Query", f"{tables}/other-records"),
            Need("dynamodb:Query", f"{tables}/{values['TablePrefix']}-records-other"),
            Need("dynamodb:DeleteTable", f"{tables}/{values['TablePrefix']}-records"),
            Need("sqs:SendMessage", f"{queues}:other-control"),
            Need("s3:GetObject", f"arn:aws:s3:::{values['Bucket']}/other/key"),
            Need("s3:DeleteBucket", f"arn:aws:s3:::{values['Bucket']}"),
            Need("states:StartExecution", f"{values['StateMachineArn']}-other"),
        ):
            assert not policy.allows(need), (role, need)
