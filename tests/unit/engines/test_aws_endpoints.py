"""Where the AWS clients call: the region of the environment, other partitions, FIPS and dual-stack endpoints."""

from pathlib import Path

import pytest

from conveyor.clock import SystemClock
from conveyor.engines import aws_session
from conveyor.engines.dynamodb.address import parse_address
from conveyor.engines.s3 import Bucket
from conveyor.engines.sqs import address as sqs_address
from conveyor.engines.sqs import inbox
from conveyor.engines.step_functions_client import parse as parse_step_functions
from conveyor.errors import InvalidSetting


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None but that of the test, and a session that reads it."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_USE_FIPS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("AWS_USE_DUALSTACK_ENDPOINT", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    aws_session.aws_session.cache_clear()
    yield
    aws_session.aws_session.cache_clear()


@pytest.mark.parametrize(
    ("region", "dynamodb", "s3"),
    [
        ("eu-central-1", "dynamodb.eu-central-1.amazonaws.com", "s3.eu-central-1.amazonaws.com"),
        ("us-gov-west-1", "dynamodb.us-gov-west-1.amazonaws.com", "s3.us-gov-west-1.amazonaws.com"),
        ("cn-north-1", "dynamodb.cn-north-1.amazonaws.com.cn", "s3.cn-north-1.amazonaws.com.cn"),
        ("us-iso-east-1", "dynamodb.us-iso-east-1.c2s.ic.gov", "s3.us-iso-east-1.c2s.ic.gov"),
    ],
)
def test_every_partition(region: str, dynamodb: str, s3: str) -> None:
    assert aws_session.service_host("dynamodb", region) == dynamodb
    assert aws_session.service_host("s3", region) == s3
    signed = Bucket("bucket", "pre", region, None, SystemClock()).url_of("key")
    assert signed == f"https://bucket.{s3}/pre/key"


@pytest.mark.parametrize(
    ("variables", "dynamodb", "s3"),
    [
        ({"AWS_USE_FIPS_ENDPOINT"}, "dynamodb-fips.us-east-1.amazonaws.com", "s3-fips.us-east-1.amazonaws.com"),
        ({"AWS_USE_DUALSTACK_ENDPOINT"}, "dynamodb.us-east-1.api.aws", "s3.dualstack.us-east-1.amazonaws.com"),
        (
            {"AWS_USE_FIPS_ENDPOINT", "AWS_USE_DUALSTACK_ENDPOINT"},
            "dynamodb-fips.us-east-1.api.aws",
            "s3-fips.dualstack.us-east-1.amazonaws.com",
        ),
    ],
)
def test_fips_and_dual_stack(monkeypatch: pytest.MonkeyPatch, variables: set[str], dynamodb: str, s3: str) -> None:
    for name in variables:
        monkeypatch.setenv(name, "true")
    assert aws_session.service_host("dynamodb", "us-east-1") == dynamodb
    assert aws_session.service_host("s3", "us-east-1") == s3


def test_an_endpoint_that_a_region_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_USE_DUALSTACK_ENDPOINT", "true")
    with pytest.raises(InvalidSetting, match="AWS_USE_DUALSTACK_ENDPOINT"):
        aws_session.service_host("dynamodb", "us-iso-east-1")


def test_the_region_of_the_environment_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "ap-south-1")
    assert parse_address("dynamodb:///conveyor").region == "ap-south-1"
    assert sqs_address.parse("sqs:///conveyor").region == "ap-south-1"
    assert inbox.parse("sqs:///jobs-intake").region == "ap-south-1"
    assert parse_step_functions("stepfunctions://").region == "ap-south-1"
    assert Bucket("bucket", None, None, None, SystemClock()).region == "ap-south-1"
    assert parse_address("dynamodb://eu-west-1/conveyor").region == "eu-west-1"


@pytest.mark.parametrize(
    "parse",
    [
        lambda: parse_address("dynamodb:///conveyor"),
        lambda: sqs_address.parse("sqs:///conveyor"),
        lambda: inbox.parse("sqs:///jobs-intake"),
        lambda: parse_step_functions("stepfunctions://"),
    ],
    ids=["dynamodb", "sqs", "intake", "step functions"],
)
def test_a_region_that_nobody_names(parse: object) -> None:
    assert callable(parse)
    with pytest.raises(InvalidSetting, match="AWS_REGION"):
        parse()
