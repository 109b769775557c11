"""Limits and breakers of the targets of downloads, and of the export APIs behind export_download."""

import itertools
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from conveyor.accept.spec import decode_spec
from conveyor.coordination.waits import waiting
from conveyor.egress.origins import plain_origin
from conveyor.egress.target_guard import TargetGuard
from conveyor.embedded import Embedded
from conveyor.engines.tasks import TaskFilter
from conveyor.model import InputJson, Job, JobId, TaskRef
from conveyor.process.executors.download.export_api_executor import ExportDownloadExecutor
from conveyor.settings import Settings
from conveyor.states import ENDED, RunState
from conveyor.system import System
from tests.support.clocks import JumpingClock
from tests.support.export_site import ExportSite
from tests.support.file_site import Behaviour, FileSite
from tests.support.make_jobs import ACME
from tests.support.places import quick_place
from tests.support.working import until

KINDS = ["download", "export_download"]
RATE = 10.0


@pytest.fixture
def settings() -> Any:
    with quick_place() as place:
        yield Settings.load({}, data=place, allow_private_targets=True, fetchers=0)


@pytest.fixture
async def site() -> AsyncIterator[ExportSite]:
    """An API whose files are on the same host. It serves downloads too."""
    async with ExportSite(ready_after=0) as made:
        made.file.size = 1000
        yield made


def spec_of(site: ExportSite, kind: str, count: int, **options: Any) -> bytes:
    if kind == "download":
        tasks: list[Any] = [site.url(f"/files/{number}?link=0") for number in range(count)]
        return msgspec.json.encode({"kind": kind, "tasks": tasks, **options})
    tasks = [{"kind": str(number), "from": "x", "days": []} for number in range(count)]
    return msgspec.json.encode({"kind": kind, "tasks": tasks, "export": site.described()} | options)


async def submit(embedded: Embedded, spec: bytes) -> Job:
    accepted = await embedded.submit.submit(ACME, decode_spec(spec))
    return await embedded.job(ACME, JobId(accepted.subject))


async def ended(embedded: Embedded, job: Job) -> Job:
    return await until(lambda: embedded.job(ACME, job.job_id), lambda found: found.state in ENDED)


@pytest.mark.parametrize("kind", KINDS)
async def test_requests_come_at_the_rate_of_the_host(system: System, site: ExportSite, kind: str) -> None:
    embedded = Embedded(system)
    async with embedded.running({"work"}):
        job = await ended(embedded, await submit(embedded, spec_of(site, kind, 15, rate_per_host=RATE)))
    assert (await system.tasks.counts(job.key)).succeeded == 15
    # An export is three requests: make it, ask for its state, and the file.
    assert len(site.times) == (15 if kind == "download" else 45)
    for (first, began), (last, at) in itertools.combinations(enumerate(site.times), 2):
        assert last - first <= (at - began + 1.0) * RATE


async def test_a_rate_of_the_api_leaves_the_host_of_the_files_alone(system: System, site: ExportSite) -> None:
    """The file comes with the response that says it is ready: no pass is needed for another host."""
    embedded = Embedded(system)
    async with FileSite(Behaviour(1000), "127.0.0.2") as files, embedded.running({"work"}):
        site.files = files.url("")
        job = await ended(embedded, await submit(embedded, spec_of(site, "export_download", 10, rate_per_host=RATE)))
        assert (await system.tasks.counts(job.key)).succeeded == 10
        assert (len(site.times), len(files.times)) == (20, 10)


