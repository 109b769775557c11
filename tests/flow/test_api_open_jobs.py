"""Open jobs over HTTP: batches from many at once, each taken once; closed by the last, by hand and by idleness."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from conveyor import faults
from conveyor.accept.add_tasks import BatchView
from conveyor.api.schemas.job_shapes import JobShape
from conveyor.model import TenantId
from conveyor.settings import Settings
from tests.support.api import Answer, Api
from tests.support.clocks import JumpingClock
from tests.support.working import all_items, ended, until, working

ACME = TenantId("acme")


def urls(count: int, name: str = "x") -> list[str]:
    return [f"http://example.com/{name}/{number}" for number in range(count)]


async def open_job(api: Api, **spec: Any) -> str:
    answer = await api.submit({"mode": "open", **spec})
    assert (answer.status, answer.json["state"], answer.json["mode"]) == (202, "ingesting", "open")
    job_id: str = answer.json["id"]
    return job_id


async def add(api: Api, job_id: str, tasks: list[Any], last: bool = False, key: str | None = None) -> Answer:
    headers = {"idempotency-key": key} if key else None
    return await api.post(f"/v1/jobs/{job_id}/tasks", {"tasks": tasks, "last_batch": last}, headers=headers)


async def show(api: Api, job_id: str) -> dict[str, Any]:
    shown: dict[str, Any] = (await api.get(f"/v1/jobs/{job_id}")).json
    return shown


async def inputs(api: Api, job_id: str) -> list[str]:
    return sorted(item["input"] for item in await all_items(api, f"/v1/jobs/{job_id}/results"))


def refusal(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.json["code"]


@pytest.fixture
def disarm() -> Iterator[None]:
    yield
    faults.arm(None)


class TestBatches:
    async def test_a_batch_runs_before_the_job_is_closed(self, server: Api) -> None:
        job_id = await open_job(server)
        async with working(server.system):
            answer = await add(server, job_id, urls(3))
            assert answer.status == 202
            view = msgspec.json.decode(answer.body, type=BatchView)
            assert (view.count, view.last_batch, view.batch_id[:6]) == (3, False, "batch_")
            shown = await until(lambda: show(server, job_id), lambda job: job["run"]["counts"]["succeeded"] == 3)
            msgspec.convert(shown, JobShape)
            assert (shown["state"], shown["run"]["total"], shown["eta"]) == ("ingesting", 3, None)
            assert (await add(server, job_id, urls(2, "y"), last=True)).json["last_batch"] is True
            done = await ended(server, job_id)
        assert (done["state"], done["reason"], done["run"]["total"]) == ("completed", None, 5)
        assert done["ingest"]["ranges"] == done["ingest"]["ranges_done"] == 2
        assert done["ingest"]["bytes_read"] == done["ingest"]["bytes_total"]
        assert await inputs(server, job_id) == sorted(urls(3) + urls(2, "y"))

    async def test_invalid_tasks_are_skipped_and_counted(self, server: Api) -> None:
        """A batch may be without any valid task: where one ends and the next begins is chance."""
        job_id = await open_job(server)
        async with working(server.system):
            mixed = (await add(server, job_id, ["http://example.com/a", "nonsense", "http://example.com/b"])).json
            assert (mixed["count"], mixed["invalid_lines"]) == (2, 1)
            wrong = (await add(server, job_id, ["ftp://x", 7], last=True)).json
            assert (wrong["count"], wrong["invalid_lines"], wrong["last_batch"]) == (0, 2, True)
            done = await ended(server, job_id)
        assert (done["state"], done["total"], done["invalid_lines"]) == ("completed", 2, 3)
        items = await all_items(server, f"/v1/jobs/{job_id}/results")
        assert [(item["index"], item["input"][-1]) for item in items] == [(0, "a"), (2, "b")]
        invalid = await all_items(server, f"/v1/jobs/{job_id}/invalid")
        assert [(line["line"], line["text"]) for line in invalid] == [(2, '"nonsense"'), (4, '"ftp://x"'), (5, "7")]

    async def test_a_job_may_refuse_batches_with_invalid_tasks(self, server: Api) -> None:
        job_id = await open_job(server, on_invalid="reject")
        assert refusal(await add(server, job_id, ["http://example.com/a", "nonsense"])) == (400, "invalid_tasks")
        assert (await show(server, job_id))["ingest"]["ranges"] == 0

    async def test_batches_from_many_at_once(self, server: Api) -> None:
        """Each batch is sent twice at the same time, under its own key: all of it is run, and once."""
        sizes = {f"b{number}": 1 + 37 * number % 211 for number in range(40)}
        job_id = await open_job(server)

        async def send(name: str) -> Answer:
            while True:
                answer = await add(server, job_id, urls(sizes[name], name), key=name)
                if answer.status != 409:
                    return answer
                assert answer.json["code"] == "idempotency_key_in_flight"
                await asyncio.sleep(0.01)

        async with working(server.system) as echo:
            answers = await asyncio.gather(*(send(name) for name in [*sizes, *sizes]))
            assert {answer.status for answer in answers} == {202}
            half = len(sizes)
            assert [one.body for one in answers[:half]] == [two.body for two in answers[half:]]
            assert (await server.post(f"/v1/jobs/{job_id}/close")).status == 200
            done = await ended(server, job_id)
        total = sum(sizes.values())
        assert (done["run"]["total"], done["run"]["counts"]["succeeded"], done["ingest"]["ranges"]) == (
            total,
            total,
            40,
        )
        assert await inputs(server, job_id) == sorted(url for name, size in sizes.items() for url in urls(size, name))
        items = await all_items(server, f"/v1/jobs/{job_id}/results")
        assert sorted(item["index"] for item in items) == list(range(total))
        assert echo.ran == Counter({(done["run"]["id"], index): 1 for index in range(total)})

    async def test_adding_and_closing_at_once(self, server: Api) -> None:
        """Whatever was answered 202 is run; whatever was answered 409 is not."""
        job_id = await open_job(server)
        async with working(server.system):
            await add(server, job_id, urls(1, "first"))
            *answers, closed = await asyncio.gather(
                *(add(server, job_id, urls(5, f"b{number}")) for number in range(30)),
                server.post(f"/v1/jobs/{job_id}/close"),
            )
            assert closed.status == 200
            done = await ended(server, job_id)
        taken = [number for number, answer in enumerate(answers) if answer.status == 202]
        assert {refusal(answer) for answer in answers if answer.status != 202} <= {(409, "job_closed")}
        expected = urls(1, "first") + [url for number in taken for url in urls(5, f"b{number}")]
        assert await inputs(server, job_id) == sorted(expected)
        assert done["run"]["total"] == len(expected)

    async def test_two_last_batches(self, server: Api) -> None:
        job_id = await open_job(server)
        async with working(server.system):
            answers = await asyncio.gather(*(add(server, job_id, urls(2, f"b{n}"), last=True) for n in range(10)))
            done = await ended(server, job_id)
        assert sorted(answer.status for answer in answers) == [202] + [409] * 9
        assert done["run"]["total"] == 2

    @pytest.mark.parametrize(
        ("body", "status", "code"),
        [
            ({}, 400, "no_tasks"),
            ({"tasks": []}, 400, "no_tasks"),
            ({"tasks": ["http://example.com/"], "last": True}, 400, "unknown_field"),
            ({"tasks": "http://example.com/"}, 400, "invalid_field"),
            ({"last_batch": 1}, 400, "invalid_field"),
            (b"", 400, "malformed_json"),
            ({"tasks": ["http://example.com/"] * 51}, 413, "too_many_tasks"),
        ],
        ids=str,
    )
    async def test_what_is_not_taken(self, server: Api, body: Any, status: int, code: str) -> None:
        job_id = await open_job(server)
        answer = await server.post(f"/v1/jobs/{job_id}/tasks", body, headers={"idempotency-key": "k"})
        assert refusal(answer) == (status, code)
        assert (await show(server, job_id))["ingest"]["ranges"] == 0
        assert (await add(server, job_id, urls(1), key="k")).status == 202

    @pytest.fixture
    def settings(self, settings: Settings, request: pytest.FixtureRequest) -> Settings:
        most = 50 if "what_is_not_taken" in request.node.name else None
        return Settings.load({}, data=settings.data, max_inline_tasks=most)


class TestClosing:
    async def test_it_takes_no_more(self, server: Api) -> None:
        job_id = await open_job(server)
        await add(server, job_id, urls(2))
        closed = await server.post(f"/v1/jobs/{job_id}/close", {})
        assert closed.status == 200
        msgspec.convert(closed.json, JobShape)
        assert refusal(await add(server, job_id, urls(1), key="k")) == (409, "job_closed")
        again = await server.post(f"/v1/jobs/{job_id}/close")
        assert again.status == 200
        async with working(server.system):
            done = await ended(server, job_id)
        assert (done["state"], done["run"]["total"]) == ("completed", 2)
        assert refusal(await add(server, job_id, urls(1), key="k")) == (409, "job_closed")
        assert (await server.post(f"/v1/jobs/{job_id}/close")).status == 200

    async def test_the_last_batch_is_replayed_after_it_closed_the_job(self, server: Api) -> None:
        job_id = await open_job(server)
        first = await add(server, job_id, urls(2), last=True, key="k")
        async with working(server.system):
            await ended(server, job_id)
        again = await add(server, job_id, urls(2), last=True, key="k")
        assert (again.status, again.body, again.headers["idempotency-replayed"]) == (202, first.body, "true")
        assert refusal(await add(server, job_id, urls(2), last=True, key="k2")) == (409, "job_closed")

    async def test_an_empty_last_batch(self, server: Api) -> None:
        job_id = await open_job(server)
        await add(server, job_id, urls(3))
        first = await add(server, job_id, [], last=True, key="k")
        assert (first.status, first.json["count"], first.json["last_batch"]) == (202, 0, True)
        again = await add(server, job_id, [], last=True, key="k")
        assert (again.status, again.body) == (202, first.body)
        async with working(server.system):
            done = await ended(server, job_id)
        assert (done["state"], done["run"]["total"]) == ("completed", 3)

    async def test_a_job_that_was_never_open(self, server: Api) -> None:
        job_id = (await server.submit({"tasks": urls(1)})).json["id"]
        assert refusal(await add(server, job_id, urls(1))) == (409, "job_closed")
        closed = await server.post(f"/v1/jobs/{job_id}/close")
        assert refusal(closed) == (409, "job_closed")
        assert "mode" in closed.json["detail"]

    async def test_a_job_that_was_deleted(self, server: Api) -> None:
        job_id = await open_job(server)
        await add(server, job_id, urls(1), key="k")
        assert (await server.request("DELETE", f"/v1/jobs/{job_id}")).status == 204
        for answer in (
            await add(server, job_id, urls(1)),
            await add(server, job_id, urls(1), key="k"),
            await server.post(f"/v1/jobs/{job_id}/close"),
        ):
            assert refusal(answer) == (404, "not_found")

    async def test_without_a_task(self, server: Api) -> None:
        job_id = await open_job(server)
        await server.post(f"/v1/jobs/{job_id}/close")
        async with working(server.system):
            done = await ended(server, job_id)
        assert (done["state"], done["reason"]) == ("failed", "there were no tasks")

    async def test_its_body(self, server: Api) -> None:
        job_id = await open_job(server)
        assert refusal(await server.post(f"/v1/jobs/{job_id}/close", {"now": True})) == (400, "unknown_field")
        assert (await add(server, job_id, urls(1))).status == 202


class TestIdleness:
    async def test_nobody_closes_it(self, server: Api, clock: JumpingClock) -> None:
        job_id = await open_job(server, idle_timeout=600)
        async with working(server.system):
            await add(server, job_id, urls(3))
            clock.advance(590)
            await add(server, job_id, urls(2, "y"))
            clock.advance(590)
            shown = await until(lambda: show(server, job_id), lambda job: job["run"]["counts"]["succeeded"] == 5)
            assert (shown["state"], shown["reason"]) == ("ingesting", None)
            clock.advance(20)
            done = await ended(server, job_id)
        assert (done["state"], done["run"]["total"]) == ("completed", 5)
        assert done["reason"] == "closed: nothing was added for 600 s"
        assert refusal(await add(server, job_id, urls(1))) == (409, "job_closed")

    async def test_nobody_adds(self, server: Api, clock: JumpingClock) -> None:
        job_id = await open_job(server, idle_timeout=600)
        async with working(server.system):
            clock.advance(610)
            done = await ended(server, job_id)
        assert done["state"] == "failed"
        assert done["reason"] == "closed: nothing was added for 600 s; there were no tasks"


class TestCrashes:
    @pytest.mark.usefixtures("disarm")
    @pytest.mark.parametrize("point", ["add.stage.before", "add.stage.after"])
    async def test_before_a_batch_is_taken(self, server: Api, clock: JumpingClock, point: str) -> None:
        job_id = await open_job(server)
        die_at(point)
        assert (await add(server, job_id, urls(3), key="k")).status == 500
        faults.arm(None)
        assert refusal(await add(server, job_id, urls(3), key="k")) == (409, "idempotency_key_in_flight")
        clock.advance(server.system.settings.idempotency_lease_seconds)
        assert (await add(server, job_id, urls(3), last=False, key="k")).status == 202
        await self.check(server, clock, job_id, 1)

    @pytest.mark.usefixtures("disarm")
    async def test_between_the_row_and_the_message(self, server: Api, clock: JumpingClock) -> None:
        """The batch is in the rows and no queue knows of it: the sweeper does, while the job is still open."""
        job_id = await open_job(server)
        die_at("add.append.after")
        assert (await add(server, job_id, urls(3), key="k")).status == 500
        faults.arm(None)
        again = await add(server, job_id, urls(3), key="k")
        assert (again.status, again.headers["idempotency-replayed"]) == (202, "true")
        async with working(server.system):
            clock.advance(15)
            shown = await until(lambda: show(server, job_id), lambda job: job["run"]["counts"]["succeeded"] == 3)
            assert shown["state"] == "ingesting"
        await self.check(server, clock, job_id, 1)

    @pytest.mark.usefixtures("disarm")
    async def test_between_the_seal_and_the_message(self, server: Api, clock: JumpingClock) -> None:
        job_id = await open_job(server)
        await add(server, job_id, urls(3))
        die_at("add.seal.after")
        assert (await server.post(f"/v1/jobs/{job_id}/close")).status == 500
        faults.arm(None)
        async with working(server.system):
            await until(lambda: show(server, job_id), lambda job: job["run"]["counts"]["succeeded"] == 3)
            clock.advance(15)
            assert (await ended(server, job_id))["run"]["total"] == 3

    async def test_a_batch_that_can_not_be_read(self, server: Api, clock: JumpingClock) -> None:
        """The job fails before anyone closed it, and goes on, still open, once the batch is mended."""
        job_id = await open_job(server)
        lost = (await add(server, job_id, urls(2, "lost"))).json["batch_id"]
        key = f"lists/acme/{job_id}/{lost}.jsonl"
        data = await server.system.blobs.get(key)
        assert data is not None
        await server.system.blobs.delete([key])

        async def look() -> dict[str, Any]:
            clock.advance(10)
            return await show(server, job_id)

        async with working(server.system):
            await until(look, lambda job: job["state"] == "failed")
            assert refusal(await add(server, job_id, urls(1))) == (409, "job_closed")
            await server.system.blobs.put(key, data)
            assert (await server.post(f"/v1/jobs/{job_id}/rerun")).status == 202
            await until(lambda: show(server, job_id), lambda job: job["run"]["counts"]["succeeded"] == 2)
            assert (await add(server, job_id, urls(1, "more"), last=True)).status == 202
            done = await ended(server, job_id)
        assert (done["state"], done["run"]["total"]) == ("completed", 3)

    async def check(self, server: Api, clock: JumpingClock, job_id: str, batches: int) -> None:
        assert (await server.post(f"/v1/jobs/{job_id}/close")).status == 200
        async with working(server.system):
            done = await ended(server, job_id)
        assert (done["run"]["total"], done["ingest"]["ranges"]) == (3, batches)
        assert await inputs(server, job_id) == sorted(urls(3))


class Died(Exception):
    """A crash, as far as this process can have one."""


def die_at(point: str) -> None:
    def die(passed: str) -> None:
        if passed == point:
            raise Died

    faults.arm(die)


async def test_a_body_says_what_it_is(server: Api) -> None:
    job_id = await open_job(server)
    body = json.dumps({"tasks": urls(1)}).encode()
    answer = await server.request("POST", f"/v1/jobs/{job_id}/tasks", body=body, headers={"content-type": "text/plain"})
    assert refusal(answer) == (415, "unsupported_media_type")
