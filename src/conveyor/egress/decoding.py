"""Content codings. Gets the body of a response as it was sent, piece by piece, and returns the decoded body in pieces
of bounded size: a small body that decodes to a huge one fills no more memory than its reader accepts.

The decoded body is the one that `curl --compressed` writes. Unlike curl, the decoder reads all members of a gzip body
(RFC 1952), and it fails if a body ends too early.
"""

import sys
import zlib
from collections.abc import Generator, Iterator, Sequence
from typing import Protocol

import brotli  # type: ignore[import-untyped] # it has no annotations

from conveyor.egress.failures import Failure
from conveyor.egress.heads import ResponseHead

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# The codings that a request for a page accepts.
ACCEPTED = "gzip, deflate, br, zstd"
PIECE = 256 * 1024

# As in curl: more codings than this are an attack.
_MAX_CODINGS = 5
_NO_CODING = frozenset({"", "identity", "none"})
# Each end of a member copies the rest of its input; small inputs keep that cheap for bodies of tiny members.
_INPUT = 16 * 1024
_INNER_EXCESS = 1024 * 1024
_GZIP_OR_ZLIB = 47
_GZIP = 31
_ZLIB = 15
_RAW = -15
# Some servers add the checksum of zlib to raw deflate.
_MAX_RAW_TRAILER = 4
# RFC 9659: a larger window is not allowed for this coding, and would take as much memory.
_ZSTD_OPTIONS: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 23}


def codings_of(head: ResponseHead) -> tuple[str, ...]:
    """The codings of a body, in the order in which they were applied; empty for a body that is sent as it is."""
    fields = head.fields
    if "content-encoding" not in fields and fields.get("transfer-encoding", "chunked") == "chunked":
        return ()
    names = [*_listed(head, "content-encoding"), *_listed(head, "transfer-encoding")]
    return tuple(name for name in names if name not in _NO_CODING and name != "chunked")


def decoded_head(head: ResponseHead) -> ResponseHead:
    """The head without what described the encoded body: its codings and its length."""
    pairs = [pair for pair in head.pairs if pair[0] not in {"content-encoding", "content-length"}]
    return ResponseHead(head.status, pairs, dict(pairs))


class Coding(Protocol):
    """One coding of a body. `decode` raises Failure or the error of its library; `finish` raises Failure if the
    body is not complete."""

    def decode(self, data: bytes) -> Iterator[bytes]: ...

    def finish(self) -> None: ...


class BodyDecoder:
    """Decodes one body of at most `max_bytes`, which its reader counts. A coding that it does not know fails with the
    first byte: an empty body needs none."""

    def __init__(self, codings: Sequence[str], max_bytes: int) -> None:
        # What stacked codings may decode to before the last: an encoded body is hardly larger than the decoded one.
        self._inner_left = (max_bytes + _INNER_EXCESS) * len(codings)
        self._max_bytes = max_bytes
        if len(codings) > _MAX_CODINGS:
            self._stages: list[Coding] = [_UnknownCoding(f"it has more than {_MAX_CODINGS} codings")]
        else:
            self._stages = [_coding(name) for name in reversed(codings)]

    def decode(self, data: bytes) -> Iterator[bytes]:
        """The next decoded pieces, at most about PIECE bytes each. Many are empty in a body that takes long to decode:
        the reader lets others run after each. Raises Failure."""
        try:
            yield from self._run(0, data)
        except (zlib.error, zstd.ZstdError, brotli.error) as error:
            raise _broken(str(error)) from None

    def finish(self) -> None:
        """Raise Failure if the body is not complete."""
        for stage in self._stages:
            stage.finish()

    def _run(self, stage: int, data: bytes) -> Iterator[bytes]:
        if stage == len(self._stages) - 1:
            yield from self._stages[stage].decode(data)
            return
        for piece in self._stages[stage].decode(data):
            self._inner_left -= len(piece)
            if self._inner_left < 0:
                raise Failure("body_too_large", f"the body is larger than {self._max_bytes} bytes")
            yield from self._run(stage + 1, piece)
            yield b""


def _coding(name: str) -> Coding:
    match name:
        case "gzip" | "x-gzip":
            return _GzipCoding()
        case "deflate":
            return _DeflateCoding()
        case "br":
            return _BrotliCoding()
        case "zstd":
            return _ZstdCoding()
        case _:
            return _UnknownCoding(f"the coding {name[:40]!r} is unknown")


