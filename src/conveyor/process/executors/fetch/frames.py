"""Frames: the protocol between a worker and its fetchers.

A frame is four bytes of length and a MessagePack value. The first frame to a fetcher holds its settings, the first one
back says that it is ready. Then orders go out and packs of outcomes come back, both in batches.
"""

import struct
from typing import Protocol

import msgspec

from conveyor.model import Job, StoredAs, TaskError, TaskRef
from conveyor.states import TaskStatus

_LENGTH = struct.Struct("<I")


class FrameReader(Protocol):
    """Reads frames."""

    async def readexactly(self, n: int, /) -> bytes:
        """Read the next `n` bytes. Raises IncompleteReadError at the end."""


class FrameWriter(Protocol):
    """Writes frames."""

    def write(self, data: bytes, /) -> None: ...

    async def drain(self) -> None:
        """Wait until the writer takes more."""

    def close(self) -> None: ...


class Order(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A reference to attempt. The worker numbers its orders."""

    number: int
    ref: TaskRef


class Orders(msgspec.Struct, frozen=True, array_like=True, tag="orders"):
    """References of one lane, of which at most `width` run at once. `job` is set when it is new or has changed."""

    lane: int
    width: int
    orders: list[Order]
    job: Job | None = None


class Drop(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """Return the orders of a lane that have not started; with `all`, cancel and forget the others too."""

    lane: int
    all: bool


class PackedOutcome(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An outcome without its body, which is the next `length` bytes of the pack. -1: it has none, or the fetcher has
    stored it in a segment of the pack, and the detail says where."""

    number: int
    status: TaskStatus
    http_status: int | None
    error: TaskError | None
    retry_after: float | None
    detail: str
    length: int
    sha256: str
    elapsed: float = 0.0
    # How the body is encoded, if it is, and the length of the body itself.
    stored: StoredAs | None = None
    decoded_length: int = 0
    # The number of the segment that holds the body, in the pack.
    segment: int = -1
    spends_attempt: bool = True


class OutcomePack(msgspec.Struct, frozen=True, array_like=True):
    """Outcomes of about the same time, orders that were dropped before they started, and the keys of the segments that
    the fetcher has written, which are not durable yet."""

    outcomes: list[PackedOutcome]
    bodies: bytes
    dropped: list[int]
    segments: list[str] = []


def framed(value: object) -> bytes:
    data = _encode(value)
    return _LENGTH.pack(len(data)) + data


async def read_frame(reader: FrameReader) -> bytes:
    """Read the next frame. Raises IncompleteReadError at the end."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(length)


_encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Orders | Drop).decode
decode_pack = msgspec.msgpack.Decoder(OutcomePack).decode
