"""What is run with one fault in it: each scenario is a few tasks and takes every path of one part of the system."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec

from conveyor.accept.spec import JobSpec
from conveyor.accept.submit import Submit
from conveyor.model import Backoff, Job, JobKind, ListFormat, Outcome, Source, TaskRef
from hashlib import sha256
from tests.faults.one_fault import Fault, Injector
from tests.faults.one_fault_world import State, World, open_world
from tests.flow.belt import failure, success
from tests.jobs import ACME

Scenario = Callable[[World], Awaitable[None]]

SOON = Backoff(base=1.0, jitter=False)


def raw(*values: Any) -> list[msgspec.Raw]:
    return [msgspec.Raw(msgspec.json.encode(value)) for value in values]


def job_spec(*values: Any, **more: Any) -> JobSpec:
    given = {"kind": JobKind.PYTHON, "handler": "anything", "tasks": raw(*values), "backoff": SOON, **more}
    return JobSpec(**given)


async def uneven(job: Job, ref: TaskRef) -> Outcome:
    """One task in five fails for good, one in five the first time only."""
    if ref.index % 5 == 3:
        return failure("result_not_json")
    if ref.index % 5 == 1 and ref.attempt == 1:
        return failure()
    return success(f"body of {ref.index}".encode())


async def staged(world: World) -> None:
    """A list with invalid lines, in two ranges; tasks that fail and tasks that are retried; packed bodies."""
    world.executor.act = uneven
    lines = [b'"input %d"' % number for number in range(9)]
    lines[2] = b"{not JSON"
    lines[7] = b"{neither"
    data = b"\n".join(lines) + b"\n"
    key = f"lists/{ACME}/list_1"
    await world.insist(lambda: world.system.blobs.put(key, data))
    source = Source(key, len(data), sha256(data).hexdigest(), ListFormat.JSONL)
    spec = job_spec(chunk_size=3, name="staged")
    submit = Submit(world.system)
    accepted = await world.ask("job", lambda request: submit.submit_as("job_" + "0" * 26, ACME, spec, source, request))
    world.start()
    await world.ended(accepted.subject)


SCENARIOS: dict[str, tuple[Scenario, dict[str, Any]]] = {
    "staged": (staged, {"ingest_range_bytes": 60}),
}


async def outcome_of(name: str, injector: Injector) -> State:
    """Run a scenario, and say all that it came to."""
    scenario, settings = SCENARIOS[name]
    async with open_world(injector, **settings) as world:
        await scenario(world)
        await world.settled()
        state = await world.end_state()
        state["left"] = await world.removed()
    state["held"] = world.held()
    return state


async def failure_of(name: str, fault: Fault, right: State) -> str | None:
    """What is wrong with a scenario in which one call failed; None if nothing is."""
    injector = Injector(fault)
    try:
        state = await outcome_of(name, injector)
    except Exception as error:
        return f"{name}, {fault}: {type(error).__name__}: {error}"
    wrong = list(differences(right, state))
    return f"{name}, {fault}: " + "; ".join(wrong) if wrong else None


def differences(right: Any, found: Any, path: str = "") -> Iterator[str]:
    if isinstance(right, dict) and isinstance(found, dict):
        for key in {**right, **found}:
            yield from differences(right.get(key), found.get(key), f"{path}/{key}")
    elif right != found:
        yield f"{path} is {found!r}, not {right!r}"
