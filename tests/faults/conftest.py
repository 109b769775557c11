"""Children that can be killed, and a place for what they do."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

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
def place() -> Iterator[Path]:
    with quick_place() as directory:
        yield directory
