"""Whatever dies or fails while a state machine waits: it is never kept waiting too long for a heartbeat, and is given
one answer.

At every crash point of what takes jobs in, keeps machines waiting and answers them: the role that was there is gone, 45
seconds pass, and another goes on. Then the same with real processes that are killed, the worker's among them.
"""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from conveyor import faults
from conveyor.auth.sealing import Seals
from conveyor.engines.step_functions import CallOutcome
from conveyor.jobs.callbacks import Callback, CallbackStatus, callback_of, seal_name
from conveyor.notify import intake
from conveyor.settings import Settings
from conveyor.states import ENDED
from conveyor.system import System, open_system
from tests.faults.forks import Forks
from tests.faults.test_crashpoints import points_in_source
from tests.servers.aws import CREDENTIALS, aws, server_time
from tests.support.clocks import JumpingClock
from tests.support.make_jobs import ACME
from tests.support.state_machines import Between, Machine, Roles, machine
from tests.support.working import until

CHILD = "tests.faults.steps_child"
CHILD_ENVIRON = CREDENTIALS
AREAS = ("callback.", "inbox.", "intake.")

JOB = {"kind": "python", "handler": "tests.echo", "tasks": [1, 2, 3]}
HEARTBEAT = 300.0
RESTART = 45.0

# Which scenario passes which points, and how often it dies there.
PASSED_IN: dict[str, dict[str, tuple[int, ...]]] = {
    "answered": {
        "intake.receive.after": (1,),
        "intake.job.after": (1,),
        "callback.attach.before": (1,),
        "callback.attach.after": (1,),
        "intake.done.after": (1,),
        "callback.claim.before": (1, 2, 3),
        "callback.claim.after": (1, 2, 3, 4),
        "callback.heartbeat.before": (1, 2),
        "callback.heartbeat.after": (1, 2),
        "callback.record.before": (1, 2, 4),
        "callback.record.after": (1, 2),
        "callback.answer.before": (1,),
        "callback.answer.after": (1,),
        "callback.sent.after": (1,),
    },
    "refused": {
        "intake.refuse.before": (1,),
        "intake.refuse.after": (1,),
        "inbox.bury.before": (1,),
        "inbox.bury.between": (1,),
        "intake.bury.after": (1,),
    },
    "stuck": {
        "callback.fail.before": (1,),
        "callback.fail.after": (1,),
        "callback.sent.after": (1,),
    },
}
CASES = [
    (scenario, point, nth) for scenario, points in PASSED_IN.items() for point, times in points.items() for nth in times
]


class Died(BaseException):
    """The process is gone, as far as the test goes."""


@pytest.fixture
async def between(clock: JumpingClock) -> AsyncIterator[Between]:
    async with Between(aws(), clock.now, settled=True).running() as made:
        yield made
    server_time().reset()
    faults.arm(None)


@pytest.fixture
async def waiter(tmp_path: Path) -> AsyncIterator[Machine]:
    async with machine(aws(), "f" + sha256(str(tmp_path).encode()).hexdigest()[:12]) as made:
        yield made


@pytest.fixture
def settings(tmp_path: Path, waiter: Machine, between: Between) -> Settings:
    return Settings.load({}, data=tmp_path / "data", **waiter.settings(between))


class Story:
    """Steps that are taken until each comes to its end, by whoever is there."""

    def __init__(self, system: System, clock: JumpingClock) -> None:
        self._system = system
        self._clock = clock
        self.roles = Roles(system)
        self.died = 0

    def pass_time(self, seconds: float) -> None:
        self._clock.advance(seconds)
        server_time().advance(seconds)

    async def take(self, step: Callable[[Roles], Awaitable[Any]], right: Callable[[Any], object] = bool) -> None:
        """A step again and again, until it says what it should."""
        for _ in range(40):
            try:
                if right(await step(self.roles)):
                    return
            except Died:
                self.died += 1
                self.pass_time(RESTART)
                self.roles = Roles(self._system)
                continue
            self.pass_time(10)
        raise AssertionError("it does not come to that")


def die_at(point: str, nth: int) -> None:
    left = nth

    def hook(name: str) -> None:
        nonlocal left
        if name == point:
            left -= 1
            if left == 0:
                raise Died(name)

    faults.arm(hook)


async def took_in(roles: Roles) -> bool:
    await roles.intake.run_once()
    return bool(await roles.all())


async def sent(roles: Roles) -> bool:
    await roles.notifier.run_once()
    await roles.callbacks.run_once()
    return all(callback.status is CallbackStatus.SENT for callback in await roles.all())


async def checked(roles: Roles) -> bool:
    await roles.callbacks.run_once()
    return True


async def finished(roles: Roles) -> bool:
    for callback in await roles.all():
        await roles.finish(callback.job_id)
    return True


def check_gaps(between: Between, started: float) -> None:
    """No machine waited for longer than it would."""
    last: dict[str, float] = {}
    for call in between.calls:
        if call.status == 200:
            before = last.get(call.token, started)
            assert call.at - before <= HEARTBEAT, call
            last[call.token] = call.at


