"""Lists in buckets that the caller may read: s3://BUCKET/KEY through botocore, gs://BUCKET/KEY and az://CONTAINER/KEY
through obstore, each with the caller's own credentials. The key is the rest of the URL, literally."""

from collections.abc import Iterator

from conveyor.client.object_stores import object_pieces
from conveyor.client.s3_objects import SCHEME, S3Object, open_s3_object
from conveyor.errors import ConveyorError, ListMissing, ListUnreadable

_SCHEMES = (SCHEME, "gs://", "az://")
_PIECE = 1024 * 1024


class StoredObject:
    """An object of Google Cloud Storage or Azure, open for reading. Failures are OSErrors, as of a file."""

    def __init__(self, url: str, pieces: Iterator[bytes]) -> None:
        self.url = url
        self._pieces = pieces
        # The first piece: an object that cannot be read is found out at once.
        self._left = next(pieces, b"")

    def read(self, size: int) -> bytes:
        while not self._left:
            piece = next(self._pieces, None)
            if piece is None:
                return b""
            self._left = piece
        read, self._left = self._left[:size], self._left[size:]
        return read

    def close(self) -> None:
        self._pieces = iter(())


ListObject = S3Object | StoredObject


def is_object(tasks: object) -> bool:
    """Whether it is the URL of an object."""
    return isinstance(tasks, str) and tasks.startswith(_SCHEMES)


def is_servers(url: str) -> bool:
    """Whether a server may be able to read the object by itself."""
    return url.startswith(SCHEME)


def open_object(url: str, version_id: str | None = None, etag: str | None = None) -> ListObject:
    """Open an object. Raises ListUnreadable."""
    if url.startswith(SCHEME):
        return open_s3_object(url, version_id, etag)
    bucket, _, key = url.partition("://")[2].partition("/")
    if not bucket or not key:
        raise ListUnreadable(f"Invalid URL {url}. Use {url[:5]}BUCKET/KEY.")
    if version_id is not None or etag is not None:
        raise ListUnreadable(f"A version of {url} cannot be named: only one in s3:// can.")
    try:
        return StoredObject(url, object_pieces(url, _PIECE))
    except FileNotFoundError:
        raise ListMissing(f"List {url} not found.") from None
    except OSError as error:
        raise ListUnreadable(f"Cannot read {error}") from None
    except ConveyorError as error:
        raise ListUnreadable(error.message) from None
