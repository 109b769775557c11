"""State machines that wait for jobs: from a message with a task token to the answer, on emulators that run them.

The flow is that of the machine in deploy/stepfunctions on one emulator; heartbeats are minded by the other, whose clock
the test moves together with its own.
"""

import asyncio
import dataclasses
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conveyor.accept.spec import decode_spec
from conveyor.accept.submit import Submit
from conveyor.clock import SystemClock
from conveyor.coordination.limits import run_slots
from conveyor.engines.queue import Outgoing, QueueName, recovery_queue, run_queue
from conveyor.engines.records import Document, Records
from conveyor.engines.sqs import SqsEngine
from conveyor.errors import ConveyorError
from conveyor.export.exports import Exports
from conveyor.jobs.callbacks import CallbackStatus
from conveyor.model import EXPORT, PROGRESS, JobId, RunId, TaskProgress, progress_id
from conveyor.notify.callback_answers import StepAnswers
from conveyor.notify.callback_monitor import Callbacks
from conveyor.notify.intake import Intake, IntakePass
from conveyor.recover.lambda_handler import handler
from conveyor.recover.monitor import monitor_of
from conveyor.settings import Settings
from conveyor.states import RunState
from conveyor.system import System, migrate, open_system, step_functions_findings
from tests.servers.aws import aws, server_time
from tests.servers.moto import moto, moto_time
from tests.servers.sqs import url_of
from tests.stacks.conftest import urls
from tests.support.api import Api
from tests.support.clocks import JumpingClock
from tests.support.make_jobs import ACME
from tests.support.state_machines import Between, Machine, Roles, machine
from tests.support.working import Echo, Flaky, until, working

JOB = {"kind": "python", "handler": "tests.echo", "tasks": [1, 2, 3]}
HEARTBEAT = 300.0


def name_of(place: Path) -> str:
    return "m" + sha256(str(place).encode()).hexdigest()[:12]


@pytest.fixture(params=["ministack"])
def emulator(request: pytest.FixtureRequest) -> str:
    """Where state machines run; a test of heartbeats asks for the other."""
    return aws() if request.param == "ministack" else moto()


class Failing:
    """A submission that fails on our side each time."""

    async def submit(self, *_: Any) -> None:
        raise ConveyorError("the store is on fire")


minds_heartbeats = pytest.mark.parametrize("emulator", ["moto"], indirect=True)


@pytest.fixture
async def between(emulator: str) -> AsyncIterator[Between]:
    async with Between(emulator).running() as made:
        yield made


@pytest.fixture
async def waiter(tmp_path: Path, emulator: str) -> AsyncIterator[Machine]:
    async with machine(emulator, name_of(tmp_path)) as made:
        yield made


@pytest.fixture
def settings(tmp_path: Path, waiter: Machine, between: Between) -> Settings:
    return Settings.load({}, data=tmp_path / "data", allow_private_targets=True, **waiter.settings(between))


@pytest.fixture
def roles(system: System) -> Roles:
    return Roles(system)


