"""Webhooks: from a change of a job to a signed request at a real receiver, whatever fails on the way."""

import asyncio
import base64
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from standardwebhooks.webhooks import Webhook

from conveyor.clock import SystemClock
from conveyor.egress.outbound import Outbound, OutboundFailed
from conveyor.egress.target_guard import TargetGuard
from conveyor.embedded import Embedded
from conveyor.engines.records import Document
from conveyor.model import OutboxEvent, TenantId
from conveyor.notify import deliverer, progress_notifier
from conveyor.notify import dispatcher as notify
from conveyor.notify.callback_answers import StepAnswers
from conveyor.notify.deliveries import DELIVERY, delivery_of
from conveyor.notify.dispatcher import OutboxDispatcher
from conveyor.notify.webhooks import Webhooks, WebhookSpec
from conveyor.service import Service
from conveyor.settings import Settings
from conveyor.system import System, open_system
from tests.support.api import Api
from tests.support.clocks import JumpingClock, ManualClock
from tests.support.engine_switch import Switch
from tests.support.make_jobs import ACME, make_job, make_notice
from tests.support.places import quick_place
from tests.support.receiver import Act, Receiver, answering, hang, hang_up, signature, then_cut, then_hanging
from tests.support.target_site import AUTHORITY, Site
from tests.support.working import all_items, ended, until, working

URL = "http://target.example/"
DAY = 86_400.0


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with Receiver() as made:
        yield made


@asynccontextmanager
async def telling(system: System, **settings: Any) -> AsyncIterator[None]:
    """The roles that tell, and no others."""
    services = [Service(role, system.clock) for role in Embedded(system).notifiers()]
    running = [asyncio.create_task(service.run()) for service in services]
    try:
        yield
    finally:
        for service in services:
            service.stop()
        await asyncio.gather(*running)


async def made(api: Api, url: str, **spec: Any) -> dict[str, Any]:
    answer = await api.post("/v1/webhooks", {"url": url, **spec})
    assert answer.status == 201, answer.body
    shown: dict[str, Any] = answer.json
    return shown


async def tell(system: System, event: str = "run.progress", **data: Any) -> OutboxEvent:
    """A notice of a job that is not there: it only has to be passed on."""
    notice = make_notice(system.clock, make_job(system.clock), event, **data)
    await system.records.documents.create_documents([], notice)
    return notice


async def deliveries(api: Api, webhook_id: str) -> list[dict[str, Any]]:
    return await all_items(api, f"/v1/webhooks/{webhook_id}/deliveries", 3)


async def settled(api: Api, webhook_id: str, number: int = 1) -> list[dict[str, Any]]:
    """So many deliveries, none of which is to be tried again now."""

    async def look() -> list[dict[str, Any]]:
        return await deliveries(api, webhook_id)

    def right(found: list[dict[str, Any]]) -> bool:
        return len(found) == number and all(each["status"] != "pending" for each in found)

    return await until(look, right)


