"""What stands under deploy/aws is what the generator makes, and what the engines expect."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from conveyor.clock import SystemClock
from conveyor.deploy.aws_stack import FOLDER, SIZES, size_values, template_parts
from conveyor.deploy.template_conditions import true_conditions
from conveyor.engines.dynamodb.address import parse_address
from conveyor.engines.dynamodb.schema import INDEXES, TTL, create_payload
from conveyor.engines.queue import CONTROL
from conveyor.engines.s3 import Bucket
from conveyor.engines.sqs.address import parse
from conveyor.engines.sqs.inbox import parse as inbox
from conveyor.engines.sqs.queues import KEEP_DEAD_SECONDS, KEEP_SECONDS, MAX_RECEIVES
from conveyor.settings import Settings
from deploy.aws.generate.calls import CALLS, ROLES, On
from deploy.aws.generate.policies import RESOURCES, policy
from deploy.aws.generate.template import files

ROOT = Path(__file__).parents[3]


class Loader(yaml.SafeLoader):
    """Reads the short forms of functions as {tag: argument}."""


def _function(loader: Any, suffix: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return {suffix: loader.construct_scalar(node)}
    assert isinstance(node, yaml.SequenceNode)
    return {suffix: loader.construct_sequence(node, deep=True)}


Loader.add_multi_constructor("!", _function)


@pytest.fixture(scope="module")
def template() -> dict[str, Any]:
    read: dict[str, Any] = yaml.load((FOLDER / "conveyor.yaml").read_text(), Loader)
    return read


def properties(template: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = template["Resources"][name]["Properties"]
    return found


def test_every_file_is_what_the_generator_makes() -> None:
    stale = [path.name for path, text in files().items() if not path.exists() or path.read_text() != text]
    assert stale == [], "run `python -m deploy.aws.generate`"


def test_the_folder_has_no_other_policies() -> None:
    made = {path for path in files() if path.parent.name == "policies"}
    assert set((ROOT / "deploy/aws/policies").iterdir()) == made


def test_the_links_lead_to_the_package() -> None:
    for name in ("conveyor.yaml", *(f"{size}.json" for size in SIZES)):
        assert (ROOT / "deploy/aws" / name).resolve() == FOLDER / name


@pytest.mark.parametrize("role", ROLES)
def test_a_policy_names_actions_and_resources(role: str) -> None:
    statements = policy(role)["Statement"]
    assert [On(statement["Sid"]) for statement in statements] == list(CALLS[role])
    for statement in statements:
        assert not any("*" in action for action in statement["Action"]), statement
        if statement["Resource"] == "*":
            assert set(statement["Action"]) <= {
                "sqs:ListQueues",
                "states:SendTaskFailure",
                "states:SendTaskHeartbeat",
                "states:SendTaskSuccess",
            }


def test_every_resource_has_the_partition_of_the_stack() -> None:
    assert not any("arn:aws:" in resource for resource in RESOURCES.values())
    assert "arn:aws:" not in (FOLDER / "conveyor.yaml").read_text().replace("arn:aws:s3:::BUCKET/*", "")


def test_every_role_has_its_policy_in_the_template(template: dict[str, Any]) -> None:
    for role in ROLES:
        (inline,) = properties(template, f"{role.capitalize()}Role")["Policies"]
        statements = [_unconditional(each) for each in inline["PolicyDocument"]["Statement"]]
        made = policy(role)["Statement"]
        assert [(each["Sid"], each["Action"]) for each in statements] == [
            (each["Sid"], each["Action"]) for each in made
        ]


def _unconditional(statement: Any) -> Any:
    return statement["If"][1] if "If" in statement else statement


@pytest.mark.parametrize(("name", "indexes"), [("RecordsTable", INDEXES), ("TasksTable", {})])
def test_a_table_is_as_the_engine_makes_it(template: dict[str, Any], name: str, indexes: Any) -> None:
    made = properties(template, name)
    suffix = name.removesuffix("Table").lower()
    expected = create_payload("x", indexes)
    assert {key: made[key] for key in expected} == {**expected, "TableName": {"Sub": f"${{Prefix}}-{suffix}"}}
    assert made["TimeToLiveSpecification"] == {"AttributeName": TTL, "Enabled": True}
    assert made["PointInTimeRecoverySpecification"] == {"PointInTimeRecoveryEnabled": True}
    assert template["Resources"][name]["DeletionPolicy"] == "RetainExceptOnCreate"


def test_queues_are_as_the_engine_makes_them(template: dict[str, Any]) -> None:
    address = parse("sqs://eu-central-1/pre")
    control, dead = properties(template, "ControlQueue"), properties(template, "DeadLetterQueue")
    assert control["QueueName"]["Sub"].replace("${Prefix}", "pre") == address.name_of(CONTROL)
    assert dead["QueueName"]["Sub"].replace("${Prefix}", "pre") == address.dead
    assert (control["MessageRetentionPeriod"], dead["MessageRetentionPeriod"]) == (KEEP_SECONDS, KEEP_DEAD_SECONDS)
    expected = {"deadLetterTargetArn": {"GetAtt": "DeadLetterQueue.Arn"}, "maxReceiveCount": MAX_RECEIVES}
    assert control["RedrivePolicy"] == expected


def test_the_lifecycle_is_as_migrate_makes_it(template: dict[str, Any]) -> None:
    (rule,) = properties(template, "Bucket")["LifecycleConfiguration"]["Rules"]
    bucket = Bucket("bucket", "pre", "eu-central-1", None, SystemClock())
    (expected,) = bucket._our_rules()
    made = {
        key: value["Sub"].replace("${Prefix}", "pre") if isinstance(value, dict) and "Sub" in value else value
        for key, value in rule.items()
    }
    assert made == {
        "Id": expected["ID"],
        "Status": expected["Status"],
        "Prefix": expected["Filter"]["Prefix"],
        "AbortIncompleteMultipartUpload": expected["AbortIncompleteMultipartUpload"],
    }


def test_every_value_of_a_size_is_a_parameter(template: dict[str, Any]) -> None:
    names = [set(size_values(size)) for size in SIZES]
    assert names[0] == names[1] == names[2] <= set(template["Parameters"])


def test_the_command_reads_the_template_as_it_is(template: dict[str, Any]) -> None:
    parts = template_parts()
    resources = {name: (each["Type"], each.get("Condition", "")) for name, each in template["Resources"].items()}
    assert parts.resources == resources
    defaults = {name: each.get("Default") for name, each in template["Parameters"].items()}
    assert parts.defaults == {name: None if value is None else str(value) for name, value in defaults.items()}


CHANGES: tuple[dict[str, str], ...] = (
    {},
    {"Parts": "storage"},
    {"Restored": "-r1", "CacheReplicas": "0", "Scaling": "no"},
    {"TasksOnPostgres": "yes", "KeyArn": "arn:aws:kms:x:1:key/1", "CoordinatorUrl": "redis://x"},
    {"StepFunctions": "yes", "MonitorBucket": "b", "MonitorKey": "k", "AlarmEmail": "a@example.com"},
    {"InterfaceEndpoints": "yes", "CertificateArn": "arn", "PublicUrl": "https://x", "EventBusArns": "arn:1,arn:2"},
    {"VpcId": "vpc-1", "MonitorBucket": "b", "StateMachineArns": "arn:1", "SourceObjectArns": "arn:2"},
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: " ".join(change) or "defaults")
def test_the_command_knows_which_conditions_hold(template: dict[str, Any], change: dict[str, str]) -> None:
    defaults = {name: str(each.get("Default", "")) for name, each in template["Parameters"].items()}
    parameters = {**defaults, **change}

    def value(expression: Any) -> Any:
        if not isinstance(expression, dict):
            return expression
        ((function, given),) = expression.items()
        match function:
            case "Ref":
                return parameters[given]
            case "Condition":
                return value(template["Conditions"][given])
            case "Join":
                return value(given[1])
        values = [value(each) for each in given]
        return {"Equals": values[0] == values[-1], "Not": not values[0], "And": all(values), "Or": any(values)}[
            function
        ]

    expected = {name for name, expression in template["Conditions"].items() if value(expression)}
    assert true_conditions(template_parts().conditions, parameters) == expected


def test_the_state_machine_is_the_sample(template: dict[str, Any]) -> None:
    sample = (ROOT / "deploy/stepfunctions/state-machine.asl.json").read_text()
    made = properties(template, "Machine")
    assert json.loads(made["DefinitionString"].replace("${Partition}", "aws")) == json.loads(sample)
    placeholders = {"IntakeQueueUrl", "ReprocessQueueUrl", "DeadLetterQueueUrl", "Partition"}
    assert set(made["DefinitionSubstitutions"]) == placeholders


_VALUES = {
    "Prefix": "pre",
    "Restored": "",
    "Bucket": "pre-1-eu",
    "AWS::Region": "eu-central-1",
    "TrustedProxies": "10.42.0.0/16",
}


def _resolved(value: Any, truths: frozenset[str]) -> Any:
    """A property as CloudFormation resolves it, with these conditions true."""
    if not isinstance(value, dict):
        return value
    if "If" in value:
        condition, then, otherwise = value["If"]
        return _resolved(then if condition in truths else otherwise, truths)
    if "Ref" in value:
        return None if value["Ref"] == "AWS::NoValue" else _VALUES.get(value["Ref"], "")
    if "Sub" in value:
        return re.sub(r"\$\{([\w:.]+)\}", lambda found: _VALUES.get(found[1], "x"), value["Sub"])
    return {name: _resolved(each, truths) for name, each in value.items()}


@pytest.mark.parametrize("truths", [frozenset[str](), frozenset({"HasMachine", "UsesPostgres", "HasPublicUrl"})])
@pytest.mark.parametrize("role", ROLES)
def test_a_service_gets_settings_that_are_valid(template: dict[str, Any], role: str, truths: frozenset[str]) -> None:
    (container,) = properties(template, f"{role.capitalize()}Task")["ContainerDefinitions"]
    assert container["Command"] == ["doctor" if role == "operator" else role]
    listed = [_resolved(each, truths) for each in container["Environment"]]
    variables = {each["Name"]: each["Value"] for each in listed}
    secrets = {each["Name"] for each in (_resolved(each, truths) for each in container["Secrets"]) if each is not None}
    settings = Settings.load(variables)
    # It stops by itself before it is killed.
    assert settings.drain_seconds < container["StopTimeout"]
    assert settings.records == "dynamodb://eu-central-1/pre"
    assert parse_address(settings.records).records == "pre-records"
    assert parse(settings.queue or "").prefix == "pre"
    assert settings.blobs == "s3://pre-1-eu/pre?region=eu-central-1"
    tasks = settings.other_tasks if "UsesPostgres" in truths else settings.tasks
    assert tasks == settings.records
    assert ("CONVEYOR_TASKS" in secrets) == ("UsesPostgres" in truths)
    assert secrets >= {"CONVEYOR_SIGNING_KEY", "CONVEYOR_COORDINATOR"}
    assert (settings.step_functions is not None) == ("HasMachine" in truths or role == "intake")
    if role == "intake":
        assert [inbox(url).name for url in (settings.intake or "").split()] == ["pre-reprocess", "pre-intake"]
    if role == "sweep":
        assert settings.cloudwatch_namespace == "pre"


def test_workers_scale_by_the_figure_that_the_sampler_prints(template: dict[str, Any]) -> None:
    policy = properties(template, "WorkScaling")["TargetTrackingScalingPolicyConfiguration"]
    metric = policy["CustomizedMetricSpecification"]
    printed = (ROOT / "src/conveyor/recover/sampler.py").read_text() + (
        ROOT / "src/conveyor/recover/backlog.py"
    ).read_text()
    assert f'"{metric["MetricName"]}"' in printed
    assert metric["Namespace"] == {"Ref": "Prefix"}
    assert policy["TargetValue"] == {"Ref": "WaitingSeconds"}


def test_tables_that_were_restored_take_the_place_of_those_of_the_template(template: dict[str, Any]) -> None:
    text = (FOLDER / "conveyor.yaml").read_text()
    tables = set(re.findall(r"(?:dynamodb://\$\{AWS::Region\}/|:table/)(\S+?)(?:-records|-tasks|'|\")", text))
    assert tables == {"${Prefix}${Restored}"}
    assert "?prefix=${Prefix}${Restored}" in text
    for name in ("RecordsTable", "TasksTable"):
        assert template["Resources"][name]["Condition"] == "MakesTables"
        assert f"!Ref {name}" not in text
        assert f"{name}." not in text
    assert template["Conditions"]["MakesTables"] == {"Equals": [{"Ref": "Restored"}, ""]}
