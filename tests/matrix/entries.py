"""The ways in: how jobs with some options are asked for, and what is said of options that may not be."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from conveyor.accept.option_changes import LIVE, RERUN
from conveyor.engines.queue import Outgoing, QueueName
from conveyor.model import JobKind
from tests.matrix.options import needed, options_of
from tests.matrix.world import INTAKE, World
from tests.support.make_jobs import ACME

_PAGE = 1000
# A scheduler takes a few fires of one tenant at a time.
_FIRE_STEPS = 400


class Case(NamedTuple):
    """A job to ask for: values by the path of their option."""

    number: int
    kind: JobKind
    chosen: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"case {self.number}"

    def options(self, site: str, only: frozenset[str] | None = None) -> dict[str, Any]:
        """As a request has them; for a way that takes only some, without the others."""
        found = options_of({**needed(self.kind, self.chosen), **self.chosen}, site)
        return {name: value for name, value in found.items() if only is None or name in only}

    def spec(self, site: str) -> dict[str, Any]:
        return {"kind": self.kind, "name": self.name, "tasks": inputs(self.kind, site), **self.options(site)}

    def plain_spec(self, site: str) -> dict[str, Any]:
        return Case(self.number, self.kind, {}).spec(site)


class Refusal(NamedTuple):
    """Why options may not be. By queue there is no code."""

    code: str | None
    message: str


# The id of a job, or why there is none.
Answer = str | Refusal
Enter = Callable[[World, Sequence[Case]], Awaitable[dict[int, Answer]]]


def inputs(kind: JobKind, site: str) -> list[Any]:
    """A task that succeeds, one that fails, and one that fails at first."""
    match kind:
        case JobKind.FETCH:
            return [f"{site}/ok", f"{site}/status/404", f"{site}/flaky/1/x", f"{site}/chain/3"]
        case JobKind.DOWNLOAD:
            return [f"{site}/file.bin", f"{site}/status/404"]
        case JobKind.EXPORT_DOWNLOAD:
            return [{"kind": "a"}]
        case JobKind.PYTHON:
            return ["works", "fails", "flaky"]


async def by_http(world: World, cases: Sequence[Case]) -> dict[int, Answer]:
    return {case.number: await _posted(world, case.spec(world.address)) for case in cases}


async def _posted(world: World, spec: dict[str, Any]) -> Answer:
    answer = await world.api.submit(spec)
    return str(answer.json["id"]) if answer.status == 201 else refusal(answer.status, answer.body)


async def by_schedule(world: World, cases: Sequence[Case]) -> dict[int, Answer]:
    """Each fires within a minute, and is removed when all have."""
    found: dict[int, Answer] = {}
    paths = []
    for case in cases:
        answer = await world.api.post("/v1/schedules", {"cron": "* * * * *", "job": case.spec(world.address)})
        if answer.status == 201:
            paths.append(f"/v1/schedules/{answer.json['id']}")
        else:
            code, message = refusal(answer.status, answer.body)
            assert message.startswith("In `job`: "), message
            found[case.number] = Refusal(code, message.removeprefix("In `job`: "))
    world.clock.advance(60.0)
    for _ in range(_FIRE_STEPS):
        found |= await _made(world, cases)
        if len(found) == len(cases):
            break
        await world.fleet.step()
    for path in paths:
        assert (await world.api.request("DELETE", path)).status == 204
    return found


async def _made(world: World, cases: Sequence[Case]) -> dict[int, Answer]:
    """The jobs of these cases that are there, by their names."""
    numbers = {case.name: case.number for case in cases}
    found: dict[int, Answer] = {}
    cursor = None
    while True:
        page = await world.fleet.system.records.jobs.jobs(ACME, cursor, _PAGE)
        found |= {numbers[job.name]: str(job.job_id) for job in page.items if job.name in numbers}
        if (cursor := page.next_cursor) is None:
            return found


async def by_intake(world: World, cases: Sequence[Case]) -> dict[int, Answer]:
    """As messages to the queue that jobs come in by."""
    queue = world.fleet.system.queue
    bodies = [json.dumps({"job": case.spec(world.address)}).encode() for case in cases]
    for body in bodies:
        assert await queue.send(QueueName(INTAKE), [Outgoing(body)]) == []
    while (await queue.depth(QueueName(INTAKE))).total:
        await world.fleet.step()
    found = await _made(world, cases)
    numbers = {case.name: case.number for case in cases}
    # A run that is past its deadline leaves one too.
    letters = [letter for letter in (await queue.dead_letters(None, _PAGE)).items if letter.queue == INTAKE]
    for letter in letters:
        name = json.loads(letter.body)["job"]["name"]
        found[numbers[name]] = Refusal(None, letter.reason)
    await queue.discard([letter.message_id for letter in letters])
    return found


async def by_rerun(world: World, cases: Sequence[Case]) -> dict[int, Answer]:
    """Of jobs that have ended, with all their tasks."""
    made = {case.number: await _posted(world, case.plain_spec(world.address)) for case in cases}
    await world.until_ended([str(job_id) for job_id in made.values()])
    found: dict[int, Answer] = {}
    for case in cases:
        body = {"select": "all", "options": case.options(world.address, frozenset(RERUN))}
        answer = await world.api.post(f"/v1/jobs/{made[case.number]}/rerun", body)
        found[case.number] = made[case.number] if answer.status == 202 else refusal(answer.status, answer.body)
    return found


async def by_change(world: World, cases: Sequence[Case]) -> dict[int, Answer]:
    """Of jobs that run; paused before, so that none ends before it is changed."""
    found: dict[int, Answer] = {}
    for case in cases:
        job_id = await _posted(world, case.plain_spec(world.address))
        path = f"/v1/jobs/{job_id}"
        assert (await world.api.post(f"{path}/pause")).status == 200
        body = json.dumps(case.options(world.address, frozenset(LIVE))).encode()
        answer = await world.api.request("PATCH", path, body=body)
        assert (await world.api.post(f"{path}/resume")).status == 200
        found[case.number] = job_id if answer.status == 200 else refusal(answer.status, answer.body)
    return found


ENTRIES: dict[str, Enter] = {
    "http": by_http,
    "schedule": by_schedule,
    "intake": by_intake,
    "rerun": by_rerun,
    "change": by_change,
}
_TAKEN: dict[str, frozenset[str]] = {"rerun": frozenset(RERUN), "change": frozenset(LIVE)}


# A schedule sets it by itself.
_NOT_BY_SCHEDULE = "changed_from"


def takes(entry: str, option: str) -> bool:
    """Whether an option can be given by this way at all."""
    return (entry not in _TAKEN or option in _TAKEN[entry]) and is_own(entry, option)


def is_own(entry: str, option: str) -> bool:
    """Whether jobs that come this way get the option from whoever makes them."""
    return (entry, option) != ("schedule", _NOT_BY_SCHEDULE)


def refusal(status: int, body: bytes) -> Refusal:
    assert status == 400, (status, body)
    problem = json.loads(body)
    return Refusal(problem["code"], problem["detail"])
