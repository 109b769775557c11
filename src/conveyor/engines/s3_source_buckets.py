"""Source buckets on S3: the buckets of CONVEYOR_SOURCE_BUCKETS, read with the server's own credentials.

Each request names the version, or has If-Match with the ETag; the answer's ETag is compared too, because some stores
ignore the condition. A request reads one block, so that a slow reader keeps no connection open.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qsl

import aiohttp
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from conveyor.engines.aws_session import aws_session
from conveyor.engines.source_buckets import SCHEME, PinnedObject
from conveyor.errors import (
    ConveyorError,
    InvalidSetting,
    ListChanged,
    ListMissing,
    ListUnreadable,
    SourceRefused,
    SourceUnavailable,
)
from conveyor.model import RemoteSource, TenantId

EVERY_TENANT = "*"

_FORM = "TENANT=s3://BUCKET/PREFIX?region=REGION&endpoint=URL"
_ENTRY = re.compile(r"(?P<tenant>[^=\s]+)=s3://(?P<bucket>[^/?\s]+)(?:/(?P<prefix>[^?\s]*))?(?:\?(?P<options>\S*))?")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_OPTIONS = frozenset({"region", "endpoint"})
_BLOCK = 8 * 1024 * 1024
_PIECE = 256 * 1024
_MAX_KEY_BYTES = 1024
_ATTEMPTS = 5
_CHANGED = "The list was replaced in its bucket since the ingest began. Submit it again."
_FAILURES = (BotoCoreError, aiohttp.ClientError, OSError)


class ListedBucket(NamedTuple):
    """An entry of the setting."""

    tenant: str
    bucket: str
    # Whole segments; empty: the whole bucket.
    prefix: str
    region: str | None
    endpoint: str | None


class S3SourceBuckets:
    """Opens one client for each region and endpoint, when it is first needed."""

    def __init__(self, listed: list[ListedBucket], stack: AsyncExitStack) -> None:
        self._listed = listed
        self._stack = stack
        self._clients: dict[tuple[str | None, str | None, bool], Any] = {}
        self._opening = asyncio.Lock()

    @classmethod
    @asynccontextmanager
    async def open(cls, setting: str) -> AsyncIterator[Self]:
        """Check the setting. It sends no request. Raises InvalidSetting."""
        listed = [_entry(text) for text in setting.split()]
        async with AsyncExitStack() as stack:
            yield cls(listed, stack)

    def check(self, tenant: TenantId, url: str) -> None:
        self._find(tenant, url)

    async def pin(self, tenant: TenantId, remote: RemoteSource) -> PinnedObject:
        listed, key = self._find(tenant, remote.url)
        client = await self._client(listed)
        with _translated():
            found = await client.head_object(Bucket=listed.bucket, Key=key, **_conditions(remote))
        _check_etag(remote, found)
        version = found.get("VersionId")
        return PinnedObject(
            size=int(found["ContentLength"]),
            etag=found.get("ETag"),
            # An object from before versions were enabled.
            version_id=None if version == "null" else version,
        )

    async def stream(self, tenant: TenantId, remote: RemoteSource, start: int, end: int) -> AsyncIterator[bytes]:
        listed, key = self._find(tenant, remote.url)
        client = await self._client(listed)
        while start < end:
            stop = min(start + _BLOCK, end)
            with _translated():
                got = await client.get_object(
                    Bucket=listed.bucket, Key=key, Range=f"bytes={start}-{stop - 1}", **_conditions(remote)
                )
                _check_etag(remote, got)
                async with got["Body"] as body:
                    # Some stores answer a request for a range of an old version with all of it.
                    await _read(body, 0 if "ContentRange" in got else start, keep=False)
                    block = await _read(body, stop - start)
            if len(block) != stop - start:
                raise SourceUnavailable(f"The bucket answered {len(block)} bytes for a range of {stop - start}.")
            view = memoryview(block)
            for offset in range(0, len(view), _PIECE):
                yield bytes(view[offset : offset + _PIECE])
            start = stop

    def _find(self, tenant: TenantId, url: str) -> tuple[ListedBucket, str]:
        bucket, key = split_url(url)
        for listed in self._listed:
            if listed.bucket == bucket and listed.tenant in (tenant, EVERY_TENANT) and _is_under(key, listed.prefix):
                return listed, key
        raise SourceRefused

    async def _client(self, listed: ListedBucket) -> Any:
        # The certificate of a name with dots would not match; a custom endpoint has no names of buckets.
        by_path = listed.endpoint is not None or "." in listed.bucket
        place = (listed.region, listed.endpoint, by_path)
        async with self._opening:
            if place not in self._clients:
                config = Config(
                    s3={"addressing_style": "path" if by_path else "virtual"},
                    connect_timeout=5,
                    read_timeout=30,
                    retries={"mode": "standard", "max_attempts": _ATTEMPTS},
                    # The ingest compares hashes; some stores send the checksum of the object with a range of it.
                    response_checksum_validation="when_required",
                )
                opening = aws_session().create_client(
                    "s3", region_name=listed.region, endpoint_url=listed.endpoint, config=config
                )
                try:
                    self._clients[place] = await self._stack.enter_async_context(opening)
                except BotoCoreError as error:
                    raise SourceUnavailable(f"The bucket {listed.bucket} cannot be reached: {error}") from error
            return self._clients[place]


def split_url(url: str) -> tuple[str, str]:
    """Bucket and key. The key is the rest of the URL, literally. Raises SourceRefused if it is not a readable one."""
    bucket, _, key = url.removeprefix(SCHEME).partition("/")
    # A client on the way might resolve dots in a path, and so leave the prefix.
    if not key or len(key.encode()) > _MAX_KEY_BYTES or not {".", ".."}.isdisjoint(key.split("/")):
        raise SourceRefused("The server reads objects as s3://BUCKET/KEY, with a key of at most 1024 bytes.")
    return bucket, key


async def _read(body: Any, length: int, *, keep: bool = True) -> bytes:
    """The next bytes, or fewer at the end. One read of the body returns what has arrived."""
    pieces: list[bytes] = []
    while length and (piece := await body.read(min(length, _PIECE))):
        length -= len(piece)
        if keep:
            pieces.append(piece)
    return b"".join(pieces)


@contextmanager
def _translated() -> Iterator[None]:
    """Translate failures of the store."""
    try:
        yield
    except ClientError as error:
        raise _error_of(error) from error
    except _FAILURES as error:
        raise SourceUnavailable(f"The bucket cannot be read: {error}") from error


def _error_of(error: ClientError) -> ConveyorError:
    response: Any = error.response
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    code = response.get("Error", {}).get("Code", "")
    if status == 404:
        return ListMissing(f"The list is not in its bucket ({code}). Check the URL, and the version if you named one.")
    if status == 412:
        return ListChanged(_CHANGED)
    if status in (400, 401, 403):
        return ListUnreadable(
            f"The bucket refused the server ({code}). Its role needs s3:GetObject and s3:GetObjectVersion there."
        )
    return SourceUnavailable(f"The bucket cannot be read: {error}")


def _conditions(remote: RemoteSource) -> Mapping[str, str]:
    conditions = {"VersionId": remote.version_id, "IfMatch": None if remote.etag is None else quoted(remote.etag)}
    return {name: value for name, value in conditions.items() if value is not None}


def _check_etag(remote: RemoteSource, answer: Mapping[str, Any]) -> None:
    etag = answer.get("ETag")
    if remote.etag is not None and etag is not None and quoted(etag) != quoted(remote.etag):
        raise ListChanged(_CHANGED)


def quoted(etag: str) -> str:
    """As in a header: clients often show an ETag without its quotes."""
    return etag if etag.endswith('"') else f'"{etag}"'


def _is_under(key: str, prefix: str) -> bool:
    return not prefix or key.startswith(f"{prefix}/")


def _entry(text: str) -> ListedBucket:
    found = _ENTRY.fullmatch(text)
    options = dict(parse_qsl(found["options"] or "")) if found else {}
    if found is None or not _BUCKET.fullmatch(found["bucket"]) or options.keys() - _OPTIONS:
        raise InvalidSetting(f"CONVEYOR_SOURCE_BUCKETS: {text!r} is invalid. Use {_FORM}, separated by spaces.")
    prefix = (found["prefix"] or "").strip("/")
    return ListedBucket(found["tenant"], found["bucket"], prefix, options.get("region"), options.get("endpoint"))
