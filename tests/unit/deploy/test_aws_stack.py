"""`conveyor deploy aws`: parameters are checked, commands are ones of the AWS CLI, figures are those of the docs."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore import xform_name

from conveyor.cli.guard import run_guarded
from conveyor.deploy.aws_costs import idle_month, million_tasks
from conveyor.deploy.aws_prices import FARGATE_GB, FARGATE_VCPU, MILLION_TASKS, PRICES
from conveyor.deploy.aws_stack import SIZES, StackPlan, made_resources, plan_stack, steps, warnings
from conveyor.errors import BadInput

DOCS = Path(__file__).parents[3] / "docs"
# Commands that the CLI makes of several calls, with their options here.
HIGH_LEVEL = {
    ("s3", "mb"): {"region"},
    ("cloudformation", "deploy"): {
        *("stack-name", "template-file", "s3-bucket", "capabilities", "region"),
        *("no-execute-changeset", "parameter-overrides"),
    },
}
EVERYWHERE = {"region", "query", "output"}


def plan(size: str = "small", region: str | None = "eu-central-1", **given: str) -> StackPlan:
    return plan_stack("demo", size, region, {"Image": "registry/conveyor:1", **given})


@pytest.mark.parametrize("size", SIZES)
def test_commands_are_ones_of_the_cli(size: str) -> None:
    session = botocore.session.get_session()
    seen = []
    for step in steps(plan(size, CertificateArn="arn:aws:acm:eu-central-1:1:certificate/x")):
        line = step.text if step.variable is None else step.text.removeprefix(f"{step.variable}=$(").removesuffix(")")
        words = shlex.split(line)
        assert words == step.command
        assert words[0] == "aws"
        service, command = words[1], words[2]
        options = {word.removeprefix("--") for word in words if word.startswith("--")}
        # Those of the container's own command.
        options -= {"tenant"}
        if command == "wait":
            assert words[3].replace("-", "_") in session.create_client(service, region_name="eu-central-1").waiter_names
        elif (service, command) in HIGH_LEVEL:
            assert options <= HIGH_LEVEL[service, command]
        else:
            model = session.get_service_model(service)
            named = {xform_name(name, "-"): name for name in model.operation_names}
            members = model.operation_model(named[command]).input_shape
            known = set() if members is None else {xform_name(name, "-") for name in members.members}
            assert options <= known | EVERYWHERE, (step, known)
        seen.append(f"{service} {command}")
    assert seen.count("ecs run-task") == 3


def test_every_variable_is_set_before_it_is_used() -> None:
    known: set[str] = set()
    for step in steps(plan()):
        assert set(re.findall(r"\$([A-Z]+)", " ".join(step.command))) <= known
        known |= {step.variable} if step.variable else set()


def test_storage_alone_needs_no_image_and_runs_nothing() -> None:
    made = plan_stack("demo", "small", "eu-central-1", {"Parts": "storage"})
    assert [step.command[2] for step in steps(made)] == ["get-caller-identity", "mb", "deploy", "deploy"]
    assert warnings(made) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stack": "1st"}, "not a stack name"),
        ({"size": "huge"}, "small, medium, large"),
        ({"region": None}, "AWS_REGION"),
        ({"region": "mars"}, "eu-central-1"),
        ({"given": {"Imaeg": "x"}}, "no parameter Imaeg"),
        ({"given": {}}, "--image"),
        ({"given": {"Image": "x", "ApiCount": "two"}}, "ApiCount must be a number"),
        ({"given": {"Image": "x", "WorkerMinimum": "9"}}, "WorkerMaximum"),
        ({"given": {"Image": "x", "MonitorBucket": "b"}}, "go together"),
        ({"given": {"Image": "x", "VpcId": "vpc-1"}}, "SubnetIds"),
        ({"given": {"Image": "x", "AllowedCidr": "all"}}, "a network"),
    ],
)
def test_what_is_wrong_is_said(change: dict[str, Any], said: str) -> None:
    arguments = {"stack": "demo", "size": "small", "region": "eu-central-1", "given": {"Image": "x"}, **change}
    with pytest.raises(BadInput, match=re.escape(said)):
        plan_stack(**arguments)


def test_what_is_probably_not_meant_is_said() -> None:
    assert len(warnings(plan())) == 3
    meant = plan(AllowedCidr="10.0.0.0/8", CertificateArn="arn", AlarmEmail="a@example.com")
    assert warnings(meant) == []


def test_costs_follow_the_parameters() -> None:
    def month(**given: str) -> float:
        return sum(line.dollars for line in idle_month(plan(**given).parameters))

    usual = month()
    assert month(CoordinatorUrl="redis://x") < usual < month(ApiCount="2") < month(ApiCount="2", StepFunctions="yes")
    assert month(TasksOnPostgres="yes") > usual
    assert month(InterfaceEndpoints="yes") > month(MonitorBucket="b", MonitorKey="k")
    assert month(Parts="storage") == 0


def test_what_is_made_follows_the_parameters() -> None:
    usual = made_resources(plan().parameters)
    assert (usual["AWS::ECS::Service"], usual["AWS::EC2::VPCEndpoint"]) == (6, 2)
    assert {"AWS::RDS::DBCluster", "AWS::Lambda::Function", "AWS::StepFunctions::StateMachine"}.isdisjoint(usual)
    assert made_resources(plan(TasksOnPostgres="yes").parameters)["AWS::RDS::DBCluster"] == 1
    assert made_resources(plan(MonitorBucket="b", MonitorKey="k").parameters)["AWS::Lambda::Function"] == 1
    storage = made_resources(plan(Parts="storage").parameters)
    assert storage["AWS::DynamoDB::Table"] == 2
    assert "AWS::ECS::Service" not in storage


@pytest.mark.parametrize("size", SIZES)
def test_the_page_has_the_figures(size: str) -> None:
    parameters = plan(size).parameters
    idle = sum(line.dollars for line in idle_month(parameters))
    million = sum(line.dollars for line in million_tasks(parameters))
    for name in ("how-to/aws.md", "explanation/scale.md"):
        (row,) = re.findall(rf"^\| `{size}` \|.*$", (DOCS / name).read_text(), re.MULTILINE)
        assert f"| ${idle:,.0f} | ${million:.2f} |" in row, name


def test_the_prices_are_those_of_the_page_on_scale() -> None:
    page = (DOCS / "explanation/scale.md").read_text()
    said = " ".join(page.split())
    for text in (
        f"DynamoDB ${PRICES['dynamodb write unit']} a million write units",
        f"${PRICES['dynamodb read unit']} a million read units",
        f"SQS ${PRICES['sqs request']:.2f} a million requests",
        f"S3 ${PRICES['s3 put']:.0f} a million PUTs, ${PRICES['s3 get']:.2f} a million GETs",
        f"${FARGATE_VCPU + 2 * FARGATE_GB:.3f} an hour",
        "| " + " | ".join(f"${dollars:.2f}" for dollars in MILLION_TASKS.values()) + " |",
    ):
        assert text in said, text


def deploy(*words: str) -> int:
    return run_guarded(["deploy", "aws", "--stack", "demo", *words])


def test_the_command_prints_what_a_shell_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert deploy("--size", "medium", "--region", "eu-central-1", "--image", "registry/conveyor:1") == 0
    printed = capsys.readouterr().out
    commands = [line for line in printed.splitlines() if line and not line.startswith("#")]
    made = steps(plan("medium", Image="registry/conveyor:1"))
    assert commands == [step.text for step in made]
    assert "2 AWS::DynamoDB::Table" in printed
    assert "together" in printed
    assert "Nobody reaches the load balancer" in printed


def test_the_command_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert deploy("--region", "cn-north-1", "--image", "x", "--set", "WorkerMaximum=9", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["parameters"]["WorkerMaximum"] == "9"
    assert said["resources"]["AWS::DynamoDB::Table"] == 2
    assert "WorkerMaximum=9" in said["commands"][3]
    assert sum(said["idle_month"].values()) > 100


def test_a_wrong_parameter_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert deploy("--region", "eu-central-1", "--image", "x", "--set", "Workers") == 2
    assert capsys.readouterr().err.strip() == "conveyor: --set takes NAME=VALUE, not 'Workers'. [bad_input]"
