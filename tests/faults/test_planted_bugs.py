"""The harness is worth what it catches: each of these bugs, planted in the child, must make its checks fail.

A bug is looked for in a few runs of the crash harness. The same runs without it, with whatever net was removed for it
still missing, must pass: what is caught is the bug.
"""

import signal
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.faults import plants
from tests.faults.forks import Forks
from tests.faults.test_crashpoints import check
from tests.support.places import quick_place

CHILD = "tests.faults.child"
# Seconds after which a job is given up that waits for something that never comes; the right ones need a tenth of it.
PATIENCE = 2.5
# A machine may be slow, and that is no fault.
LONG_PATIENCE = 30.0


class Plant(NamedTuple):
    """A bug, in what it is planted, and the runs that are to show it: scenarios, each with a crash point or none."""

    bug: str
    runs: tuple[tuple[str, str | None], ...]
    # Nets that are removed, or circumstances that are made, with the bug and in the control.
    given: tuple[str, ...] = ()


def at(scenario: str, point: str, hits: tuple[int, ...] = (1, 2, 3)) -> tuple[tuple[str, str | None], ...]:
    return tuple((scenario, f"{point}:{nth}") for nth in hits)


BUGS = [
    Plant("latch_before_total", at("staged", "lifecycle.latch.after", (1,)), ("no_live_total",)),
    Plant("additive_total", at("staged", "lifecycle.latch.before", (1,)), ("no_live_total",)),
    Plant("unguarded_counter", (("doubled_steps", None),)),
    Plant("unguarded_flush", (("doubled", None),)),
    Plant("unconditional_end", (("doubled_steps", None),)),
    Plant("unconditional_flush", (("doubled", None),)),
    Plant("acknowledge_before_write", at("steps", "tasks.finish.before"), ("no_sweeper",)),
    Plant("acknowledge_before_flush", at("inline", "recorder.flush.between"), ("no_sweeper",)),
    Plant("partial_failure_ignored", (("staged", None),), ("picky_queue", "no_sweeper")),
    Plant("unfenced_checkpoint", (("stale", None),), ("no_sweeper",)),
    Plant("no_recheck_after_latch", (("staged", None),), ("late_latch", "no_sweeper")),
    Plant("completes_unlatched", (("staged", None), ("open", None)), ("slow_pipeline",)),
    Plant("references_before_rows", (("staged", None),), ("slow_pipeline", "no_sweeper")),
    Plant("checkpoint_before_enqueue", at("staged", "ingest.checkpoint.after"), ("slow_pipeline", "no_sweeper")),
    Plant("checkpoint_before_rows", at("staged", "ingest.checkpoint.after"), ("slow_pipeline",)),
    Plant("ids_of_the_attempt", at("staged", "ingest.put.after")),
    Plant("subject_of_the_attempt", at("steps", "accept.tasks.after")),
    Plant("answer_outside_create", at("inline", "accept.after", (1,))),
    Plant("notice_outside_move", at("steps", "lifecycle.move.after", (1,))),
    Plant("notice_outside_flush", at("inline", "recorder.flush.between", (1,))),
    Plant("body_after_reference", at("inline", "recorder.flush.after")),
]


async def fault_of(
    children: Forks, scenario: str, crash_at: str | None, planted: tuple[str, ...], patience: float
) -> str | None:
    """What the harness finds wrong with a run that dies once, if anything."""
    with quick_place() as place:
        status = children.run(place, scenario=scenario, crash_at=crash_at, planted=planted, patience=patience)
        if crash_at is not None and status == -signal.SIGKILL:
            status = children.run(place, scenario=scenario, planted=planted, patience=patience)
        if status != 0:
            return last_line(place)
        try:
            await check(place, scenario)
        except AssertionError as error:
            return f"check: {error}"
        return None


def last_line(place: Path) -> str:
    return "child: " + (place / "log").read_text().strip().rpartition("\n")[2]


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.bug)
async def test_a_planted_bug_is_caught(children: Forks, plant: Plant) -> None:
    for scenario, crash_at in plant.runs:
        fault = await fault_of(children, scenario, crash_at, (*plant.given, plant.bug), PATIENCE)
        if fault is not None:
            # A mistake in the plant itself is no catch.
            assert not fault.startswith(("child: AttributeError", "child: TypeError", "child: NameError")), fault
            print(f"{plant.bug}: {scenario} {crash_at}: {fault[:200]}")
            return
    pytest.fail(f"{plant.bug} is not caught in {len(plant.runs)} runs")


CONTROLS = sorted({(run, plant.given) for plant in BUGS for run in plant.runs}, key=str)


@pytest.mark.parametrize(("run", "given"), CONTROLS)
async def test_the_same_run_without_the_bug_passes(
    children: Forks, run: tuple[str, str | None], given: tuple[str, ...]
) -> None:
    assert await fault_of(children, *run, given, LONG_PATIENCE) is None


def test_there_are_enough() -> None:
    assert len({plant.bug for plant in BUGS}) >= 12
    named = {plant.bug for plant in BUGS} | {name for plant in BUGS for name in plant.given}
    assert named == set(plants.PLANTS), "a plant that no run has"