async def test_a_link_that_expires_while_it_waits_is_replaced(
    system: System, clock: JumpingClock, site: ExportSite
) -> None:
    site.lapse = {1, 2}
    embedded = Embedded(system)
    async with embedded.running({"work"}):
        job = await submit(embedded, spec_of(site, "export_download", 1, rate_per_host=RATE))

        async def later() -> Job:
            clock.advance(1)
            return await embedded.job(ACME, job.job_id)

        await until(later, lambda found: found.state in ENDED)
    assert (await system.tasks.counts(job.key)).succeeded == 1
    assert [seen.path.split("/")[1] for seen in site.seen] == ["exports", *["exports", "files"] * 3]
    (task,) = await system.tasks.at(job.key, [0])
    assert task.attempts == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_no_more_at_once_than_the_host_may_get(system: System, site: ExportSite, kind: str) -> None:
    site.seconds = 0.03
    embedded = Embedded(system)
    async with embedded.running({"work"}):
        spec = spec_of(site, kind, 20, concurrency=10, concurrency_per_host=2)
        job = await ended(embedded, await submit(embedded, spec))
    assert (await system.tasks.counts(job.key)).succeeded == 20
    assert site.most_at_once == 2


@pytest.mark.parametrize("kind", KINDS)
async def test_a_host_that_is_down_is_left_alone_and_probed(
    system: System, clock: JumpingClock, site: ExportSite, kind: str
) -> None:
    site.is_down, site.seconds = True, 0.005
    # Later it answers, and no export is ready: its answers close the breaker all the same.
    site.ready_after = 1_000_000
    backoff = {"base": 1000, "cap": 1000, "jitter": False}
    options: dict[str, Any] = {"concurrency": 8, "backoff": backoff, "attempts": 10}
    if kind == "export_download":
        # The clock goes on for as long as the machine takes: no export may time out meanwhile.
        poll = {"first": 5, "rate": 2, "cap": 60, "timeout": 30 * 86_400}
        options["export"] = site.described(poll=poll)
    embedded = Embedded(system)
    async with embedded.running({"work"}):
        job = await submit(embedded, spec_of(site, kind, 150, **options))
        said = await until(lambda: waiting(system.coordinator, job.run.run_id))
        assert said is not None
        assert "breaker open for" in said.detail
        assert "127.0.0.1" in said.detail
        tried = len(site.times)
        assert 20 <= tried <= 100

        site.is_down = False

        async def some_more() -> int:
            clock.advance(5)
            return len(site.made) if kind == "export_download" else (await system.tasks.counts(job.key)).succeeded

        await until(some_more, lambda count: count >= 150 - tried)
        site.ready_after = 0

        async def later() -> Job:
            clock.advance(5)
            return await embedded.job(ACME, job.job_id)

        found = await until(later, lambda found: found.state in ENDED)
    assert found.state is RunState.COMPLETED
    assert (await system.tasks.counts(job.key)).succeeded == 150


async def test_the_host_of_the_files_is_not_the_api(system: System, site: ExportSite) -> None:
    """The file host is down: the API answers all the same, and no task waits for it."""
    embedded = Embedded(system)
    async with FileSite(Behaviour(1000), "127.0.0.2") as files, embedded.running({"work"}):
        files.file.refusals = [(503, "")] * 1000
        site.files = files.url("")
        job = await ended(embedded, await submit(embedded, spec_of(site, "export_download", 60, attempts=1)))
        assert await waiting(system.coordinator, job.run.run_id) is None
        assert len(site.made) == len(files.times) == 60
        tasks = await system.tasks.page(job.key, 0, None, 100, TaskFilter())
        assert {task.error_code for task in tasks} == {"http_503"}
        assert all((task.detail.final_url or "").startswith(files.url("")) for task in tasks)


async def test_the_target_is_the_host_of_the_api(system: System, site: ExportSite) -> None:
    embedded = Embedded(system)
    async with embedded.running(set()):
        job = await submit(embedded, spec_of(site, "export_download", 1))
    guard = TargetGuard(allow_private=True, clock=system.clock)
    executor = ExportDownloadExecutor(system.settings, system.clock, guard, system.records, system.blobs)
    ref = TaskRef(0, InputJson('{"a": 1}'))
    assert executor.targets(job)(ref) == "127.0.0.1"
    assert executor.origins(job)(ref) == plain_origin(site.url(""))
    none = msgspec.structs.replace(job, options=msgspec.structs.replace(job.options, export=None))
    assert executor.targets(none)(ref) is executor.origins(none)(ref) is None
