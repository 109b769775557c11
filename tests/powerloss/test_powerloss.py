"""The power-loss replay, for as long as `make test` has time; `make soak` tries more states, of other recordings."""

import pytest

from tests.powerloss.local_runs import recorded_runs
from tests.powerloss.recording import recorded
from tests.powerloss.run import check_answers, check_runs, check_states

pytestmark = pytest.mark.slow

# Of the moments of answers, with the loss of everything that was not synced, about one half; and any others.
SEED = 1
ANSWERS = 50
STATES = 110


@pytest.mark.timeout(600)
def test_all_that_clients_were_told_is_true_after_a_power_cut() -> None:
    figures = check_states(recorded(SEED), ANSWERS, STATES)
    print(figures)
    assert figures.states > (ANSWERS + STATES) // 2
    assert figures.torn > STATES // 4


@pytest.mark.parametrize("part", ["inline", "staged", "fetched", "added", "objects", "downloaded"])
def test_all_that_clients_were_told_about_one_job_is_true(part: str) -> None:
    """Bugs that are planted (tests/faults/planted/powerloss.py) are looked for in these."""
    check_answers(part)


@pytest.mark.timeout(300)
def test_a_run_ends_whole_or_can_be_resumed_after_a_power_cut() -> None:
    figures = check_states(recorded_runs(SEED), ANSWERS, STATES)
    print(figures)
    assert figures.states > STATES // 2
    assert figures.torn > STATES // 4


@pytest.mark.parametrize("outs", [["pages.zip"], ["pages"], ["mixed.zip"], ["pages.zip", "pages"], ["table.jsonl"]])
def test_a_run_of_one_form_ends_whole_or_can_be_resumed(outs: list[str]) -> None:
    """As above."""
    check_runs(*outs)
