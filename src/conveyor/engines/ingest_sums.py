"""Sums over the ranges of a run. Every engine stores them and updates them in the transaction of each checkpoint, so
that no reader adds up the ranges: an open job may have any number of them."""

import msgspec

from conveyor.model import Compression, Ingested, Range


class IngestSums(msgspec.Struct, frozen=True):
    """The sums of some ranges, or a change of the sums."""

    ranges: int = 0
    ranges_done: int = 0
    range_tasks: int = 0
    range_invalid: int = 0
    bytes_read: int = 0
    # Bytes of the ranges whose end is known, and the number of ranges whose end is unknown.
    bytes_known: int = 0
    ranges_endless: int = 0

    def __sub__(self, other: "IngestSums") -> "IngestSums":
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return IngestSums(*(span - two for span, two in pairs))

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
    stops = [_stop(span) for span in ranges]
    known = [stop - span.start for span, stop in zip(ranges, stops, strict=True) if stop is not None]
    return IngestSums(
        ranges=len(ranges),
        ranges_done=sum(span.done for span in ranges),
        range_tasks=sum(span.tasks for span in ranges),
        range_invalid=sum(span.invalid for span in ranges),
        bytes_read=sum(
            (span.offset if stop is None else min(span.offset, stop)) - span.start
            for span, stop in zip(ranges, stops, strict=True)
        ),
        bytes_known=sum(known),
        ranges_endless=len(ranges) - len(known),
    )


def change_of(before: Range, to: Range) -> IngestSums:
    """The change of the sums when a range advances."""
    after = msgspec.structs.replace(
        before, index=to.index, offset=to.offset, tasks=to.tasks, invalid=to.invalid, done=to.done
    )
    return sums_of(after) - sums_of(before)


def _stop(span: Range) -> int | None:
    """The end of a range. The end of a compressed list is unknown until it is reached."""
    if span.end is not None:
        return span.end
    if span.compression is Compression.NONE:
        return span.source.size
    return span.offset if span.done else None
