"""Read an object in S3 with the caller's own credentials, as botocore finds them: in the environment, in a profile, or
of a role. Also the caller's S3 for those who write there."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from conveyor.errors import ListChanged, ListMissing, ListUnreadable

SCHEME = "s3://"
# botocore reads only the second name by default.
_VARIABLES = {"region": ("region", ["AWS_REGION", "AWS_DEFAULT_REGION"], None, None)}
# How long a store may use credentials before it asks for them again, in seconds.
_CREDENTIAL_SECONDS = 300


class S3Object:
    """An object in one version, open for reading. Failures to read are OSErrors, as those of a file."""

    def __init__(self, url: str, body: Any, failures: tuple[type[Exception], ...]) -> None:
        self.url = url
        self._body = body
        self._failures = failures

    def read(self, size: int) -> bytes:
        try:
            piece: bytes = self._body.read(size)
        except self._failures as error:
            raise OSError(f"{self.url}: {error}") from None
        return piece

    def close(self) -> None:
        self._body.close()


def open_s3_object(url: str, version_id: str | None = None, etag: str | None = None) -> S3Object:
    """Open s3://BUCKET/KEY. The key is the rest of the URL, literally. Raises ListUnreadable."""
    try:
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415  (of an extra)
        from botocore.session import get_session  # noqa: PLC0415  (of an extra)
    except ImportError:
        raise ListUnreadable(f"Reading {url} needs the extra 'aws': pip install 'conveyor-jobs[aws]'") from None
    bucket, _, key = url.removeprefix(SCHEME).partition("/")
    if not bucket or not key:
        raise ListUnreadable(f"Invalid URL {url}. Use s3://BUCKET/KEY.")
    version = {} if version_id is None else {"VersionId": version_id}
    match = {} if etag is None else {"IfMatch": etag}
    try:
        client: Any = get_session(env_vars=_VARIABLES).create_client("s3")
        body = client.get_object(Bucket=bucket, Key=key, **version, **match)["Body"]
    except ClientError as error:
        raise _error_of(url, error) from None
    except BotoCoreError as error:
        raise ListUnreadable(f"Cannot read {url}: {error}") from None
    return S3Object(url, body, (BotoCoreError,))


def _error_of(url: str, error: Any) -> ListUnreadable:
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if status == 404:
        return ListMissing(f"List {url} not found.")
    if status == 412:
        return ListChanged(f"{url} has another ETag than the one that was named.")
    return ListUnreadable(f"Cannot read {url}: {error}")


def s3_client(region: str | None = None) -> tuple[Any, Callable[[], Any]]:
    """A client of S3, in this region or in that of the caller's configuration, and a provider of the same credentials,
    which renew themselves, for obstore. Needs botocore. Raises BotoCoreError."""
    from botocore.exceptions import NoCredentialsError  # noqa: PLC0415  (of an extra)
    from botocore.session import get_session  # noqa: PLC0415  (of an extra)

    session: Any = get_session(env_vars=_VARIABLES)
    credentials = session.get_credentials()
    if credentials is None:
        raise NoCredentialsError

    def provide() -> dict[str, Any]:
        frozen = credentials.get_frozen_credentials()
        until = time.time() + _CREDENTIAL_SECONDS  # noqa: TID251  (the library compares it with the machine's clock)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.fromtimestamp(until, UTC),
        }

    return session.create_client("s3", region_name=region), provide
