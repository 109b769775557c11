"""Isolation: in one pass of a role over many items, an item that raises stops no other. The failure is logged and
counted, and the item is retried after a pause, which grows while it fails. A role works on several items at once, and
only on those in the buckets of its process. Items share the counts of a pass: `counts.x += await …` would lose what
others add during the wait.

An engine that does not answer fails every item: after several such failures in a row the pass raises the engine's
error, and the service backs off.
"""

from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.coordination.buckets import ALL_BUCKETS, Buckets
from conveyor.coordination.parallel import at_once
from conveyor.engines.records import Document, Records
from conveyor.errors import NewerRow, Unavailable
from conveyor.telemetry import metrics

log = structlog.get_logger()

T = TypeVar("T")

# After this many failures of an engine in a row, the engine is to blame and not the items.
_MAX_UNAVAILABLE = 10
_FIRST_PAUSE = 2.0
_LONGEST_PAUSE = 60.0
# How many failed items are remembered. Others that fail are retried in every pass.
_MAX_RESTING = 10_000
# How many items of other processes a role reads past, at most, to find its own.
_MAX_FOREIGN = 5000


class Isolation:
    """The items of one role. Lives as long as the role."""

    def __init__(self, role: str, clock: Clock, buckets: Buckets = ALL_BUCKETS) -> None:
        # Without the random part of the name.
        self._role = role.partition("_")[0]
        self._clock = clock
        self._buckets = buckets
        self._unavailable = 0
        # Items of other processes in the last pass.
        self._foreign = 0
        # Failures in a row, and when to retry the item, on the monotonic clock.
        self._failing: dict[str, tuple[int, float]] = {}

    @property
    def failing(self) -> int:
        """How many items failed last time."""
        return len(self._failing)

    @property
    def skipped(self) -> int:
        """How many items failed last time, or were another process's. A role that reads the first N items reads this
        many more, or these would hide all others."""
        return len(self._failing) + self._foreign

    def is_resting(self, name: str) -> bool:
        """Return whether the item failed and its pause is not over."""
        return self._failing.get(name, (0, 0.0))[1] > self._clock.monotonic()

    def pause(self, name: str) -> float:
        """Return the seconds until a failed item is retried."""
        failures = self._failing.get(name, (1, 0.0))[0]
        return min(_FIRST_PAUSE * 2.0 ** min(failures - 1, 10), _LONGEST_PAUSE)

    @contextmanager
    def item(self, name: str) -> Iterator[None]:
        """Wrap the work on one item. Raises only the error of an engine that fails for all items."""
        try:
            yield
        except Exception as error:
            self._fail(name)
            is_engine = isinstance(error, Unavailable) and not isinstance(error, NewerRow)
            self._unavailable = self._unavailable + 1 if is_engine else 0
            if self._unavailable >= _MAX_UNAVAILABLE:
                self._unavailable = 0
                raise
        else:
            self._unavailable = 0
            self._failing.pop(name, None)

    async def each(
        self,
        items: Iterable[T],
        name: Callable[[T], str],
        work: Callable[[T], Awaitable[None]],
        bucket: Callable[[T], str] | None = None,
    ) -> None:
        """Work on the items of this process that do not rest, several at once. The name of an item is also its bucket,
        unless there is a function for it. Raises only the error of an engine that fails for all items, after the work
        under way is done."""
        await self.each_own(self.own(items, name, bucket), name, work)

    async def each_own(
        self, items: Iterable[T], name: Callable[[T], str], work: Callable[[T], Awaitable[None]]
    ) -> None:
        """As `each`, on items that `own` has returned."""

        async def isolated(item: T) -> None:
            with self.item(name(item)):
                await work(item)

        await at_once(items, isolated)

    def own(
        self, items: Iterable[T], name: Callable[[T], str], bucket: Callable[[T], str] | None = None
    ) -> Sequence[T]:
        """The items of this process that do not rest."""
        every = list(items)
        own = [item for item in every if self._buckets.owns((bucket or name)(item))]
        self._foreign = min(len(every) - len(own), _MAX_FOREIGN)
        return [item for item in own if not self.is_resting(name(item))]

    async def due_rows(
        self, records: Records, rows: Iterable[Document], work: Callable[[Document], Awaitable[None]]
    ) -> None:
        """`due_row` for several documents at once."""
        await at_once(rows, lambda row: self.due_row(records, row, partial(work, row)))

    async def due_row(self, records: Records, row: Document, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work on a document that is due. One that fails is postponed, so that it hides no other."""
        name = f"{row.kind} {row.tenant} {row.id}"
        with self.item(name):
            await work()
        if name in self._failing:
            with self.item(f"{name}: put off"):
                await records.documents.replace_document(
                    msgspec.structs.replace(row, due_at=self._clock.now() + self.pause(name))
                )

    def _fail(self, name: str) -> None:
        metrics.ITEM_ERRORS.add(1, self._role)
        log.exception("item failed; the pass goes on", role=self._role, item=name)
        if name in self._failing or len(self._failing) < _MAX_RESTING:
            failures = self._failing.get(name, (0, 0.0))[0] + 1
            self._failing[name] = (failures, 0.0)
            self._failing[name] = (failures, self._clock.monotonic() + self.pause(name))

    def forget_others(self, names: Collection[str]) -> None:
        """Forget failed items that are not among these: they no longer exist."""
        self._failing = {name: failed for name, failed in self._failing.items() if name in names}


async def run_all(*parts: Callable[[], Awaitable[None]]) -> None:
    """Run all parts of a pass, even if some fail; then raise the first error."""
    first: Exception | None = None
    for part in parts:
        try:
            await part()
        except Exception as error:
            if first is not None:
                log.exception("another part of the pass failed")
            first = first or error
    if first is not None:
        raise first
