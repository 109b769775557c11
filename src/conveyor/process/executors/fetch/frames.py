"""Frames: the protocol between a worker and its fetchers.

A frame is four bytes of length and a MessagePack value. The first frame to a fetcher holds its settings, the first one
back says that it is ready. Then orders go out and packs of outcomes come back, both in batches.
"""

import asyncio
import struct
from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from conveyor.model import Job, Outcome, StoredAs, TaskError, TaskRef
from conveyor.process.changed_pages import Condition
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

    def is_closing(self) -> bool:
        """Whether nothing more can be written."""

    def close(self) -> None: ...


class Order(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A reference to attempt, and which gateway of the job's pool to go through. The worker numbers its orders."""

    number: int
    ref: TaskRef
    gateway: int = 0
    # Which page the task has, of a run that compares.
    condition: Condition | None = None


class Orders(msgspec.Struct, frozen=True, array_like=True, tag="orders"):
    """References of one lane, of which at most `width` run at once. `job` is set when it is new or has changed. More
    may run that began when the lane was wider: with a `narrowing`, the fetcher reports how many, until they ended."""

    lane: int
    width: int
    orders: list[Order]
    job: Job | None = None
    narrowing: int = 0


class Drop(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """Return the orders of a lane that have not started; with `all`, cancel and forget the others too."""

    lane: int
    all: bool


class PackedOutcome(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An outcome without its body, which is the next `length` bytes of the pack. -1: it has none."""

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
    spends_attempt: bool = True
    first_byte: float = 0.0
    unchanged: bool = False


class StoredPages(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Pages of one run that the fetcher has written to one segment, which is not durable yet: tasks that succeeded, by
    column, so that there is no object for each. The details say where the pages are."""

    segment: str
    numbers: list[int]
    http_statuses: list[int | None]
    elapsed: list[float]
    details: list[str]

    def at(self, places: Sequence[int]) -> "StoredPages":
        """Some of them."""
        return StoredPages(
            self.segment,
            [self.numbers[place] for place in places],
            [self.http_statuses[place] for place in places],
            [self.elapsed[place] for place in places],
            [self.details[place] for place in places],
        )


class RunningReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How many orders of a lane run after it was narrowed."""

    lane: int
    narrowing: int
    running: int


class OutcomePack(msgspec.Struct, frozen=True, array_like=True):
    """Outcomes of about the same time, and orders that were dropped before they started."""

    outcomes: list[PackedOutcome]
    bodies: bytes
    dropped: list[int]
    pages: list[StoredPages] = []
    reports: list[RunningReport] = []
    # How late the fetcher runs what is due, in seconds.
    lag: float = 0.0


def outcomes_of(pack: OutcomePack) -> Iterator[tuple[int, Outcome]]:
    """Yield outcomes, but for stored pages, with the numbers of their orders, each with its part of the pack's
    bodies."""
    bodies, at = memoryview(pack.bodies), 0
    for packed in pack.outcomes:
        body = None
        if packed.length >= 0:
            body = bodies[at : at + packed.length]
            at += packed.length
        yield (
            packed.number,
            Outcome(
                packed.status,
                packed.http_status,
                packed.error,
                body,
                elapsed=packed.elapsed,
                retry_after=packed.retry_after,
                detail=packed.detail,
                sha256=packed.sha256,
                stored=packed.stored,
                length=packed.decoded_length,
                spends_attempt=packed.spends_attempt,
                first_byte=packed.first_byte,
                unchanged=packed.unchanged,
            ),
        )


def write_frame(writer: FrameWriter, value: object) -> None:
    """Write a frame, unless the other process is gone. Who reads from it learns that, and loses nothing by the frame:
    what the process had is attempted again."""
    if not writer.is_closing():
        writer.write(framed(value))


class JoinedFrames:
    """A writer that joins the frames of one step of the event loop: those of many small lanes leave by one system call,
    and wake the other process once."""

    def __init__(self, writer: FrameWriter) -> None:
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._waiting: list[bytes] = []

    def write(self, data: bytes, /) -> None:
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(data)

    async def drain(self) -> None:
        self._flush()
        await self._writer.drain()

    def is_closing(self) -> bool:
        return self._writer.is_closing()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting and not self._writer.is_closing():
            self._writer.write(b"".join(waiting))


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
