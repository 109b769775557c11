"""The loop of a command: how seldom a server collects garbage."""

import gc

import pytest

from conveyor.cli.loop import freeze_loaded_objects


def test_a_server_that_has_started_collects_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of small jobs make thousands of objects, none of which a collection would find."""
    frozen: list[bool] = []
    before = gc.get_threshold()
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    try:
        freeze_loaded_objects()
        youngest, *older = gc.get_threshold()
    finally:
        gc.set_threshold(*before)
    assert frozen == [True]
    assert youngest >= 20_000
    # Cycles are found in the end: memory is bounded.
    assert 0 < max(older) <= 10
