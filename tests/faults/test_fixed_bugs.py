"""The tests that guard against fixed bugs would find them again: each bug is planted, and its test must fail."""

import inspect
import re
import traceback
from typing import Any

import pytest
import structlog
from structlog.testing import LogCapture

from tests.faults.planted import Planted, all_planted

# A plant that no longer fits the code raises an error of its own, or cannot be called. The test then fails, too, and
# says nothing about the bug.
_DOES_NOT_FIT = re.compile(
    r"""/planted/\w+\.py",\ line\ \d+,\ in\ .*\n (?:\ {4}.*\n)* (?:\ *\|\ )?
    (?:AttributeError|ImportError|ModuleNotFoundError|NameError|TypeError|UnboundLocalError):\ .*
    |TypeError:\ \w+\.<locals>\.\w+\(\)\ .*""",
    re.VERBOSE,
)


class _Errors:
    """A structlog processor that keeps the tracebacks of what is logged."""

    def __init__(self) -> None:
        self.tracebacks: list[str] = []

    def __call__(self, logger: Any, method: str, event: Any) -> Any:
        if event.get("exc_info"):
            self.tracebacks.append(traceback.format_exc())
        return event


@pytest.fixture
def logged_errors(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tracebacks of all that is logged, also where a test captures the log for itself."""
    errors = _Errors()
    capture = LogCapture.__call__

    def keep_and_capture(self: LogCapture, logger: Any, method: str, event: Any) -> Any:
        return capture(self, logger, method, errors(logger, method, event))

    monkeypatch.setattr(LogCapture, "__call__", keep_and_capture)
    structlog.configure(processors=[errors, *structlog.get_config()["processors"]])
    return errors.tracebacks


@pytest.mark.parametrize("bug", all_planted().values(), ids=lambda bug: bug.name)
async def test_a_fixed_bug_is_caught_when_it_is_planted_again(
    bug: Planted, monkeypatch: pytest.MonkeyPatch, logged_errors: list[str]
) -> None:
    bug.plant(monkeypatch)
    with pytest.raises(bug.faults) as caught:
        outcome = bug.caught_by()
        if inspect.isawaitable(outcome):
            await outcome
    wrong = _DOES_NOT_FIT.search("\n".join([*logged_errors, *traceback.format_exception(caught.value)]))
    assert wrong is None, f"the plant no longer fits the code: {wrong[0]}"
    print(f"{bug.name}: {caught.type.__name__}: {str(caught.value)[:200]}")
