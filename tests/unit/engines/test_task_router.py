"""The router over task engines: it sends every call about a run to the engine that holds it."""

import inspect

import pytest

from conveyor.engines.task_router import TaskRouter
from conveyor.engines.tasks import Tasks

CALLS = [name for name, value in vars(Tasks).items() if inspect.iscoroutinefunction(value)]


@pytest.mark.parametrize("name", CALLS)
def test_every_call_is_routed(name: str) -> None:
    """What the router does not define itself goes to the configured engine, whichever holds the run."""
    assert name in vars(TaskRouter)
