"""What tests of exports share: jobs that are done, with bodies in a real store, and ways to have them exported."""

import random
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import msgspec

from conveyor.engines.blobs import Blobs
from conveyor.engines.tasks import Tasks
from conveyor.export.exporter import Exporter
from conveyor.export.exports import ExportRecord, Exports, ExportState, part_range
from conveyor.export.request import ExportSpec
from conveyor.jobs.body_coding import deflate
from conveyor.model import (
    BodyRef,
    InputJson,
    Job,
    JobId,
    JobKind,
    Mode,
    Options,
    OutboxEvent,
    ResultDetail,
    ResultLayout,
    Run,
    RunId,
    TaskEnd,
    TaskError,
    TaskSeed,
    TenantId,
)
from conveyor.settings import export_places
from conveyor.states import RunState, TaskStatus
from conveyor.system import System

ACME = TenantId("acme")


class Unordered:
    """An engine without the capability to walk by index. Everything else is the real one's."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks

    def __getattr__(self, name: str) -> Any:
        if name in {"walk", "engine_of"}:
            raise AttributeError(name)
        return getattr(self._tasks, name)


def url_of(index: int) -> str:
    return f"https://example.com/{index}"


def body_of(index: int) -> bytes:
    """Text, but for every seventh."""
    if index % 7 == 3:
        return random.Random(index).randbytes(100 + index % 50)
    return f"<p>page {index} of äll</p>".encode() * (1 + index % 30)


def outcome_of(index: int) -> TaskStatus:
    """Most succeed, with a body; every tenth fails, with one too; every thirteenth has none."""
    return TaskStatus.FAILED if index % 10 == 9 else TaskStatus.SUCCEEDED


def has_body(index: int) -> bool:
    return index % 13 != 5


def end_of(index: int, ref: BodyRef | None, at: float) -> TaskEnd:
    failed = outcome_of(index) is TaskStatus.FAILED
    detail = ResultDetail(
        error=TaskError("http_503", "The target answered 503.") if failed else None,
        content_type="text/html" if ref else None,
        final_url=url_of(index),
        headers=[("server", "fleet")],
        body=ref,
        elapsed=0.25,
    )
    code = "http_503" if failed else None
    text = msgspec.json.encode(detail).decode()
    return TaskEnd(index, outcome_of(index), 1, 503 if failed else 200, code, text, at)


async def pack(blobs: Blobs, key: str, bodies: Sequence[bytes]) -> list[BodyRef]:
    """A segment of bodies, with rubbish between them as a lost attempt would leave it. Two of three are deflated, if
    they shrink; earlier versions wrote the others."""
    data = bytearray()
    refs = []
    for number, body in enumerate(bodies):
        data += b"rubbish"
        deflated = None if number % 3 == 2 else deflate(body)
        stored = None if deflated is None else deflated.stored
        refs.append(BodyRef(key, len(body), sha256(body).hexdigest(), len(data), stored=stored))
        data += body if deflated is None else deflated.data
    await blobs.put(key, data)
    return refs


def new_job(system: System, total: int, shards: int = 1, state: RunState = RunState.COMPLETED) -> Job:
    now = system.clock.now()
    job_id = JobId(system.clock.new_id("job"))
    return Job(
        tenant=ACME,
        job_id=job_id,
        name=None,
        kind=JobKind.FETCH,
        mode=Mode.CLOSED,
        options=Options(),
        task_shard_count=shards,
        result_layout=ResultLayout.PACKED,
        state=state,
        reason=None,
        created_at=now,
        expires_at=now + 14 * 86_400,
        run=Run(RunId(job_id.replace("job_", "run_")), 1, state, total, True, now, ended_at=now),
    )


async def stored_job(system: System, total: int, shards: int = 1, per_segment: int = 500) -> Job:
    """A job that has ended, with its tasks and their bodies."""
    job = new_job(system, total, shards)
    notice = OutboxEvent(
        system.clock.new_id("evt"), ACME, job.job_id, job.run.run_id, "job.accepted", job.created_at, {}
    )
    await system.records.jobs.create_job(job, notice, None)
    await store_tasks(system, job, range(total), per_segment)
    return job


async def store_tasks(system: System, job: Job, indexes: Sequence[int], per_segment: int = 500) -> None:
    for start in range(0, len(indexes), per_segment):
        some = indexes[start : start + per_segment]
        await system.tasks.put(
            job.key,
            [TaskSeed(index, InputJson(f'{{"url":"{url_of(index)}","tag":"t{index % 5}"}}')) for index in some],
        )
        with_body = [index for index in some if has_body(index)]
        key = f"results/{job.tenant}/{job.job_id}/{job.run.run_id}/{system.clock.new_id('seg')}"
        refs = dict(zip(with_body, await pack(system.blobs, key, [body_of(index) for index in with_body]), strict=True))
        await system.tasks.finish(job.key, [end_of(index, refs.get(index), job.created_at + index) for index in some])


def exporter(system: System, name: str = "one") -> Exporter:
    return Exporter(
        system.records,
        system.tasks,
        system.blobs,
        system.coordinator,
        system.clock,
        system.settings.export_piece_bytes,
        export_places(system.settings),
        name,
    )


async def asked(system: System, job: Job, **spec: Any) -> str:
    """An export that is asked for; its id."""
    accepted = await Exports(system).create(job, msgspec.convert(spec, ExportSpec))
    return accepted.subject


async def found(system: System, export_id: str) -> ExportRecord:
    return (await Exports(system).find(ACME, export_id)).export


async def made(system: System, job: Job, **spec: Any) -> tuple[str, list[bytes]]:
    """An export, and the bytes of its parts."""
    export_id = await asked(system, job, **spec)
    role = exporter(system)
    while await role.tick() == 0.0:
        pass
    return export_id, await parts_of(system, export_id)


async def parts_of(system: System, export_id: str) -> list[bytes]:
    export = await found(system, export_id)
    assert export.state is ExportState.READY, export.error
    parts = []
    for part in export.parts:
        data = b"".join([piece async for piece in part_range(system.blobs, part, 0, part.size)])
        assert (len(data), sha256(data).hexdigest()) == (part.size, part.sha256)
        parts.append(data)
    return parts
