"""The machine, for as long as `make test` has time; `make soak` runs it for longer, from other seeds."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.machine.machine import Machine
from tests.machine.run import independent_examples, settings_of

EXAMPLES = 30


# A violation is made small before it is shown, which takes its time.
@pytest.mark.timeout(600)
def test_everything_ends_and_nothing_is_left() -> None:
    # The same examples each time: what a change breaks is then due to the change.
    chosen = settings(settings_of(EXAMPLES, shrink=True), derandomize=True)
    with independent_examples():
        run_state_machine_as_test(Machine, settings=chosen)
