"""Documents that a clock which was ahead made due too late are due again, on every engine of records."""

import msgspec
import pytest

from conveyor.accept.schedules import LOOK_SECONDS, SCHEDULE
from conveyor.engines.records import Document, Records
from conveyor.export.exports import ExportRecord, ExportState
from conveyor.export.request import ExportBodies, ExportCompression, ExportFormat, ExportSelect
from conveyor.jobs.callbacks import CALLBACK, Callback
from conveyor.jobs.deadlines import DEADLINE, Deadline, deadline_of
from conveyor.model import BEAT, EXPORT, PROGRESS, JobId, RunId
from conveyor.notify.deliveries import DELIVERY
from conveyor.recover.future_documents import FutureDocuments
from conveyor.settings import Settings
from tests.support.clocks import ManualClock
from tests.support.make_jobs import ACME, DAY

HOUR = 3600.0
KINDS = [BEAT, CALLBACK, DELIVERY, PROGRESS, SCHEDULE, EXPORT]


def part(records: Records, clock: ManualClock) -> FutureDocuments:
    """As a process has it that starts now."""
    return FutureDocuments(records, clock, Settings.load({}))


def callback(clock: ManualClock, heartbeat: float = 300.0) -> bytes:
    return msgspec.json.encode(Callback(JobId("job_1"), RunId("run_1"), "", clock.now(), heartbeat, 600.0))


def export(clock: ManualClock, state: ExportState) -> bytes:
    options = (ExportFormat.JSONL, ExportCompression.NONE, ExportBodies.NONE, ExportSelect())
    return msgspec.json.encode(ExportRecord(*options, [RunId("run_1")], 1, clock.now(), state=state))


def row(clock: ManualClock, kind: str, seconds: float, name: str = "one", body: bytes | None = None) -> Document:
    """One that is due so many seconds from now."""
    given = {CALLBACK: callback(clock), EXPORT: export(clock, ExportState.RUNNING)}
    return Document(kind, ACME, name, body or given.get(kind, b"{}"), due_at=clock.now() + seconds)


async def due(records: Records, clock: ManualClock, kind: str) -> list[str]:
    return [each.id for each in await records.documents.due_documents(kind, clock.now(), 10)]


@pytest.mark.parametrize("restarts", [False, True])
async def test_what_waits_for_a_clock_that_was_ahead_is_due(
    records: Records, clock: ManualClock, restarts: bool
) -> None:
    first = part(records, clock)
    assert await first.part() == {}
    await records.documents.create_documents([row(clock, kind, 20.0) for kind in KINDS])
    clock.step(-6 * DAY)
    assert await (part(records, clock) if restarts else first).part() == {"revealed": len(KINDS)}
    for kind in KINDS:
        assert await due(records, clock, kind) == ["one"], kind


async def test_what_another_machine_set_is_due_within_minutes(records: Records, clock: ManualClock) -> None:
    first = part(records, clock)
    await first.part()
    await records.documents.create_documents([row(clock, BEAT, 6 * DAY)])
    assert await first.part() == {}
    clock.advance(301)
    assert await first.part() == {"revealed": 1}


async def test_what_is_to_wait_goes_on_waiting(records: Records, clock: ManualClock) -> None:
    deadline = msgspec.json.encode(Deadline(RunId("run_1"), clock.now()))
    await records.documents.create_documents(
        [
            row(clock, BEAT, 60.0),
            row(clock, DELIVERY, DAY),
            row(clock, PROGRESS, DAY),
            row(clock, SCHEDULE, LOOK_SECONDS),
            row(clock, CALLBACK, 0.8 * 20 * DAY, body=callback(clock, 20 * DAY)),
            row(clock, EXPORT, 7 * DAY, body=export(clock, ExportState.READY)),
            row(clock, DEADLINE, 300 * DAY, body=deadline),
        ]
    )
    assert await part(records, clock).part() == {}


async def test_the_deadline_of_a_run_counts_from_the_step(records: Records, clock: ManualClock) -> None:
    deadline = msgspec.json.encode(Deadline(RunId("run_1"), clock.now()))
    await records.documents.create_documents([row(clock, DEADLINE, HOUR, body=deadline)])
    clock.step(-6 * DAY)
    assert await part(records, clock).part() == {"revealed": 1}
    (stored,) = await records.documents.due_documents(DEADLINE, clock.now() + HOUR, 10)
    assert (stored.due_at, deadline_of(stored).since) == (clock.now() + HOUR, clock.now())
    assert await part(records, clock).part() == {}


async def test_many_are_due_again_in_one_pass(records: Records, clock: ManualClock) -> None:
    rows = [row(clock, DELIVERY, 20.0 + number // 10, f"id_{number:04}") for number in range(700)]
    for start in range(0, len(rows), 25):
        await records.documents.create_documents(rows[start : start + 25])
    clock.step(-6 * DAY)
    assert await part(records, clock).part() == {"revealed": 700}
