"""Every AWS client has the credentials of the whole chain, and renews them before they expire.

A loopback server stands for STS and for the endpoint that hands credentials to containers. The clients then talk to the
emulator through a proxy that notes who signed.
"""

import json
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import botocore.credentials
import botocore.session
import pytest
from aiohttp import web

from conveyor.clock import SystemClock
from conveyor.engines.aws_credentials import aws_credentials
from conveyor.engines.aws_session import aws_session, default_region
from conveyor.engines.dynamodb.address import parse_address
from conveyor.engines.dynamodb.wire import Patience, Wire, make_session
from conveyor.engines.object_blobs import ObjectEngine
from conveyor.engines.queue import CONTROL
from conveyor.engines.sqlite import SqliteEngine
from conveyor.engines.sqs import SqsEngine
from conveyor.errors import EngineFailed
from tests.faults.shim import Answer, Call, Forward, Shim, refusal
from tests.servers import dynamodb, s3, sqs
from tests.servers.aws import REGION, aws

pytestmark = pytest.mark.server

HOUR = 3600.0
POD_TOKEN = "token of the pod"

_STS = """<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>{key}</AccessKeyId><SecretAccessKey>secret</SecretAccessKey>
<SessionToken>session</SessionToken><Expiration>{until}</Expiration></Credentials>
</AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"""


class Issuer:
    """Hands out KEY1, KEY2 and so on, each valid for an hour."""

    def __init__(self) -> None:
        self.issued = 0
        self.refuses = False
        self.ahead = timedelta(0)
        self.url = ""

    async def web_identity(self, request: web.Request) -> web.Response:
        form = await request.post()
        assert form["Action"] == "AssumeRoleWithWebIdentity"
        assert form["WebIdentityToken"] == POD_TOKEN
        if self.refuses:
            error = "<ErrorResponse><Error><Code>AccessDenied</Code><Message>no</Message></Error></ErrorResponse>"
            return web.Response(text=error, status=403, content_type="text/xml")
        key, until = self._next()
        return web.Response(text=_STS.format(key=key, until=until), content_type="text/xml")

    async def container(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == POD_TOKEN
        if self.refuses:
            return web.Response(status=400, text="no")
        key, until = self._next()
        answer = {"AccessKeyId": key, "SecretAccessKey": "secret", "Token": "session", "Expiration": until}
        return web.json_response(answer)

    def _next(self) -> tuple[str, str]:
        self.issued += 1
        return f"KEY{self.issued}", (self.now() + timedelta(seconds=HOUR)).isoformat()

    def now(self) -> datetime:
        return datetime.now(UTC) + self.ahead


class Signers:
    """Who signed the calls to each service."""

    def __init__(self) -> None:
        self.keys: dict[str, str] = {}
        self.expired: set[str] = set()

    async def __call__(self, call: Call, forward: Forward) -> Answer:
        found = re.search(r"Credential=([^/]+)/", call.headers.get("Authorization", ""))
        self.keys[call.service] = found[1] if found else "nobody"
        assert call.headers.get("X-Amz-Security-Token") in {"session", None}
        if self.keys[call.service] in self.expired:
            prefix = "com.amazon.coral.service#"
            return refusal("ExpiredTokenException", 400, prefix)
        return await forward(call)


@pytest.fixture
async def issuer() -> AsyncIterator[Issuer]:
    made = Issuer()
    application = web.Application()
    application.router.add_post("/", made.web_identity)
    application.router.add_get("/pod", made.container)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    made.url = f"http://{host}:{port}"
    yield made
    await runner.cleanup()


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """An environment with a region, under the name that containers have it by, and no credentials."""
    aws()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_REGION", REGION)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return monkeypatch


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    aws_credentials.cache_clear()
    aws_session.cache_clear()
    yield
    aws_credentials.cache_clear()
    aws_session.cache_clear()


@pytest.fixture(params=["irsa", "pod_identity"])
def chain(request: pytest.FixtureRequest, issuer: Issuer, nothing: pytest.MonkeyPatch, tmp_path: Path) -> str:
    token = tmp_path / "token"
    token.write_text(POD_TOKEN)
    if request.param == "irsa":
        nothing.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
        nothing.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/conveyor")
        nothing.setenv("AWS_ENDPOINT_URL_STS", issuer.url)
    else:
        nothing.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{issuer.url}/pod")
        nothing.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(token))
    return str(request.param)


class Clients:
    """One of each kind, behind one proxy."""

    def __init__(self, signers: Signers, calls: dict[str, Callable[[], Awaitable[object]]]) -> None:
        self.signers = signers
        self._calls = calls

    async def signed_by(self, *services: str) -> dict[str, str]:
        """The access key of a call of each, or of some."""
        self.signers.keys.clear()
        for service, call in self._calls.items():
            if not services or service in services:
                await call()
        return self.signers.keys


