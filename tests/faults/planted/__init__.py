"""Bugs that were fixed, planted again one at a time: the test that guards against each must fail while it is there.

Each module here covers one area and lists its bugs in `PLANTED`. A plant puts the old code back with monkeypatch. Its
guard is an ordinary test without fixtures, or a function of one.
"""

import importlib
import pkgutil
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import pytest


class Planted(NamedTuple):
    """`caught_by` must raise one of `faults` with the bug in place. It passes without it: it is run as a test, too."""

    name: str
    plant: Callable[[pytest.MonkeyPatch], None]
    caught_by: Callable[[], Awaitable[None] | None]
    faults: tuple[type[BaseException], ...] = (AssertionError,)


def all_planted() -> dict[str, Planted]:
    """Every planted bug by its name."""
    bugs: dict[str, Planted] = {}
    for module in pkgutil.iter_modules(__path__):
        for bug in importlib.import_module(f"{__name__}.{module.name}").PLANTED:
            assert bug.name not in bugs, f"two planted bugs are named {bug.name}"
            bugs[bug.name] = bug
    return bugs
