"""Announcements: before a process finishes tasks, it writes down which ones. Counts change in a later write, and if the
process dies in between, another one finds in the announcement which tasks it has to count (late_counts.py).

Each process has a few lanes in a run, and one call at a time uses a lane: the announcement of a lane is overwritten by
the next one, and the count item knows the number of the lane's last addition. An announcement with a higher number is
open. So an announcement costs one write for a batch of tasks, and is never removed in the normal course.
"""

import zlib
from collections.abc import Iterable
from zlib import crc32

import msgspec

from conveyor.engines.dynamodb.table import Item

SLOTS = 8

# Seconds that a process and its announcements are left alone after the last one, before another process removes them.
KEPT = 3600.0


class Announcement(msgspec.Struct, frozen=True):
    """The tasks that one call is about to finish. `counted` are those that another process has counted for it."""

    writer: str
    lane: int
    number: int
    epoch: int
    indexes: tuple[int, ...]
    at: float
    counted: frozenset[int] | None = None

    @property
    def by(self) -> str:
        """The name of the call, which each task carries that it finished."""
        return call_name(self.writer, self.number)

    @property
    def slot(self) -> int:
        return slot_of(self.writer)

    @property
    def attribute(self) -> str:
        """The attribute of the count item that has the number of the lane's last addition."""
        return lane_attribute(self.writer, self.lane)

    def is_open(self, count_item: Item) -> bool:
        """Whether its tasks may be missing in the counts, and can be added to this item."""
        same_epoch: bool = count_item.get("epoch", 0) == self.epoch
        return same_epoch and count_item.get(self.attribute, 0) < self.number


def slot_of(writer: str) -> int:
    """The count item to which a process adds."""
    return crc32(writer.encode()) % SLOTS


def lane_attribute(writer: str, lane: int) -> str:
    return f"w:{writer}.{lane}"


def call_name(writer: str, number: int) -> str:
    return f"{writer}.{number}"


def announcement_item(announcement: Announcement) -> Item:
    """The item, without key and TTL."""
    return {
        "v": 1,
        "writer": announcement.writer,
        "lane": announcement.lane,
        "number": announcement.number,
        "epoch": announcement.epoch,
        "indexes": packed(announcement.indexes),
        "at": int(announcement.at),
    }


def announcement_of(item: Item) -> Announcement:
    return Announcement(
        writer=item["writer"],
        lane=item["lane"],
        number=item["number"],
        epoch=item["epoch"],
        indexes=unpacked(item["indexes"]),
        at=item["at"],
        counted=frozenset(unpacked(item["counted"])) if "counted" in item else None,
    )


def packed(indexes: Iterable[int]) -> bytes:
    """Indexes as the differences between them, seven bits to a byte, deflated: the thousand of a flush are 1 KB or
    less."""
    data, last = bytearray(), -1
    for index in sorted(indexes):
        step = index - last
        last = index
        while step >= 128:
            data.append(step & 127 | 128)
            step >>= 7
        data.append(step)
    return zlib.compress(bytes(data), 1)


def unpacked(data: bytes) -> tuple[int, ...]:
    indexes: list[int] = []
    last, step, shift = -1, 0, 0
    for byte in zlib.decompress(data):
        step |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            last += step
            indexes.append(last)
            step, shift = 0, 0
    return tuple(indexes)
