"""Runs the machine from a seed, and says what it did and what it found."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture.engine import ConjectureRunner
from hypothesis.stateful import run_state_machine_as_test

from tests.machine.machine import Machine

STEPS = 20


class Figures(msgspec.Struct):
    """What examples did, together."""

    examples: int = 0
    steps: int = 0
    jobs: int = 0
    tasks: int = 0
    exports: int = 0
    crashes: int = 0
    failed_calls: int = 0
    # Of the clock, and of the processor.
    hours: float = 0.0
    cpu: float = 0.0

    def add(self, machine: Machine) -> None:
        world = machine.world
        self.examples += 1
        self.steps += machine.steps
        if world is not None:
            self.jobs += len(world.pledges)
            self.tasks += len(world.targets.starts)
            self.exports += world.faults.seen["documents.create_documents"]
            self.crashes += len(world.crashed)
            self.failed_calls += len(world.faults.fired)
            self.hours += world.loop.now / 3600


class Found(NamedTuple):
    """A violation, the program that shows it, and how many examples it took."""

    violation: str
    program: str
    examples: int


def settings_of(examples: int, *, shrink: bool) -> settings:
    """The same for every use of the machine but for how long it runs."""
    return settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        print_blob=False,
        # An example is a fraction of a second, and most of it is not ours to draw.
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
    )


@contextmanager
def independent_examples() -> Iterator[None]:
    """Draw each example anew. Hypothesis follows each by up to five small changes of it, which is good where a property
    depends on values that are alike: here they do the same again, and take five parts of six of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConjectureRunner, "generate_mutations_from", lambda runner, data: None)
        yield


def run(
    seed: int,
    examples: int,
    figures: Figures,
    *,
    shrink: bool = False,
    without: frozenset[str] = frozenset(),
) -> Found | None:
    """Run so many examples, or up to the first that violates something."""
    before, began = figures.examples, time.process_time()
    first: list[int] = []

    class Counted(Machine):
        def teardown(self) -> None:
            try:
                super().teardown()
            except BaseException:
                self.broken = True
                raise
            finally:
                figures.add(self)
                if self.broken and not first:
                    first.append(figures.examples - before)

    Counted.__name__ = Counted.__qualname__ = "Machine"
    Counted.without = without
    Counted._hypothesis_internal_use_seed = seed  # type: ignore[attr-defined]  # what `@seed` sets, on a class
    try:
        with independent_examples():
            run_state_machine_as_test(Counted, settings=settings_of(examples, shrink=shrink))
    except Exception as error:
        program = "\n".join(getattr(error, "__notes__", []))
        return Found(f"{type(error).__name__}: {error}", program, first[0] if first else 0)
    finally:
        figures.cpu += time.process_time() - began
    return None
