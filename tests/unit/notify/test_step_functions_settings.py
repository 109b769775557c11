"""What is set for state machines and for jobs by queue, and what is wrong with it."""

from pathlib import Path
from typing import Any

import pytest

from conveyor.engines.sqs.inbox import parse as parse_inbox
from conveyor.engines.step_functions_client import parse
from conveyor.errors import InvalidSetting
from conveyor.notify.intake import Intake
from conveyor.settings import Settings
from conveyor.system import open_system


def test_addresses() -> None:
    assert parse("stepfunctions://eu-central-1") == ("eu-central-1", None)
    assert parse("stepfunctions://eu-central-1?endpoint=http://127.0.0.1:1") == ("eu-central-1", "http://127.0.0.1:1")
    assert parse_inbox("sqs://eu-central-1/jobs") == ("eu-central-1", "jobs", None, 20)
    assert parse_inbox("sqs://eu-central-1/jobs?endpoint=https://sqs.example&wait=0")[2:] == ("https://sqs.example", 0)


@pytest.mark.parametrize(
    "url",
    [
        "sqs://eu-central-1",
        "stepfunctions://eu-central-1/machine",
        "stepfunctions://EU",
        "stepfunctions://eu-central-1?wait=1",
        "stepfunctions://eu-central-1?endpoint=ftp://x",
        "stepfunctions://eu-central-1?endpoint=http://user@x",
    ],
)
def test_what_is_no_address_of_step_functions(url: str) -> None:
    with pytest.raises(InvalidSetting, match="CONVEYOR_STEP_FUNCTIONS"):
        parse(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://eu-central-1/jobs",
        "sqs://eu-central-1/",
        "sqs://eu-central-1/a/b",
        "sqs://eu-central-1/jobs?settle=1",
        "sqs://eu-central-1/jobs?wait=21",
        "sqs://eu-central-1/jobs?wait=-1",
        "sqs://eu-central-1/jobs?endpoint=x",
    ],
)
def test_what_is_no_queue(url: str) -> None:
    with pytest.raises(InvalidSetting, match="CONVEYOR_INTAKE"):
        parse_inbox(url)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"step_functions": "eu-central-1"}, "CONVEYOR_STEP_FUNCTIONS"),
        ({"intake": "control"}, "CONVEYOR_INTAKE"),
        ({"intake": "run:x"}, "CONVEYOR_INTAKE"),
        ({"intake": "jobs", "intake_tenant": "No Tenant"}, "CONVEYOR_INTAKE_TENANT"),
    ],
)
async def test_what_is_wrong_is_said_at_the_start(tmp_path: Path, given: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidSetting, match=named):
        async with open_system(Settings.load({}, data=tmp_path, **given)) as system:
            Intake(system)
