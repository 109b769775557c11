"""Whoever pauses and resumes runs, however fast and how often: a run that was resumed ends in bounded time. A message
that is out of sight is visible after a lease at the latest, and then a worker comes for it."""

import asyncio
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.queue_fleets import ENGINES, open_fleet_on
from tests.support.resume_programs import LEASE, Program, on_fleet, on_simulated_sqs, programs

# No run has a queue of its own; one has; all have.
LIMITS = (0, 0, 1, 1000)


@pytest.fixture(autouse=True)
def _logs() -> Iterator[None]:
    """The simulation silences them."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(programs(), st.sampled_from(LIMITS))
def test_on_a_fleet_with_sqs(program: Program, queue_limit: int) -> None:
    assert on_simulated_sqs(program, queue_limit) == {}


@pytest.mark.slow
@pytest.mark.parametrize(("runs", "queue_limit"), [(300, 500), (520, 500), (520, 0)])
def test_more_runs_than_polls_and_queues(runs: int, queue_limit: int) -> None:
    """A process has 256 long polls, and 500 runs a queue of their own."""
    program = Program(workers=2, runs=[3] * runs, paused=runs // 2, is_early=True, moves=[], rest=30.0)
    assert on_simulated_sqs(program, queue_limit) == {}


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.parametrize("engine", ENGINES)
def test_on_each_queue(engine: str) -> None:
    async def run(program: Program) -> dict[str, str]:
        async with open_fleet_on(engine, lease_seconds=LEASE) as fleet:
            return await on_fleet(program, fleet)

    @settings(max_examples=6, suppress_health_check=list(HealthCheck))
    @given(programs(longest=8))
    def check(program: Program) -> None:
        assert asyncio.run(run(program)) == {}

    check()
