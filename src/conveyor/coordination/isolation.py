"""Isolation: one pass of a role over many items, in which an item that raises stops no other. The failure is logged and
counted, and the item is looked at again after a pause, which grows while it fails.

An engine that does not answer fails every item: after some of those in a row the pass ends with the engine's error, and
the service backs off.
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

# Failures of an engine in a row after which it is the engine and not the items.
_MAX_UNAVAILABLE = 10
_FIRST_PAUSE = 2.0
_LONGEST_PAUSE = 60.0
# Items that failed lately and are remembered. Any other that fails is looked at in every pass.
_MAX_RESTING = 10_000


class Isolation:
    """The items of one role. It lives as long as the role."""

    def __init__(self, role: str, clock: Clock) -> None:
        # Without the part that makes the name of one of several unlike the others'.
        self._role = role.partition("_")[0]
        self._clock = clock
        self._unavailable = 0
        # Failures in a row, and when the item is looked at again.
        self._failing: dict[str, tuple[int, float]] = {}

    @property
    def failing(self) -> int:
        """Items that failed when they were last looked at. Who asks for the first so many items asks for so many
        more, or these would stand before all others."""
        return len(self._failing)

    def is_resting(self, name: str) -> bool:
        """Whether the item failed and its pause is not over."""
        return self._failing.get(name, (0, 0.0))[1] > self._clock.now()

    def pause(self, name: str) -> float:
        """Seconds for which an item that has failed is left alone."""
        failures = self._failing.get(name, (1, 0.0))[0]
        return min(_FIRST_PAUSE * 2.0 ** min(failures - 1, 10), _LONGEST_PAUSE)

    @contextmanager
    def item(self, name: str) -> Iterator[None]:
        """Around the work on one item. Raises only what an engine raised that fails for all of them."""
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
        """Carry out the work on a row that is due. One that fails is put off, so that it stands before no other."""
        name = f"{row.kind} {row.tenant} {row.id}"
        with self.item(name):
            await work()
        if name in self._failing:
            with self.item(f"{name}: put off"):
                await records.documents.replace_row(
                    msgspec.structs.replace(row, due_at=self._clock.now() + self.pause(name))
                )

    def _fail(self, name: str) -> None:
        metrics.ITEM_ERRORS.add(1, self._role)
        log.exception("an item failed; the pass goes on", role=self._role, item=name)
        if name in self._failing or len(self._failing) < _MAX_RESTING:
            failures = self._failing.get(name, (0, 0.0))[0] + 1
            self._failing[name] = (failures, 0.0)
            self._failing[name] = (failures, self._clock.now() + self.pause(name))

    def forget_others(self, names: Collection[str]) -> None:
        """Remember only items of these that failed: the rest is not there any more."""
        self._failing = {name: failed for name, failed in self._failing.items() if name in names}


async def in_turn(*parts: Callable[[], Awaitable[None]]) -> None:
    """Carry out all parts of a pass, whatever becomes of each; then raise what the first of them that failed did."""
    first: Exception | None = None
    for part in parts:
        try:
            await part()
        except Exception as error:
            if first is not None:
                log.exception("one more part of a pass failed")
            first = first or error
    if first is not None:
        raise first
