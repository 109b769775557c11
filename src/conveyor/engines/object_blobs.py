"""Blobs on an object store, through obstore: S3, and with it Google Cloud Storage and Azure.

The URL is `s3://BUCKET/PREFIX?region=…&endpoint=…`, `gs://BUCKET/PREFIX` or `az://CONTAINER/PREFIX`; all keys are under
the prefix. An acknowledged put is durable, and readers see all of it or none. Only S3 signs requests that cover a size
and a hash (s3.py): on the other stores, clients upload and download through the API.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from hashlib import sha256
from typing import Any, Self, TypeVar
from urllib.parse import parse_qsl, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from conveyor.clock import Clock
from conveyor.engines.aws_session import service_host
from conveyor.engines.blob_keys import check_key, check_range, folder_of
from conveyor.engines.blobs import BlobInfo, Presigned, StoredPart
from conveyor.engines.s3 import Bucket, Signer
from conveyor.engines.s3_parts import S3Parts
from conveyor.errors import EngineFailed, InvalidSetting, NotFound
from conveyor.faults import crashpoint

T = TypeVar("T")

PIECE_BYTES = 256 * 1024

_FORMS = "s3://BUCKET/PREFIX?region=REGION, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX"
_OPTIONS = {"s3": frozenset({"region", "endpoint"}), "gs": frozenset[str](), "az": frozenset({"account"})}
# A stream reads this much per request, so that a slow reader keeps no connection open.
_BLOCK = 8 * 1024 * 1024
_PART = 8 * 1024 * 1024
_PARTS_AT_ONCE = 2
_PUTS_AT_ONCE = 16
# A smaller object is one request, which costs a quarter of the smallest multipart upload.
_MAX_IN_ONE = 64 * 1024 * 1024
_LIST_BATCH = 1000
_DELETE_BATCH = 1000
_CLIENT: Any = {"connect_timeout": "5s", "read_timeout": "30s", "timeout": "600s"}
_RETRY: Any = {
    "max_retries": 10,
    "retry_timeout": timedelta(seconds=30),
    "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2},
}

Store = S3Store | GCSStore | AzureStore


class ObjectBlobs:
    """A prefix consists of whole segments: `a/b` and `a/b/` both match keys under `a/b/`, never `a/bc`."""

    def __init__(self, store: Store, signer: Signer | None = None, parts: S3Parts | None = None) -> None:
        self._store = store
        self._signer = signer
        self._parts = parts

    async def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        path = check_key(key)
        crashpoint("blob.put.before")
        if len(data) <= _MAX_IN_ONE:
            await _written(obstore.put_async(self._store, path, data, use_multipart=False))
        else:
            await self.put_stream(key, _one(bytes(data)))
        crashpoint("blob.put.after")

    async def put_all(self, objects: Sequence[tuple[str, bytes | bytearray | memoryview]]) -> list[str]:
        at_once = asyncio.Semaphore(_PUTS_AT_ONCE)

        async def put(key: str, data: bytes | bytearray | memoryview) -> None:
            async with at_once:
                await self.put(key, data)

        await asyncio.gather(*(put(key, data) for key, data in objects))
        return [key for key, _ in objects]

    async def put_stream(self, key: str, chunks: AsyncIterator[bytes]) -> int:
        path = check_key(key)
        size = 0
        # On an exception the writer aborts the upload, and the store drops its parts.
        async with _writing(self._store, path) as write:
            async for chunk in chunks:
                if chunk:
                    await _written(write(chunk))
                    size += len(chunk)
            crashpoint("blob.put.before")
        crashpoint("blob.put.after")
        return size

    async def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes | None:
        check_range(offset, length)
        block = await self._block(check_key(key), offset, None if length is None else offset + length)
        return None if block is None else bytes(block.data)

    async def stream(self, key: str, offset: int = 0) -> AsyncIterator[bytes]:
        check_range(offset)
        path = check_key(key)
        etag: str | None = None
        while True:
            # Only the object of the first request: a replaced object is an error, never a mixture of both.
            block = await self._block(path, offset, offset + _BLOCK, etag)
            if block is None:
                raise NotFound(f"Object not found: {key}.")
            view = memoryview(block.data)
            for start in range(0, len(view), PIECE_BYTES):
                yield bytes(view[start : start + PIECE_BYTES])
            offset, etag = offset + len(view), block.etag
            if offset >= block.size:
                return

    async def size(self, key: str) -> int | None:
        try:
            return int((await _asked(obstore.head_async(self._store, check_key(key))))["size"])
        except FileNotFoundError as error:
            _check_bucket(error)
            return None

    async def listing(self, prefix: str) -> AsyncIterator[BlobInfo]:
        listed = obstore.list(self._store, folder_of(prefix) or None, chunk_size=_LIST_BATCH)
        while (batch := await _asked(anext(listed, None))) is not None:
            for meta in batch:
                yield BlobInfo(meta["path"], meta["size"])

    async def delete(self, keys: list[str]) -> None:
        paths = [check_key(key) for key in keys]
        for start in range(0, len(paths), _DELETE_BATCH):
            try:
                await _asked(obstore.delete_async(self._store, paths[start : start + _DELETE_BATCH]))
            except FileNotFoundError:
                # The store named one failed key of several: delete each by itself.
                await asyncio.gather(*(self._delete(path) for path in paths[start : start + _DELETE_BATCH]))

    async def delete_prefix(self, prefix: str, limit: int) -> int:
        if not folder_of(prefix):
            raise ValueError("an empty prefix would delete everything")
        removed = 0
        keys: list[str] = []
        async for info in self.listing(prefix):
            if removed + len(keys) == limit:
                break
            keys.append(info.key)
            if len(keys) == _DELETE_BATCH:
                await self.delete(keys)
                removed += len(keys)
                keys = []
        await self.delete(keys)
        return removed + len(keys)

    async def presigned_put(self, key: str, size: int, sha256: str, seconds: float) -> Presigned | None:
        check_key(key)
        return None if self._signer is None else await self._signer.put(key, size, sha256, seconds)

    async def presigned_get(self, key: str, seconds: float, content_type: str, filename: str) -> Presigned | None:
        check_key(key)
        return None if self._signer is None else await self._signer.get(key, seconds, content_type, filename)

    async def part_bytes(self, size: int) -> int | None:
        return None if self._parts is None else self._parts.part_bytes(size)

    async def begin_parts(self, key: str) -> str:
        crashpoint("blob.begin_parts.before")
        multipart_id = await self._by_parts().begin(check_key(key))
        crashpoint("blob.begin_parts.after")
        return multipart_id

    async def presigned_part(self, key: str, multipart_id: str, number: int, size: int, seconds: float) -> Presigned:
        return await self._by_parts().signed(check_key(key), multipart_id, number, size, seconds)

    async def stored_parts(self, key: str, multipart_id: str) -> list[StoredPart]:
        return await self._by_parts().stored(check_key(key), multipart_id)

    async def complete_parts(self, key: str, multipart_id: str, parts: list[StoredPart]) -> None:
        crashpoint("blob.complete_parts.before")
        await self._by_parts().complete(check_key(key), multipart_id, parts)
        crashpoint("blob.complete_parts.after")

    def _by_parts(self) -> S3Parts:
        assert self._parts is not None, "part_bytes says that there are none"
        return self._parts

    async def _block(self, path: str, start: int, end: int | None, etag: str | None = None) -> "_Block | None":
        """Bytes from `start` to `end`, or to the end of the object."""
        options: dict[str, Any] = {"range": {"offset": start} if end is None else (start, end)}
        if etag is not None:
            options["if_match"] = etag
        whole = end is None and start == 0
        try:
            if end is None or start < end:
                got = await obstore.get_async(self._store, path, options=None if whole else options)  # type: ignore[arg-type]  # a dict built in steps
                return _Block(await got.bytes_async(), got.meta["size"], got.meta["e_tag"])
        except FileNotFoundError as error:
            _check_bucket(error)
            return None
        except BaseError as error:
            # The store answers a range past the end with the same error as any other failure.
            size = None if whole else await self.size(path)
            if size is None or start < size:
                raise _failed(error) from error
        size = await self.size(path)
        return None if size is None else _Block(b"", size, etag)

    async def _delete(self, path: str) -> None:
        try:
            await _asked(obstore.delete_async(self._store, path))
        except FileNotFoundError:
            return


class ObjectEngine:
    """Blobs under one URL, with migration and checks."""

    def __init__(self, store: Store, bucket: Bucket | None, clock: Clock) -> None:
        self._store = store
        self._bucket = bucket
        self._clock = clock
        self.blobs = ObjectBlobs(store) if bucket is None else ObjectBlobs(store, bucket.signer, S3Parts(bucket))

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, clock: Clock) -> AsyncIterator[Self]:
        """Check the URL. It sends no request to the store."""
        parts, options = _parsed(url)
        prefix = parts.path.strip("/") or None
        if prefix is not None:
            _check_prefix(prefix)
        if parts.scheme == "gs":
            yield cls(GCSStore(parts.netloc, prefix=prefix, client_options=_CLIENT, retry_config=_RETRY), None, clock)
        elif parts.scheme == "az":
            account: Any = {"account_name": options["account"]} if "account" in options else {}
            store = AzureStore(parts.netloc, prefix=prefix, client_options=_CLIENT, retry_config=_RETRY, **account)
            yield cls(store, None, clock)
        else:
            bucket = Bucket(parts.netloc, prefix, options.get("region"), options.get("endpoint"), clock)
            yield cls(_s3_store(bucket), bucket, clock)

    async def migrate(self) -> None:
        """Create the bucket if it is missing, and set its lifecycle rules. Safe to repeat."""
        if self._bucket is not None:
            await self._bucket.migrate()

    async def checks(self) -> list[tuple[str, str | None]]:
        """The name of each check, and what to fix, or None."""
        key = f"checks/{self._clock.new_id('check')}"
        data = key.encode()
        unwritten = await _tried(self.blobs.put(key, data))
        if unwritten is not None:
            return [("write an object", unwritten)]
        listed = [
            ("write an object", None),
            ("read it back", await _tried(self._reads(key, data))),
            ("read a part of it", await _tried(self._reads(key, data, 3, 5))),
            ("list it", await _tried(self._lists(key))),
        ]
        if self._bucket is not None:
            signed = f"{key}.signed"
            listed += await self._bucket.checks(signed, data, sha256(data).hexdigest())
            listed.append(("delete a signed object", await _tried(self.blobs.delete([signed]))))
        listed.append(("delete it", await _tried(self.blobs.delete([key]))))
        return listed

    async def _reads(self, key: str, data: bytes, offset: int = 0, length: int | None = None) -> None:
        """Not every store that speaks S3 answers a range with a range."""
        end = None if length is None else offset + length
        if await self.blobs.get(key, offset, length) != data[offset:end]:
            raise EngineFailed("the object that was read differs from the one that was written")

    async def _lists(self, key: str) -> None:
        if key not in [info.key async for info in self.blobs.listing("checks")]:
            raise EngineFailed("the listing lacks an object that was written")


class _Block:
    __slots__ = ("data", "etag", "size")

    def __init__(self, data: Any, size: int, etag: str | None) -> None:
        self.data = data
        # The size of the whole object.
        self.size = size
        self.etag = etag


@asynccontextmanager
async def _writing(store: Store, path: str) -> AsyncIterator[Callable[[bytes], Awaitable[int]]]:
    writer = obstore.open_writer_async(store, path, buffer_size=_PART, max_concurrency=_PARTS_AT_ONCE)
    inside: BaseException | None = None
    try:
        async with writer as file:
            try:
                yield file.write
            except BaseException as error:
                inside = error
                raise
    except (BaseError, FileNotFoundError) as error:
        # An error of the stream's source belongs to the caller.
        if error is inside:
            raise
        raise _failed(error) from error


async def _one(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def _asked(call: Awaitable[T]) -> T:
    """Call the store. A missing object remains FileNotFoundError."""
    try:
        return await call
    except BaseError as error:
        raise _failed(error) from error


async def _written(call: Awaitable[object]) -> None:
    """A write: the object may be missing, the bucket must exist."""
    try:
        await _asked(call)
    except FileNotFoundError as error:
        raise _failed(error) from error


def _check_bucket(error: FileNotFoundError) -> None:
    """Whether the bucket is missing. The error resembles that of a missing object, but is a failure."""
    if "NoSuchBucket" in str(error):
        raise _failed(error) from error


async def _tried(step: Awaitable[object]) -> str | None:
    try:
        await step
    except EngineFailed as error:
        return error.message
    return None


def _failed(error: Exception) -> EngineFailed:
    # The first line names the problem; the request and a document of the store follow.
    return EngineFailed(f"The object store failed: {str(error).splitlines()[0][:300]}")


def _parsed(url: str) -> tuple[Any, dict[str, str]]:
    parts = urlsplit(url)
    if parts.scheme not in _OPTIONS or not parts.netloc or "@" in parts.netloc:
        raise InvalidSetting(f"CONVEYOR_BLOBS must be {_FORMS}")
    options = dict(parse_qsl(parts.query))
    unknown = options.keys() - _OPTIONS[parts.scheme]
    if unknown:
        raise InvalidSetting(f"CONVEYOR_BLOBS: `{min(unknown)}` is not an option of {parts.scheme}. Use {_FORMS}.")
    return parts, options


def _check_prefix(prefix: str) -> None:
    try:
        check_key(prefix)
    except ValueError:
        raise InvalidSetting("CONVEYOR_BLOBS: the prefix must be plain segments of A-Z a-z 0-9 . _ = - #") from None


def _s3_store(bucket: Bucket) -> S3Store:
    # The library itself knows only the endpoints of the partition `aws`.
    endpoint = bucket.endpoint or f"https://{service_host('s3', bucket.region)}"
    options: Any = {**_CLIENT, "allow_http": bucket.endpoint is not None and bucket.endpoint.startswith("http:")}
    return S3Store(
        bucket.name,
        prefix=bucket.prefix,
        region=bucket.region,
        client_options=options,
        retry_config=_RETRY,
        credential_provider=bucket.provider,
        endpoint=endpoint,
    )
