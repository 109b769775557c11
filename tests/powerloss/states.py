"""States: what the disk may be after a power cut. Chooses cuts and what survives of unsynced changes, starts a system
on each, and counts."""

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from structlog.processors import format_exc_info
from structlog.testing import capture_logs

from conveyor.engines.sqlite import database
from conveyor.recover import retention
from conveyor.verify import orphan_objects
from tests.machine.loop import VirtualLoop, database_on_loop
from tests.powerloss.check import Broken, expect
from tests.powerloss.disk import (
    Change,
    Disk,
    FileSurvival,
    Image,
    Survival,
    Sync,
    keep_all,
    keep_none,
    keep_some,
    keep_torn,
)
from tests.powerloss.ledger import Known
from tests.powerloss.life import RecordedDatabase
from tests.powerloss.recorder import Recorder
from tests.powerloss.recording import CheckDisk, Recording
from tests.powerloss.vfs import recorded_databases
from tests.support.places import quick_place

# Seconds from the power cut to the next start.
_OUTAGE = 5.0
_SECOND_CUTS = 4
# Lines of the log that a power cut does not account for.
_NEVER = ("role tick failed", "item failed; the pass goes on", "counts had drifted", "outcomes not written; retrying")


class Loss(StrEnum):
    """What is lost of the changes that were not synced."""

    ALL = "all"
    NOTHING = "nothing"
    SOME = "some"
    TORN = "torn"
    # Of each file something else.
    MIXED = "mixed"


_LOSSES = (Loss.ALL, Loss.NOTHING, Loss.SOME, Loss.TORN, Loss.TORN, Loss.MIXED, Loss.MIXED)


class State(NamedTuple):
    """The disk after the power failed: after how many operations, with what loss, decided by a seed."""

    cut: int
    loss: Loss
    seed: int


class Figures(msgspec.Struct):
    """What was tried, together."""

    recordings: int = 0
    operations: int = 0
    answers: int = 0
    # Different disks that a system was started on, the cuts that they come from, and how many have torn files.
    states: int = 0
    cuts: int = 0
    torn: int = 0
    # States without those that another had, too.
    same: int = 0
    # States after a second power cut, during the recovery from the first.
    second: int = 0
    # Answers that the systems were held to, and states in which one was not true any more.
    held: int = 0
    broken: int = 0
    cpu: float = 0.0

    def count(self, state: State, known: Known) -> None:
        self.states += 1
        self.torn += state.loss in (Loss.TORN, Loss.MIXED)
        self.held += len(known.answers)


def survival_of(state: State) -> Survival:
    chance = random.Random(f"{state.cut} {state.seed}")
    ways: dict[Loss, FileSurvival] = {
        Loss.ALL: keep_none,
        Loss.NOTHING: keep_all,
        Loss.SOME: keep_some(chance),
        Loss.TORN: keep_torn(chance),
    }

    def mixed(content: bytearray, changes: Sequence[Change]) -> None:
        ways[chance.choice(list(ways))](content, changes)

    def names(changes: Sequence[Change]) -> Iterable[Change]:
        if state.loss in (Loss.ALL, Loss.NOTHING):
            return changes if state.loss is Loss.NOTHING else []
        return [change for change in changes if chance.random() < 0.5]

    return Survival(ways.get(state.loss, mixed), names)


def at_answers(recording: Recording) -> list[State]:
    """The moments of all answers, with the loss of everything that was not synced: the strictest that there are."""
    return [State(cut, Loss.ALL, 0) for cut in sorted({entry.told_at for entry in recording.ledger.entries})]


def anywhere(recording: Recording, count: int, seed: int) -> list[State]:
    """Any moments, half of them before a sync, when most is at stake; any loss."""
    chance = random.Random(seed)
    operations, since = recording.record.operations, recording.record.recorded_since
    syncs = [place for place, operation in enumerate(operations) if isinstance(operation, Sync) and place >= since]
    return [
        State(
            chance.choice(syncs) if chance.random() < 0.5 else chance.randint(max(1, since), len(operations)),
            chance.choice(_LOSSES),
            chance.getrandbits(32),
        )
        for _ in range(count)
    ]


