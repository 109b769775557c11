"""Buckets and directories of the caller, through obstore, with the caller's own credentials: for S3 as botocore finds
them (the environment, a profile, a role), for Google Cloud Storage and Azure as their environment variables and tools
leave them."""

import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from conveyor.client.s3_objects import s3_client
from conveyor.client.upload_file import BytesProgress
from conveyor.errors import BadInput, ConveyorError, DestinationUnavailable

SCHEMES = ("s3://", "gs://", "az://", "file://")

_FORMS = "s3://BUCKET/PREFIX/, gs://BUCKET/PREFIX/, az://CONTAINER/PREFIX/ or file:///DIRECTORY/"
_SEGMENT = re.compile(r"[A-Za-z0-9._=+@,:-]+")
# A larger object goes in parts of this size, a few of them at once.
_PART_BYTES = 8 * 1024 * 1024
_PARTS_AT_ONCE = 4
_MAX_PARTS = 9000
_LIST_BATCH = 1000
_FORBIDDEN = 403
_NOT_FOUND = 404


class StoredPrefix:
    """A prefix in a bucket, or a directory. Names are those below it. A write is seen whole, or not at all."""

    def __init__(self, url: str, store: Any, library: Any) -> None:
        # With a slash at its end.
        self.url = url
        self._store = store
        self._library = library

    def names(self, limit: int) -> list[str]:
        """Return at most `limit` names that exist. Raises DestinationUnavailable."""

        def listed() -> list[str]:
            found: list[str] = []
            for batch in self._library.list(self._store, chunk_size=_LIST_BATCH):
                found += (item["path"] for item in batch)
                if len(found) >= limit:
                    break
            return found[:limit]

        names: list[str] = self._call("list", listed)
        return names

    def size(self, name: str) -> int | None:
        """The size of an object; None if there is none."""
        try:
            return int(self._call("read", lambda: self._library.head(self._store, name))["size"])
        except FileNotFoundError:
            return None

    def read(self, name: str, limit: int | None = None) -> bytes | None:
        """A small object; None if there is none, or it is larger than `limit`."""

        def found() -> bytes | None:
            answer = self._library.get(self._store, name)
            return bytes(answer.bytes()) if limit is None or answer.meta["size"] <= limit else None

        try:
            data: bytes | None = self._call("read", found)
        except FileNotFoundError:
            return None
        return data

    def write(self, name: str, data: bytes) -> None:
        """Write a small object."""
        self._call("write", lambda: self._library.put(self._store, name, data, use_multipart=False), is_write=True)

    def write_file(self, name: str, path: Path, progress: BytesProgress | None = None) -> None:
        """Write a file of any size."""
        with path.open("rb") as file:
            body = _CountedFile(file, path.stat().st_size, progress)
            put = partial(self._library.put, chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE)
            try:
                self._call("write", lambda: put(self._store, name, body), is_write=True)
            except DestinationUnavailable:
                # A Ctrl-C during a read is not a failure of the store.
                if body.interrupted is not None:
                    raise body.interrupted from None
                raise

    async def write_stream(self, name: str, pieces: AsyncIterator[bytes], size: int) -> None:
        """Write an object of `size` bytes as they come. If the iterator fails, nothing is written."""
        # A store takes 10,000 parts.
        buffer = max(_PART_BYTES, size // _MAX_PARTS)
        writer = self._library.open_writer_async(self._store, name, buffer_size=buffer, max_concurrency=_PARTS_AT_ONCE)
        try:
            async with writer as file:
                async for piece in pieces:
                    await file.write(piece)
        except ConveyorError:
            raise
        except (self._library.exceptions.BaseError, OSError) as error:
            raise self._failed("write", error) from None

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects; one that is missing is no error."""
        for name in names:
            try:
                self._call("delete", partial(self._library.delete, self._store, name))
            except FileNotFoundError:
                continue

    def _call(self, action: str, function: Callable[[], Any], is_write: bool = False) -> Any:
        """Call the store. A missing object is a FileNotFoundError, unless a write finds the bucket missing."""
        try:
            return function()
        except FileNotFoundError as error:
            if is_write or "NoSuchBucket" in str(error):
                raise self._failed(action, error) from None
            raise
        except ConveyorError:
            raise
        except (self._library.exceptions.BaseError, OSError) as error:
            raise self._failed(action, error) from None

    def _failed(self, action: str, error: Exception) -> DestinationUnavailable:
        return DestinationUnavailable(f"Cannot {action} {self.url}: {first_line(error)}")


class _CountedFile:
    """A file whose reader is watched."""

    def __init__(self, file: IO[bytes], total: int, progress: BytesProgress | None) -> None:
        self._file = file
        self._total = total
        self._progress = progress
        self.interrupted: BaseException | None = None

    def read(self, size: int = -1) -> bytes:
        try:
            piece = self._file.read(size)
            if self._progress is not None:
                self._progress(self._file.tell(), self._total)
        except BaseException as error:
            self.interrupted = error
            raise
        return piece

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def is_destination(place: str) -> bool:
    """Whether it is the URL of a bucket or of a directory."""
    return place.startswith(SCHEMES)


def open_prefix(url: str) -> StoredPrefix:
    """A prefix to write to. Raises BadInput, and DestinationUnavailable if credentials or bucket are missing."""
    scheme, bucket, prefix = _checked(url)
    library = _library(url)
    if scheme == "file":
        place = Path("/", prefix)
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DestinationUnavailable(f"Cannot open {url}: {first_line(error)}") from None
        return StoredPrefix(f"file://{place}/", library.store.LocalStore(place), library)
    store = _store(library, scheme, bucket, prefix)
    return StoredPrefix(f"{scheme}://{bucket}/{prefix}{'/' if prefix else ''}", store, library)


def object_pieces(url: str, piece_bytes: int) -> Iterator[bytes]:
    """Read gs://BUCKET/KEY or az://CONTAINER/KEY. Raises FileNotFoundError and OSError."""
    library = _library(url)
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    store = _store(library, scheme, bucket, None)
    try:
        answer = library.get(store, key)
        stream: Iterable[Any] = answer.stream(min_chunk_size=piece_bytes)
        for piece in stream:
            yield bytes(piece)
    except library.exceptions.BaseError as error:
        raise OSError(f"{url}: {first_line(error)}") from None


def first_line(error: Exception) -> str:
    """What a store says; the request and a document follow."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:300]


def _checked(url: str) -> tuple[str, str, str]:
    """Scheme, bucket and prefix. Raises BadInput."""
    parts = urlsplit(url)
    if not url.startswith(SCHEMES) or parts.query or parts.fragment or "@" in parts.netloc:
        raise BadInput(f"Invalid destination {url}. Use {_FORMS}.")
    path = unquote(parts.path) if parts.scheme == "file" else parts.path
    prefix = path.removeprefix("/").removesuffix("/")
    if parts.scheme == "file":
        if parts.netloc or not prefix:
            raise BadInput(f"Invalid destination {url}. Use {_FORMS}.")
        return "file", "", prefix
    for segment in prefix.split("/") if prefix else ():
        if not _SEGMENT.fullmatch(segment) or segment in (".", ".."):
            raise BadInput(
                f"Invalid destination {url}. Between slashes, a prefix has letters, digits and any of . _ = + @ , : -"
            )
    if not parts.netloc:
        raise BadInput(f"Invalid destination {url}. Use {_FORMS}.")
    return parts.scheme, parts.netloc, prefix


def _library(url: str) -> Any:
    try:
        import obstore  # noqa: PLC0415  (of an extra)
        import obstore.exceptions  # noqa: PLC0415  (of an extra)
        import obstore.store  # noqa: PLC0415  (of an extra)
    except ImportError:
        raise BadInput(f"{url} needs the extra 'aws': pip install 'conveyor-jobs[aws]'") from None
    return obstore


def _store(library: Any, scheme: str, bucket: str, prefix: str | None) -> Any:
    if scheme == "s3":
        return _s3_store(library, bucket, prefix)
    store = library.store.GCSStore if scheme == "gs" else library.store.AzureStore
    try:
        return store(bucket, prefix=prefix or None)
    except (library.exceptions.BaseError, ValueError, OSError) as error:
        raise DestinationUnavailable(f"Cannot open {scheme}://{bucket}: {first_line(error)}") from None


def _s3_store(library: Any, bucket: str, prefix: str | None) -> Any:
    """The store, in the region of the bucket, at the endpoint of the caller's configuration."""
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415  (of an extra)

    try:
        client, credentials = s3_client()
        head = _bucket_head(client, bucket)
        region = head.get("HTTPHeaders", {}).get("x-amz-bucket-region") or client.meta.region_name
        if region != client.meta.region_name:
            client, credentials = s3_client(region)
    except (BotoCoreError, ClientError) as error:
        raise DestinationUnavailable(f"Cannot open s3://{bucket}: {first_line(error)}") from None
    endpoint = client.meta.endpoint_url
    return library.store.S3Store(
        bucket,
        prefix=prefix or None,
        region=region,
        endpoint=endpoint,
        client_options={"allow_http": endpoint.startswith("http:")},
        credential_provider=credentials,
    )


def _bucket_head(client: Any, bucket: str) -> Any:
    """What S3 says about a bucket. Raises ClientError and DestinationUnavailable."""
    from botocore.exceptions import ClientError  # noqa: PLC0415  (of an extra)

    try:
        return client.head_bucket(Bucket=bucket)["ResponseMetadata"]
    except ClientError as error:
        found = error.response.get("ResponseMetadata", {})
        status = found.get("HTTPStatusCode")
        if status == _NOT_FOUND:
            raise DestinationUnavailable(f"The bucket s3://{bucket} does not exist.") from None
        # Without the right to list, it may still be written.
        if status != _FORBIDDEN:
            raise
        return found
