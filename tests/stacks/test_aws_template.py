"""The template under deploy/aws, made by an emulator: `migrate` and `doctor` are content with it, and a job runs on it.

The emulator makes no Valkey and no scaling, for which parameters leave them out, and it does not apply TTL, the redrive
policy and the lifecycle of a template, which `migrate` then adds.
"""

import asyncio
import io
import re
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.exceptions import WaiterError

from conveyor.clock import SystemClock
from conveyor.deploy.aws_stack import TEMPLATE, size_values
from conveyor.embedded import Embedded
from conveyor.settings import Settings
from conveyor.system import engine_findings, migrate, open_system
from tests.servers import redis
from tests.servers.aws import REGION, aws
from tests.support.api import serving
from tests.support.target_site import Site
from tests.support.working import ended

pytestmark = [pytest.mark.timeout(600), pytest.mark.server]

CODE = "template-code"


def made(stack: str, **given: str) -> dict[str, str]:
    """Make a stack; its outputs."""
    parameters = {**size_values("small"), "Prefix": stack, **given}
    client = service("cloudformation")
    client.create_stack(
        StackName=stack,
        # The emulator takes no parameter for this number, and would start containers.
        TemplateBody=re.sub(r"DesiredCount: .*", "DesiredCount: 0", TEMPLATE.read_text()),
        Capabilities=["CAPABILITY_IAM"],
        Parameters=[{"ParameterKey": name, "ParameterValue": value} for name, value in parameters.items()],
    )
    try:
        client.get_waiter("stack_create_complete").wait(
            StackName=stack, WaiterConfig={"Delay": 0.2, "MaxAttempts": 300}
        )
    except WaiterError:
        events = client.describe_stack_events(StackName=stack)["StackEvents"]
        reasons = [
            (each["LogicalResourceId"], each["ResourceStatusReason"])
            for each in events
            if each.get("ResourceStatusReason")
        ]
        raise AssertionError(reasons) from None
    (shown,) = client.describe_stacks(StackName=stack)["Stacks"]
    return {output["OutputKey"]: output["OutputValue"] for output in shown["Outputs"]}


def service(name: str) -> Any:
    return botocore.session.get_session().create_client(name, region_name=REGION, endpoint_url=aws())


def prefix_of(place: Path) -> str:
    return "t" + sha256(str(place).encode()).hexdigest()[:12]


def settings_of(place: Path, outputs: dict[str, str]) -> Settings:
    """What the template gives to the services, on the emulator."""
    endpoint = f"endpoint={aws()}"
    tables = f"{outputs['Records']}?{endpoint}"
    return Settings.load(
        {},
        data=place,
        records=tables,
        tasks=tables,
        queue=f"{outputs['Queue']}?{endpoint}&wait=1&settle=0",
        blobs=f"{outputs['Blobs']}&{endpoint}",
        coordinator=f"{redis.redis().url}?prefix={prefix_of(place)}",
        signing_key="s" * 32,
        allow_private_targets=True,
        fetchers=0,
    )


async def problems(settings: Settings) -> dict[str, str]:
    found = await engine_findings(settings, SystemClock())
    return {name: problem for name, problem in found if problem is not None}


async def check_ready(settings: Settings) -> None:
    """What the emulator leaves out is what `migrate` adds; then a job runs."""
    before = await problems(settings)
    assert all("conveyor migrate" in problem for problem in before.values()), before
    await migrate(settings, SystemClock())
    assert await problems(settings) == {}
    async with (
        Site() as site,
        open_system(settings, SystemClock()) as system,
        serving(system) as api,
        Embedded(system).running(),
    ):
        job = await api.submit({"tasks": [site.url("/ok"), site.url("/status/404")]})
        assert (await ended(api, job.json["id"]))["run"]["counts"]["succeeded"] == 1


async def test_storage_alone(tmp_path: Path) -> None:
    outputs = await asyncio.to_thread(made, prefix_of(tmp_path), Parts="storage")
    assert set(outputs) == {"Records", "Queue", "Blobs"}
    await check_ready(settings_of(tmp_path, outputs))


async def test_every_part_that_the_emulator_has(tmp_path: Path) -> None:
    stack = prefix_of(tmp_path)
    outputs = await asyncio.to_thread(
        made,
        stack,
        Image="registry.example.com/conveyor:1",
        CoordinatorUrl="redis://cache.example.com",
        Scaling="no",
        StepFunctions="yes",
        AllowedCidr="203.0.113.0/24",
        AlarmEmail="ops@example.com",
        **lambda_code(),
    )
    await check_ready(settings_of(tmp_path, outputs))
    check_services(stack, outputs)


def lambda_code() -> dict[str, str]:
    """A zip file for the monitor, which nobody calls here."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("conveyor/__init__.py", "")
    client = service("s3")
    client.create_bucket(Bucket=CODE, CreateBucketConfiguration={"LocationConstraint": REGION})
    client.put_object(Bucket=CODE, Key="monitor.zip", Body=packed.getvalue())
    return {"MonitorBucket": CODE, "MonitorKey": "monitor.zip"}


def check_services(stack: str, outputs: dict[str, str]) -> None:
    ecs = service("ecs")
    listed = ecs.list_services(cluster=stack, maxResults=100)["serviceArns"]
    assert {arn.rpartition("/")[2] for arn in listed} == {
        f"{stack}-{role}" for role in ("api", "work", "ingest", "sweep", "schedule", "intake")
    }
    function = service("lambda").get_function(FunctionName=f"{stack}-monitor")["Configuration"]
    assert function["Handler"] == "conveyor.recover.lambda_handler.handler"
    machine = service("stepfunctions").describe_state_machine(stateMachineArn=outputs["StateMachine"])
    assert "${" not in machine["definition"]