def disks(record: Recorder, states: Iterable[State]) -> Iterator[tuple[State, Image]]:
    """The disk of each state, in the order of the cuts."""
    disk = Disk(record.operations, record.directories)
    for state in sorted(states):
        disk.advance(state.cut)
        yield state, disk.image(survival_of(state))


def try_states(
    recording: Recording, states: Iterable[State], figures: Figures, again: int = 0
) -> Iterator[tuple[State, Broken]]:
    """Start a system on each disk; yields each state in which something is broken. On every `again`th disk the power
    fails a second time, while the system recovers."""
    began = time.process_time()
    figures.recordings += 1
    figures.operations += len(recording.record.operations)
    figures.answers += len(recording.ledger.entries)
    seen: set[tuple[bytes, int]] = set()
    cuts: set[int] = set()
    for state, image in disks(recording.record, states):
        known = recording.ledger.at(state.cut)
        this = (image.digest(), len(known.answers))
        if this in seen:
            figures.same += 1
            continue
        seen.add(this)
        cuts.add(state.cut)
        start = Start(image, known, recording.record.times[state.cut - 1] + _OUTAGE, state.seed, recording.check)
        for broken in _try(start, state, figures, is_recorded=again > 0 and len(seen) % again == 0):
            yield state, broken
    figures.cuts += len(cuts)
    figures.cpu += time.process_time() - began


def _try(start: "Start", state: State, figures: Figures, *, is_recorded: bool) -> Iterator[Broken]:
    try:
        figures.count(state, start.known)
        record = start.recorded() if is_recorded else start.run()
    except Broken as broken:
        figures.broken += 1
        yield broken
        return
    if record is None:
        return
    before = len(record.operations) - record.recorded_since
    if not before:
        # There was nothing to recover.
        return
    chance = random.Random(f"again {state.seed}")
    second = [
        State(record.recorded_since + chance.randint(1, before), chance.choice(_LOSSES), chance.getrandbits(32))
        for _ in range(_SECOND_CUTS)
    ]
    for cut, image in disks(record, second):
        figures.second += 1
        again = start._replace(image=image, now=record.times[cut.cut - 1] + _OUTAGE, seed=cut.seed)
        yield from _try(again, cut, figures, is_recorded=False)


class Start(NamedTuple):
    """A start on a disk, at a time, with what was told before."""

    image: Image
    known: Known
    now: float
    seed: int
    check: CheckDisk

    def run(self) -> None:
        """Start a system, and hold it to what was told. Raises Broken."""
        with quick_place() as place, database_on_loop():
            self.image.write(place)
            self._run(place, self._loop())

    def recorded(self) -> Recorder:
        """The same, with a record of what it does."""
        with quick_place() as place, pytest.MonkeyPatch.context() as patch:
            self.image.write(place)
            loop = self._loop()
            record = Recorder(place, loop.time)
            record.adopt(self.image)
            patch.setattr(database, "SqliteDatabase", RecordedDatabase)
            with recorded_databases(record), record.recording():
                self._run(place, loop)
                record.check_complete()
        return record

    def _loop(self) -> VirtualLoop:
        loop = VirtualLoop()
        loop.now = self.now
        return loop

    def _run(self, place: Path, loop: VirtualLoop) -> None:
        with pytest.MonkeyPatch.context() as patch, capture_logs(processors=[format_exc_info]) as log:
            # Nothing is under way when it looks for orphans.
            patch.setattr(orphan_objects, "SETTLED_SECONDS", -1.0)
            # Nobody has begun anything that a purge would have to wait for.
            patch.setattr(retention, "SETTLE_SECONDS", 0.0)
            patch.setattr(retention, "_EVERY", 0.5)
            try:
                self.check(place, loop, self.seed, self.known)
            finally:
                loop.close()
        for line in log:
            expect(line["event"] not in _NEVER, f"log: {line}")
