"""The tests that guard against fixed bugs would find them again: each bug is planted, and its test must fail."""

import inspect

import pytest

from tests.faults.planted import Planted, all_planted


@pytest.mark.parametrize("bug", all_planted().values(), ids=lambda bug: bug.name)
async def test_a_fixed_bug_is_caught_when_it_is_planted_again(bug: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)
    with pytest.raises(bug.faults) as caught:
        outcome = bug.caught_by()
        if inspect.isawaitable(outcome):
            await outcome
    print(f"{bug.name}: {caught.type.__name__}: {str(caught.value)[:200]}")