async def tried(api: Api, webhook_id: str, tries: int) -> list[dict[str, Any]]:
    """The deliveries of an endpoint, once the first was tried so often."""

    async def look() -> list[dict[str, Any]]:
        return await deliveries(api, webhook_id)

    return await until(look, lambda found: bool(found) and found[0]["attempts"] == tries)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Roles look more often than they would."""
    monkeypatch.setattr(deliverer, "_IDLE", 0.05)
    monkeypatch.setattr(deliverer, "_CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(notify, "_IDLE", 0.05)
    # A slow machine would have it tell of quarters anywhere.
    monkeypatch.setattr(progress_notifier, "_EVERY", 3600.0)


class TestEndpoints:
    async def test_the_secret_is_shown_once_and_kept_nowhere(self, server: Api, settings: Settings) -> None:
        created = await server.post("/v1/webhooks", {"url": "https://hooks.example/x", "description": "ours"})
        assert created.status == 201
        shown = created.json
        secret = shown.pop("secret")
        assert secret.startswith("whsec_")
        assert len(base64.b64decode(secret.removeprefix("whsec_"))) == 32
        assert created.headers["location"] == f"/v1/webhooks/{shown['id']}"
        counts = {"delivered": 0, "failed": 0, "pending": 0}
        assert (await server.get(f"/v1/webhooks/{shown['id']}")).json == {**shown, "deliveries": counts}
        assert (await server.get("/v1/webhooks")).json == {"items": [shown], "next_cursor": None}
        assert shown["events"] is None
        assert not shown["disabled"]
        kept = b"".join(path.read_bytes() for path in settings.data.rglob("conveyor.db*"))
        assert shown["id"].encode() in kept
        assert secret.removeprefix("whsec_").encode() not in kept

    async def test_a_request_under_a_key_makes_one_and_is_answered_the_same(
        self, server: Api, settings: Settings
    ) -> None:
        headers = {"idempotency-key": "once"}
        answers = [
            await server.post("/v1/webhooks", {"url": "https://hooks.example/"}, headers=headers) for _ in range(2)
        ]
        assert answers[0].body == answers[1].body
        assert answers[1].headers["idempotency-replayed"] == "true"
        assert len((await server.get("/v1/webhooks")).json["items"]) == 1
        secret = answers[0].json["secret"].removeprefix("whsec_").encode()
        assert secret not in b"".join(path.read_bytes() for path in settings.data.rglob("conveyor.db*"))

    async def test_each_has_a_secret_of_its_own(self, server: Api) -> None:
        other = await server.as_tenant("other")
        secrets = [(await made(api, "https://hooks.example/"))["secret"] for api in (server, server, other)]
        secrets += [(await api.get("/v1/webhooks/secret")).json["secret"] for api in (server, other)]
        assert len(set(secrets)) == 5

    @pytest.mark.parametrize(
        ("spec", "field"),
        [
            ({"url": "ftp://hooks.example/"}, "url"),
            ({"url": "not a url"}, "url"),
            ({"url": "https://user:pass@hooks.example/"}, "url"),
            ({"url": "https://hooks.example/", "events": ["run.exploded"]}, "events"),
            ({"url": "https://hooks.example/", "description": "a\nb"}, "description"),
            ({"url": "https://hooks.example/", "description": "x" * 501}, "description"),
            ({"url": "https://hooks.example/", "secret": "whsec_x"}, "secret"),
            ({}, ""),
        ],
    )
    async def test_what_is_wrong_is_named(self, server: Api, spec: dict[str, Any], field: str) -> None:
        answer = await server.post("/v1/webhooks", spec)
        assert (answer.status, answer.json["field"]) == (400, field)
        assert (await server.get("/v1/webhooks")).json["items"] == []

    async def test_a_tenant_may_have_so_many(self, tmp_path: Path) -> None:
        async with open_system(Settings.load({}, data=tmp_path / "few", max_webhooks=2)) as system:
            webhooks = Webhooks(system)
            spec = WebhookSpec("https://hooks.example/")
            for _ in range(2):
                await webhooks.create(ACME, spec)
            with pytest.raises(Exception, match="2 endpoints already"):
                await webhooks.create(ACME, spec)
            await webhooks.create(TenantId("other"), spec)

    async def test_it_is_changed_and_removed(self, server: Api) -> None:
        webhook = await made(server, "https://hooks.example/", events=["run.completed"])
        path = f"/v1/webhooks/{webhook['id']}"
        changed = await server.request("PATCH", path, body=b'{"url": "https://new.example/", "description": "moved"}')
        assert changed.status == 200
        assert (changed.json["url"], changed.json["events"]) == ("https://new.example/", ["run.completed"])
        assert (await server.request("PATCH", path, body=b'{"events": null}')).json["events"] is None
        assert (await server.request("PATCH", path, body=b'{"events": ["nothing"]}')).status == 400
        assert (await server.request("PATCH", path, body=b'{"id": "x"}')).json["code"] == "unknown_field"
        assert (await server.request("DELETE", path)).status == 204
        for method in ("GET", "DELETE"):
            assert (await server.request(method, path)).status == 404

    async def test_cursors_are_checked(self, server: Api) -> None:
        webhook = await made(server, "https://hooks.example/")
        other = await made(server, "https://hooks.example/")
        listed = f"/v1/webhooks/{webhook['id']}/deliveries"
        for path in (
            "/v1/webhooks?cursor=x",
            f"{listed}?cursor=x",
            f"{listed}?cursor={other['id']}:evt_1",
            f"{listed}?cursor={webhook['id']}:",
        ):
            assert (await server.get(path)).json["code"] == "bad_cursor", path


class TestTelling:
    async def test_a_job_is_told_of_from_beginning_to_end(
        self, server: Api, system: System, receiver: Receiver
    ) -> None:
        webhook = await made(server, receiver.url())
        async with working(system):
            job_id = (await server.submit({"tasks": [URL] * 8})).json["id"]
            await ended(server, job_id)
            await settled(server, webhook["id"], 2)
        assert receiver.events() == ["job.accepted", "run.completed"]
        events = await all_items(server, f"/v1/jobs/{job_id}/events")
        assert [told.id for told in receiver.told] == [event["id"] for event in events]
        accepted, completed = receiver.told
        assert accepted.json == {
            "type": "job.accepted",
            "id": accepted.id,
            "timestamp": events[0]["at"],
            "data": {"job_id": job_id, "run_id": job_id.replace("job_", "run_"), "total": 8},
        }
        assert completed.json["data"]["counts"] == {"succeeded": 8, "failed": 0, "cancelled": 0, "unchanged": 0}
        for told in receiver.told:
            assert told.seen.method == "POST"
            assert told.seen.headers["content-type"] == "application/json"
            assert told.seen.headers["user-agent"].startswith("conveyor/")
            # The reference implementation, with its tolerance for the time.
            assert Webhook(webhook["secret"]).verify(told.seen.body, dict(told.seen.headers)) == told.json
            assert not told.signed_with((await made(server, receiver.url()))["secret"])

    async def test_an_ingested_job_tells_that_too(self, server: Api, system: System, receiver: Receiver) -> None:
        webhook = await made(server, receiver.url())
        upload_id = await server.upload(f"{URL}\n{URL}\nnot a url\n".encode())
        async with working(system):
            spec = {"source": {"upload_id": upload_id}}
            job_id = (await server.submit(spec, headers={"prefer": "respond-async"})).json["id"]
            await ended(server, job_id)
            await settled(server, webhook["id"], 3)
        assert sorted(receiver.events()) == ["job.accepted", "job.ingested", "run.completed"]
        told = next(told for told in receiver.told if told.event == "job.ingested")
        assert told.json["data"] == {
            "job_id": job_id,
            "run_id": job_id.replace("job_", "run_"),
            "total": 2,
            "invalid": 1,
        }
        events = [event["event"] for event in await all_items(server, f"/v1/jobs/{job_id}/events")]
        assert events == ["job.accepted", "job.ingested", "run.completed"]

    async def test_only_what_is_wanted_is_sent(self, server: Api, system: System, receiver: Receiver) -> None:
        some = await made(server, receiver.url("/some"), events=["run.completed", "run.failed"])
        none = await made(server, receiver.url("/none"), events=[])
        async with working(system):
            job_id = (await server.submit({"tasks": [URL]})).json["id"]
            await ended(server, job_id)
            await settled(server, some["id"])
        assert [(told.seen.path, told.event) for told in receiver.told] == [("/some", "run.completed")]
        assert await deliveries(server, none["id"]) == []

    async def test_a_job_names_whom_it_wants_told(self, server: Api, system: System, receiver: Receiver) -> None:
        quiet = await made(server, receiver.url("/quiet"), events=[])
        secret = (await server.get("/v1/webhooks/secret")).json["secret"]
        notify = [
            {"type": "webhook", "url": receiver.url("/own"), "events": ["run.completed"]},
            {"type": "webhook", "endpoint_id": quiet["id"]},
            # The same once more is told once.
            {"type": "webhook", "endpoint_id": quiet["id"], "events": ["run.completed"]},
        ]
        async with working(system):
            silent = (await server.submit({"tasks": [URL]})).json["id"]
            job_id = (await server.submit({"tasks": [URL], "notify": notify})).json["id"]
            await ended(server, job_id)
            await ended(server, silent)
            await settled(server, quiet["id"], 2)
            found = await all_items(server, f"/v1/jobs/{job_id}/deliveries", 1)
            await until(lambda: _sleep(receiver), lambda told: len(told) == 3)
        assert Counter((told.seen.path, told.event) for told in receiver.told) == {
            ("/own", "run.completed"): 1,
            ("/quiet", "job.accepted"): 1,
            ("/quiet", "run.completed"): 1,
        }
        for told in receiver.told:
            assert told.json["data"]["job_id"] == job_id
            assert told.signed_with(secret if told.seen.path == "/own" else quiet["secret"])
        assert Counter(each["webhook_id"] for each in found) == {quiet["id"]: 2, None: 1}
        assert await all_items(server, f"/v1/jobs/{silent}/deliveries") == []

    @pytest.mark.parametrize(
        ("entry", "field"),
        [
            ({"type": "webhook"}, "notify[0]"),
            ({"type": "webhook", "url": "https://a.example/", "endpoint_id": "webhook_1"}, "notify[0]"),
            ({"type": "webhook", "url": "gopher://a.example/"}, "notify[0].url"),
            ({"type": "webhook", "url": "https://a.example/", "events": ["x"]}, "notify[0].events"),
            ({"type": "webhook", "endpoint_id": "webhook_00000000000000000000000000"}, "notify[0].endpoint_id"),
            ({"type": "pigeon", "url": "https://a.example/"}, "notify[0]"),
        ],
    )
    async def test_what_is_wrong_with_it_is_named(self, server: Api, entry: dict[str, Any], field: str) -> None:
        answer = await server.submit({"tasks": [URL], "notify": [entry]})
        assert answer.status == 400
        assert answer.json["field"].startswith(field)
        assert (await server.get("/v1/jobs")).json["items"] == []

    async def test_another_tenants_endpoint_is_none(self, server: Api) -> None:
        other = await server.as_tenant("other")
        foreign = await made(other, "https://hooks.example/")
        entry = {"type": "webhook", "endpoint_id": foreign["id"]}
        assert (await server.submit({"tasks": [URL], "notify": [entry]})).status == 400

    async def test_tenants_hear_only_of_their_own(self, server: Api, system: System, receiver: Receiver) -> None:
        other = await server.as_tenant("other")
        mine, theirs = await made(server, receiver.url("/mine")), await made(other, receiver.url("/theirs"))
        async with working(system):
            for api, webhook in ((server, mine), (other, theirs)):
                job_id = (await api.submit({"tasks": [URL]})).json["id"]
                await ended(api, job_id)
                await settled(api, webhook["id"], 2)
                path = "/mine" if api is server else "/theirs"
                assert {told.json["data"]["job_id"] for told in receiver.told if told.seen.path == path} == {job_id}

    async def test_it_goes_by_tls_to_the_very_address_that_was_checked(self, system: System) -> None:
        async def resolve(host: str, port: int) -> list[str]:
            assert host == "site.example"
            return ["127.0.0.1"]

        guard = TargetGuard(allow_private=False, clock=system.clock, resolver=resolve, policy=lambda address: None)
        outbound = Outbound(guard, root_certificate=AUTHORITY)
        async with Receiver(tls=True) as receiver:
            status, *_ = await outbound.post(receiver.url(host="site.example"), [("webhook-id", "1")], b"{}", 5.0)
            assert status == 200
            assert receiver.told[0].seen.headers["host"] == f"site.example:{receiver.port}"
        await outbound.close()


async def _sleep(receiver: Receiver) -> list[Any]:
    return list(receiver.told)


async def the_head_of_an_answer_decides(act: Callable[[int], Act] = then_cut, status: int = 200) -> None:
    """Its body may hang, for longer than the whole request may take, or be cut."""
    async with Receiver() as receiver:
        receiver.acts = [act(status)]
        outbound = Outbound(TargetGuard(allow_private=True, clock=JumpingClock()))
        try:
            answer = await outbound.post(receiver.url(), [], b"{}", 0.3)
        except OutboundFailed as error:
            raise AssertionError(f"the receiver has answered, and this counts as {error.code}") from error
        finally:
            await outbound.close()
        assert (answer.status, answer.retry_after) == (status, "7")


class TestTesting:
    async def test_an_endpoint_gets_a_signed_event_when_it_is_asked_for(
        self, server: Api, system: System, receiver: Receiver
    ) -> None:
        webhook = await made(server, receiver.url("/hook"), events=[])
        path = f"/v1/webhooks/{webhook['id']}"
        async with telling(system):
            tested = await server.post(f"{path}/test")
            assert (tested.status, tested.json["event"], tested.json["job_id"]) == (202, "webhook.test", None)
            (delivery,) = await settled(server, webhook["id"])
        assert (delivery["status"], delivery["id"]) == ("delivered", tested.json["id"])
        (told,) = receiver.told
        assert told.json["data"] == {"webhook_id": webhook["id"]}
        Webhook(webhook["secret"]).verify(told.seen.body, dict(told.seen.headers))
        shown = (await server.get(path)).json
        assert shown["deliveries"] == {"delivered": 1, "failed": 0, "pending": 0}

    async def test_a_disabled_endpoint_is_not_tested(self, server: Api) -> None:
        webhook = await made(server, "https://hooks.example/")
        path = f"/v1/webhooks/{webhook['id']}"
        await server.request("PATCH", path, body=b'{"disabled": true}')
        refused = await server.post(f"{path}/test")
        assert (refused.status, refused.json["code"]) == (409, "conflict")

    async def test_an_endpoint_that_fails_says_so_until_it_works(
        self, server: Api, system: System, receiver: Receiver
    ) -> None:
        webhook = await made(server, receiver.url("/hook"))
        path = f"/v1/webhooks/{webhook['id']}"
        receiver.acts = [answering(500), answering(200)]

        async def look() -> dict[str, Any]:
            shown: dict[str, Any] = (await server.get(path)).json
            return shown

        async with telling(system):
            tested = (await server.post(f"{path}/test")).json
            (failed,) = await tried(server, webhook["id"], 1)
            assert failed["log"][0]["error"] == "http_500"
            # The health of an endpoint is noted after its delivery.
            shown = await until(look, lambda shown: shown["failing_since"] is not None)
            assert shown["error"] == "http_500"
            await server.post(f"/v1/webhooks/deliveries/{tested['id']}/redeliver")
            await settled(server, webhook["id"])
            shown = await until(look, lambda shown: shown["failing_since"] is None)
        assert shown["error"] is None


class TestTrying:
    @pytest.mark.parametrize("status", [200, 204, 410, 503])
    @pytest.mark.parametrize("act", [then_cut, then_hanging])
    async def test_the_head_of_an_answer_decides(self, act: Callable[[int], Act], status: int) -> None:
        await the_head_of_an_answer_decides(act, status)

    async def test_an_answer_with_half_a_body_is_delivered(
        self, server: Api, system: System, receiver: Receiver
    ) -> None:
        webhook = await made(server, receiver.url())
        receiver.acts = [then_cut(200), then_hanging(200)]
        async with telling(system):
            await tell(system, number=1)
            await tell(system, number=2)
            found = await settled(server, webhook["id"], 2)
        assert [(each["status"], each["attempts"]) for each in found] == [("delivered", 1)] * 2

    async def test_it_is_tried_again_under_the_same_id_and_logged(
        self, server: Api, system: System, clock: JumpingClock, receiver: Receiver
    ) -> None:
        webhook = await made(server, receiver.url())
        receiver.acts = [answering(500), hang_up, answering(404)]
        async with telling(system):
            notice = await tell(system, number=1)
            for tries in range(1, 4):
                await tried(server, webhook["id"], tries)
                clock.advance(700)
            (delivery,) = await settled(server, webhook["id"])
        assert delivery["status"] == "delivered"
        assert delivery["event_id"] == notice.notice_id
        assert [(each["status"], each["error"]) for each in delivery["log"]] == [
            (500, "http_500"),
            (None, "read_failed"),
            (404, "http_404"),
            (200, None),
        ]
        assert delivery["next_attempt_at"] is None
        assert {told.id for told in receiver.told} == {notice.notice_id}
        assert len({told.seen.body for told in receiver.told}) == 1
        stamps = [int(told.seen.headers["webhook-timestamp"]) for told in receiver.told]
        assert stamps == sorted(set(stamps))
        assert all(told.signed_with(webhook["secret"]) for told in receiver.told)

    async def test_pauses_grow_and_are_spread(
        self, server: Api, system: System, clock: JumpingClock, receiver: Receiver
    ) -> None:
        webhook = await made(server, receiver.url())
        receiver.always = answering(503)
        waits: list[float] = []
        async with telling(system):
            await tell(system)
            for tries in range(1, 10):
                found = await tried(server, webhook["id"], tries)
                row = await system.records.documents.document(DELIVERY, ACME, found[0]["id"])
                assert row is not None and row.due_at is not None
                waits.append(row.due_at - delivery_of(row).log[-1].at)
                clock.advance(row.due_at - clock.now() + 0.01)
            (delivery,) = await settled(server, webhook["id"])
        plan = [5, 30, 120, 600, 3600, 10_800, 28_800, 86_400, 86_400]
        for wait, planned in zip(waits, plan, strict=True):
            assert 0.8 * planned <= wait <= 1.2 * planned + 5
        # More than two and a half days, then it is given up.
        assert sum(waits) > 2 * DAY
        assert (delivery["status"], delivery["attempts"]) == ("failed", 10)

    async def test_a_wait_that_is_asked_for_is_kept(
        self, server: Api, system: System, clock: JumpingClock, receiver: Receiver
    ) -> None:
        webhook = await made(server, receiver.url())
        receiver.acts = [
            answering(429, retry_after="3600"),
            answering(503, retry_after="Wed, 21 Oct 2015 07:28:00 GMT"),
        ]
        async with telling(system):
            await tell(system)
            for tries, wait in ((1, 3600), (2, 24)):
                found = await tried(server, webhook["id"], tries)
                row = await system.records.documents.document(DELIVERY, ACME, found[0]["id"])
                assert row is not None and row.due_at is not None
                assert wait - 30 <= row.due_at - clock.now() <= wait + 30
                clock.advance(wait + 60)
            assert (await settled(server, webhook["id"]))[0]["status"] == "delivered"

    async def test_what_was_given_up_is_sent_again_when_asked(self, tmp_path: Path, receiver: Receiver) -> None:
        settings = Settings.load({}, data=tmp_path / "few", allow_private_targets=True, webhook_retries="")
        clock = JumpingClock()
        async with open_system(settings, clock) as system, serving(system) as server:
            webhook = await made(server, receiver.url())
            receiver.acts = [answering(500)] * 2
            async with telling(system):
                await tell(system)
                (failed,) = await settled(server, webhook["id"])
                assert (failed["status"], failed["attempts"]) == ("failed", 1)
                for attempts, status in ((2, "failed"), (3, "delivered"), (4, "delivered")):
                    again = await server.post(f"/v1/webhooks/deliveries/{failed['id']}/redeliver")
                    assert (again.status, again.json["status"]) == (202, "pending")
                    (shown,) = await settled(server, webhook["id"])
                    assert (shown["status"], shown["attempts"]) == (status, attempts)
            detail = (await server.get(f"/v1/webhooks/deliveries/{failed['id']}")).json
            assert detail["payload"] == receiver.told[0].json
            assert [each["error"] for each in detail["log"]] == ["http_500", "http_500", None, None]
            assert len({told.id for told in receiver.told}) == 1
            assert len(receiver.told) == 4

    async def test_the_log_is_bounded(self, server: Api, system: System, receiver: Receiver) -> None:
        webhook = await made(server, receiver.url())
        async with telling(system):
            await tell(system)
            (delivery,) = await settled(server, webhook["id"])
            for number in range(2, 26):
                await server.post(f"/v1/webhooks/deliveries/{delivery['id']}/redeliver")
                await tried(server, webhook["id"], number)
        (delivery,) = await deliveries(server, webhook["id"])
        assert (delivery["attempts"], len(delivery["log"])) == (25, 20)

    async def test_gone_disables_the_endpoint(self, server: Api, system: System, receiver: Receiver) -> None:
        webhook = await made(server, receiver.url())
        path = f"/v1/webhooks/{webhook['id']}"
        receiver.acts = [answering(410)]
        async with telling(system):
            await tell(system, number=1)
            (gone,) = await settled(server, webhook["id"])
            assert (gone["status"], gone["log"][0]["status"]) == ("failed", 410)
            shown = (await server.get(path)).json
            assert shown["disabled"]
            assert "410" in shown["reason"]
            # Nothing is made for it meanwhile, and nothing is sent again.
            await tell(system, number=2)
            await until(lambda: system.records.outbox.undispatched(10), lambda left: left == [])
            assert len(await deliveries(server, webhook["id"])) == 1
            refused = await server.post(f"/v1/webhooks/deliveries/{gone['id']}/redeliver")
            assert (refused.status, refused.json["code"]) == (409, "conflict")
            enabled = (await server.request("PATCH", path, body=b'{"disabled": false}')).json
            assert (enabled["disabled"], enabled["reason"]) == (False, None)
            assert (await server.post(f"/v1/webhooks/deliveries/{gone['id']}/redeliver")).status == 202
            await tell(system, number=3)
            found = await settled(server, webhook["id"], 2)
        assert [each["status"] for each in found] == ["delivered", "delivered"]
        assert len(receiver.told) == 3

    async def test_gone_ends_what_a_job_named(self, server: Api, system: System, receiver: Receiver) -> None:
        receiver.acts = [answering(410)]
        notify = [{"type": "webhook", "url": receiver.url()}]
        job_id = (await server.submit({"tasks": [URL], "notify": notify})).json["id"]
        async with telling(system):
            look = lambda: all_items(server, f"/v1/jobs/{job_id}/deliveries")  # noqa: E731
            await until(look, lambda found: found and found[0]["status"] == "failed")
            async with working(system):
                await ended(server, job_id)
                await until(lambda: system.records.outbox.undispatched(10), lambda left: left == [])
        assert receiver.events() == ["job.accepted"]

    async def test_what_is_disabled_or_removed_on_the_way_is_not_sent(
        self, server: Api, system: System, clock: JumpingClock, receiver: Receiver
    ) -> None:
        receiver.always = answering(500)
        one, two = await made(server, receiver.url("/one")), await made(server, receiver.url("/two"))
        async with telling(system):
            await tell(system)
            for webhook in (one, two):
                await tried(server, webhook["id"], 1)
            await server.request("PATCH", f"/v1/webhooks/{one['id']}", body=b'{"disabled": true}')
            await server.request("DELETE", f"/v1/webhooks/{two['id']}")
            clock.advance(10)
            (dropped,) = await settled(server, one["id"])
            assert (dropped["status"], dropped["log"][-1]["error"]) == ("failed", "endpoint_disabled")
            await until(
                lambda: system.records.documents.documents(DELIVERY, ACME, f"{two['id']}:", 10),
                lambda page: not [row for row in page.items if row.id.startswith(two["id"])],
            )
        assert len(receiver.told) == 2

    async def test_a_redirect_is_a_failure_and_not_followed(
        self, server: Api, system: System, receiver: Receiver
    ) -> None:
        async with Site() as site:
            webhook = await made(server, receiver.url())
            receiver.acts = [answering(307, location=site.url("/ok"))]
            async with telling(system):
                await tell(system)
                found = await tried(server, webhook["id"], 1)
            assert found[0]["log"][0]["error"] == "http_307"
            assert found[0]["status"] == "pending"
            assert site.connections == 0

    async def test_a_receiver_that_does_not_answer_is_given_so_long(self, tmp_path: Path, receiver: Receiver) -> None:
        settings = Settings.load({}, data=tmp_path / "short", allow_private_targets=True, webhook_timeout=0.2)
        async with open_system(settings, JumpingClock()) as system, serving(system) as server:
            webhook = await made(server, receiver.url())
            receiver.acts = [hang]
            async with telling(system):
                await tell(system)
                found = await tried(server, webhook["id"], 1)
            assert (found[0]["log"][0]["status"], found[0]["log"][0]["error"]) == (None, "timeout")
            assert found[0]["log"][0]["seconds"] >= 0.2

    async def test_nobody_there_and_no_such_name(self, server: Api, system: System) -> None:
        async with Receiver() as gone:
            url = gone.url()
        webhook = await made(server, url)
        async with telling(system):
            await tell(system)
            found = await tried(server, webhook["id"], 1)
        assert found[0]["log"][0]["error"] == "connect_failed"

    async def test_rotated_secrets_sign_side_by_side_for_a_while(
        self, server: Api, system: System, clock: JumpingClock, receiver: Receiver
    ) -> None:
        webhook = await made(server, receiver.url())
        secrets = [webhook["secret"]]
        async with telling(system):

            async def signers() -> list[bool]:
                await tell(system)
                number = len(receiver.told) + 1
                await until(lambda: _sleep(receiver), lambda told: len(told) == number)
                told = receiver.told[-1]
                signed = [told.signed_with(secret) for secret in secrets]
                assert len(told.signatures) == sum(signed)
                return signed

            assert await signers() == [True]
            rotated = await server.post(f"/v1/webhooks/{webhook['id']}/rotate")
            assert (rotated.status, rotated.json["id"]) == (200, webhook["id"])
            secrets.append(rotated.json["secret"])
            assert await signers() == [True, True]
            clock.advance(12 * 3600)
            secrets.append((await server.post(f"/v1/webhooks/{webhook['id']}/rotate")).json["secret"])
            assert await signers() == [True, True, True]
            clock.advance(13 * 3600)
            assert await signers() == [False, True, True]
            clock.advance(12 * 3600)
            assert await signers() == [False, False, True]
        assert len(set(secrets)) == 3

    async def test_a_slow_receiver_holds_up_nobody(self, tmp_path: Path, receiver: Receiver) -> None:
        """More deliveries for one that hangs than can be seen at once stand before the one for another."""
        settings = Settings.load({}, data=tmp_path / "lanes", allow_private_targets=True, webhook_concurrency=2)
        async with open_system(settings, JumpingClock()) as system, serving(system) as server, Receiver() as slow:
            slow.always = hang
            await made(server, slow.url())
            for number in range(300):
                await tell(system, number=number)
            notifier = OutboxDispatcher(settings, system.records, system.tasks, system.clock)
            while (await notifier.run_once()).notices:
                pass
            quick = await made(server, receiver.url())
            await tell(system, number=-1)
            await notifier.run_once()
            async with telling(system):
                await settled(server, quick["id"])
            assert len(receiver.told) == 1
            assert slow.most_at_once <= 2

    async def test_of_more_than_can_be_seen_at_once_those_for_a_silent_receiver_are_postponed(
        self, tmp_path: Path
    ) -> None:
        settings = Settings.load({}, data=tmp_path / "burst", allow_private_targets=True)
        clock = ManualClock()
        async with open_system(settings, clock) as system, serving(system) as server, Receiver() as receiver:
            receiver.always = hang
            await made(server, receiver.url())
            for number in range(300):
                await tell(system, number=number)
            notifier = OutboxDispatcher(settings, system.records, system.tasks, clock)
            while (await notifier.run_once()).notices:
                pass
            (role,) = (each for each in Embedded(system).notifiers() if isinstance(each, deliverer.Deliverer))

            async def count_due() -> int:
                return len(await system.records.documents.due_documents(DELIVERY, clock.now(), 1000))

            await role.tick()
            await until(lambda: _sleep(receiver), lambda told: len(told) == settings.webhook_concurrency)
            await role.tick()
            assert await count_due() == 300 - settings.webhook_concurrency, "it may answer in a moment"
            clock.advance(10.0)
            await role.tick()
            assert await count_due() < 200
            await role.close()

    async def test_one_tenant_has_not_all_slots(self, tmp_path: Path, receiver: Receiver) -> None:
        settings = Settings.load(
            {}, data=tmp_path / "slots", allow_private_targets=True, webhook_slots=8, webhook_concurrency=2
        )
        async with open_system(settings, JumpingClock()) as system, serving(system) as server, Receiver() as slow:
            slow.always = hang
            for number in range(10):
                await made(server, slow.url(f"/{number}"))
            other = await server.as_tenant("other")
            quick = await made(other, receiver.url())
            await tell(system)
            notice = make_notice(system.clock, make_job(system.clock, tenant=TenantId("other")), "run.progress")
            await system.records.documents.create_documents([], notice)
            async with telling(system):
                await settled(other, quick["id"])
            assert slow.most_at_once == 2


class TestKeeping:
    async def test_events_that_nobody_waits_for_cost_no_read_each(self, system: System, settings: Settings) -> None:
        for number in range(30):
            await tell(system, number=number)
        switch = Switch()
        switched = switch.system(system, "records")
        notifier = OutboxDispatcher(settings, switched.records, system.tasks, system.clock, StepAnswers(switched))
        assert (await notifier.run_once()).notices == 30
        assert switch.calls["records.documents.documents"] <= 3

    async def test_events_that_come_one_after_the_other_are_dispatched_together(
        self, system: System, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(notify, "_EVENTS", 3)
        notifier = OutboxDispatcher(system.settings, system.records, system.tasks, system.clock)
        assert await notifier.tick() == notify._IDLE
        for _ in range(4):
            await tell(system)
        assert await notifier.tick() == 0.0, "one is left"
        assert await notifier.tick() == notify._BUSY
        assert await notifier.tick() == notify._IDLE

    async def test_two_notifiers_and_a_repeated_one_make_the_same(
        self, server: Api, system: System, settings: Settings
    ) -> None:
        webhook = await made(server, "https://hooks.example/")
        notices = [await tell(system, number=number) for number in range(30)]
        first, second = (OutboxDispatcher(settings, system.records, system.tasks, system.clock) for _ in range(2))
        await asyncio.gather(first.run_once(), second.run_once())
        found = await deliveries(server, webhook["id"])
        assert [each["event_id"] for each in found] == sorted(notice.notice_id for notice in notices)
        assert await system.records.outbox.undispatched(10) == []
        # As if the mark had been lost.
        done = (await system.records.documents.documents(DELIVERY, ACME, None, 100)).items
        changed = [await system.records.documents.replace_document(row) for row in done]
        assert None not in changed
        await first.run_once()
        assert len((await system.records.documents.documents(DELIVERY, ACME, None, 100)).items) == 30

    async def test_deliveries_go_with_their_job(self, server: Api, system: System, receiver: Receiver) -> None:
        await made(server, receiver.url())
        receiver.always = answering(500)
        job_id = (await server.submit({"tasks": [URL], "notify": [{"type": "webhook", "url": receiver.url()}]})).json[
            "id"
        ]
        async with telling(system):
            look = lambda: all_items(server, f"/v1/jobs/{job_id}/deliveries")  # noqa: E731
            await until(look, lambda found: len(found) == 2)
        await system.records.jobs.mark_deleted(ACME, job_id)
        clock = system.clock
        assert isinstance(clock, JumpingClock)
        clock.advance(1)
        await system.records.jobs.purge_job(job_id)
        for kind in (DELIVERY, "notify"):
            assert (await system.records.documents.documents(kind, ACME, None, 10)).items == []

    async def test_they_expire(self, server: Api, system: System, clock: JumpingClock, receiver: Receiver) -> None:
        webhook = await made(server, receiver.url())
        receiver.always = answering(500)
        async with telling(system):
            await tell(system)
            await tried(server, webhook["id"], 1)
        clock.advance(15 * DAY)
        assert await deliveries(server, webhook["id"]) == []
        sent = len(receiver.told)
        async with telling(system):
            await until(
                lambda: system.records.documents.due_documents(DELIVERY, clock.now(), 10), lambda due: due == []
            )
        assert len(receiver.told) == sent

    async def test_a_row_that_can_not_be_read_is_left_aside(
        self, server: Api, system: System, receiver: Receiver
    ) -> None:
        webhook = await made(server, receiver.url())
        broken = Document(DELIVERY, ACME, f"{webhook['id']}:evt_broken", b"{", due_at=0.0)
        await system.records.documents.create_documents([broken])
        async with telling(system):
            await tell(system)
            await until(lambda: _sleep(receiver), lambda told: len(told) == 1)
            await until(
                lambda: system.records.documents.due_documents(DELIVERY, system.clock.now(), 10), lambda due: due == []
            )


@asynccontextmanager
async def serving(system: System) -> AsyncIterator[Api]:
    """The API over a system of the test's own."""
    from conveyor.api.server import serve
    from tests.support.api import client, new_key

    stop = asyncio.Event()
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(serve(system, "127.0.0.1", 0, stop, url.set_result))
    await asyncio.wait({running, url}, return_when=asyncio.FIRST_COMPLETED)
    async with client() as http:
        yield Api(url.result(), system, await new_key(system, "acme"), http)
    stop.set()
    await running


