"""A stack on AWS before it is made: its parameters, checked against the template, and the commands of the AWS CLI."""

import json
import re
import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from conveyor.deploy.template_conditions import true_conditions
from conveyor.errors import BadInput

FOLDER = Path(__file__).parent / "aws"
TEMPLATE = FOLDER / "conveyor.yaml"
SIZES = ("small", "medium", "large")

_STACK = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,127}")
_REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-\d")
_CIDR = re.compile(r"\d+\.\d+\.\d+\.\d+/\d+")
# A resource of the template, which is written by a program, so that this form is certain.
_RESOURCE = re.compile(r"^  (\w+):\n    Type: (AWS::\S+)(?:\n    Condition: (\w+))?", re.MULTILINE)
_PARAMETER = re.compile(r"^  (\w+):((?:\n    .*|[^\n]*)+?)(?=\n  \w|\Z)", re.MULTILINE)
_DEFAULT = re.compile(r"\bDefault: (?:'([^']*)'|([^,}\n]*))")


class TemplateParts(NamedTuple):
    """What the template says: the default of each parameter (None: it must be given), the type of each resource and
    the condition under which it is made, if there is one; and its conditions, as they are written."""

    defaults: dict[str, str | None]
    resources: dict[str, tuple[str, str]]
    conditions: str


class StackPlan(NamedTuple):
    """A stack that is to be made."""

    stack: str
    region: str
    # All parameters, and those that differ from the template's defaults.
    parameters: dict[str, str]
    given: dict[str, str]


class Step(NamedTuple):
    """A command, and what it is for. Later commands use its output as a shell variable, if it has one."""

    why: str
    command: list[str]
    variable: str | None = None

    @property
    def text(self) -> str:
        """As one types it."""
        line = " ".join(map(_quoted, self.command))
        return line if self.variable is None else f"{self.variable}=$({line})"


def _quoted(word: str) -> str:
    """For a shell, which fills in variables. No word of ours has a dollar sign and double quotes."""
    return f'"{word}"' if {"$", "'"} & set(word) else shlex.quote(word)


def template_parts(text: str | None = None) -> TemplateParts:
    body = TEMPLATE.read_text() if text is None else text
    sections = dict(re.findall(r"^(\w+):\n((?:  .*\n?)+)", body, re.MULTILINE))
    defaults: dict[str, str | None] = {}
    for name, rest in _PARAMETER.findall(sections["Parameters"].rstrip("\n")):
        found = _DEFAULT.search(rest)
        defaults[name] = None if found is None else found[1] or found[2] or ""
    resources = {name: (kind, condition) for name, kind, condition in _RESOURCE.findall(sections["Resources"])}
    return TemplateParts(defaults, resources, sections["Conditions"])


def made_resources(parameters: Mapping[str, str]) -> dict[str, int]:
    """How many resources of each type the template makes with these parameters."""
    parts = template_parts()
    holds = true_conditions(parts.conditions, parameters)
    return dict(Counter(kind for kind, condition in parts.resources.values() if not condition or condition in holds))


def size_values(size: str) -> dict[str, str]:
    """The parameters of a size."""
    if size not in SIZES:
        raise BadInput(f"Unknown size {size!r}. Use {', '.join(SIZES)}.")
    rows = json.loads((FOLDER / f"{size}.json").read_text())
    return {row["ParameterKey"]: row["ParameterValue"] for row in rows}


def plan_stack(stack: str, size: str, region: str | None, given: Mapping[str, str]) -> StackPlan:
    """Check everything that can be checked here. Raises BadInput with what to do."""
    if not _STACK.fullmatch(stack):
        raise BadInput(f"{stack!r} is not a stack name: a letter, then letters, digits and dashes.")
    if region is None:
        raise BadInput("Unknown region. Pass --region, or set AWS_REGION.")
    if not _REGION.fullmatch(region):
        raise BadInput(f"{region!r} is not an AWS region. Use a name such as eu-central-1.")
    defaults = template_parts().defaults
    unknown = given.keys() - defaults.keys()
    if unknown:
        raise BadInput(f"The template has no parameter {min(unknown)}. It has: {', '.join(defaults)}.")
    chosen = {**size_values(size), **given}
    parameters = {name: chosen.get(name, default or "") for name, default in defaults.items()}
    _check(parameters)
    return StackPlan(stack, region, parameters, chosen)


