"""A small simulated fleet, as `python -m bench fleet` has it: what its workers cost, and that no message is lost."""

from collections.abc import Iterator

import pytest
import structlog

from bench import fleet_world

LIMIT = 1000
# So few that all other runs are on the shared queue.
FEW_QUEUES = 2


@pytest.fixture(autouse=True)
def _logs() -> Iterator[None]:
    """The simulation silences them."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def test_a_quiet_fleet_calls_for_its_workers_and_not_for_its_runs() -> None:
    few, many = (
        fleet_world.quiet("", workers=2, runs=runs, warm=70.0, seconds=60.0, queue_limit=LIMIT) for runs in (6, 60)
    )
    assert few["calls"]["redis look_for_runs"] == pytest.approx(8, abs=1)
    assert many["calls"]["redis look_for_runs"] == pytest.approx(few["calls"]["redis look_for_runs"], abs=1)
    assert many["units"]["sqs request"] < 60 / 10, "four polls of a run in a minute, and the sweeper"


def test_messages_that_arrive_at_a_worker_that_has_left_the_run_are_worked_on_there() -> None:
    with pytest.MonkeyPatch.context() as patch:
        # With more work than slots, workers leave runs whose messages are on their way.
        patch.setattr(fleet_world, "LOAD", 1.38)
        result = fleet_world.steady("", workers=4, runs=14, warm=20.0, seconds=20.0, queue_limit=FEW_QUEUES, dying=0)
    assert result["repeated"] == 0
    assert result["first_start"]["most"] < 4.0, "given back, they would wait for five seconds, and some again"


def test_tasks_of_workers_that_die_are_done_by_others() -> None:
    result = fleet_world.steady("", workers=4, runs=12, warm=5.0, seconds=5.0, queue_limit=LIMIT, dying=1)
    assert result["recovery"]["tasks"] > 0
    assert 30.0 < result["recovery"]["most"] < 60.0, "the lease, and a while"


def test_tenants_have_equal_parts_of_the_fleet() -> None:
    """Half of the runs are one tenant's, and every worker serves it: its part is that of a tenant with one run."""
    result = fleet_world.crowded("", workers=12, runs=96, warm=15.0, seconds=20.0, queue_limit=LIMIT)
    assert result["fairness"] > 0.95, result
    part = result["tasks"] / result["tenants"]
    assert result["big"] < 1.5 * part, "twice as much, if each worker knows of itself only"
    assert result["big"] > 0.4 * part, "nothing, if all workers had it wait at the same time"
