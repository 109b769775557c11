"""Executions that jobs start, and events that they put on a bus: from the end of a run to AWS, whatever fails on the
way; and only for those whom the operator allows it."""

import asyncio
import json
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from conveyor import faults
from conveyor.accept.spec import decode_spec
from conveyor.embedded import Embedded
from conveyor.engines.aws_event_targets import AwsEventTargets
from conveyor.errors import InvalidSetting
from conveyor.lifecycle import Lifecycle
from conveyor.model import JobId, TaskEnd
from conveyor.notify.callback_answers import StepAnswers
from conveyor.notify.deliverer import Deliverer
from conveyor.notify.deliveries import Deliveries, delivery_json
from conveyor.notify.dispatcher import OutboxDispatcher
from conveyor.settings import Settings
from conveyor.states import TaskStatus
from conveyor.system import System, open_system
from tests.servers.aws import aws
from tests.servers.event_targets import EventTargetServer
from tests.servers.moto import moto
from tests.support.api import Api
from tests.support.clocks import JumpingClock
from tests.support.make_jobs import ACME
from tests.support.receiver import Receiver, hang
from tests.support.state_machines import Between
from tests.support.working import Echo, until, working

pytestmark = pytest.mark.server

JOB = {"kind": "python", "handler": "tests.echo", "tasks": [1, 2, 3]}
OTHER = "arn:aws:states:eu-central-1:000000000000:stateMachine:other"


class Died(BaseException):
    """The process is gone, as far as the test goes."""


@pytest.fixture(params=["ministack"])
def targets(request: pytest.FixtureRequest, tmp_path: Path) -> EventTargetServer:
    name = "t" + sha256(str(tmp_path).encode()).hexdigest()[:12]
    on_moto = request.param == "moto"
    return EventTargetServer(moto() if on_moto else aws(), name, bus=not on_moto)


@pytest.fixture
async def between(targets: EventTargetServer) -> AsyncIterator[Between]:
    async with Between(targets.endpoint).running() as made:
        yield made
    faults.arm(None)


@pytest.fixture
def settings(tmp_path: Path, targets: EventTargetServer, between: Between) -> Settings:
    return Settings.load({}, data=tmp_path / "data", event_targets=targets.listed(endpoint=between.endpoint))


def notify(targets: EventTargetServer, **fields: Any) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = [{"type": "start_execution", "state_machine_arn": targets.machine, **fields}]
    if targets.bus:
        entries.append({"type": "eventbridge", "event_bus_arn": targets.bus, **fields})
    return entries


async def submitted(server: Api, entries: list[dict[str, Any]]) -> JobId:
    answer = await server.submit({**JOB, "notify": entries})
    assert answer.status == 201, answer.body
    return JobId(answer.json["id"])


async def finish(system: System, job_id: JobId) -> str:
    """What a worker does for a job, in one step; the id of the event that reports it."""
    job = await system.records.jobs.job(ACME, job_id)
    assert job is not None
    ends = [TaskEnd(index, TaskStatus.SUCCEEDED, 1, None, None, "{}", 0.0) for index in range(job.run.total)]
    finished = await system.tasks.finish(job.key, ends)
    await Lifecycle(system.records, system.tasks, system.clock).settle(job, finished.counts)
    events = (await system.records.outbox.events(ACME, job_id, None, 100)).items
    (event_id,) = [event.id for event in events if event.event == "run.completed"]
    assert event_id is not None
    return event_id


async def deliver(system: System) -> None:
    """One pass of the dispatcher, and one of the deliverer with its attempts. It raises Died if one of them dies."""
    dispatcher = OutboxDispatcher(system.settings, system.records, system.tasks, system.clock, StepAnswers(system))
    await dispatcher.run_once()
    (deliverer,) = (role for role in Embedded(system).notifiers() if isinstance(role, Deliverer))
    await deliverer.tick()
    ended = await asyncio.gather(*deliverer._running, return_exceptions=True)
    await deliverer.close()
    for outcome in ended:
        if isinstance(outcome, BaseException):
            raise outcome


async def listed(server: Api, job_id: JobId) -> list[dict[str, Any]]:
    answer = await server.get(f"/v1/jobs/{job_id}/deliveries")
    items: list[dict[str, Any]] = answer.json["items"]
    return items