@pytest.fixture
async def clients(tmp_path: Path) -> AsyncIterator[Clients]:
    signers, clock = Signers(), SystemClock()
    async with AsyncExitStack() as stack:
        shim = await stack.enter_async_context(Shim(aws(), signers))
        beside = await stack.enter_async_context(SqliteEngine.open(tmp_path, clock))
        queues = await stack.enter_async_context(
            SqsEngine.open(sqs.url_of(tmp_path, shim.url), clock, beside.records.documents)
        )
        address = parse_address(dynamodb.url_for(tmp_path, shim.url))
        session = await stack.enter_async_context(make_session())
        wire = Wire(session, address, clock, Patience(limit=5))
        blobs = (await stack.enter_async_context(ObjectEngine.open(s3.url_of(tmp_path, shim.url), clock))).blobs

        _make_bucket()
        yield Clients(
            signers,
            {
                "sqs": lambda: queues.queue.queues.own(CONTROL, memory=0),
                "dynamodb": lambda: wire.call("ListTables", {}),
                "s3": lambda: blobs.put("check", b"check"),
            },
        )


def _make_bucket() -> None:
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    client = botocore.session.get_session().create_client("s3", region_name=REGION, endpoint_url=aws(), **keys)
    if s3.BUCKET not in {each["Name"] for each in client.list_buckets()["Buckets"]}:
        client.create_bucket(Bucket=s3.BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION})


def all_by(key: str) -> dict[str, str]:
    return dict.fromkeys(("sqs", "dynamodb", "s3"), key)


def later(monkeypatch: pytest.MonkeyPatch, issuer: Issuer, seconds: float) -> None:
    """So much time has passed for the credentials that were found, and for their issuer."""
    issuer.ahead = timedelta(seconds=seconds)
    monkeypatch.setattr(aws_credentials()._found, "_time_fetcher", issuer.now)
    monkeypatch.setattr(botocore.credentials, "_local_now", issuer.now)


@pytest.mark.usefixtures("chain")
async def test_all_clients_share_one_key_of_the_chain(clients: Clients, issuer: Issuer) -> None:
    assert await clients.signed_by() == all_by("KEY1")
    assert await clients.signed_by() == all_by("KEY1")
    assert issuer.issued == 1


@pytest.mark.usefixtures("chain")
async def test_they_renew_it_before_it_expires(
    clients: Clients, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await clients.signed_by() == all_by("KEY1")
    later(monkeypatch, issuer, HOUR - 300)
    keys = await clients.signed_by()
    assert (keys["sqs"], keys["dynamodb"]) == ("KEY2", "KEY2")
    # The store asks again every five minutes.
    assert (await aws_credentials().current()).access_key == "KEY2"
    assert issuer.issued == 2


@pytest.mark.usefixtures("chain")
async def test_the_old_key_serves_while_no_new_one_is_to_be_had(
    clients: Clients, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await clients.signed_by() == all_by("KEY1")
    later(monkeypatch, issuer, HOUR - 800)
    issuer.refuses = True
    assert await clients.signed_by() == all_by("KEY1")
    issuer.refuses = False
    aws_credentials()._rest_until = 0.0
    assert (await clients.signed_by())["dynamodb"] == "KEY2"


@pytest.mark.usefixtures("chain")
async def test_a_key_that_the_service_calls_expired_is_replaced(clients: Clients) -> None:
    assert await clients.signed_by() == all_by("KEY1")
    clients.signers.expired = {"KEY1"}
    # The client of S3 asks for credentials every five minutes, whatever the service says.
    assert await clients.signed_by("sqs", "dynamodb") == {"sqs": "KEY2", "dynamodb": "KEY2"}


@pytest.mark.usefixtures("chain")
async def test_a_refusal_is_told_as_one_of_the_credentials(clients: Clients, issuer: Issuer) -> None:
    issuer.refuses = True
    for call in clients._calls.values():
        with pytest.raises(EngineFailed, match=r"(?i)credentials|provider|retriev"):
            await call()


async def test_a_profile_may_name_a_process(clients: Clients, nothing: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answer = json.dumps(
        {"Version": 1, "AccessKeyId": "PROCESS", "SecretAccessKey": "secret", "SessionToken": "session"}
    )
    script = tmp_path / "print_key.py"
    script.write_text(f"print({answer!r})")
    (tmp_path / "config").write_text(f"[profile work]\ncredential_process = {sys.executable} {script}\n")
    nothing.setenv("AWS_PROFILE", "work")
    assert await clients.signed_by() == all_by("PROCESS")


@pytest.mark.usefixtures("nothing")
async def test_without_any_each_client_says_so(clients: Clients) -> None:
    for call in clients._calls.values():
        with pytest.raises(EngineFailed, match=r"(?i)credentials"):
            await call()


def test_the_region_of_a_container_is_enough(nothing: pytest.MonkeyPatch) -> None:
    assert default_region() == REGION
    nothing.setenv("AWS_DEFAULT_REGION", "us-west-2")
    aws_session.cache_clear()
    assert default_region() == REGION
