"""Sums over the ranges of a run, kept beside them by every engine and changed with each of them in one step. So neither
a checkpoint nor a status adds the ranges up: an open job may have any number of batches."""

import msgspec

from conveyor.model import Compression, Ingested, Range


class IngestSums(msgspec.Struct, frozen=True):
    """What some ranges have together, or by how much that changes."""

    ranges: int = 0
    ranges_done: int = 0
    range_tasks: int = 0
    range_invalid: int = 0
    bytes_read: int = 0
    # Of the ranges whose end is known, and how many there are whose end is not.
    bytes_known: int = 0
    ranges_endless: int = 0

    def __sub__(self, other: "IngestSums") -> "IngestSums":
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return IngestSums(*(one - two for one, two in pairs))

    @property
    def ingested(self) -> Ingested:
        return Ingested(
            ranges=self.ranges,
            ranges_done=self.ranges_done,
            tasks=self.range_tasks,
            invalid=self.range_invalid,
            bytes_read=self.bytes_read,
            bytes_total=None if self.ranges_endless else self.bytes_known,
        )


def sums_of(*ranges: Range) -> IngestSums:
    stops = [_stop(one) for one in ranges]
    known = [stop - one.start for one, stop in zip(ranges, stops, strict=True) if stop is not None]
    return IngestSums(
        ranges=len(ranges),
        ranges_done=sum(one.done for one in ranges),
        range_tasks=sum(one.tasks for one in ranges),
        range_invalid=sum(one.invalid for one in ranges),
        bytes_read=sum(
            (one.offset if stop is None else min(one.offset, stop)) - one.start
            for one, stop in zip(ranges, stops, strict=True)
        ),
        bytes_known=sum(known),
        ranges_endless=len(ranges) - len(known),
    )


def change_of(before: Range, to: Range) -> IngestSums:
    """By how much the sums change when a range comes as far as another value of it says."""
    after = msgspec.structs.replace(
        before, index=to.index, offset=to.offset, tasks=to.tasks, invalid=to.invalid, done=to.done
    )
    return sums_of(after) - sums_of(before)


def _stop(one: Range) -> int | None:
    """Where a range ends; the end of a compressed list is not known before it is reached."""
    if one.end is not None:
        return one.end
    if one.compression is Compression.NONE:
        return one.source.size
    return one.offset if one.done else None
