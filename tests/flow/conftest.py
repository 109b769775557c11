"""Every flow test is watched: a step of the event loop that is longer than the bound fails it."""

import os
from collections.abc import Iterator

import pytest
from _pytest.runner import runtestprotocol

from conveyor.read import list_order
from tests.support.loop_watch import LoopWatch

# Ten times the longest step of these tests on a quiet machine.
BOUND_SECONDS = 0.5

_BLOCKED = pytest.StashKey[bool]()


class LoopBlocked(AssertionError):
    """Nobody else got a turn for too long."""


@pytest.fixture(autouse=True)
def loop_watch(request: pytest.FixtureRequest) -> Iterator[LoopWatch]:
    with LoopWatch(BOUND_SECONDS) as watch:
        yield watch
    if os.environ.get("CONVEYOR_LOOP_STEPS"):
        print(f"LOOP {watch.longest.seconds:.3f} {request.node.nodeid} {watch.longest.where}")
    if watch.blocked:
        request.node.stash[_BLOCKED] = True
        said = "; ".join(f"{step.seconds:.2f} s at {step.where}" for step in watch.blocked)
        raise LoopBlocked(f"the event loop was blocked for more than {BOUND_SECONDS} s: {said}")


@pytest.fixture
def by_task_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an engine that does not store tasks by index."""
    monkeypatch.setattr(list_order, "by_index", lambda tasks, run: None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """A busy machine stops anybody for a while: a test with a step that was too long is run once more, alone in its
    process, and only if that has one too it counts."""
    if "loop_watch" not in getattr(item, "fixturenames", ()):
        return None
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    if item.stash.get(_BLOCKED, False) and all(report.passed for report in reports if report.when != "teardown"):
        del item.stash[_BLOCKED]
        item._initrequest()  # type: ignore[attr-defined]
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