class _GzipCoding:
    """Consecutive gzip members, and the zero padding that may follow them. A zlib stream passes too, as in curl."""

    def __init__(self) -> None:
        self._member: zlib._Decompress | None = None
        self._members = 0

    def decode(self, data: bytes) -> Iterator[bytes]:
        for start in range(0, len(data), _INPUT):
            rest = data[start : start + _INPUT]
            while rest := rest.lstrip(b"\0") if self._member is None and self._members else rest:
                if self._member is None:
                    self._member = zlib.decompressobj(_GZIP if self._members else _GZIP_OR_ZLIB)
                    self._members += 1
                rest = yield from _inflate(self._member, rest)
                if self._member.eof:
                    self._member = None
                if rest:
                    yield b""

    def finish(self) -> None:
        if self._member is not None:
            raise _cut_short(self._members)


class _DeflateCoding:
    """A zlib stream, or deflate without its wrapper, which many servers send by mistake."""

    def __init__(self) -> None:
        self._begin = b""
        self._stream: zlib._Decompress | None = None
        self._trailer = 0

    def decode(self, data: bytes) -> Iterator[bytes]:
        if self._stream is None:
            self._begin += data
            if len(self._begin) < 2:
                return
            data, self._begin = self._begin, b""
            is_raw = not _has_zlib_header(data)
            self._stream = zlib.decompressobj(_RAW if is_raw else _ZLIB)
            self._trailer = _MAX_RAW_TRAILER if is_raw else 0
        rest = data if self._stream.eof else (yield from _inflate(self._stream, data))
        self._trailer -= len(rest)
        if self._trailer < 0:
            raise _broken("it goes on after its end")

    def finish(self) -> None:
        if self._begin or (self._stream is not None and not self._stream.eof):
            raise _cut_short(1)


class _BrotliCoding:
    def __init__(self) -> None:
        self._stream = brotli.Decompressor()
        self._begun = False

    def decode(self, data: bytes) -> Iterator[bytes]:
        self._begun = True
        while piece := self._stream.process(data, output_buffer_limit=PIECE):
            yield piece
            data = b""

    def finish(self) -> None:
        if self._begun and not self._stream.is_finished():
            raise _cut_short(1)


class _ZstdCoding:
    """Consecutive frames."""

    def __init__(self) -> None:
        self._frame: zstd.ZstdDecompressor | None = None
        self._frames = 0

    def decode(self, data: bytes) -> Iterator[bytes]:
        for start in range(0, len(data), _INPUT):
            rest = data[start : start + _INPUT]
            while rest:
                if self._frame is None:
                    self._frame = zstd.ZstdDecompressor(options=_ZSTD_OPTIONS)
                    self._frames += 1
                rest = yield from self._decode_frame(self._frame, rest)
                if rest:
                    yield b""

    def _decode_frame(self, frame: zstd.ZstdDecompressor, data: bytes) -> Generator[bytes, None, bytes]:
        """Returns what follows the end of the frame."""
        while True:
            piece = frame.decompress(data, PIECE)
            if piece:
                yield piece
            if frame.eof:
                self._frame = None
                rest: bytes = frame.unused_data
                return rest
            if frame.needs_input:
                return b""
            data = b""

    def finish(self) -> None:
        if self._frame is not None:
            raise _cut_short(self._frames)


class _UnknownCoding:
    def __init__(self, problem: str) -> None:
        self._problem = problem

    def decode(self, data: bytes) -> Iterator[bytes]:
        if data:
            raise _broken(self._problem)
        yield from ()

    def finish(self) -> None:
        pass


def _inflate(stream: "zlib._Decompress", data: bytes) -> Generator[bytes, None, bytes]:
    """Yields what the stream has for this input, and returns what follows its end."""
    while True:
        piece = stream.decompress(data, PIECE)
        if piece:
            yield piece
        if stream.eof:
            return stream.unused_data
        data = stream.unconsumed_tail
        if not data and len(piece) < PIECE:
            return b""


def _has_zlib_header(data: bytes) -> bool:
    return data[0] & 0x0F == 8 and data[0] >> 4 <= 7 and (data[0] << 8 | data[1]) % 31 == 0


def _broken(problem: str) -> Failure:
    return Failure("decode_failed", f"the body cannot be decoded: {problem}")


def _cut_short(part: int) -> Failure:
    """A body that ends in its first part was probably cut on its way. What follows a complete part, and is not one, is
    broken."""
    if part > 1:
        return _broken("it goes on after its end, and then ends too early")
    return Failure("read_failed", "the compressed body ends too early")


def _listed(head: ResponseHead, header: str) -> Iterator[str]:
    for name, value in head.pairs:
        if name == header:
            yield from (part.strip().lower() for part in value.split(","))
