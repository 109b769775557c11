"""The throughput of hosts agrees with that of their run."""

import msgspec
import pytest

from conveyor.jobs.breakdowns import HostTally
from conveyor.read.breakdown_views import _tally_json
from conveyor.states import RunState
from tests.support.clocks import ManualClock
from tests.support.make_jobs import make_job


@pytest.mark.parametrize(("lasted", "rate"), [(0.25, 400.0), (30.0, 100.0)])
def test_a_short_run_is_as_long_as_it_was(lasted: float, rate: float) -> None:
    """Its outcomes were all written at once. Those of a longer run may be, too, of a host with few tasks."""
    clock = ManualClock()
    run = make_job(clock, state=RunState.COMPLETED).run
    run = msgspec.structs.replace(run, created_at=clock.now(), ended_at=clock.now() + lasted)
    tally = HostTally(succeeded=100, first_at=clock.now() + lasted, last_at=clock.now() + lasted)
    assert _tally_json(tally, run, clock.now() + 100)["rate"] == rate
