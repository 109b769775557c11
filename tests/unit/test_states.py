"""The transition table, walked."""

from collections import deque

import pytest

from conveyor.states import ENDED, MOVES, TERMINAL, WORKABLE, RunState, TaskStatus, sources_of


def reachable(start: RunState) -> set[RunState]:
    seen, todo = {start}, deque([start])
    while todo:
        for target in MOVES[todo.popleft()] - seen:
            seen.add(target)
            todo.append(target)
    return seen


def test_every_state_has_its_moves() -> None:
    assert set(MOVES) == set(RunState)
    assert all(targets <= set(RunState) for targets in MOVES.values())


@pytest.mark.parametrize("state", RunState)
def test_no_state_moves_to_itself(state: RunState) -> None:
    assert state not in MOVES[state]


@pytest.mark.parametrize("state", RunState)
def test_sources_are_the_table_read_backwards(state: RunState) -> None:
    assert sources_of(state) == {source for source in RunState if state in MOVES[source]}


def test_ended_states_are_final_and_all_others_can_end() -> None:
    assert {RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED} == ENDED
    for state in RunState:
        if state is not RunState.FAILED:
            assert (MOVES[state] == frozenset()) == (state in ENDED)
        if state not in ENDED:
            assert reachable(state) >= ENDED, f"a run in {state} could hang for ever"
            assert {RunState.FAILED, RunState.CANCELLED} <= MOVES[state], f"a run in {state} can not be stopped"


def test_a_failed_run_can_only_be_ingested_further() -> None:
    """Its ingest is resumed; the store allows it only before the latch."""
    assert MOVES[RunState.FAILED] == {RunState.INGESTING}
    assert sources_of(RunState.INGESTING) == {RunState.PAUSED, RunState.FAILED}


def test_every_state_can_be_reached() -> None:
    assert reachable(RunState.INGESTING) == set(RunState)


def test_a_run_completes_only_from_running() -> None:
    assert sources_of(RunState.COMPLETED) == {RunState.RUNNING}


def test_workers_work_where_a_run_goes_on() -> None:
    assert {RunState.INGESTING, RunState.RUNNING} == WORKABLE
    assert not WORKABLE & ENDED


def test_a_task_has_one_state_that_is_not_terminal() -> None:
    assert set(TaskStatus) - TERMINAL == {TaskStatus.PENDING}


def test_stored_numbers_and_labels_do_not_change() -> None:
    """Rows hold the number, clients see the label."""
    assert {status.label: int(status) for status in TaskStatus} == {
        "pending": 0,
        "succeeded": 1,
        "failed": 2,
        "cancelled": 3,
    }
    assert {str(state) for state in RunState} == {
        "ingesting",
        "running",
        "paused",
        "completed",
        "failed",
        "cancelled",
    }
