"""Exports from an API on loopback: it is asked once for a file, and asked how far it is until there is one."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from conveyor.accept.spec import decode_spec
from conveyor.egress.target_guard import TargetGuard
from conveyor.embedded import Embedded
from conveyor.engines.queue import recovery_queue
from conveyor.faults import arm
from conveyor.model import (
    PROGRESS,
    ExportApi,
    InputJson,
    Job,
    JobId,
    JobKind,
    Outcome,
    TaskProgress,
    TaskRef,
    progress_id,
)
from conveyor.model import task_id as id_of
from conveyor.process.executors.download.export_api_executor import ExportDownloadExecutor
from conveyor.settings import Settings
from conveyor.states import RunState, TaskStatus
from conveyor.system import System
from tests.support.clocks import JumpingClock
from tests.support.export_site import SIZE, ExportSite
from tests.support.file_site import Behaviour, FileSite, digest
from tests.support.make_jobs import ACME, make_job
from tests.support.working import until

INPUT = {"kind": "a/b?c", "from": "2026-01-01", "days": [1, 2]}


@pytest.fixture
async def api() -> AsyncIterator[ExportSite]:
    async with ExportSite() as made:
        yield made


@pytest.fixture
async def executor(settings: Settings, system: System) -> AsyncIterator[ExportDownloadExecutor]:
    clock = system.clock
    guard = TargetGuard(allow_private=True, clock=clock)
    made = ExportDownloadExecutor(settings, clock, guard, system.records, system.blobs)
    yield made
    await made.close()


def job_for(clock: JumpingClock, described: dict[str, Any], **options: Any) -> Job:
    export = msgspec.convert(described, ExportApi)
    return make_job(clock, kind=JobKind.EXPORT_DOWNLOAD, chunk_size=1, export=export, **options)


async def attempt(executor: ExportDownloadExecutor, job: Job, given: Any = None, number: int = 1) -> Outcome:
    text = InputJson(msgspec.json.encode(given or INPUT).decode())
    (outcome,) = await executor.attempt(job, [TaskRef(0, text, number)])
    return outcome


async def row_of(system: System, job: Job) -> tuple[TaskProgress, float | None]:
    row = await system.records.documents.document(PROGRESS, job.tenant, progress_id(job.run.run_id, 0))
    assert row is not None
    return msgspec.json.decode(row.body, type=TaskProgress), row.due_at


def code(outcome: Outcome) -> str | None:
    return outcome.error.code if outcome.error else None


async def test_from_request_to_file(
    executor: ExportDownloadExecutor, api: ExportSite, system: System, clock: JumpingClock
) -> None:
    job = job_for(clock, api.described(), headers={"X-Job": "1", "Cookie": "a=1"})
    for delay in (5.0, 10.0):
        outcome = await attempt(executor, job)
        assert (outcome.status, outcome.spends_attempt, outcome.retry_after) == (TaskStatus.PENDING, False, delay)
        progress, due_at = await row_of(system, job)
        assert due_at is None, "it stands in the queue, nobody is late"
        assert progress.note == "the export is 'working'"
    outcome = await attempt(executor, job)
    assert outcome.status is TaskStatus.SUCCEEDED, outcome.error
    assert outcome.kept is not None
    assert (outcome.kept.length, outcome.kept.sha256) == (SIZE, digest(SIZE))
    created, *polled = api.calls
    task = id_of(job.run.run_id, 0)
    assert (created.method, created.target) == ("POST", "/exports?kind=a%2Fb%3Fc")
    assert created.headers["idempotency-key"] == f"conveyor-{task}"
    assert (created.headers["x-task"], created.headers["content-type"]) == (task, "application/json")
    assert api.bodies == [{"from": "2026-01-01", "note": "for a/b?c", "all": True, "days": [1, 2]}]
    assert [(seen.method, seen.path) for seen in polled] == [("GET", "/exports/ex%2F1")] * 3
    assert polled[0].headers["authorization"] == "Bearer of the API"
    file = api.seen[-1]
    assert (file.headers["x-job"], file.headers["cookie"]) == ("1", "a=1")
    assert "authorization" not in file.headers


async def test_responses_of_the_api_are_decoded(
    executor: ExportDownloadExecutor, api: ExportSite, clock: JumpingClock
) -> None:
    api.encodes, api.ready_after = True, 0
    outcome = await attempt(executor, job_for(clock, api.described()))
    assert outcome.status is TaskStatus.SUCCEEDED, outcome.error
    assert {call.headers["accept-encoding"] for call in api.calls} == {"identity"}


async def test_a_link_to_elsewhere_gets_no_secrets(
    executor: ExportDownloadExecutor, api: ExportSite, clock: JumpingClock
) -> None:
    api.ready_after = 0
    job = job_for(clock, api.described(), headers={"X-Job": "1", "Authorization": "Bearer of the job"})
    port = api.port
    async with FileSite(Behaviour(SIZE)) as other:
        api.port = other.port
        described = job.options.export
        assert described is not None
        # The API itself is where it was; only its links lead to the other site.
        assert str(port) in described.status.url
        outcome = await attempt(executor, job)
        api.port = port
        assert outcome.status is TaskStatus.SUCCEEDED, outcome.error
        assert other.seen[0].headers["x-job"] == "1"
        assert "authorization" not in other.seen[0].headers


async def test_a_file_at_a_place_of_its_own(
    executor: ExportDownloadExecutor, api: ExportSite, clock: JumpingClock
) -> None:
    api.ready_after = 0
    for download in (
        api.url("/files/{id}?link=0"),
        {"url": api.url("/files/{id}?link=0"), "headers": {"X-Key": "{input.from}"}},
    ):
        job = job_for(clock, api.described(download=download))
        assert (await attempt(executor, job)).status is TaskStatus.SUCCEEDED
    assert api.seen[-1].headers["x-key"] == "2026-01-01"


@pytest.mark.parametrize("point", ["export.create.before", "export.create.after"])
async def test_a_crash_makes_no_second_export(
    executor: ExportDownloadExecutor, api: ExportSite, clock: JumpingClock, point: str
) -> None:
    class Crash(BaseException):
        pass

    def hook(name: str) -> None:
        if name == point:
            raise Crash

    job = job_for(clock, api.described())
    arm(hook)
    try:
        with pytest.raises(Crash):
            await attempt(executor, job)
    finally:
        arm(None)
    for _ in range(4):
        outcome = await attempt(executor, job)
    assert outcome.status is TaskStatus.SUCCEEDED
    assert len(api.made) == 1
    # Where the API honours no key, only a crash before the id was kept makes another.
    assert sum(seen.method == "POST" for seen in api.calls) == (2 if point.endswith("before") else 1)


async def test_calls_are_made_again_by_their_own_policy(
    executor: ExportDownloadExecutor, api: ExportSite, clock: JumpingClock
) -> None:
    job = job_for(clock, api.described(), attempts=1)
    api.failures = [(503, "")] * 5
    delays = []
    for _ in range(5):
        outcome = await attempt(executor, job)
        assert (code(outcome), outcome.spends_attempt) == ("http_503", False)
        delays.append(outcome.retry_after)
    assert delays == [60.0, 120.0, 240.0, 480.0, 900.0]
    # One that succeeds is the end of the row of failures.
    assert (await attempt(executor, job)).status is TaskStatus.PENDING
    api.failures = [(503, "")] * 6
    for _ in range(5):
        assert not (await attempt(executor, job)).spends_attempt
    outcome = await attempt(executor, job)
    assert (code(outcome), outcome.spends_attempt) == ("export_api_failed", True)
    assert outcome.error is not None
    assert "6 times" in outcome.error.message


async def test_the_job_may_have_a_policy_of_its_own(
    executor: ExportDownloadExecutor, api: ExportSite, clock: JumpingClock
) -> None:
    retry = {"retries": 1, "base": 1, "rate": 1, "cap": 9}
    job = job_for(clock, api.described(retry=retry))
    api.failures = [(429, "Retry-After: 7\r\n"), (429, "")]
    assert (await attempt(executor, job)).retry_after == 8.0
    assert code(await attempt(executor, job)) == "export_api_failed"


@pytest.mark.parametrize(
    ("change", "want"),
    [
        ({"id": "$.nothing"}, "bad_answer"),
        ({"id": "$.data"}, "bad_answer"),
        ({"state": "/export"}, "bad_answer"),
        ({"download": "$.export.files[3].href"}, "bad_answer"),
        ({"download": "$.export.status"}, "bad_url"),
        ({"status": {"url": "http://127.0.0.1:1/{id}"}}, "connect_failed"),
    ],
)
async def test_what_the_api_says_is_not_what_was_described(
    executor: ExportDownloadExecutor, api: ExportSite, clock: JumpingClock, change: dict[str, Any], want: str
) -> None:
    api.ready_after = 0
    assert code(await attempt(executor, job_for(clock, api.described(**change)))) == want


@pytest.mark.parametrize("given", [{"kind": "a"}, "text", {**INPUT, "kind": ".."}, {**INPUT, "kind": {}}])
async def test_an_input_that_does_not_fill_the_templates(
    executor: ExportDownloadExecutor, api: ExportSite, clock: JumpingClock, given: Any
) -> None:
    described = api.described()
    described["create"]["url"] = api.url("/exports/{input.kind}")
    assert code(await attempt(executor, job_for(clock, described), given)) == "bad_input"
    assert api.calls == []


async def test_a_header_can_not_be_broken_out_of(
    executor: ExportDownloadExecutor, api: ExportSite, clock: JumpingClock
) -> None:
    described = api.described()
    described["create"]["headers"] = {"X-Kind": "{input.from}"}
    given = {**INPUT, "from": "a\r\nX-Evil: 1"}
    assert code(await attempt(executor, job_for(clock, described), given)) == "bad_input"


async def test_an_export_that_fails_or_takes_too_long(
    executor: ExportDownloadExecutor, api: ExportSite, clock: JumpingClock
) -> None:
    job = job_for(clock, api.described())
    assert (await attempt(executor, job)).status is TaskStatus.PENDING
    clock.advance(1001)
    assert code(await attempt(executor, job)) == "export_timeout"
    api.ready_after, api.final = 0, "broken"
    outcome = await attempt(executor, job_for(clock, api.described()))
    assert (code(outcome), outcome.spends_attempt) == ("export_failed", True)


async def test_a_link_that_lapses_is_replaced_and_the_file_gone_on_with(
    executor: ExportDownloadExecutor, api: ExportSite, system: System, clock: JumpingClock
) -> None:
    api.ready_after = 0
    api.file.cuts = [SIZE - 100_000]
    api.lapse = {2}
    job = job_for(clock, api.described(), attempts=1)

    class Once:
        """The first link lapses when its connection is cut."""

        def __contains__(self, link: object) -> bool:
            return link == 2 or (link == 1 and not api.file.cuts)

    api.lapse = Once()  # type: ignore[assignment]
    outcome = await attempt(executor, job)
    assert (code(outcome), outcome.spends_attempt) == ("http_403", False)
    outcome = await attempt(executor, job)
    assert (code(outcome), outcome.spends_attempt) == ("http_403", False)
    outcome = await attempt(executor, job)
    assert outcome.status is TaskStatus.SUCCEEDED, outcome.error
    assert outcome.kept is not None
    assert outcome.kept.sha256 == digest(SIZE)
    assert api.sent < 1.3 * SIZE


async def test_the_guard_stands_before_every_call(settings: Settings, system: System, clock: JumpingClock) -> None:
    guard = TargetGuard(allow_private=False, clock=clock)
    made = ExportDownloadExecutor(settings, clock, guard, system.records, system.blobs)
    async with ExportSite() as api:
        assert code(await attempt(made, job_for(clock, api.described()))) == "target_refused"
        assert api.seen == []
    await made.close()


async def test_a_job_waits_without_a_worker(system: System, clock: JumpingClock) -> None:
    """From submit to the end, on a worker with one slot: both tasks wait at the same time."""
    system_settings = msgspec.structs.replace(system.settings, worker_concurrency=1)
    object.__setattr__(system, "settings", system_settings)
    async with ExportSite(ready_after=6) as api:
        embedded = Embedded(system)
        spec = {
            "kind": "export_download",
            "tasks": [INPUT, {**INPUT, "kind": "other"}],
            "export": api.described(poll={"first": 30, "cap": 30}),
            "attempts": 1,
        }
        accepted = await embedded.submit.submit(ACME, decode_spec(msgspec.json.encode(spec)))
        job = await embedded.job(ACME, JobId(accepted.subject))
        queue = recovery_queue(job.run.run_id)
        async with embedded.running():
            for _ in range(3):
                await until(lambda: system.queue.depth(queue), lambda depth: depth.delayed == 2)
                assert await system.coordinator.permits_in_use(f"run:{job.run.run_id}") in (0, 1)
                clock.advance(31)
                await until(lambda: system.queue.depth(queue), lambda depth: depth.delayed < 2)
            job = await until(lambda: embedded.job(ACME, job.job_id), lambda found: found.run.ended_at is not None)
        assert job.state is RunState.COMPLETED
        counts = await system.tasks.counts(job.key)
        assert counts.succeeded == 2
        (first, _) = await system.tasks.at(job.key, [0, 1])
        assert first.attempts == 1
        assert len(api.made) == 2