class TestCrashPoints:
    def test_every_point_is_died_at(self) -> None:
        points = {point for point in points_in_source() if point.startswith(AREAS)}
        assert points == set().union(*PASSED_IN.values())

    @pytest.mark.parametrize(("scenario", "point", "nth"), CASES)
    async def test_one_answer_and_in_time(
        self,
        system: System,
        waiter: Machine,
        between: Between,
        clock: JumpingClock,
        scenario: str,
        point: str,
        nth: int,
    ) -> None:
        await waiter.make()
        story = Story(system, clock)
        started = clock.now()
        job: dict[str, Any] = {**JOB, "colour": "red"} if scenario == "refused" else JOB
        execution = await waiter.start(job)
        await waiter.until_sent("intake")
        die_at(point, nth)
        if scenario == "refused":
            await self.refused(story, waiter, between, execution)
        elif scenario == "answered":
            await self.answered(story, waiter, execution)
            check_gaps(between, started)
        else:
            await self.stuck(story, system, waiter, execution)
        assert story.died == 1, "the point was not passed"
        assert set(between.answers().values()) == {1}

    async def answered(self, story: Story, waiter: Machine, execution: str) -> None:
        await story.take(took_in)
        for _ in range(7):
            await story.take(checked)
            story.pass_time(60)
        await story.take(finished)
        await story.take(sent)
        output = await waiter.output(execution)
        (callback,) = await story.roles.all()
        assert output["job_id"] == callback.job_id
        # Whoever was to remove the message removes it, and it makes no second job.
        story.pass_time(61)
        await story.take(lambda roles: roles.intake.run_once(), lambda taken: taken == intake.IntakePass())
        assert len((await story.roles.system.records.jobs.jobs(ACME, None, 10)).items) == 1
        assert await waiter.waiting("intake") == 0

    async def refused(self, story: Story, waiter: Machine, between: Between, execution: str) -> None:
        async def done(roles: Roles) -> bool:
            await roles.intake.run_once()
            return bool(between.taken("SendTaskFailure")) and await waiter.held("intake") == 0

        await story.take(done)
        assert (await waiter.ended(execution))["status"] == "FAILED"
        assert 1 <= len(await waiter.letters(f"{waiter.name}-intake-dead-letters")) <= 2

    async def stuck(self, story: Story, system: System, waiter: Machine, execution: str) -> None:
        await story.take(took_in)
        story.pass_time(system.settings.callback_stuck_after + 1)
        await story.take(sent)

        async def second(roles: Roles) -> bool:
            await roles.intake.run_once()
            return len(await roles.all()) == 2

        await waiter.until_sent("reprocess")
        await story.take(second)
        jobs = (await system.records.jobs.jobs(ACME, None, 10)).items
        (new,) = [job for job in jobs if job.state not in ENDED]
        assert [(job.state, job.run.reason_code) for job in jobs if job is not new] == [("cancelled", "replaced")]
        await story.roles.ingest(new.job_id)
        await story.roles.finish(new.job_id)
        await story.take(sent)
        assert (await waiter.output(execution))["counts"]["succeeded"] == 3


class TestCalls:
    """What Step Functions answers, and what becomes of it."""

    @pytest.fixture(autouse=True)
    async def waiting(self, waiter: Machine, system: System) -> None:
        await waiter.make()
        self.execution = await waiter.start(JOB)
        await waiter.until_sent("intake")
        self.roles = Roles(system)
        await self.roles.take_in()

    async def ended(self, clock: JumpingClock) -> Callback:
        await self.roles.finish((await self.roles.only()).job_id)
        await self.roles.notifier.run_once()
        for _ in range(20):
            await self.roles.callbacks.run_once()
            callback = await self.roles.only()
            if callback.status in (CallbackStatus.SENT, CallbackStatus.TIMED_OUT):
                return callback
            clock.advance(300)
        raise AssertionError(callback)

    @pytest.mark.parametrize(
        "befalls", [["throttle"] * 4, ["AccessDeniedException"], ["error"], ["reset"], ["error", "throttle"]]
    )
    async def test_an_answer_is_sent_until_it_was_taken_and_heard_once(
        self, clock: JumpingClock, between: Between, waiter: Machine, befalls: list[str]
    ) -> None:
        between.faults["SendTaskSuccess"] = list(befalls)
        callback = await self.ended(clock)
        assert callback.status is CallbackStatus.SENT
        assert set(between.answers().values()) == {1}
        said = {call.said["output"] for call in between.calls if call.operation == "SendTaskSuccess"}
        assert len(said) == 1, "every try says the same"
        await waiter.output(self.execution)

    @pytest.mark.parametrize("code", ["TaskTimedOut", "TaskDoesNotExist", "InvalidToken"])
    async def test_when_nobody_waits_that_is_the_end_of_it(
        self, clock: JumpingClock, between: Between, code: str
    ) -> None:
        between.faults["SendTaskSuccess"] = [code, code]
        assert (await self.ended(clock)).status is CallbackStatus.TIMED_OUT
        assert between.faults["SendTaskSuccess"] == [code], "it was sent once"
        (row,) = await self.roles.rows()
        assert (row.due_at, callback_of(row).token) == (None, "")
        # The row goes by itself.
        clock.advance(self.roles.system.settings.callback_log_seconds + 1)
        await self.roles.system.records.access.purge_expired(10)
        assert await self.roles.rows() == []

    async def test_heartbeats_that_are_refused_come_again_soon(self, clock: JumpingClock, between: Between) -> None:
        between.faults["SendTaskHeartbeat"] = ["throttle", "error", "throttle"]
        for _ in range(4):
            await self.roles.callbacks.run_once()
            clock.advance(10)
        # That which was answered by an error was heard.
        assert len(between.taken("SendTaskHeartbeat")) == 2
        assert (await self.roles.only()).heartbeat_at is not None

    async def test_a_heartbeat_that_nobody_waits_for_ends_it(self, clock: JumpingClock, between: Between) -> None:
        between.faults["SendTaskHeartbeat"] = ["TaskTimedOut"]
        assert (await self.roles.callbacks.run_once()).timed_out == 1
        # What the outbox says later changes nothing.
        await self.roles.finish((await self.roles.only()).job_id)
        await self.roles.answer()
        assert (await self.roles.only()).status is CallbackStatus.TIMED_OUT
        assert between.answers() == {}


