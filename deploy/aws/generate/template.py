"""The whole template, and every generated file."""

import json
from pathlib import Path
from typing import Any

from deploy.aws.generate import policies
from deploy.aws.generate.intrinsics import Intrinsic, att, either, ref, sub, text_of
from deploy.aws.generate.network import BALANCER, NETWORK, URL
from deploy.aws.generate.parameters import CONDITIONS, PARAMETERS, SIZES, size_file
from deploy.aws.generate.services import COMPUTE
from deploy.aws.generate.stores import CACHE, INTAKE, POSTGRES, SECRETS, STORAGE, TABLES_URL
from deploy.aws.generate.watching import ALARMS, DASHBOARD, MACHINE, MONITOR

# In the package, so that `conveyor deploy aws` has them wherever it is installed; deploy/aws links to them.
PACKAGE = Path(__file__).parents[3] / "src/conveyor/deploy/aws"

_HEADER = "# Made by `python -m deploy.aws.generate`. docs/how-to/aws.md leads through it.\n"


def _output(value: Any, condition: str | None = "HasAll") -> dict[str, Any]:
    return {"Condition": condition, "Value": value} if condition else {"Value": value}


OUTPUTS: dict[str, Any] = {
    "Records": _output(TABLES_URL, None),
    "Queue": _output(sub("sqs://${AWS::Region}/${Prefix}"), None),
    "Blobs": _output(sub("s3://${Bucket}/${Prefix}?region=${AWS::Region}"), None),
    "Url": _output(URL),
    "BalancerName": _output(att("Balancer.DNSName")),
    "Cluster": _output(ref("Cluster")),
    "OperatorTask": _output(ref("OperatorTask")),
    "Subnets": _output(either("MakesVpc", sub("${SubnetA},${SubnetB}"), Intrinsic("!Join", [",", ref("SubnetIds")]))),
    "TasksGroup": _output(att("TasksGroup.GroupId")),
    "LogGroup": _output(ref("Logs")),
    "StateMachine": _output(ref("Machine"), "HasMachine"),
}


def template() -> dict[str, Any]:
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": "Conveyor: durable bulk jobs on DynamoDB, SQS, S3, Valkey and Fargate",
        # An empty parameter is one that is not given, and a condition keeps it from being used.
        "Metadata": {"cfn-lint": {"config": {"ignore_checks": ["W1030"]}}},
        "Parameters": PARAMETERS,
        "Conditions": CONDITIONS,
        "Resources": {
            **STORAGE,
            **NETWORK,
            **SECRETS,
            **CACHE,
            **POSTGRES,
            **INTAKE,
            **BALANCER,
            **COMPUTE,
            **MONITOR,
            **MACHINE,
            **ALARMS,
            **DASHBOARD,
        },
        "Outputs": OUTPUTS,
    }


def files() -> dict[Path, str]:
    """Every generated file, and what it holds."""
    sizes = {PACKAGE / f"{size}.json": json.dumps(size_file(size), indent=2) + "\n" for size in SIZES}
    return {PACKAGE / "conveyor.yaml": _HEADER + text_of(template()), **sizes, **policies.files()}