class TestDelivery:
    async def test_when_a_run_completes(
        self, server: Api, system: System, targets: EventTargetServer, between: Between
    ) -> None:
        job_id = await submitted(server, notify(targets))
        async with working(system, Echo()):
            found = await until(
                lambda: listed(server, job_id), lambda rows: {row["status"] for row in rows} == {"delivered"}
            )
        assert [(row["type"], row["event"], row["webhook_id"], row["attempts"]) for row in found] == [
            ("start_execution", "run.completed", None, 1),
            ("eventbridge", "run.completed", None, 1),
        ]
        event_id = found[0]["event_id"]
        payload = (await server.get(f"/v1/webhooks/deliveries/{found[0]['id']}")).json["payload"]
        assert (payload["type"], payload["id"], payload["data"]["job_id"]) == ("run.completed", event_id, job_id)
        assert payload["data"]["counts"]["succeeded"] == 3
        assert targets.executions() == {event_id: payload}
        (event,) = targets.put()
        assert (event["source"], event["detail-type"], event["detail"]) == ("conveyor", "run.completed", payload)

    async def test_other_events_are_sent_if_they_are_named(
        self, server: Api, system: System, targets: EventTargetServer
    ) -> None:
        job_id = await submitted(server, notify(targets, events=["job.accepted"]))
        await finish(system, job_id)
        await deliver(system)
        assert {row["event"] for row in await listed(server, job_id)} == {"job.accepted"}
        assert [each["type"] for each in targets.executions().values()] == ["job.accepted"]
        assert [event["detail-type"] for event in targets.put()] == ["job.accepted"]

    @pytest.mark.parametrize("targets", ["ministack", "moto"], indirect=True)
    async def test_a_redelivery_starts_no_second_execution(
        self, server: Api, system: System, targets: EventTargetServer
    ) -> None:
        job_id = await submitted(server, notify(targets))
        event_id = await finish(system, job_id)
        await deliver(system)
        row, *_ = await listed(server, job_id)
        assert (await server.post(f"/v1/webhooks/deliveries/{row['id']}/redeliver", None)).status == 202
        await deliver(system)
        row, *_ = await listed(server, job_id)
        assert (row["status"], row["attempts"], row["log"][1]["error"]) == ("delivered", 2, None)
        assert list(targets.executions()) == [event_id]

    @pytest.mark.parametrize(
        ("fault", "error"),
        [
            ("throttle", "throttling"),
            ("AccessDeniedException", "access_denied"),
            ("error", "internal_server_error"),
            ("reset", "no_answer"),
        ],
    )
    async def test_a_call_that_fails_is_retried(
        self,
        server: Api,
        system: System,
        targets: EventTargetServer,
        between: Between,
        clock: JumpingClock,
        fault: str,
        error: str,
    ) -> None:
        """Also one that was carried out, and whose answer was lost."""
        job_id = await submitted(server, notify(targets))
        event_id = await finish(system, job_id)
        between.faults = {"StartExecution": [fault], "PutEvents": [fault]}
        await deliver(system)
        rows = await listed(server, job_id)
        assert [(row["status"], row["log"][0]["error"]) for row in rows] == [("pending", error)] * 2
        clock.advance(7)
        await deliver(system)
        rows = await listed(server, job_id)
        assert [(row["status"], row["log"][1]["error"]) for row in rows] == [("delivered", None)] * 2
        assert list(targets.executions()) == [event_id]
        assert {event["detail"]["id"] for event in targets.put()} == {event_id}

    @pytest.mark.parametrize(
        "point",
        [
            "notify.deliveries.before",
            "notify.deliveries.after",
            "notify.told.after",
            "delivery.claim.before",
            "delivery.claim.after",
            "delivery.sent.after",
            "delivery.record.before",
            "delivery.record.after",
        ],
    )
    async def test_whoever_dies_it_is_started_once(
        self, server: Api, system: System, targets: EventTargetServer, clock: JumpingClock, point: str
    ) -> None:
        job_id = await submitted(server, notify(targets))
        event_id = await finish(system, job_id)

        def die(name: str) -> None:
            if name == point:
                faults.arm(None)
                raise Died(name)

        faults.arm(die)
        with pytest.raises(Died):
            await deliver(system)
        clock.advance(system.settings.webhook_timeout + 20)
        await deliver(system)
        rows = await listed(server, job_id)
        assert [row["status"] for row in rows] == ["delivered"] * 2
        assert list(targets.executions()) == [event_id]
        assert {event["detail"]["id"] for event in targets.put()} == {event_id}

    async def test_a_target_that_does_not_answer(
        self, tmp_path: Path, targets: EventTargetServer, clock: JumpingClock
    ) -> None:
        async with Receiver() as silent:
            silent.acts = [hang, hang]
            listed = targets.listed(endpoint=silent.url("").rstrip("/"))
            given = Settings.load({}, data=tmp_path / "silent", event_targets=listed, webhook_timeout=0.3)
            async with open_system(given, clock) as system:
                job_id = await submit(system, notify(targets))
                await finish(system, job_id)
                await deliver(system)
                rows = await rows_of(system, job_id)
        assert [(row["status"], row["log"][0]["error"]) for row in rows] == [("pending", "timeout")] * 2

    async def test_a_state_machine_that_is_missing(
        self, tmp_path: Path, targets: EventTargetServer, clock: JumpingClock
    ) -> None:
        gone = targets.machine + "-gone"
        setting = f"*={gone}?endpoint={targets.endpoint}"
        given = Settings.load({}, data=tmp_path / "gone", event_targets=setting, webhook_retries="1")
        async with open_system(given, clock) as system:
            job_id = await submit(system, [{"type": "start_execution", "state_machine_arn": gone}])
            await finish(system, job_id)
            for _ in range(2):
                await deliver(system)
                clock.advance(5)
            (row,) = await rows_of(system, job_id)
        assert row["status"] == "failed"
        assert [attempt["error"] for attempt in row["log"]] == ["state_machine_does_not_exist"] * 2