# The full number is 10,000: DELIVERIES=10000 pytest tests/flow/test_webhooks.py -k random
DELIVERIES = int(os.environ.get("DELIVERIES", "1000"))
KILLS = 6


@pytest.fixture
def place() -> Iterator[Path]:
    with quick_place() as directory:
        yield directory


class Outside:
    """The receiver in a process of its own, killed and started again on the same port."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.port = 0
        self.starts = 0

    def start(self) -> None:
        self.starts += 1
        command = [sys.executable, "-m", "tests.support.receiver", str(self.log), str(self.port), str(self.starts)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.mark.timeout(900)
async def test_a_receiver_that_fails_at_random_and_restarts_hears_of_everything(place: Path) -> None:
    outside = Outside(place / "received")
    outside.start()
    settings = Settings.load(
        {},
        data=place / "data",
        allow_private_targets=True,
        webhook_timeout=2.0,
        # Small, since no clock is moved here; long enough to outlast the restarts.
        webhook_retries=" ".join(["0.02 0.05 0.1 0.2"] + ["0.4"] * 40),
        webhook_concurrency=32,
    )
    chance = random.Random(7)
    try:
        async with open_system(settings, SystemClock()) as system:
            made_by = Webhooks(system)
            accepted = await made_by.create(ACME, WebhookSpec(f"http://127.0.0.1:{outside.port}/hook"))
            secret = json.loads(accepted.body)["secret"]
            job = make_job(system.clock)
            notices = [make_notice(system.clock, job, "run.progress", number=number) for number in range(DELIVERIES)]
            for start in range(0, DELIVERIES, 500):
                batch = notices[start : start + 500]
                await asyncio.gather(*(system.records.documents.create_documents([], notice) for notice in batch))
            async with telling(system):
                for _ in range(KILLS):
                    await asyncio.sleep(chance.uniform(0.2, 0.6) * max(1, DELIVERIES / 2000))
                    outside.kill()
                    await asyncio.sleep(chance.uniform(0.0, 0.5))
                    outside.start()

                async def left() -> int:
                    return len(
                        await system.records.documents.due_documents(DELIVERY, system.clock.now() + 1000, 1)
                    ) + len(await system.records.outbox.undispatched(1))

                while await left():  # noqa: ASYNC110  (seen from outside)
                    await asyncio.sleep(0.1)
            rows: list[Document] = []
            cursor: str | None = None
            while True:
                page = await system.records.documents.documents(DELIVERY, ACME, cursor, 1000)
                rows += page.items
                cursor = page.next_cursor
                if cursor is None:
                    break
    finally:
        outside.kill()
    received = [json.loads(line) for line in outside.log.read_text().splitlines()]
    wanted = {notice.notice_id: notice for notice in notices}
    assert {line["id"] for line in received} == set(wanted), "each event id is seen, and no other"
    accepted_ids = {line["id"] for line in received if line["ok"]}
    assert accepted_ids == set(wanted)
    for line in received:
        assert signature(secret, line["id"], line["timestamp"], line["body"].encode()) == line["signature"]
        body = json.loads(line["body"])
        assert (body["id"], body["data"]["number"]) == (line["id"], wanted[line["id"]].data["number"])
    tries = Counter(line["id"] for line in received)
    assert len(rows) == DELIVERIES
    for row in rows:
        delivery = delivery_of(row)
        assert delivery.standing == "delivered"
        assert delivery.attempts >= 1
        ats = [attempt.at for attempt in delivery.log]
        assert ats == sorted(ats), "in the order in which they were made"
        assert [attempt.error for attempt in delivery.log][-1] is None
        assert all(attempt.error is not None for attempt in delivery.log[:-1])
        assert delivery.attempts >= tries[delivery.event_id]
    print(f"{DELIVERIES} events, {len(received)} requests, most tries {max(tries.values())}, {KILLS} restarts")
