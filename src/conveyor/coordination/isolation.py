"""Isolation: in one pass of a role over many items, an item that raises stops no other. The failure is logged and
counted, and the item is retried after a pause, which grows while it fails.

An engine that does not answer fails every item: after several such failures in a row the pass raises the engine's
error, and the service backs off.
"""

from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.engines.records import Document, Records
from conveyor.errors import Unavailable
from conveyor.telemetry import metrics

log = structlog.get_logger()

# After this many failures of an engine in a row, the engine is to blame and not the items.
_MAX_UNAVAILABLE = 10
_FIRST_PAUSE = 2.0
_LONGEST_PAUSE = 60.0
# How many failed items are remembered. Others that fail are retried in every pass.
_MAX_RESTING = 10_000


class Isolation:
    """The items of one role. Lives as long as the role."""

    def __init__(self, role: str, clock: Clock) -> None:
        # Without the random part of the name.
        self._role = role.partition("_")[0]
        self._clock = clock
        self._unavailable = 0
        # Failures in a row, and when to retry the item.
        self._failing: dict[str, tuple[int, float]] = {}

    @property
    def failing(self) -> int:
        """How many items failed last time. A role that reads the first N items reads this many more, or failing ones
        would hide all others."""
        return len(self._failing)

    def is_resting(self, name: str) -> bool:
        """Return whether the item failed and its pause is not over."""
        return self._failing.get(name, (0, 0.0))[1] > self._clock.now()

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
            self._unavailable = self._unavailable + 1 if isinstance(error, Unavailable) else 0
            if self._unavailable >= _MAX_UNAVAILABLE:
                self._unavailable = 0
                raise
        else:
            self._unavailable = 0
            self._failing.pop(name, None)

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
            self._failing[name] = (failures, self._clock.now() + self.pause(name))

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
