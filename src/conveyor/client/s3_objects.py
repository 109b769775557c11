"""Read an object in S3 with the caller's own credentials, as botocore finds them: in the environment, in a profile, or
of a role."""

from typing import Any

from conveyor.errors import ListChanged, ListMissing, ListUnreadable

SCHEME = "s3://"
# botocore reads only the second name by default.
_VARIABLES = {"region": ("region", ["AWS_REGION", "AWS_DEFAULT_REGION"], None, None)}


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


def is_object(tasks: object) -> bool:
    """Whether it is the URL of an object."""
    return isinstance(tasks, str) and tasks.startswith(SCHEME)


def open_object(url: str, version_id: str | None = None, etag: str | None = None) -> S3Object:
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
