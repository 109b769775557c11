"""S3 only: the standard credential chain, presigned requests, and lifecycle rules of the bucket.

A presigned PUT covers the object's key, size, sha256 and type. If-None-Match: * makes it valid once, if the store
supports that; otherwise a second PUT can only write the same bytes. A presigned GET covers the content type and the
file name of the download.
"""

import base64
import re
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import structlog
from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from pyreqwest.client import ClientBuilder
from pyreqwest.exceptions import PyreqwestError

from conveyor.clock import Clock
from conveyor.engines.aws_credentials import aws_credentials, missing_credentials
from conveyor.engines.aws_session import aws_session, default_region, service_host
from conveyor.engines.blobs import Presigned
from conveyor.errors import EngineFailed, InvalidSetting

log = structlog.get_logger()

# The maximum size of one PUT, and the maximum lifetime of a signature.
MAX_IN_ONE_PUT = 5 * 1024**3
LONGEST_SECONDS = 7 * 86_400

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_UNSAFE_IN_NAME = re.compile(r"[^A-Za-z0-9._-]")
# The store refreshes credentials after this many seconds; those of a role last longer.
_CREDENTIAL_SECONDS = 300
_MAX_SKEW = 60.0
# What stores answer that have no lifecycle rules. Some take the call for that which creates the bucket.
_WITHOUT_LIFECYCLE = frozenset({"BucketAlreadyExists", "BucketAlreadyOwnedByYou", "MethodNotAllowed", "NotImplemented"})
ABANDONED_DAYS = 2


class Signer:
    """Signs requests for objects under one bucket and prefix."""

    def __init__(self, bucket: "Bucket") -> None:
        self._bucket = bucket

    async def put(self, key: str, size: int, sha256: str, seconds: float) -> Presigned | None:
        if size > MAX_IN_ONE_PUT:
            return None
        headers = {
            "Content-Length": str(size),
            "Content-Type": "application/octet-stream",
            "If-None-Match": "*",
            "x-amz-checksum-sha256": base64.b64encode(bytes.fromhex(sha256)).decode(),
            "x-amz-sdk-checksum-algorithm": "SHA256",
        }
        return await self.signed("PUT", self._bucket.url_of(key), headers, seconds)

    async def get(self, key: str, seconds: float, content_type: str, filename: str) -> Presigned:
        name = _UNSAFE_IN_NAME.sub("_", filename)
        query = urlencode(
            {
                "response-content-disposition": f'attachment; filename="{name}"',
                "response-content-type": content_type,
            },
            quote_via=quote,
        )
        return await self.signed("GET", f"{self._bucket.url_of(key)}?{query}", {}, seconds)

    async def signed(self, method: str, url: str, headers: dict[str, str], seconds: float) -> Presigned:
        request = AWSRequest(method=method, url=url, headers=headers)
        credentials = await self._bucket.credentials()
        until = max(1, min(int(seconds), LONGEST_SECONDS))
        S3SigV4QueryAuth(credentials, "s3", self._bucket.region, expires=until).add_auth(request)
        return Presigned(request.url, method, headers)


