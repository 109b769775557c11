"""Bodies in every store: what the body store keeps, every reader gives back, deflated or not."""

import random
from collections.abc import AsyncGenerator

import msgspec
import pytest

from conveyor.engines.blobs import Blobs
from conveyor.engines.tasks import Tasks
from conveyor.errors import BodyDamaged, ConveyorError, EngineFailed
from conveyor.jobs.body_coding import LARGE
from conveyor.model import BodyRef, JobKind, Outcome, ResultDetail, ResultLayout, Task, TaskId
from conveyor.process.body_store import BodyStore
from conveyor.read.body_reader import is_damaged, windows
from conveyor.read.results import read_body, stream_body, stream_gzip, stream_range
from conveyor.read.walk import Position, TaskBatch
from conveyor.states import TaskStatus
from conveyor.system import System
from tests.support.body_readers import all_readings
from tests.support.clocks import ManualClock
from tests.support.make_jobs import make_job

WORDS = b"<p>One page after the other, and each has some words of its own.</p>\n"


def bodies() -> list[tuple[bytes, str | None]]:
    """Of all sizes around the limits, of some types, with and without anything to save."""
    chance = random.Random(7)
    sizes = [0, 1, 511, 512, 513, 2048, 2049, 20_000, 300_000, LARGE - 1, LARGE, LARGE + 1]
    made: list[tuple[bytes, str | None]] = []
    for size in sizes:
        text = (b"page %d\n" % size + WORDS * (size // len(WORDS) + 1))[:size]
        made += [(text, "text/html; charset=utf-8"), (chance.randbytes(size), None), (text, "image/png")]
    return made


async def stored_tasks(blobs: Blobs, tasks: Tasks, layout: ResultLayout, kind: JobKind) -> list[Task]:
    clock = ManualClock()
    job = make_job(clock, kind=kind, layout=layout)
    outcomes = [Outcome(TaskStatus.SUCCEEDED, body=body, content_type=type_) for body, type_ in bodies()]
    [refs] = await BodyStore(blobs, tasks, clock).keep([(job, outcomes)])
    assert [outcome.body for outcome in outcomes] == [body for body, _ in bodies()], "they may be written once more"
    return [
        Task(
            TaskId(f"{index:064d}"),
            index,
            msgspec.Raw(b"0"),
            TaskStatus.SUCCEEDED,
            # As it is in a row.
            detail=msgspec.json.decode(msgspec.json.encode(ResultDetail(body=ref)), type=ResultDetail),
        )
        for index, ref in enumerate(refs)
    ]


@pytest.mark.parametrize("layout", list(ResultLayout))
async def test_what_was_extracted_is_stored_beside_the_body(blobs: Blobs, system: System, layout: ResultLayout) -> None:
    """In the row where the result of a handler would be, in the segment of the bodies, or as an object."""
    clock = ManualClock()
    job = make_job(clock, kind=JobKind.FETCH, layout=layout, extract="parse")
    sizes = [2, 700, 60_000, LARGE + 1]
    outcomes = [
        Outcome(TaskStatus.SUCCEEDED, body=WORDS * 20, extracted=b"[" + b" " * (size - 2) + b"]") for size in sizes
    ]
    outcomes.append(Outcome(TaskStatus.SUCCEEDED, body=None, extracted=b"{}"))
    outcomes.append(Outcome(TaskStatus.SUCCEEDED, body=WORDS))
    store = BodyStore(blobs, system.tasks, clock)
    [refs] = await store.keep([(job, outcomes)])
    assert [ref is not None for ref in refs] == [True] * 4 + [False, True]
    first = [outcome.extracted_ref for outcome in outcomes]
    for outcome, ref in zip(outcomes, first, strict=True):
        if ref is None:
            assert outcome.extracted is None
            continue
        assert b"".join([piece async for piece in stream_body(blobs, ref)]) == outcome.extracted
    if layout is ResultLayout.PACKED:
        assert first[0] is not None and first[0].inline == b"[]"
        assert first[2] is not None and refs[2] is not None and first[2].key == refs[2].key
    # A flush that is repeated stores it once.
    await store.keep([(job, outcomes)])
    assert [outcome.extracted_ref for outcome in outcomes] == first


@pytest.mark.parametrize("kind", [JobKind.FETCH, JobKind.PYTHON])
@pytest.mark.parametrize("layout", list(ResultLayout))
async def test_every_reader_gives_the_same_bytes(
    blobs: Blobs, system: System, layout: ResultLayout, kind: JobKind
) -> None:
    given = [body for body, _ in bodies()]
    tasks = await stored_tasks(blobs, system.tasks, layout, kind)
    for reader, got in (await all_readings(blobs, tasks)).items():
        assert [body == expected for body, expected in zip(got, given, strict=True)] == [True] * len(given), reader
    refs = [task.detail.body for task in tasks]
    for ref, (body, type_) in zip(refs, bodies(), strict=True):
        assert ref is not None and ref.length == len(body)
        in_segment = layout is ResultLayout.PACKED and ref.inline is None and len(body) <= LARGE
        is_text = body.startswith(b"page")
        assert (ref.stored is not None) == (in_segment and is_text and type_ != "image/png"), (len(body), type_)
        assert ref.stored is None or ref.stored_length < len(body) // 3


@pytest.mark.parametrize("place", [0, 1, 40, -1])
async def test_a_damaged_body_is_never_given_out(blobs: Blobs, place: int) -> None:
    clock, body = ManualClock(), WORDS * 100
    job = make_job(clock, layout=ResultLayout.PACKED)

    class NoRows:
        inline_bytes = 0

    [[ref]] = await BodyStore(blobs, NoRows(), clock).keep(  # type: ignore[arg-type]  # it asks for nothing else
        [(job, [Outcome(TaskStatus.SUCCEEDED, body=body)])]
    )
    assert ref is not None and ref.stored is not None
    data = bytearray(await blobs.get(ref.key, ref.offset, ref.stored_length) or b"")
    data[place] ^= 4
    await blobs.put("results/damaged", bytes(data))
    await blobs.put("results/short", bytes(data[:-1]))
    for key in ("results/damaged", "results/short", "results/missing"):
        task = await check_refused(blobs, msgspec.structs.replace(ref, key=key, offset=0))
        await check_left_out(blobs, task)


async def check_refused(blobs: Blobs, ref: BodyRef, error: type[ConveyorError] = BodyDamaged) -> Task:
    task = Task(TaskId("0"), 0, msgspec.Raw(b"0"), TaskStatus.SUCCEEDED, detail=ResultDetail(body=ref))
    for pieces in (stream_body(blobs, ref), stream_range(blobs, ref, 0, 1), stream_gzip(blobs, ref, 0, 5)):
        with pytest.raises(error):
            await anext(pieces)
    with pytest.raises(error):
        await read_body(blobs, task)
    return task


async def check_left_out(blobs: Blobs, task: Task) -> None:
    """Exports go on without the body, and say why."""

    async def batches() -> AsyncGenerator[TaskBatch, None]:
        yield TaskBatch([task], Position(), task.index, 1)

    for deflated in (True, False):
        [window] = [window async for window in windows(blobs, batches(), True, deflated)]
        assert window.bodies == [None]
        assert is_damaged(window.tasks[0])


async def test_an_encoding_of_a_later_version_is_named(blobs: Blobs, system: System) -> None:
    tasks = await stored_tasks(blobs, system.tasks, ResultLayout.PACKED, JobKind.FETCH)
    ref = next(
        task.detail.body for task in tasks if task.detail.body is not None and task.detail.body.stored is not None
    )
    assert ref.stored is not None
    later = msgspec.json.encode(ref).replace(b'["deflate",', b'["brotli",').replace(b"],", b',"more"],')
    unknown = msgspec.json.decode(later, type=BodyRef)
    assert unknown.stored is not None and unknown.stored.encoding == "brotli"
    for pieces in (stream_body(blobs, unknown), stream_range(blobs, unknown, 0, 1)):
        with pytest.raises(EngineFailed, match="the encoding 'brotli', which this version of Conveyor does not know"):
            await anext(pieces)
    task = await check_refused(blobs, unknown, EngineFailed)
    with pytest.raises(EngineFailed):
        await all_readings(blobs, [task])