def _check(parameters: Mapping[str, str]) -> None:
    if parameters["Parts"] == "all" and not parameters["Image"]:
        raise BadInput("Which image? Push one to a registry, and pass --image URI. docs/how-to/aws.md says how.")
    if not _CIDR.fullmatch(parameters["AllowedCidr"]):
        raise BadInput("AllowedCidr must be a network, such as 203.0.113.0/24.")
    for name, value in parameters.items():
        if name.endswith(("Count", "Cpu", "Memory", "Minimum", "Maximum", "Shards", "Replicas")) and not _number(value):
            raise BadInput(f"{name} must be a number, not {value!r}.")
    if float(parameters["WorkerMinimum"]) > float(parameters["WorkerMaximum"]):
        raise BadInput("WorkerMinimum must be at most WorkerMaximum.")
    if bool(parameters["MonitorBucket"]) != bool(parameters["MonitorKey"]):
        raise BadInput("MonitorBucket and MonitorKey go together.")
    if parameters["VpcId"] and not (parameters["SubnetIds"] and parameters["LoadBalancerSubnetIds"]):
        raise BadInput("VpcId needs SubnetIds and LoadBalancerSubnetIds.")


def _number(text: str) -> bool:
    return re.fullmatch(r"\d+(\.\d+)?", text) is not None


def steps(plan: StackPlan) -> list[Step]:
    """The commands that make the stack and bring it to work, in order."""
    prefix, region = plan.parameters["Prefix"], ["--region", plan.region]
    templates = f"{prefix}-templates-$ACCOUNT"
    overrides = ["--parameter-overrides", *(f"{name}={value}" for name, value in plan.given.items())]
    deploy = [
        *("aws", "cloudformation", "deploy", "--stack-name", plan.stack, "--template-file", str(TEMPLATE)),
        *("--s3-bucket", templates, "--capabilities", "CAPABILITY_IAM", *region),
    ]
    account = ["aws", "sts", "get-caller-identity", "--query", "Account", "--output", "text"]
    made = [
        Step("the account", account, "ACCOUNT"),
        Step(
            "once: a bucket for the template, which is larger than the 51,200 bytes that a request takes",
            ["aws", "s3", "mb", f"s3://{templates}", *region],
        ),
        Step("show the changes, and make none", [*deploy, "--no-execute-changeset", *overrides]),
        Step("make the stack, or update it", [*deploy, *overrides]),
    ]
    if plan.parameters["Parts"] != "all":
        return made
    log = ["aws", "logs", "filter-log-events", "--log-group-name", f"/conveyor/{prefix}"]
    return [
        *made,
        _output(plan, "the subnets of the tasks", "Subnets", "SUBNETS"),
        _output(plan, "their security group", "TasksGroup", "GROUP"),
        *_operator(plan, "check what was made, and add what a newer version needs", "migrate"),
        *_operator(plan, "see that everything is ready", "doctor"),
        *_operator(plan, "make the first key", "keys", "create", "--tenant", "acme"),
        Step("read what these commands said, the key among it", _text(log, "operator", region)),
        _output(plan, "the address", "Url"),
    ]


def warnings(plan: StackPlan) -> list[str]:
    """What is allowed, and probably not meant."""
    found: list[str] = []
    if plan.parameters["Parts"] != "all":
        return found
    if plan.parameters["AllowedCidr"] == template_parts().defaults["AllowedCidr"]:
        found.append("Nobody reaches the load balancer: pass --set AllowedCidr=203.0.113.0/24, with your network.")
    if not plan.parameters["CertificateArn"]:
        found.append("Keys and results travel unencrypted: pass --set CertificateArn=ARN and --set PublicUrl=URL.")
    if not plan.parameters["AlarmEmail"]:
        found.append("Nobody is told of alarms: pass --set AlarmEmail=ADDRESS.")
    return found


def _text(command: list[str], streams: str, region: list[str]) -> list[str]:
    shown = ["--query", "events[].[message]", "--output", "text"]
    return [*command, "--log-stream-name-prefix", streams, *shown, *region]


def _output(plan: StackPlan, why: str, name: str, variable: str | None = None) -> Step:
    query = f"Stacks[0].Outputs[?OutputKey=='{name}'].OutputValue"
    command = ["aws", "cloudformation", "describe-stacks", "--stack-name", plan.stack, "--region", plan.region]
    return Step(why, [*command, "--query", query, "--output", "text"], variable)


def _operator(plan: StackPlan, why: str, *command: str) -> list[Step]:
    """A command as a task of its own, and the wait for its end."""
    prefix, public = plan.parameters["Prefix"], plan.parameters["AssignPublicIp"]
    network = f"awsvpcConfiguration={{subnets=[$SUBNETS],securityGroups=[$GROUP],assignPublicIp={public}}}"
    overrides = json.dumps({"containerOverrides": [{"name": "conveyor", "command": list(command)}]})
    run = [
        *("aws", "ecs", "run-task", "--cluster", prefix, "--task-definition", f"{prefix}-operator"),
        *("--launch-type", "FARGATE", "--network-configuration", network),
        *("--overrides", overrides, "--query", "tasks[0].taskArn", "--output", "text", "--region", plan.region),
    ]
    wait = ["aws", "ecs", "wait", "tasks-stopped", "--cluster", prefix, "--tasks", "$TASK", "--region", plan.region]
    return [Step(why, run, "TASK"), Step("wait until it has ended", wait)]