class Bucket:
    """A bucket, and the prefix of all objects of Conveyor."""

    def __init__(self, name: str, prefix: str | None, region: str | None, endpoint: str | None, clock: Clock) -> None:
        self._clock = clock
        self.name = _checked_name(name)
        self.prefix = prefix
        self.region = region or default_region() or ""
        self.endpoint = None if endpoint is None else _checked_endpoint(endpoint)
        self.signer = Signer(self)
        if not self.region:
            raise InvalidSetting("CONVEYOR_BLOBS needs a region: s3://BUCKET/PREFIX?region=REGION, or set AWS_REGION")

    def url_of(self, key: str) -> str:
        path = quote(key if self.prefix is None else f"{self.prefix}/{key}", safe="/~")
        if self.endpoint is not None:
            return f"{self.endpoint}/{self.name}/{path}"
        host = service_host("s3", self.region)
        # The certificate of a name with dots would not match.
        return f"https://{host}/{self.name}/{path}" if "." in self.name else f"https://{self.name}.{host}/{path}"

    async def credentials(self) -> Any:
        """The current credentials of the process."""
        try:
            return await aws_credentials().current()
        except BotoCoreError as error:
            raise EngineFailed(missing_credentials(error)) from error

    def provider(self) -> Any:
        """The same credentials for the store, which calls this in its own threads."""
        try:
            frozen = aws_credentials().load()
        except BotoCoreError as error:
            raise EngineFailed(missing_credentials(error)) from error
        now = datetime.fromtimestamp(self._clock.now(), UTC)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": now + timedelta(seconds=_CREDENTIAL_SECONDS),
        }

    async def migrate(self) -> None:
        """Create the bucket unless it exists, and add the lifecycle rules of Conveyor to the existing ones."""
        try:
            async with self.client() as client:
                await self._make(client)
                await self._put_rules(client)
        except (BotoCoreError, ClientError) as error:
            raise EngineFailed(f"The bucket {self.name} could not be prepared: {error}") from error

    async def checks(self, key: str, data: bytes, sha256: str) -> list[tuple[str, str | None]]:
        """Check a presigned PUT and GET, as a client makes them, the clocks, and the rules of the bucket."""
        try:
            put = await self.signer.put(key, len(data), sha256, 60)
            got = await self.signer.get(key, 60, "application/octet-stream", "check")
            assert put is not None
            stored = await _sent(put, data)
            read = await _sent(got)
        except (PyreqwestError, OSError, EngineFailed) as error:
            return [("signed requests", f"{error}")]
        again = await _sent(put, data)
        wrong = None if stored.status == 200 else f"a signed PUT was answered {stored.status}: {stored.reason}"
        unread = None if read.body == data else f"a signed GET was answered {read.status}: {read.reason}"
        return [
            ("signed PUT", wrong),
            ("signed GET", unread),
            ("signed PUT is good once", None if again.status in {409, 412} else "the store ignores If-None-Match"),
            ("clock", self._skew(stored.date)),
            ("lifecycle of the bucket", await self._rules_missing()),
        ]

    def _skew(self, date: str | None) -> str | None:
        if date is None:
            return None
        skew = abs(parsedate_to_datetime(date).timestamp() - self._clock.now())
        return (
            None
            if skew <= _MAX_SKEW
            else f"this clock and the clock of S3 are {skew:.0f} s apart: synchronize it with NTP"
        )

    async def _rules_missing(self) -> str | None:
        try:
            async with self.client() as client:
                there = {rule.get("ID") for rule in await _rules(client, self.name)}
        except (BotoCoreError, ClientError) as error:
            return f"cannot be read: {error}"
        missing = {rule["ID"] for rule in self._our_rules()} - there
        if missing:
            return (
                f"run `conveyor migrate`, unless the store has no such rules: {', '.join(sorted(missing))} is missing"
            )
        if self._old_rule in there:
            return f"run `conveyor migrate`: {self._old_rule} removes lists that unfinished jobs may still need"
        return None

    async def _make(self, client: Any) -> None:
        try:
            await client.head_bucket(Bucket=self.name)
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
                raise
            # The first region has no name here.
            where = {} if self.region == "us-east-1" else {"LocationConstraint": self.region}
            await client.create_bucket(Bucket=self.name, **({"CreateBucketConfiguration": where} if where else {}))

    async def _put_rules(self, client: Any) -> None:
        ours = self._our_rules()
        names = {*(rule["ID"] for rule in ours), self._old_rule}
        stored = await _rules(client, self.name)
        theirs = [rule for rule in stored if rule.get("ID") not in names]
        if [_plain(rule) for rule in stored if rule not in theirs] == [_plain(rule) for rule in ours]:
            # A template may own them.
            return
        rules = {"Rules": [*theirs, *ours]}
        try:
            await client.put_bucket_lifecycle_configuration(Bucket=self.name, LifecycleConfiguration=rules)
        except ClientError as error:
            code = error.response["Error"]["Code"]
            # S3 itself has them.
            if self.endpoint is None or code not in _WITHOUT_LIFECYCLE:
                raise
            log.warning(
                "this store has no lifecycle rules; remove abandoned multipart uploads by other means",
                bucket=self.name,
                error=code,
            )

    def _our_rules(self) -> list[dict[str, Any]]:
        """No rule by age: only retention knows which objects unfinished jobs still need."""
        folder = "" if self.prefix is None else f"{self.prefix}/"
        return [
            {
                "ID": f"{self._label}-abandoned",
                "Status": "Enabled",
                "Filter": {"Prefix": folder},
                "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": ABANDONED_DAYS},
            },
        ]

    @property
    def _label(self) -> str:
        return f"conveyor-{self.prefix or 'all'}"[:200]

    @property
    def _old_rule(self) -> str:
        """The rule of earlier versions that removed uploads by age."""
        return f"{self._label}-uploads"

    def client(self) -> AbstractAsyncContextManager[Any]:
        # Path style for a name with dots, or a custom endpoint.
        style = "path" if self.endpoint is not None or "." in self.name else "virtual"
        config = Config(s3={"addressing_style": style}, connect_timeout=5, read_timeout=30)
        client: AbstractAsyncContextManager[Any] = aws_session().create_client(
            "s3", region_name=self.region, endpoint_url=self.endpoint, config=config
        )
        return client


class _PresignedAnswer:
    def __init__(self, status: int, body: bytes, date: str | None) -> None:
        self.status = status
        self.body = body
        self.date = date

    @property
    def reason(self) -> str:
        return self.body[:200].decode(errors="replace")


async def _sent(request: Presigned, body: bytes | None = None) -> _PresignedAnswer:
    builder = ClientBuilder().error_for_status(False).timeout(timedelta(seconds=30))
    # A proxy cannot reach this machine's loopback.
    local = urlsplit(request.url).hostname in {"127.0.0.1", "::1", "localhost"}
    async with (builder.no_proxy() if local else builder).build() as client:
        asked = client.request(request.method, request.url).headers(dict(request.headers))
        response = await (asked if body is None else asked.body_bytes(body)).build().send()
        return _PresignedAnswer(response.status, bytes(await response.bytes()), response.headers.get("date"))


async def _rules(client: Any, bucket: str) -> list[dict[str, Any]]:
    try:
        configuration = await client.get_bucket_lifecycle_configuration(Bucket=bucket)
    except ClientError as error:
        if error.response["Error"]["Code"] != "NoSuchLifecycleConfiguration":
            raise
        return []
    rules: list[dict[str, Any]] = configuration.get("Rules", [])
    return rules


def _plain(rule: dict[str, Any]) -> dict[str, Any]:
    """A rule with its prefix where older templates have it."""
    return {
        "Prefix": rule.get("Filter", {}).get("Prefix", ""),
        **{key: value for key, value in rule.items() if key != "Filter"},
    }


def _checked_name(name: str) -> str:
    if not _BUCKET.fullmatch(name):
        raise InvalidSetting(f"CONVEYOR_BLOBS: {name!r} is not a valid bucket name")
    return name


def _checked_endpoint(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.username:
        raise InvalidSetting("CONVEYOR_BLOBS: `endpoint` must be an http or https address")
    return endpoint.rstrip("/")
