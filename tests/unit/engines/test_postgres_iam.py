"""Logins to Postgres by IAM: the token is that of AWS, each connection has its own, and only TLS carries it."""

import itertools
from collections.abc import Iterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import botocore.auth
import botocore.session
import pytest

from conveyor.engines.aws_credentials import aws_credentials
from conveyor.engines.postgres import PostgresEngine, migrate
from conveyor.engines.postgres.iam import token_source
from conveyor.engines.postgres.url import parse_url
from conveyor.errors import EngineFailed, InvalidSetting
from tests.servers.aws import CREDENTIALS, REGION
from tests.servers.iam_door import IamDoor
from tests.servers.postgres import url_of
from tests.support.clocks import JumpingClock
from tests.support.places import quick_place
from tests.support.target_site import AUTHORITY

pytestmark = pytest.mark.server

NOON = datetime(2026, 11, 17, 12, tzinfo=UTC)
RDS = "db.abc.eu-central-1.rds.amazonaws.com"


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    aws_credentials.cache_clear()
    yield
    aws_credentials.cache_clear()


@pytest.fixture
def place() -> Iterator[Path]:
    with quick_place() as directory:
        yield directory


def through(door: IamDoor, place: Path, more: str = "") -> str:
    schema = url_of(place).rpartition("?")[2]
    return f"postgres://postgres@127.0.0.1:{door.port}/postgres?{schema}&auth=iam&region={REGION}{more}"


async def test_the_token_is_that_of_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda: NOON)
    client = botocore.session.get_session().create_client("rds", region_name=REGION)
    expected = client.generate_db_auth_token(DBHostname=RDS, Port=5432, DBUsername="the user")
    assert await token_source(f"postgres://the%20user@{RDS}/jobs", REGION)() == expected


async def test_each_connection_has_a_token_of_its_own(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda: NOON + timedelta(seconds=next(seconds)))
    async with IamDoor.open() as door:
        await migrate(through(door, place))
        async with PostgresEngine.open(through(door, place), JumpingClock()) as engine, AsyncExitStack() as stack:
            for _ in range(3):
                await stack.enter_async_context(engine._database._connection())
        # One to migrate, one to look for a pooler, three of the pool.
        assert len(door.passwords) == 5
        dates = [parse_qs(urlsplit(f"https://{token}").query)["X-Amz-Date"][0] for token in door.passwords]
        assert dates == [f"20261117T12000{number}Z" for number in range(5)]
        assert {urlsplit(f"https://{token}").netloc for token in door.passwords} == {f"127.0.0.1:{door.port}"}
        assert door.refused == 0


async def test_the_certificate_is_checked_by_the_given_authority(place: Path) -> None:
    authority = place / "authority.pem"
    authority.write_bytes(AUTHORITY)
    async with IamDoor.open() as door:
        await migrate(through(door, place, f"&sslrootcert={authority}&sslmode=verify-ca"))
        assert len(door.passwords) == 1
        # The certificate is of another host.
        with pytest.raises(EngineFailed, match="certificate"):
            await migrate(through(door, place, f"&sslrootcert={authority}"))
        assert len(door.passwords) == 1, "the token went to nobody else"


async def test_without_credentials_it_says_so(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(place / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(place / "none"))
    async with IamDoor.open() as door:
        with pytest.raises(EngineFailed, match="no AWS credentials"):
            await migrate(through(door, place))
        assert door.passwords == []


class TestUrl:
    def test_the_region_is_in_the_name_of_the_host(self) -> None:
        place = parse_url(f"postgres://me@{RDS}/jobs?auth=iam")
        assert (place.iam_region, place.dsn) == (REGION, f"postgres://me@{RDS}/jobs?sslmode=require")
        assert parse_url("postgres://me@db/jobs?auth=iam&region=us-gov-west-1").iam_region == "us-gov-west-1"

    @pytest.mark.parametrize(
        ("url", "why"),
        [
            ("postgres://me@db/jobs?auth=iam", "region="),
            (f"postgres://me:secret@{RDS}/jobs?auth=iam", "no password"),
            (f"postgres://{RDS}/jobs?auth=iam", "needs a user"),
            (f"postgres://me@{RDS}/jobs?auth=iam&sslmode=prefer", "needs TLS"),
            (f"postgres://me@{RDS}/jobs?auth=kerberos", "auth is iam"),
            ("postgres://me@db/jobs?region=eu-central-1", "belongs to auth=iam"),
        ],
    )
    def test_what_is_missing_is_named(self, url: str, why: str) -> None:
        with pytest.raises(InvalidSetting, match=why):
            parse_url(url)
