"""Multipart uploads of S3: objects too large for one PUT. A client sends the parts by signed requests; the server
begins and completes the upload. No signature covers the hash of the whole: its reader compares that."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, urlencode

from botocore.exceptions import BotoCoreError, ClientError

from conveyor.engines import s3
from conveyor.engines.blobs import Presigned, StoredPart
from conveyor.errors import EngineFailed, UploadConflict

# S3 takes up to 10,000 parts, of at least 5 MiB.
PART_BYTES = 256 * 1024 * 1024
_MAX_PARTS = 9000
_MIB = 1024 * 1024
# The object exists already, or another request completes it.
_EXISTS = frozenset({409, 412})


class S3Parts:
    """Uploads in parts to one bucket."""

    def __init__(self, bucket: s3.Bucket) -> None:
        self._bucket = bucket

    def part_bytes(self, size: int) -> int | None:
        if size <= s3.MAX_IN_ONE_PUT:
            return None
        needed = -(-size // _MAX_PARTS)
        return max(PART_BYTES, -(-needed // _MIB) * _MIB)

    async def begin(self, key: str) -> str:
        with _translated():
            async with self._bucket.client() as client:
                begun = await client.create_multipart_upload(
                    **self._object(key), ContentType="application/octet-stream"
                )
        upload_id: str = begun["UploadId"]
        return upload_id

    async def signed(self, key: str, multipart_id: str, number: int, size: int, seconds: float) -> Presigned:
        query = urlencode({"partNumber": number, "uploadId": multipart_id}, quote_via=quote)
        url = f"{self._bucket.url_of(key)}?{query}"
        return await self._bucket.signer.signed("PUT", url, {"Content-Length": str(size)}, seconds)

    async def stored(self, key: str, multipart_id: str) -> list[StoredPart]:
        parts: list[StoredPart] = []
        with _translated():
            async with self._bucket.client() as client:
                marker = 0
                while True:
                    page = await client.list_parts(**self._object(key), UploadId=multipart_id, PartNumberMarker=marker)
                    found = page.get("Parts", [])
                    parts += [StoredPart(part["PartNumber"], part["Size"], part["ETag"]) for part in found]
                    if not page.get("IsTruncated") or not found:
                        return parts
                    marker = found[-1]["PartNumber"]

    async def complete(self, key: str, multipart_id: str, parts: list[StoredPart]) -> None:
        whole = {"Parts": [{"PartNumber": part.number, "ETag": part.etag} for part in parts]}
        with _translated():
            async with self._bucket.client() as client:
                try:
                    await client.complete_multipart_upload(
                        **self._object(key), UploadId=multipart_id, MultipartUpload=whole, IfNoneMatch="*"
                    )
                except ClientError as error:
                    if _status(error) not in _EXISTS:
                        raise

    def _object(self, key: str) -> dict[str, Any]:
        prefix = self._bucket.prefix
        return {"Bucket": self._bucket.name, "Key": key if prefix is None else f"{prefix}/{key}"}


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except ClientError as error:
        if _status(error) in (400, 404):
            raise UploadConflict("The upload in parts is unknown or has ended. Begin another.") from None
        raise EngineFailed(f"The object store failed: {error}") from error
    except (BotoCoreError, OSError) as error:
        raise EngineFailed(f"The object store failed: {error}") from error


def _status(error: ClientError) -> int | None:
    response: Any = error.response
    status: int | None = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status
