"""Decoders of compressed lists: from bytes as they are stored to bytes of the list, a piece at a time."""

import bz2
import sys
import zlib
from collections.abc import Iterator

from conveyor.errors import ListUnreadable
from conveyor.model import Compression

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_PIECE = 256 * 1024


class GzipDecoder:
    """Decompresses consecutive gzip members, a piece at a time."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(wbits=31)
        self._members = 0
        self.at_end = True

    def feed(self, data: bytes) -> Iterator[bytes]:
        try:
            while data := self._next(data):
                self.at_end = False
                yield self._member.decompress(data, _PIECE)
                data = self._member.unconsumed_tail
                if self._member.eof:
                    data = self._member.unused_data
                    self._member = zlib.decompressobj(wbits=31)
                    self._members += 1
                    self.at_end = True
        except zlib.error as error:
            raise ListUnreadable(f"The list is not valid gzip: {error}.") from None

    def _next(self, data: bytes) -> bytes:
        return _without_padding(data) if self.at_end and self._members else data


class ZstdDecoder:
    """Decompresses consecutive zstd frames, a piece at a time."""

    def __init__(self) -> None:
        self._frame = zstd.ZstdDecompressor()
        self._frames = 0
        self.at_end = True

    def feed(self, data: bytes) -> Iterator[bytes]:
        try:
            while (data := self._next(data)) or not self._frame.needs_input:
                self.at_end = False
                yield self._frame.decompress(data, _PIECE)
                data = b""
                if self._frame.eof:
                    data = self._frame.unused_data
                    self._frame = zstd.ZstdDecompressor()
                    self._frames += 1
                    self.at_end = True
        except zstd.ZstdError as error:
            raise ListUnreadable(f"The list is not valid zstd: {error}.") from None

    def _next(self, data: bytes) -> bytes:
        return _without_padding(data) if self.at_end and self._frames else data


class Bzip2Decoder:
    """Decompresses consecutive bzip2 streams, a piece at a time."""

    def __init__(self) -> None:
        self._stream = bz2.BZ2Decompressor()
        self._streams = 0
        self.at_end = True

    def feed(self, data: bytes) -> Iterator[bytes]:
        try:
            while (data := self._next(data)) or not self._stream.needs_input:
                self.at_end = False
                yield self._stream.decompress(data, _PIECE)
                data = b""
                if self._stream.eof:
                    data = self._stream.unused_data
                    self._stream = bz2.BZ2Decompressor()
                    self._streams += 1
                    self.at_end = True
        except OSError as error:
            raise ListUnreadable(f"The list is not valid bzip2: {error}.") from None

    def _next(self, data: bytes) -> bytes:
        return _without_padding(data) if self.at_end and self._streams else data


def decoder_of(compression: Compression) -> GzipDecoder | ZstdDecoder | Bzip2Decoder:
    """A decoder of a compressed list."""
    if compression is Compression.BZIP2:
        return Bzip2Decoder()
    return GzipDecoder() if compression is Compression.GZIP else ZstdDecoder()


def _without_padding(data: bytes) -> bytes:
    """Tape and block writers pad with zeros; no member and no frame begins with a zero."""
    return data.lstrip(b"\0")