class TestSeals:
    def test_a_secret_opens_under_its_name_and_key_only(self) -> None:
        seals = Seals([b"k" * 32])
        sealed = seals.close("token", "acme/job_1.0")
        assert "token" not in sealed
        assert seals.open(sealed, "acme/job_1.0") == "token"
        assert seals.close("token", "acme/job_1.0") == sealed
        assert seals.close("token", "acme/job_2.0") != sealed
        assert seals.open(sealed, "acme/job_2.0") is None
        assert Seals([b"x" * 32]).open(sealed, "acme/job_1.0") is None
        assert Seals([b"x" * 32, b"k" * 32]).open(sealed, "acme/job_1.0") == "token"
        for wrong in ("", "x", "é", sealed[:-4], sealed[:10] + "AAAA" + sealed[14:]):
            assert seals.open(wrong, "acme/job_1.0") is None

    async def test_a_key_that_was_rotated_still_opens_and_one_that_is_gone_loses_nothing(
        self, tmp_path: Path, waiter: Machine, between: Between, clock: JumpingClock
    ) -> None:
        await waiter.make()
        given = {"data": tmp_path / "keys", **waiter.settings(between)}
        old, new = "o" * 32, "n" * 32
        execution = await waiter.start(JOB)
        await waiter.until_sent("intake")
        async with open_system(Settings.load({}, signing_key=old, **given), clock) as system:
            await Roles(system).take_in()
        async with open_system(Settings.load({}, signing_key=new, **given), clock) as system:
            # Not known: it waits for whoever knows it.
            assert (await Roles(system).callbacks.run_once()).later == 1
        clock.advance(60)
        async with open_system(Settings.load({}, signing_key=new, previous_signing_key=old, **given), clock) as system:
            roles = Roles(system)
            assert (await roles.callbacks.run_once()).heartbeats == 1
            await roles.finish((await roles.only()).job_id)
            await roles.answer()
        await waiter.output(execution)

    async def test_a_row_that_was_moved_is_of_no_use(self, system: System, waiter: Machine, between: Between) -> None:
        await waiter.make()
        await waiter.start(JOB)
        await waiter.until_sent("intake")
        roles = Roles(system)
        await roles.take_in()
        (row,) = await roles.rows()
        assert system.step_functions is not None
        told = await system.step_functions.heartbeat(callback_of(row).token, seal_name(row).replace("acme", "other"))
        assert told is CallOutcome.LATER
        assert between.calls == []


@pytest.mark.parametrize(
    "point",
    [
        "intake.job.after",
        "accept.after",
        "queue.receive.after",
        "recorder.flush.before",
        "recorder.flush.after",
        "callback.answer.after",
        "notify.told.after",
        "callback.heartbeat.after",
        "callback.sent.after",
        "callback.record.before",
    ],
)
async def test_the_process_is_killed(
    children: Forks, place: Path, waiter: Machine, between: Between, point: str
) -> None:
    async def run(crash_at: str | None) -> int:
        return await asyncio.to_thread(children.run, place, settings=waiter.settings(between), crash_at=crash_at)

    await waiter.make()
    execution = await waiter.start(JOB)
    assert await run(f"{point}:1") == -signal.SIGKILL, (place / "log").read_text()
    running = asyncio.create_task(run(None))
    try:
        output = await waiter.output(execution)
        # The answer is written down, too.
        await until(lambda: _shown(place), lambda shown: shown == ["callback_sent"])
    finally:
        (place / "end").touch()
        assert await running == 0, (place / "log").read_text()
    assert output["counts"] == {"succeeded": 3, "failed": 0, "cancelled": 0, "unchanged": 0}
    assert set(between.answers().values()) == {1}


async def _shown(place: Path) -> list[str]:
    path = place / "shown"
    return json.loads(path.read_text()) if path.exists() else []