async def submit(system: System, entries: list[dict[str, Any]]) -> JobId:
    spec = decode_spec(json.dumps({**JOB, "notify": entries}).encode())
    return JobId((await Embedded(system).submit.submit(ACME, spec)).subject)


async def rows_of(system: System, job_id: JobId) -> list[dict[str, Any]]:
    return [delivery_json(row) for row in (await Deliveries(system).of_job(ACME, job_id, None, 10)).items]


class TestPermission:
    async def test_only_what_is_listed_for_the_tenant(self, server: Api, targets: EventTargetServer) -> None:
        beta = await server.as_tenant("beta")
        cases: list[tuple[Api, dict[str, Any], str]] = [
            (server, {"type": "start_execution", "state_machine_arn": OTHER}, "state_machine_arn"),
            (server, {"type": "eventbridge", "event_bus_arn": targets.bus + "-too"}, "event_bus_arn"),
            *((beta, entry, [*entry][1]) for entry in notify(targets)),
        ]
        for api, entry, field in cases:
            for path, body in (
                ("/v1/jobs", {**JOB, "notify": [entry]}),
                ("/v1/schedules", {"cron": "0 0 * * *", "job": {**JOB, "notify": [entry]}}),
            ):
                answer = await api.post(path, body)
                assert (answer.status, answer.json["code"]) == (403, "event_target_refused"), answer.body
                assert answer.json["field"] == f"notify[0].{field}"
            assert (await api.get("/v1/jobs")).json["items"] == []

    async def test_a_form_that_is_invalid(self, server: Api, targets: EventTargetServer) -> None:
        for entry, field in (
            ({"type": "start_execution", "state_machine_arn": targets.bus}, "notify[0].state_machine_arn"),
            ({"type": "start_execution", "state_machine_arn": "other"}, "notify[0].state_machine_arn"),
            ({"type": "eventbridge", "event_bus_arn": targets.machine}, "notify[0].event_bus_arn"),
            ({"type": "eventbridge", "event_bus_arn": targets.bus, "events": ["x"]}, "notify[0].events"),
        ):
            answer = await server.submit({**JOB, "notify": [entry]})
            assert (answer.status, answer.json["field"]) == (400, field), answer.body

    async def test_no_target_is_listed_by_default(self, tmp_path: Path, targets: EventTargetServer) -> None:
        async with open_system(Settings.load({}, data=tmp_path / "none"), JumpingClock()) as system:
            with pytest.raises(Exception, match="CONVEYOR_EVENT_TARGETS"):
                await submit(system, notify(targets))

    async def test_a_target_that_is_no_longer_listed(
        self, tmp_path: Path, targets: EventTargetServer, clock: JumpingClock
    ) -> None:
        """Each attempt asks again; if the operator lists it again, it is delivered."""
        data = tmp_path / "data"
        everyone = Settings.load({}, data=data, event_targets=targets.listed("*"))
        async with open_system(everyone, clock) as system:
            job_id = await submit(system, notify(targets))
            event_id = await finish(system, job_id)
        async with open_system(Settings.load({}, data=data), clock) as system:
            await deliver(system)
            rows = await rows_of(system, job_id)
            assert [(row["status"], row["log"][0]["error"]) for row in rows] == [
                ("pending", "event_target_refused")
            ] * 2
        assert (targets.executions(), targets.put()) == ({}, [])
        clock.advance(7)
        async with open_system(everyone, clock) as system:
            await deliver(system)
            assert {row["status"] for row in await rows_of(system, job_id)} == {"delivered"}
        assert list(targets.executions()) == [event_id]

    @pytest.mark.parametrize(
        "setting",
        [
            "acme",
            OTHER,
            "acme=arn:aws:sqs:eu-central-1:000000000000:queue",
            "acme=arn:aws:states:eu-central-1:000000000000:stateMachine:*",
            f"acme={OTHER}?role=x",
            f"acme={OTHER}?endpoint=ftp://x",
        ],
    )
    async def test_an_invalid_setting(self, setting: str) -> None:
        with pytest.raises(InvalidSetting, match="CONVEYOR_EVENT_TARGETS"):
            async with AwsEventTargets.open(setting):
                pass
