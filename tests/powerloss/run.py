"""Runs the replay from a seed, and says what it finds."""

import random

from tests.powerloss.local_runs import recorded_runs
from tests.powerloss.recording import Recording, recorded
from tests.powerloss.states import Figures, State, anywhere, at_answers, try_states

# Of the moments of answers of a small recording.
_FEW = 12
_SOME = 40
# On one disk of so many the power fails again.
_AGAIN = 20
# Of the states of a seed one in so many is of `conveyor run`, the others of a server.
_RUNS = 4


def check_states(recording: Recording, answers: int, others: int) -> Figures:
    """Try some moments of answers, and some others. Raises Broken at the first state that is broken."""
    figures, seed = Figures(), recording.seed
    told = at_answers(recording)
    states = random.Random(seed).sample(told, min(answers, len(told))) + anywhere(recording, others, seed)
    for _, broken in try_states(recording, states, figures, _AGAIN):
        raise broken
    return figures


def check_answers(*parts: str, seed: int = 1) -> None:
    """Record parts only, and try a few moments of answers, spread over them. Raises Broken at the first state that is
    broken."""
    recording = recorded(seed, parts)
    told = at_answers(recording)
    for _, broken in try_states(recording, told[:: max(1, len(told) // _FEW)], Figures()):
        raise broken


def check_runs(*outs: str, seed: int = 1) -> None:
    """The same for commands that write these files, at any moments."""
    recording = recorded_runs(seed, outs)
    for _, broken in try_states(recording, at_answers(recording) + anywhere(recording, _SOME, seed), Figures()):
        raise broken


def replay(seed: int, states: int, figures: Figures, *, threads: bool = False) -> list[State]:
    """Record a server and commands, and try so many states, one half moments of answers; print and return those that
    are broken."""
    of_runs = states // _RUNS
    what = "server with threads" if threads else "server"
    found = _replay(recorded(seed, threads=threads), states - of_runs, figures, what)
    return found + _replay(recorded_runs(seed), of_runs, figures, "commands")


def _replay(recording: Recording, states: int, figures: Figures, what: str) -> list[State]:
    told, seed, found = at_answers(recording), recording.seed, []
    chosen = random.Random(seed).sample(told, min(states // 2, len(told)))
    chosen += anywhere(recording, states - len(chosen), seed)
    for state, broken in try_states(recording, chosen, figures, _AGAIN):
        found.append(state)
        print(f"powerloss, {what}, seed {seed}, {state}: {broken}", flush=True)
    return found
