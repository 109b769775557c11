"""The machine, for as long as `make test` has time; `make soak` runs it for longer, from other seeds."""

import pytest
from hypothesis import settings

from tests.machine.machine import Machine
from tests.machine.run import settings_of

EXAMPLES = 100

Machine.TestCase.settings = settings(
    settings_of(EXAMPLES, shrink=True),
    # The same examples each time: what a change breaks is then due to the change.
    derandomize=True,
)
# A violation is made small before it is shown, which takes its time.
TestMachine = pytest.mark.timeout(600)(Machine.TestCase)
