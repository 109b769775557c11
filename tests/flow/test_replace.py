"""Jobs that replace others: the old one is cancelled, and nothing of it runs when the first task of the new one
starts. By id and by key, on every stack, whoever dies in between."""

import asyncio
import dataclasses
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conveyor import AsyncClient, faults
from conveyor.accept.spec import decode_spec
from conveyor.accept.submit import Submit
from conveyor.clock import SystemClock
from conveyor.coordination.limits import run_slots
from conveyor.embedded import Embedded
from conveyor.engines.queue import Outgoing, QueueName
from conveyor.errors import NotFound, QuotaExceeded, ReplacementInFlight
from conveyor.jobs.chunks import request_ingest
from conveyor.jobs.idempotency import IdempotentRequest
from conveyor.jobs.replacements import REPLACEMENT, replacement_of
from conveyor.model import Job, JobId, Outcome, RunId, TaskRef
from conveyor.settings import Settings
from conveyor.states import ENDED, RunState
from conveyor.system import System, migrate, open_system
from tests.stacks.conftest import urls
from tests.support.api import Api
from tests.support.make_jobs import ACME
from tests.support.working import Echo, until, working

TASKS = 12
JOB = {"kind": "python", "handler": "tests.echo", "tasks": list(range(TASKS)), "concurrency": 4, "chunk_size": 2}


class Watched(Echo):
    """Remembers when each run had a task running. Tasks of runs in `stuck` end only when they are cancelled, and take
    a while for that."""

    def __init__(self) -> None:
        super().__init__()
        self.stuck: set[RunId] = set()
        self.every = True
        self.farewell = 0.0
        self.first: dict[RunId, float] = {}
        self.last: dict[RunId, float] = {}

    def grain(self, job: Job) -> int:
        return 1

    async def attempt(self, job: Job, refs: Sequence[TaskRef]) -> list[Outcome]:
        run = job.run.run_id
        self.first.setdefault(run, time.monotonic())
        try:
            if self.every or run in self.stuck:
                await asyncio.Event().wait()
            return await super().attempt(job, refs)
        finally:
            if self.farewell:
                await asyncio.sleep(self.farewell)
            self.last[run] = time.monotonic()

    def only_first_is_stuck(self) -> None:
        self.stuck, self.every = set(self.first), False

    def check_apart(self, old: Job, new: Job) -> None:
        assert self.first[new.run.run_id] > self.last[old.run.run_id]


async def submit(system: System, key: str | None = None, **more: Any) -> Job:
    spec = decode_spec(json.dumps({**JOB, **more}).encode())
    request = None if key is None else IdempotentRequest("POST /v1/jobs", key, "fingerprint")
    accepted = await Submit(system).submit(ACME, spec, request)
    return await job_of(system, accepted.subject)


async def job_of(system: System, job_id: str) -> Job:
    job = await system.records.jobs.job(ACME, JobId(job_id))
    assert job is not None
    return job


async def finished(system: System, job_id: str) -> Job:
    return await until(lambda: job_of(system, job_id), lambda job: job.state in ENDED)


def check_replaced(old: Job, new: Job) -> None:
    assert (old.state, old.reason, old.run.reason_code) == (
        RunState.CANCELLED,
        f"replaced by {new.job_id}",
        "replaced",
    )


@pytest.fixture
async def settings(tmp_path: Path) -> Settings:
    return Settings.load({}, data=tmp_path / "data", lease_seconds=3.0)


@pytest.fixture
async def system(settings: Settings) -> AsyncIterator[System]:
    async with open_system(settings, SystemClock()) as opened:
        yield opened
    faults.arm(None)


