"""Bodies that the budget has no room for are refused when their job is submitted, wherever it enters."""

from conveyor.clock import SystemClock
from conveyor.egress.target_guard import TargetGuard
from conveyor.process.executors.fetch.fetch_executor import FetchExecutor
from conveyor.settings import Settings
from tests.flow.test_fetch import attempt, code
from tests.support.api import Answer, Api
from tests.support.target_site import Site

MIB = 1024 * 1024
LARGEST = 64 * MIB
TASKS = ["http://example.com/"]


def check_refused(answer: Answer) -> None:
    assert (answer.status, answer.json["code"]) == (400, "invalid_field"), answer.body
    assert str(LARGEST) in answer.json["detail"]
    assert "CONVEYOR_BODY_BUDGET_BYTES" in answer.json["detail"]


async def test_jobs_changes_reruns_and_schedules(server: Api) -> None:
    over = {"max_body_bytes": LARGEST + 1}
    check_refused(await server.submit({"tasks": TASKS, **over}))
    check_refused(await server.post("/v1/schedules", {"cron": "0 3 * * *", "job": {"tasks": TASKS, **over}}))
    made = await server.submit({"tasks": TASKS, "max_body_bytes": LARGEST})
    assert made.status == 201
    path = made.headers["location"]
    check_refused(await server.request("PATCH", path, body=b'{"max_body_bytes": %d}' % (LARGEST + 1)))
    assert (await server.post(f"{path}/cancel")).status == 200
    check_refused(await server.post(f"{path}/rerun", {"select": "all", "options": over}))


async def test_kinds_without_bodies_in_memory_have_no_such_bound(server: Api) -> None:
    job = {"kind": "python", "handler": "x", "tasks": [1], "max_body_bytes": LARGEST + 1}
    assert (await server.submit(job)).status == 201


async def a_worker_reads_no_larger_body() -> None:
    """The job was accepted under another setting."""
    clock = SystemClock()
    settings = Settings(body_budget_bytes=8 * MIB, fetchers=2)
    executor = FetchExecutor(settings, clock, TargetGuard(allow_private=True, clock=clock))
    async with Site() as site:
        assert code(await attempt(executor, site.url(f"/ok?size={4 * MIB}"), max_body_bytes=100 * MIB)) is None
        outcome = await attempt(executor, site.url(f"/ok?size={4 * MIB + 1}"), max_body_bytes=100 * MIB)
        assert code(outcome) == "body_too_large"
    await executor.close()


async def test_a_worker_reads_no_larger_body() -> None:
    await a_worker_reads_no_larger_body()
