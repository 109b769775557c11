"""What a worker and the processes that fetch for it say to each other, and how it stands on the wire.

A frame is four bytes of length and a MessagePack value. The first one to a fetcher holds its settings, the first one
back says that it is ready; then orders go out and packs of outcomes come back, both in batches.
"""

import struct
from typing import Protocol

import msgspec

from conveyor.model import Job, TaskError, TaskRef
from conveyor.states import TaskStatus

_LENGTH = struct.Struct("<I")


class FrameReader(Protocol):
    """Where frames come from."""

    async def readexactly(self, n: int, /) -> bytes:
        """The next `n` bytes. Raises IncompleteReadError at the end."""


class FrameWriter(Protocol):
    """Where frames go to."""

    def write(self, data: bytes, /) -> None: ...

    async def drain(self) -> None:
        """Wait until it takes more."""

    def close(self) -> None: ...


class Order(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A reference to attempt, under a number of the worker's."""

    number: int
    ref: TaskRef


class Orders(msgspec.Struct, frozen=True, array_like=True, tag="orders"):
    """References of one lane, of which at most `width` are attempted at once. The job comes along when it is new."""

    lane: int
    width: int
    orders: list[Order]
    job: Job | None = None


class Drop(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """Start nothing more for a lane; with `all`, break off what runs too, and forget it."""

    lane: int
    all: bool


class PackedOutcome(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An outcome with all but its body, which is the next `length` bytes of the pack; -1: it has none."""

    number: int
    status: TaskStatus
    http_status: int | None
    error: TaskError | None
    retry_after: float | None
    detail: str
    length: int
    sha256: str
    elapsed: float = 0.0


class OutcomePack(msgspec.Struct, frozen=True, array_like=True):
    """Outcomes that came at about the same time, and orders that were dropped before they began."""

    outcomes: list[PackedOutcome]
    bodies: bytes
    dropped: list[int]


def framed(value: object) -> bytes:
    data = _encode(value)
    return _LENGTH.pack(len(data)) + data


async def read_frame(reader: FrameReader) -> bytes:
    """The next frame. Raises IncompleteReadError at the end."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(length)


_encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Orders | Drop).decode
decode_pack = msgspec.msgpack.Decoder(OutcomePack).decode