class TestStacks:
    @pytest.fixture(params=["embedded", "postgres", "aws"])
    async def settings(self, request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
        given = urls(request.param, tmp_path / "data")
        made = Settings.load({}, data=tmp_path / "data", lease_seconds=5.0, workers=2, **given)
        await migrate(made, SystemClock())
        return made

    @pytest.mark.server
    async def test_nothing_of_the_old_job_runs_beside_the_new(self, system: System) -> None:
        watched = Watched()
        watched.farewell = 0.7
        async with working(system, watched):
            old = await submit(system, key="mine")
            await until(lambda: _count(system, old), lambda count: count >= 4)
            watched.only_first_is_stuck()
            new = await submit(system, replaces="mine")
            assert new.state is RunState.INGESTING
            new = await finished(system, new.job_id)
        assert new.state is RunState.COMPLETED
        check_replaced(await job_of(system, old.job_id), new)
        watched.check_apart(old, new)
        assert {run for run, _ in watched.ran} == {new.run.run_id}
        assert sorted(watched.ran.values()) == [1] * TASKS
        row = await system.records.documents.document(REPLACEMENT, ACME, new.job_id)
        assert row is not None
        assert replacement_of(row).done


async def _count(system: System, job: Job) -> int:
    return await system.coordinator.permits_in_use(run_slots(job.run.run_id))


class TestNames:
    async def test_by_id_and_what_it_waits_for_is_shown(self, system: System, server: Api) -> None:
        old = await server.submit(JOB)
        slots = run_slots(_run_of(old.json))
        await system.coordinator.acquire(slots, "a dead worker", 1, 9, 60.0)
        new = await server.submit({**JOB, "replaces": old.json["id"]})
        assert new.status == 202
        async with working(system) as echo:
            shown = await until(
                lambda: server.get(f"/v1/jobs/{new.json['id']}"),
                lambda answer: (answer.json["waiting"] or {}).get("code") == "replacing",
            )
            assert old.json["id"] in shown.json["waiting"]["detail"]
            cancelled = (await server.get(f"/v1/jobs/{old.json['id']}")).json
            assert (cancelled["state"], cancelled["reason_code"]) == ("cancelled", "replaced")
            assert echo.ran == {}
            await system.coordinator.acquire(slots, "a dead worker", 0, 9, 60.0)
            assert (await finished(system, new.json["id"])).state is RunState.COMPLETED
        assert {run for run, _ in echo.ran} == {_run_of(new.json)}

    async def test_a_key_that_made_no_job_is_a_place_to_take(self, system: System) -> None:
        first = await submit(system, replaces="never-sent")
        assert first.state is RunState.RUNNING, "nothing to wait for"
        second = await submit(system, replaces="never-sent")
        check_replaced(await job_of(system, first.job_id), second)
        third = await submit(system, replaces="never-sent")
        check_replaced(await job_of(system, second.job_id), third)
        # A name that leads to the same job again.
        fourth = await submit(system, replaces=first.job_id)
        check_replaced(await job_of(system, third.job_id), fourth)

    async def test_what_is_not_there_or_not_ours_is_not_found(self, system: System, server: Api) -> None:
        unknown = await server.submit({**JOB, "replaces": system.clock.new_id("job")})
        assert (unknown.status, unknown.json["code"]) == (404, "not_found")
        theirs = await (await server.as_tenant("other")).submit(JOB)
        with pytest.raises(NotFound):
            await submit(system, replaces=theirs.json["id"])
        for wrong in ("", "two words", "é", "x" * 256):
            answer = await server.submit({**JOB, "replaces": wrong})
            assert (answer.status, answer.json["field"]) == (400, "replaces")

    async def test_a_finished_job_stays_as_it_is(self, system: System) -> None:
        async with working(system):
            old = await finished(system, (await submit(system)).job_id)
            await asyncio.sleep(1.1)
            new = await submit(system, replaces=old.job_id)
            assert new.state is RunState.RUNNING
            await finished(system, new.job_id)
        assert (await job_of(system, old.job_id)).state is RunState.COMPLETED

    async def test_a_schedule_replaces_none(self, server: Api) -> None:
        answer = await server.post("/v1/schedules", {"cron": "0 0 * * *", "job": {**JOB, "replaces": "x"}})
        assert (answer.status, answer.json["field"]) == (400, "job.replaces")


def _run_of(answer: dict[str, Any]) -> RunId:
    run: RunId = answer["run"]["id"]
    return run


class TestManners:
    async def test_of_many_at_once_one_is_left(self, system: System) -> None:
        watched = Watched()
        async with working(system, watched):
            old = await submit(system)
            await until(lambda: _count(system, old))
            watched.only_first_is_stuck()

            async def persistent() -> Job:
                while True:
                    try:
                        return await submit(system, replaces=old.job_id)
                    except ReplacementInFlight:
                        await asyncio.sleep(0.05)

            made = await asyncio.gather(*(persistent() for _ in range(5)))
            jobs = [await finished(system, job.job_id) for job in made]
        assert [job.state for job in jobs].count(RunState.COMPLETED) >= 1
        assert {job.run.reason_code for job in jobs if job.state is not RunState.COMPLETED} <= {"replaced"}
        # On a slow machine one may have begun before the next came; none ran beside another.
        order = sorted(watched.first, key=watched.first.__getitem__)
        assert order[0] == old.run.run_id
        for before, after in itertools.pairwise(order):
            assert watched.first[after] > watched.last[before]

    async def test_who_replaces_a_job_that_waits_also_waits_for_the_first(self, system: System) -> None:
        old = await submit(system)
        await system.coordinator.acquire(run_slots(old.run.run_id), "a dead worker", 1, 9, 3.0)
        began = time.monotonic()
        watched = Watched()
        watched.every = False
        async with working(system, watched):
            second = await submit(system, replaces=old.job_id)
            third = await submit(system, replaces=second.job_id)
            await finished(system, third.job_id)
        assert watched.first[third.run.run_id] - began >= 2.9
        assert second.run.run_id not in watched.first

    async def test_it_has_the_capacity_of_the_old_job(self, settings: Settings) -> None:
        tight = msgspec.structs.replace(settings, tenant_jobs=1, tenant_queued_tasks=TASKS)
        async with open_system(tight, SystemClock()) as system:
            old = await submit(system)
            with pytest.raises(QuotaExceeded):
                await submit(system)
            new = await submit(system, replaces=old.job_id)
            check_replaced(await job_of(system, old.job_id), new)

    async def test_an_open_job_can_replace(self, system: System) -> None:
        old = await submit(system)
        async with working(system) as echo:
            echo.gate.clear()
            new = await submit(system, replaces=old.job_id, mode="open", tasks=[])
            await until(lambda: job_of(system, old.job_id), lambda job: job.state is RunState.CANCELLED)
            assert (await job_of(system, new.job_id)).state is RunState.INGESTING

    async def test_without_a_wait_the_answer_is_that_of_any_small_job(self, server: Api) -> None:
        assert (await server.submit({**JOB, "replaces": "some-key"})).status == 201


class TestEntries:
    async def test_by_sdk(self, system: System, server: Api) -> None:
        async with AsyncClient(server.url, server.key) as client:
            old = await client.submit([1, 2], handler="tests.echo", idempotency_key="batch-1")
            new = await client.submit([1, 2], handler="tests.echo", replaces="batch-1")
            third = await client.open_job(handler="tests.echo", replaces=new.id)
        check_replaced(await job_of(system, old.id), await job_of(system, new.id))
        check_replaced(await job_of(system, new.id), await job_of(system, third.id))

    async def test_by_queue(self, settings: Settings) -> None:
        own = msgspec.structs.replace(settings, intake="jobs", intake_tenant="acme")
        async with open_system(own, SystemClock()) as system, working(system) as echo:
            echo.gate.clear()

            async def send(**message: Any) -> None:
                await system.queue.send(QueueName("jobs"), [Outgoing(json.dumps({"job": JOB, **message}).encode())])

            await send(idempotency_key="mine")
            (old,) = await until(lambda: _jobs(system))
            # The same again is the same job.
            await send(idempotency_key="mine")
            await send(replaces="mine")
            new, _ = await until(lambda: _jobs(system), lambda jobs: len(jobs) > 1)
            echo.gate.set()
            assert (await finished(system, new.job_id)).state is RunState.COMPLETED
            check_replaced(await job_of(system, old.job_id), new)
            await send(replaces="a b")
            letters = await until(lambda: system.queue.dead_letters(None, 10), lambda page: page.items)
        assert "replaces" in letters.items[0].reason


async def _jobs(system: System) -> list[Job]:
    return (await system.records.jobs.jobs(ACME, None, 10)).items


class TestCallsThatGoOn:
    """A function cannot be interrupted: the new job waits until it has returned."""

    @pytest.mark.parametrize("processes", [0, 1])
    async def test_a_function_of_the_old_job_has_returned(self, tmp_path: Path, processes: int) -> None:
        settings = Settings.load(
            {},
            data=tmp_path / "data",
            app="tests.support.handlers_app:handlers",
            fetchers=0,
            handler_processes=processes,
            lease_seconds=1.0,
        )
        async with open_system(settings, SystemClock()) as system, Embedded(system).running():
            spec = {"handler": "takes-its-time", "concurrency": 2, "chunk_size": 1}
            old = await submit(system, **spec, tasks=[[str(tmp_path / "old"), 3.0]] * 2)
            await until(lambda: _lines(tmp_path / "old"))
            new = await submit(system, **spec, tasks=[[str(tmp_path / "new"), 0.0]], replaces=old.job_id)
            assert (await finished(system, new.job_id)).state is RunState.COMPLETED
        began = min(float(line.split()[1]) for line in (tmp_path / "new").read_text().splitlines())
        said = [line.split() for line in (tmp_path / "old").read_text().splitlines()]
        starts = [at for what, at in said if what == "start"]
        ends = [float(at) for what, at in said if what == "end"]
        assert len(ends) == len(starts) > 0
        assert max(ends) < began


async def _lines(path: Path) -> bool:
    return path.exists()


class Died(BaseException):
    """The process is gone, as far as the test goes."""


def die_at(point: str, nth: int = 1) -> Callable[[str], None]:
    left = nth

    def hook(name: str) -> None:
        nonlocal left
        if name == point:
            left -= 1
            if left == 0:
                raise Died(name)

    return hook


class TestCrashes:
    """Whoever dies, the request is sent again with its key, and one job is left."""

    @pytest.mark.parametrize(
        "point",
        [
            "replace.take.before",
            "replace.take.after",
            "accept.ingested.before",
            "accept.ingested.after",
            "replace.cancel.before",
            "replace.cancel.after",
        ],
    )
    async def test_the_request_dies(self, system: System, point: str) -> None:
        impatient = msgspec.structs.replace(system.settings, idempotency_lease_seconds=0.0)
        system = _with(system, impatient)
        old = await submit(system)
        faults.arm(die_at(point))
        with pytest.raises(Died):
            await submit(system, key="again", replaces=old.job_id)
        faults.arm(None)
        watched = Watched()
        watched.every = False
        async with working(system, watched):
            new = await submit(system, key="again", replaces=old.job_id)
            assert (await finished(system, new.job_id)).state is RunState.COMPLETED
        jobs = {job.job_id for job in await _jobs(system)}
        assert jobs == {old.job_id, new.job_id}
        if point == "accept.ingested.after":
            # Nobody sent it again, and the ingest cancels the old job.
            check_replaced(await job_of(system, old.job_id), new)

    @pytest.mark.parametrize("point", ["handover.done.before", "handover.done.after"])
    async def test_the_ingester_dies(self, system: System, point: str) -> None:
        old = await submit(system)
        new = await submit(system, replaces=old.job_id)
        embedded = Embedded(system, {})
        (ingester, *_) = embedded.ingesters()
        faults.arm(die_at(point))
        with pytest.raises(Died):
            async with asyncio.timeout(10):
                while True:
                    await ingester.tick()
                    await asyncio.sleep(0.05)
        faults.arm(None)
        async with working(system) as echo:
            # The message of the dead ingester is redelivered.
            await request_ingest(system.queue, new, system.clock)
            assert (await finished(system, new.job_id)).state is RunState.COMPLETED
        assert {run for run, _ in echo.ran} == {new.run.run_id}

    async def test_an_abandoned_place_can_be_taken(self, system: System) -> None:
        """A request without a key took the place, and died before it wrote its job."""
        old = await submit(system)
        faults.arm(die_at("replace.take.after"))
        with pytest.raises(Died):
            await submit(system, replaces=old.job_id)
        faults.arm(None)
        with pytest.raises(ReplacementInFlight):
            await submit(system, replaces=old.job_id)
        impatient = _with(system, msgspec.structs.replace(system.settings, idempotency_lease_seconds=0.0))
        new = await submit(impatient, replaces=old.job_id)
        check_replaced(await job_of(system, old.job_id), new)


def _with(system: System, settings: Settings) -> System:
    return dataclasses.replace(system, settings=settings)