class TestFlow:
    async def test_a_state_machine_is_answered(
        self,
        system: System,
        roles: Roles,
        waiter: Machine,
        between: Between,
        settings: Settings,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        await waiter.make()
        execution = await waiter.start({**JOB, "name": "ours"})
        async with working(system):
            output = await waiter.output(execution)
            found = await until(roles.only, lambda callback: callback.answered_at is not None)
        assert output["counts"] == {"succeeded": 3, "failed": 0, "cancelled": 0, "unchanged": 0}
        assert (output["total"], output["name"], output["event"]) == (3, "ours", "run.completed")
        events = (await system.records.outbox.events(ACME, found.job_id, None, 100)).items
        assert output["event_id"] == events[-1].id
        assert (found.status, found.token) == (CallbackStatus.SENT, "")
        (answer,) = between.taken("SendTaskSuccess")
        assert between.answers() == {answer.token: 1}
        kept = b"".join(path.read_bytes() for path in settings.data.rglob("*") if path.is_file())
        assert found.job_id.encode() in kept
        assert answer.token.encode() not in kept
        logged = capsys.readouterr()
        assert found.job_id in logged.out + logged.err
        assert answer.token not in logged.out + logged.err

    async def test_a_job_that_fails_ends_with_a_dead_letter(self, system: System, waiter: Machine) -> None:
        await waiter.make()
        execution = await waiter.start({**JOB, "attempts": 1, "failure_threshold": {"failed": 1}})
        async with working(system, Flaky(lambda job, index: "handler_raised")):
            seen = await waiter.ended(execution)
        assert (seen["status"], seen["error"]) == ("FAILED", "ConveyorJobFailed")
        (letter,) = await waiter.letters(f"{waiter.name}-dead")
        said = json.loads(letter["Body"])
        assert (said["error"]["Error"], said["retry_count"], said["execution"]) == ("JOB_FAILED", 0, execution)
        cause = json.loads(said["error"]["Cause"])
        assert "failure threshold" in cause["reason"]
        assert cause["reason_code"] == "failure_threshold"
        assert cause["event"] == "run.failed"

    async def test_a_stuck_run_is_reprocessed_with_a_counter(
        self, system: System, roles: Roles, waiter: Machine, clock: JumpingClock, between: Between
    ) -> None:
        await waiter.make()
        execution = await waiter.start(JOB)
        echo = Echo()
        echo.gate.clear()
        async with working(system, echo):
            await until(roles.all)
            clock.advance(system.settings.callback_stuck_after + 1)
            old, _ = sorted(await until(roles.all, lambda all: len(all) == 2), key=lambda one: one.created_at)
            slots = run_slots(old.run_id)
            await until(lambda: system.coordinator.permits_in_use(slots), lambda count: count == 0)
            echo.gate.set()
            output = await waiter.output(execution)
        first, second = sorted(await roles.all(), key=lambda callback: callback.created_at)
        assert first.answer is not None
        assert first.answer.error == "WORKER_STUCK"
        assert output["job_id"] == second.job_id
        # It was cancelled, and none of its tasks ran beside those of the other.
        replaced = await roles.job(first.job_id)
        assert (replaced.state, replaced.reason) == (RunState.CANCELLED, f"replaced by {second.job_id}")
        assert {run for run, _ in echo.ran} == {second.run_id}
        assert sorted(between.answers().values()) == [1, 1]
        assert len((await system.records.jobs.jobs(ACME, None, 10)).items) == 2

    async def test_a_token_that_comes_late_is_answered_at_once(
        self, system: System, roles: Roles, waiter: Machine, between: Between
    ) -> None:
        """The job completed while its state machine had stopped waiting, and sends its message once more."""

        def hasty(definition: dict[str, Any]) -> None:
            definition["States"]["Submit"]["TimeoutSeconds"] = 3
            definition["States"]["Pause"]["Seconds"] = 1
            definition["States"]["Cancel and reprocess"]["Result"] = "attach"

        await waiter.make(hasty)
        execution = await waiter.start(JOB)
        await waiter.until_sent("intake")
        await roles.take_in()
        job_id = (await roles.only()).job_id
        await waiter.until_sent("reprocess")
        await roles.finish(job_id)
        await roles.answer()
        await roles.take_in()
        await roles.callbacks.run_once()
        output = await waiter.output(execution)
        assert (output["job_id"], output["event"]) == (job_id, "run.completed")
        assert len((await system.records.jobs.jobs(ACME, None, 10)).items) == 1

    async def test_a_message_that_was_sent_twice_makes_one_job_with_both_tokens(
        self, system: System, roles: Roles, waiter: Machine
    ) -> None:
        """A state that retries to send has another token each time, and waits with the last."""
        await waiter.make()
        for token in ("a" * 40, "b" * 40):
            message = {"task_token": token, "job": JOB, "idempotency_key": "execution-1"}
            await waiter.sqs.send_message(QueueUrl=waiter.urls["intake"], MessageBody=json.dumps(message))
            await roles.intake.run_once()
        first, second = await roles.all()
        assert first.job_id == second.job_id
        assert len((await system.records.jobs.jobs(ACME, None, 10)).items) == 1

    async def test_a_message_whose_place_is_taken_makes_no_job(
        self, system: System, roles: Roles, waiter: Machine
    ) -> None:
        """The reprocess queue was faster."""
        await waiter.make()
        sent = [
            ("reprocess", {"task_token": "b" * 40, "job": JOB, "replaces": "execution-1"}),
            ("intake", {"task_token": "a" * 40, "job": JOB, "idempotency_key": "execution-1"}),
        ]
        taken = []
        for queue, message in sent:
            await waiter.sqs.send_message(QueueUrl=waiter.urls[queue], MessageBody=json.dumps(message))
            taken.append(await roles.intake.run_once())
        assert (taken[0].jobs, taken[1].jobs, taken[1].stale) == (1, 0, 1)
        assert len((await system.records.jobs.jobs(ACME, None, 10)).items) == 1

    async def test_of_a_job_and_one_that_replaces_it_at_the_same_time_one_is_left(
        self, system: System, roles: Roles, waiter: Machine, clock: JumpingClock
    ) -> None:
        await waiter.make()
        sent = [
            ("reprocess", {"task_token": "b" * 40, "job": JOB, "replaces": "execution-1"}),
            ("intake", {"task_token": "a" * 40, "job": JOB, "idempotency_key": "execution-1"}),
        ]
        for queue, message in sent:
            await waiter.sqs.send_message(QueueUrl=waiter.urls[queue], MessageBody=json.dumps(message))
        await roles.intake.run_once()
        assert len(await system.records.jobs.active_jobs()) <= 1
        try:
            clock.advance(61)
            server_time().advance(61)
            await roles.intake.run_once()
        finally:
            server_time().reset()
        assert len(await system.records.jobs.active_jobs()) == 1

    async def test_when_retries_are_used_up_somebody_has_to_look(
        self, system: System, roles: Roles, waiter: Machine, clock: JumpingClock
    ) -> None:
        def none_left(definition: dict[str, Any]) -> None:
            definition["States"]["Retries left?"]["Choices"][0]["NumericLessThanEquals"] = 0

        await waiter.make(none_left)
        execution = await waiter.start(JOB)
        await waiter.until_sent("intake")
        await roles.take_in()
        clock.advance(system.settings.callback_stuck_after + 1)
        await roles.callbacks.run_once()
        assert (await waiter.ended(execution))["status"] == "FAILED"
        (letter,) = await waiter.letters(f"{waiter.name}-dead")
        assert json.loads(letter["Body"])["retry_count"] == 1

    async def test_a_message_that_nobody_waits_for_any_more_makes_no_job(
        self, system: System, roles: Roles, waiter: Machine, clock: JumpingClock
    ) -> None:
        """The state machine timed out while nobody took it in, and has sent another since."""

        def hasty(definition: dict[str, Any]) -> None:
            definition["States"]["Submit"]["TimeoutSeconds"] = 1

        await waiter.make(hasty)
        execution = await waiter.start(JOB)
        await waiter.until_sent("reprocess")
        clock.advance(HEARTBEAT)
        async with working(system):
            output = await waiter.output(execution)
            await until(lambda: waiter.waiting("intake"), lambda left: left == 0)
        (job,) = (await system.records.jobs.jobs(ACME, None, 10)).items
        assert output["job_id"] == job.job_id

    async def test_a_message_that_could_not_be_sent_is_sent_again(self, system: System, waiter: Machine) -> None:
        await waiter.make(queues=False)
        execution = await waiter.start(JOB)

        async def tries() -> int:
            history = await waiter.steps.get_execution_history(executionArn=execution, maxResults=1000)
            return sum(event["type"] == "TaskFailed" for event in history["events"])

        await until(tries, lambda count: count >= 2)
        for queue in ("intake", "reprocess", "dead"):
            await waiter.make_queue(queue)
        async with working(system):
            await waiter.output(execution)

    async def test_the_answer_can_have_an_export(self, system: System, waiter: Machine, settings: Settings) -> None:
        def exported(definition: dict[str, Any]) -> None:
            definition["States"]["Submit"]["Parameters"]["MessageBody"]["export"] = "jsonl"

        await waiter.make(exported)
        execution = await waiter.start(JOB)
        # Nobody asked for it by a request whose address it could have.
        named = msgspec.structs.replace(settings, public_url="https://jobs.example.com")
        async with working(dataclasses.replace(system, settings=named)):
            output = await waiter.output(execution)
        (part,) = output["export"]["parts"]
        path = f"/v1/exports/{output['export']['id']}/parts/1"
        assert part["url"] == output["export_url"] == f"https://jobs.example.com{path}"
        assert output["event"] == "run.completed"
        events = (await system.records.outbox.events(ACME, JobId(output["job_id"]), None, 100)).items
        assert output["event_id"] == next(event.id for event in events if event.event == "run.completed")

    async def test_an_export_is_asked_for_once(self, system: System, roles: Roles, waiter: Machine) -> None:
        def exported(definition: dict[str, Any]) -> None:
            definition["States"]["Submit"]["Parameters"]["MessageBody"]["export"] = "csv"

        await waiter.make(exported)
        execution = await waiter.start(JOB)
        await waiter.until_sent("intake")
        await roles.take_in()
        job_id = (await roles.only()).job_id
        await roles.finish(job_id)
        (notice,) = [
            notice for notice in await system.records.outbox.undispatched(10) if notice.event == "run.completed"
        ]
        await asyncio.gather(*(StepAnswers(system).take(notice) for _ in range(3)))
        (export,) = (await system.records.documents.documents(EXPORT, ACME, None, 10)).items
        assert (await roles.only()).export_id == export.id
        # It waits for the export, which counts as progress while it is made; and goes without one that is gone.
        await roles.callbacks.run_once()
        assert (await roles.only()).answer is None
        await Exports(system).delete(ACME, export.id)
        system.clock.advance(300)  # type: ignore[attr-defined]
        await roles.callbacks.run_once()
        output = await waiter.output(execution)
        assert (output["job_id"], output["export"], output["event_id"]) == (job_id, None, notice.notice_id)


class TestIntake:
    async def test_what_is_no_job_is_a_dead_letter_and_is_told(
        self, system: System, roles: Roles, waiter: Machine, between: Between
    ) -> None:
        await waiter.make()
        execution = await waiter.start({**JOB, "tasks": [], "colour": "red"})
        await waiter.until_sent("intake")
        assert (await roles.intake.run_once()).refused == 1
        assert (await waiter.ended(execution))["status"] == "FAILED"
        (letter,) = await waiter.letters(f"{waiter.name}-intake-dead-letters")
        assert "colour" in letter["MessageAttributes"]["reason"]["StringValue"]
        assert json.loads(letter["Body"])["job"]["colour"] == "red"
        (told,) = between.taken("SendTaskFailure")
        assert told.said["error"] == "INVALID_JOB"
        assert json.loads(told.said["cause"])["code"] == "unknown_field"
        assert (await system.records.jobs.jobs(ACME, None, 10)).items == []

    @pytest.mark.parametrize("text", ["", "{", "[1]", '{"task_token": 7, "job": {}}', '{"jobs": {}}'])
    async def test_what_is_no_message_is_a_dead_letter(self, roles: Roles, waiter: Machine, text: str) -> None:
        await waiter.make()
        await waiter.sqs.send_message(QueueUrl=waiter.urls["intake"], MessageBody=text or " ")
        assert (await roles.intake.run_once()).refused == 1
        assert len(await waiter.letters(f"{waiter.name}-intake-dead-letters")) == 1
        assert await waiter.waiting("intake") == 0

    async def test_a_message_that_comes_again_makes_no_second_job(
        self, system: System, roles: Roles, waiter: Machine, between: Between, clock: JumpingClock
    ) -> None:
        await waiter.make()
        message = {"task_token": "t" * 40, "job": JOB}
        for _ in range(3):
            await waiter.sqs.send_message(QueueUrl=waiter.urls["intake"], MessageBody=json.dumps(message))
        # At the same time: one is under way, the others are put off.
        taken = await roles.intake.run_once()
        assert (taken.jobs, taken.again + taken.put_off) == (1, 2)
        # Long after a client's key would have been forgotten.
        clock.advance(10 * 86_400)
        server_time().advance(10 * 86_400)
        try:
            await waiter.sqs.send_message(QueueUrl=waiter.urls["intake"], MessageBody=json.dumps(message))
            assert (await roles.intake.run_once()).jobs == 0
        finally:
            server_time().reset()
        assert len((await system.records.jobs.jobs(ACME, None, 10)).items) == 1
        assert between.taken("SendTaskFailure") == []

    async def test_a_token_is_one_jobs(self, system: System, roles: Roles, waiter: Machine, between: Between) -> None:
        await waiter.make()
        for job in (JOB, {**JOB, "tasks": [9]}):
            message = json.dumps({"task_token": "t" * 40, "job": job})
            await waiter.sqs.send_message(QueueUrl=waiter.urls["intake"], MessageBody=message)
            await roles.intake.run_once()
        assert len((await system.records.jobs.jobs(ACME, None, 10)).items) == 1
        assert len(await waiter.letters(f"{waiter.name}-intake-dead-letters")) == 1
        # The first job will answer it.
        assert [call.operation for call in between.calls] == []

    async def test_without_room_it_stays_in_the_queue_and_is_not_forgotten(
        self, tmp_path: Path, clock: JumpingClock, waiter: Machine, between: Between
    ) -> None:
        await waiter.make()
        idle = Settings.load({}, data=tmp_path / "idle", min_workers=1, **waiter.settings(between))
        async with open_system(idle, clock) as system:
            execution = await waiter.start(JOB)
            await waiter.until_sent("intake")
            # Nobody is there who would do the work.
            assert (await Intake(system).run_once()).put_off == 1
            assert len(between.taken("SendTaskHeartbeat")) == 1
            try:
                # Received in between for a heartbeat only, whether or not there is capacity by then.
                clock.advance(HEARTBEAT * 0.4 + 1)
                server_time().advance(HEARTBEAT * 0.4 + 1)
                able = dataclasses.replace(system, settings=Settings.load({}, **waiter.settings(between)))
                assert (await Intake(able).run_once()).put_off == 1
                assert len(between.taken("SendTaskHeartbeat")) == 2
                clock.advance(HEARTBEAT)
                server_time().advance(HEARTBEAT)
                async with working(system):
                    await waiter.output(execution)
            finally:
                server_time().reset()

    async def test_a_message_is_put_off_for_as_long_as_is_set(self, tmp_path: Path, clock: JumpingClock) -> None:
        settings = Settings.load({}, data=tmp_path / "late", intake="jobs", min_workers=1, intake_delay_seconds=700)
        async with open_system(settings, clock) as system:
            await system.queue.send(QueueName("jobs"), [Outgoing(json.dumps({"job": JOB}).encode())])
            intake = Intake(system)
            assert (await intake.run_once()).put_off == 1
            able = Intake(dataclasses.replace(system, settings=msgspec.structs.replace(settings, min_workers=0)))
            clock.advance(690)
            assert await able.run_once() == IntakePass()
            clock.advance(11)
            assert (await able.run_once()).jobs == 1

    async def test_waiting_for_capacity_is_not_failing(self, tmp_path: Path, clock: JumpingClock) -> None:
        """A message that was put off many times is not dead-lettered for the first server error."""
        settings = Settings.load({}, data=tmp_path / "often", intake="jobs", min_workers=1)
        async with open_system(settings, clock) as system:
            await system.queue.send(QueueName("jobs"), [Outgoing(json.dumps({"job": JOB}).encode())])
            intake = Intake(system)
            for _ in range(25):
                assert (await intake.run_once()).put_off == 1
                clock.advance(301)
            able = dataclasses.replace(system, settings=msgspec.structs.replace(settings, min_workers=0))
            broken = Intake(able)
            broken._submit = Failing()  # type: ignore[assignment]
            for failure in range(1, 21):
                assert (await broken.run_once()).put_off == (failure < 20)
                clock.advance(61)
            (letter,) = (await system.queue.dead_letters(None, 10)).items
            assert "the store is on fire" in letter.reason

    async def test_the_first_queue_goes_first_within_a_bound(self, tmp_path: Path, clock: JumpingClock) -> None:
        settings = Settings.load(
            {},
            data=tmp_path / "order",
            intake="urgent normal",
            intake_tenant="acme",
            intake_batch_size=2,
            intake_concurrency=1,
            intake_priority_ratio=3,
        )
        async with open_system(settings, clock) as system:
            for queue in ("normal", "urgent"):
                bodies = [json.dumps({"job": {**JOB, "name": queue}}).encode() for _ in range(20)]
                await system.queue.send(QueueName(queue), [Outgoing(body) for body in bodies])
            intake, order = Intake(system), []
            for _ in range(20):
                before = {job.job_id for job in (await system.records.jobs.jobs(ACME, None, 100)).items}
                assert (await intake.run_once()).jobs == 2
                made = (await system.records.jobs.jobs(ACME, None, 100)).items
                names = {job.name for job in made if job.job_id not in before}
                assert len(names) == 1, "a batch is of one queue"
                order += names
            assert await intake.run_once() == IntakePass()
        # Three urgent batches for each normal one while both wait, then what is left.
        assert order == (["urgent"] * 3 + ["normal"]) * 3 + ["urgent"] + ["normal"] * 7

    async def test_batches_and_how_many_at_once_are_as_set(self, tmp_path: Path, clock: JumpingClock) -> None:
        settings = Settings.load(
            {}, data=tmp_path / "flood", intake="jobs", intake_tenant="acme", intake_batch_size=3, intake_concurrency=4
        )
        async with open_system(settings, clock) as system:
            body = json.dumps({"job": JOB}).encode()
            await system.queue.send(QueueName("jobs"), [Outgoing(body)] * 40)
            first, second = Intake(system), Intake(system)
            assert (await first.run_once()).jobs == 12
            # All intakes together: what another one accepts at the moment counts.
            await system.coordinator.acquire("role:intake", "another", 4, 4, 60.0)
            assert (await second.run_once()).jobs == 0
            await system.coordinator.acquire("role:intake", "another", 3, 4, 60.0)
            clock.advance(1.0)
            assert (await second.run_once()).jobs == 3
            assert await system.coordinator.permits_in_use("role:intake") == 3

    async def test_a_queue_of_our_own_needs_no_aws(self, tmp_path: Path, clock: JumpingClock) -> None:
        settings = Settings.load({}, data=tmp_path / "own", intake="again jobs", intake_tenant="acme")
        async with open_system(settings, clock) as system, working(system):
            for number, queue in enumerate(("jobs", "again", "jobs")):
                body = json.dumps({"job": {**JOB, "name": f"job {number}"}}).encode()
                await system.queue.send(QueueName(queue), [Outgoing(body)])
            await system.queue.send(QueueName("jobs"), [Outgoing(b'{"job": {"colour": "red"}}')])

            async def completed() -> Counter[str | None]:
                jobs = (await system.records.jobs.jobs(ACME, None, 10)).items
                return Counter(job.name for job in jobs if job.state is RunState.COMPLETED)

            await until(completed, lambda found: len(found) == 3)
            letters = await until(lambda: system.queue.dead_letters(None, 10), lambda page: page.items)
        assert "colour" in letters.items[0].reason


class TestNotify:
    async def test_a_job_can_carry_a_token(self, server: Api, system: System, waiter: Machine, roles: Roles) -> None:
        def straight(definition: dict[str, Any]) -> None:
            definition["States"]["Submit"]["Parameters"]["QueueUrl"] = waiter.urls["dead"]

        await waiter.make(straight)
        execution = await waiter.start(JOB)
        await waiter.until_sent("dead")
        (message,) = await waiter.letters(f"{waiter.name}-dead")
        token = json.loads(message["Body"])["task_token"]
        asked = await server.submit({**JOB, "notify": [{"type": "step_functions", "task_token": token}]})
        assert asked.status == 201
        path = f"/v1/jobs/{asked.json['id']}/callbacks"
        shown = (await server.get(path)).json
        assert shown["next_cursor"] is None
        (callback,) = shown["items"]
        assert (callback["status"], callback["last_heartbeat_at"], callback["error"]) == ("pending", None, None)
        assert token not in json.dumps(shown)
        seen = await monitor_of(system).run_once()
        assert seen.others == {"callback_checked": 1, "callback_heartbeats": 1}
        assert (await server.get(path)).json["items"][0]["last_heartbeat_at"] is not None
        await roles.finish(asked.json["id"])
        await roles.answer()
        (callback,) = (await server.get(path)).json["items"]
        assert callback["status"] == "callback_sent"
        output = await waiter.output(execution)
        assert (output["job_id"], output["event_id"]) == (asked.json["id"], callback["event_id"])

    async def test_what_is_wrong_is_named(self, server: Api) -> None:
        wrong: list[tuple[dict[str, Any], str]] = [
            ({}, "notify[0]"),
            ({"task_token": ""}, "notify[0].task_token"),
            ({"task_token": "x" * 2049}, "notify[0].task_token"),
            ({"task_token": "é"}, "notify[0].task_token"),
            ({"task_token": "x", "heartbeat_seconds": 0}, "notify[0].heartbeat_seconds"),
            ({"task_token": "x", "stuck_after": -1}, "notify[0].stuck_after"),
            ({"task_token": "x", "export": "xls"}, "notify[0].export"),
            ({"task_token": "x", "url": "http://a.example/"}, "notify[0].url"),
        ]
        for entry, field in wrong:
            answer = await server.submit({**JOB, "notify": [{"type": "step_functions", **entry}]})
            assert (answer.status, answer.json["field"]) == (400, field)

    async def test_a_schedule_carries_none(self, server: Api) -> None:
        job = {**JOB, "notify": [{"type": "step_functions", "task_token": "x"}]}
        answer = await server.post("/v1/schedules", {"cron": "0 0 * * *", "job": job})
        assert (answer.status, answer.json["field"]) == (400, "job.notify[0]")

    async def test_without_step_functions_there_are_no_tokens(self, tmp_path: Path, clock: JumpingClock) -> None:
        async with open_system(Settings.load({}, data=tmp_path / "none"), clock) as system:
            spec = decode_spec(json.dumps({**JOB, "notify": [{"type": "step_functions", "task_token": "x"}]}).encode())
            with pytest.raises(Exception, match="CONVEYOR_STEP_FUNCTIONS"):
                await Submit(system).submit(ACME, spec)

    async def test_who_waits_for_a_deleted_job_is_told(
        self, system: System, roles: Roles, waiter: Machine, between: Between
    ) -> None:
        await waiter.make()
        execution = await waiter.start(JOB)
        await waiter.until_sent("intake")
        await roles.take_in()
        job_id = (await roles.only()).job_id
        await system.records.jobs.mark_deleted(ACME, job_id)
        await system.records.jobs.purge_job(job_id)
        await roles.callbacks.run_once()
        (told,) = between.taken("SendTaskFailure")
        assert told.said["error"] == "JOB_DELETED"
        assert (await waiter.ended(execution))["status"] == "FAILED"


class TestFresh:
    """What counts as progress, and what as waiting."""

    @pytest.fixture(autouse=True)
    async def waiting(self, roles: Roles, waiter: Machine, between: Between) -> None:
        await waiter.make()
        await waiter.start(JOB)
        await waiter.until_sent("intake")
        await roles.take_in()
        await roles.callbacks.run_once()

    async def test_a_task_that_ends(self, roles: Roles, clock: JumpingClock, between: Between) -> None:
        job = await roles.job((await roles.only()).job_id)
        for index in range(2):
            clock.advance(1100)
            await roles.finish_one(job, index)
            await roles.callbacks.run_once()
            assert (await roles.only()).status is CallbackStatus.IN_PROGRESS
        clock.advance(1201)
        await roles.callbacks.run_once()
        assert [call.said["error"] for call in between.taken("SendTaskFailure")] == ["WORKER_STUCK"]

    async def test_a_long_task_that_moves(self, roles: Roles, clock: JumpingClock, between: Between) -> None:
        job = await roles.job((await roles.only()).job_id)
        records = roles.system.records
        for number in range(3):
            clock.advance(1100)
            said = TaskProgress(job.run.run_id, 1, 1, "hold_x", clock.now(), done=number)
            name = progress_id(job.run.run_id, 1)
            standing = await records.documents.document(PROGRESS, ACME, name)
            body = msgspec.json.encode(said)
            if standing is None:
                await records.documents.create_documents([Document(PROGRESS, ACME, name, body, job_id=job.job_id)])
            else:
                await records.documents.replace_document(
                    Document(PROGRESS, ACME, name, body, standing.version, job_id=job.job_id)
                )
            await roles.callbacks.run_once()
        assert between.taken("SendTaskFailure") == []
        clock.advance(1201)
        await roles.callbacks.run_once()
        assert len(between.taken("SendTaskFailure")) == 1

    async def test_a_paused_job_is_not_stuck(self, roles: Roles, clock: JumpingClock, between: Between) -> None:
        job = await roles.job((await roles.only()).job_id)
        records = roles.system.records
        await records.jobs.move_run(job.job_id, job.run.run_id, [RunState.RUNNING], RunState.PAUSED, None, None)
        clock.advance(5000)
        await roles.callbacks.run_once()
        assert between.taken("SendTaskFailure") == []
        await records.jobs.move_run(job.job_id, job.run.run_id, [RunState.PAUSED], RunState.RUNNING, None, None)
        clock.advance(5000)
        await roles.callbacks.run_once()
        assert len(between.taken("SendTaskFailure")) == 1

    async def test_retries_that_wait_for_their_time_are_not_stuck(
        self, roles: Roles, clock: JumpingClock, between: Between
    ) -> None:
        job = await roles.job((await roles.only()).job_id)
        queue = recovery_queue(job.run.run_id)
        await roles.system.queue.send(queue, [Outgoing(b"x", delay=7000)])
        clock.advance(5000)
        await roles.callbacks.run_once()
        assert between.taken("SendTaskFailure") == []
        clock.advance(3000)
        await roles.callbacks.run_once()
        assert len(between.taken("SendTaskFailure")) == 1

    @pytest.mark.parametrize("run_queue_limit", [500, 0])
    async def test_a_fresh_process_finds_a_stuck_run_on_sqs(
        self, roles: Roles, clock: JumpingClock, between: Between, tmp_path: Path, run_queue_limit: int
    ) -> None:
        """As a Lambda function does that runs one pass. It knows neither how long a queue has been empty, nor whose the
        messages in the queue are that the runs share."""
        job = await roles.job((await roles.only()).job_id)
        documents = roles.system.records.documents
        url = url_of(tmp_path, settle=60)

        async def monitor_once() -> None:
            async with SqsEngine.open(url, clock, documents, run_queue_limit) as engine:
                system = dataclasses.replace(roles.system, queue=engine.queue)
                await Callbacks(system, roles.system.step_functions).run_once()  # type: ignore[arg-type]

        async with SqsEngine.open(url, clock, documents, run_queue_limit) as engine:
            await engine.queue.send(run_queue(job.run.run_id), [Outgoing(b"x")])
            await engine.queue.send(run_queue(RunId("run_of_another")), [Outgoing(b"y", delay=800)])
            (got,) = await engine.queue.receive(run_queue(job.run.run_id), 1, 30.0)
            await engine.queue.ack(run_queue(job.run.run_id), [got.receipt])
        clock.advance(1100)
        await monitor_once()
        assert between.taken("SendTaskFailure") == []
        # When the next heartbeat is due.
        clock.advance(130)
        await monitor_once()
        assert [call.said["error"] for call in between.taken("SendTaskFailure")] == ["WORKER_STUCK"]


def waiting_state_alone(definition: dict[str, Any]) -> None:
    """The state that waits, and nothing else: the emulator reads the machine anew for each execution, and slowly."""
    submit = definition["States"]["Submit"]
    for field in ("Catch", "Retry", "Next", "ResultPath"):
        del submit[field]
    del submit["Parameters"]["MessageBody"]["retry_count.$"]
    definition.update(StartAt="Submit", States={"Submit": {**submit, "End": True}})


@minds_heartbeats
class TestHeartbeats:
    async def test_a_state_machine_is_kept_waiting_for_as_long_as_it_takes(
        self, system: System, roles: Roles, waiter: Machine, clock: JumpingClock, between: Between
    ) -> None:
        await waiter.make(waiting_state_alone)
        execution = await waiter.start({**JOB, "stuck_after": 3600})
        await waiter.until_sent("intake")
        await roles.take_in()
        job = await roles.job((await roles.only()).job_id)
        for minute in range(15):
            # A pass each minute, as a rule of EventBridge would make it.
            await roles.callbacks.run_once()
            if minute == 9:
                await roles.finish_one(job, 0)
            await pass_time(clock, 60)
        beats = len(between.taken("SendTaskHeartbeat"))
        assert 4 <= beats <= 8
        assert (await waiter.look(execution))["status"] == "RUNNING"
        await roles.finish(job.job_id)
        await roles.answer()
        assert (await waiter.output(execution))["counts"]["succeeded"] == 3

    async def test_without_heartbeats_it_is_caught_and_comes_again(
        self, system: System, roles: Roles, waiter: Machine, clock: JumpingClock
    ) -> None:
        """That the emulator minds them, and that the machine catches it."""

        def hasty(definition: dict[str, Any]) -> None:
            definition["States"]["Pause"]["Seconds"] = 0
            # This emulator calls it States.Timeout.
            definition["States"]["Cancel and reprocess"] = definition["States"]["Wait on"]

        await waiter.make(hasty)
        execution = await waiter.start(JOB)
        await waiter.until_sent("intake")
        await roles.take_in()
        await pass_time(clock, HEARTBEAT + 1)
        await waiter.until_sent("reprocess")
        await roles.take_in()
        # The job was well: its state machine waits for the same job with another token.
        first, second = await roles.all()
        assert first.job_id == second.job_id
        assert len((await system.records.jobs.jobs(ACME, None, 10)).items) == 1
        await roles.finish(second.job_id)
        await roles.answer()
        # The answer to the first comes too late, though this emulator takes it.
        assert (await waiter.output(execution))["job_id"] == second.job_id

    async def test_a_hundred_are_kept_waiting_by_one_pass(
        self, system: System, waiter: Machine, clock: JumpingClock, between: Between
    ) -> None:
        calls: Counter[str] = Counter()
        watched = dataclasses.replace(
            system,
            records=Records(
                jobs=Counted(system.records.jobs, "jobs", calls),
                ingests=Counted(system.records.ingests, "ingests", calls),
                access=Counted(system.records.access, "access", calls),
                documents=Counted(system.records.documents, "documents", calls),
                outbox=Counted(system.records.outbox, "outbox", calls),
            ),
            tasks=Counted(system.tasks, "tasks", calls),
            queue=Counted(system.queue, "queue", calls),
            coordinator=Counted(system.coordinator, "coordinator", calls),
        )
        roles = Roles(watched)
        await waiter.make(waiting_state_alone)
        executions = await asyncio.gather(*(waiter.start(JOB) for _ in range(100)))
        await roles.take_in(100)
        await roles.callbacks.run_once()
        for _ in range(2):
            await pass_time(clock, 250)
            calls.clear()
            kept = await roles.callbacks.run_once()
            assert (kept.checked, kept.heartbeats) == (100, 100)
            # Two pages of due rows, workers once; for each row: claimed, looked at, written.
            assert calls["documents.due_documents"] == 2
            assert sum(calls.values()) <= 100 * 6 + 3
        assert calls["tasks.page"] == calls["tasks.at"] == calls["tasks.recount"] == 0
        for callback in await roles.all():
            await roles.finish(callback.job_id)
        while (await roles.notifier.run_once()).notices:
            pass
        assert (await roles.callbacks.run_once()).answers == 100
        assert between.answers() == dict.fromkeys(between.answers(), 1)
        assert len(between.answers()) == 100
        for execution in executions:
            await waiter.output(execution)

    async def test_monitors_share_the_load(
        self, system: System, roles: Roles, waiter: Machine, clock: JumpingClock, between: Between
    ) -> None:
        await waiter.make(waiting_state_alone)
        for _ in range(10):
            await waiter.start(JOB)
        await roles.take_in(10)
        monitors = [roles, Roles(system), Roles(system)]
        kept = await asyncio.gather(*(each.callbacks.run_once() for each in monitors))
        assert sum(each.heartbeats for each in kept) == 10
        for callback in await roles.all():
            await roles.finish(callback.job_id)
        # Notifiers too.
        await asyncio.gather(*(each.notifier.run_once() for each in monitors))
        kept = await asyncio.gather(*(each.callbacks.run_once() for each in monitors))
        assert sum(each.answers for each in kept) == 10
        assert sorted(between.answers().values()) == [1] * 10


@pytest.mark.parametrize("stack", ["aws", "postgres"])
async def test_on_engines_that_processes_share(stack: str, tmp_path: Path, waiter: Machine, between: Between) -> None:
    """Records on DynamoDB and on Postgres; one process takes the job in, the other does the rest."""
    given = {**urls(stack, tmp_path / "data"), **waiter.settings(between), "signing_key": "s" * 32}
    settings = Settings.load({}, data=tmp_path / "data", **given)
    await migrate(settings, SystemClock())
    await waiter.make()
    execution = await waiter.start({**JOB, "stuck_after": 3600})
    await waiter.until_sent("intake")
    async with open_system(settings, SystemClock()) as first:
        await Roles(first).take_in()
        assert (await Roles(first).callbacks.run_once()).heartbeats == 1
    async with open_system(settings, SystemClock()) as second, working(second):
        output = await waiter.output(execution)
        (found,) = await until(lambda: Roles(second).all(), lambda all: all[0].status is CallbackStatus.SENT)
    assert output["job_id"] == found.job_id
    assert set(between.answers().values()) == {1}


@pytest.mark.parametrize("stack", ["aws", "postgres"])
async def test_the_function_of_lambda_keeps_and_answers_callbacks(
    stack: str, tmp_path: Path, waiter: Machine, between: Between, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one minder of a state machine: its first pass sends the heartbeat, the one after the run's end the answer."""
    given = {**urls(stack, tmp_path / "data"), **waiter.settings(between), "signing_key": "s" * 32}
    settings = Settings.load({}, data=tmp_path / "data", **given)
    for name, value in {**given, "data": tmp_path / "lambda"}.items():
        monkeypatch.setenv(f"CONVEYOR_{name.upper()}", str(value))
    await migrate(settings, SystemClock())
    await waiter.make()
    execution = await waiter.start({**JOB, "stuck_after": 3600})
    await waiter.until_sent("intake")

    async def called_by_a_rule() -> Any:
        event = {"source": "aws.events", "detail-type": "Scheduled Event", "detail": {}}
        return json.loads(json.dumps(await asyncio.to_thread(handler, event, None)))

    async with open_system(settings, SystemClock()) as system:
        roles = Roles(system)
        await roles.take_in()
        assert (await called_by_a_rule())["others"]["callback_heartbeats"] == 1
        callback = await roles.only()
        assert callback.answered_at is None
        await roles.finish(callback.job_id)
        await roles.notifier.run_once()
        assert (await called_by_a_rule())["others"]["callback_answers"] == 1
        assert (await roles.only()).status is CallbackStatus.SENT
    assert (await waiter.output(execution))["job_id"] == callback.job_id
    assert list(between.answers().values()) == [1]


class Counted:
    """An engine whose calls are counted."""

    def __init__(self, engine: Any, name: str, calls: Counter[str]) -> None:
        self._engine = engine
        self._name = name
        self._calls = calls

    def __getattr__(self, method: str) -> Any:
        call = getattr(self._engine, method)

        async def counted(*args: Any, **kwargs: Any) -> Any:
            self._calls[f"{self._name}.{method}"] += 1
            return await call(*args, **kwargs)

        return counted


async def pass_time(clock: JumpingClock, seconds: float) -> None:
    """Here and at the emulator. What waits there looks at its clock every now and then, whatever the machine's load: so
    long is waited for it."""
    clock.advance(seconds)
    moto_time().advance(seconds)
    await asyncio.sleep(0.08)


async def test_the_doctor_asks_whether_it_may_be_told(emulator: str) -> None:
    [(name, problem)] = await step_functions_findings(f"stepfunctions://us-east-1?endpoint={emulator}")
    assert (name, problem) == ("step functions: takes heartbeats", None)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        port = deaf.getsockname()[1]
        [(_, problem)] = await step_functions_findings(f"stepfunctions://us-east-1?endpoint=http://127.0.0.1:{port}")
    assert problem is not None
    assert "does not answer" in problem
