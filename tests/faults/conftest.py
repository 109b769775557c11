"""Children that can be killed, and a place for what they do."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.faults.forks import Forks
from tests.support.places import quick_place


@pytest.fixture(scope="module")
def children(request: pytest.FixtureRequest) -> Iterator[Forks]:
    """They run the module that the test's own names as CHILD, with what it may have as CHILD_ENVIRON."""
    module = request.module
    with closing(Forks(module.CHILD, getattr(module, "CHILD_ENVIRON", None))) as started:
        yield started


@pytest.fixture
def start() -> "Iterator[Callable[..., subprocess.Popen[bytes]]]":
    """Starts processes that end with the test, whatever becomes of it."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(command: list[str], **how: Any) -> "subprocess.Popen[bytes]":
        started.append(subprocess.Popen(command, **how))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def place() -> Iterator[Path]:
    with quick_place() as directory:
        yield directory
