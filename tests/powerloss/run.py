"""Runs the replay from a seed, and says what it finds."""

import random

from tests.powerloss.recording import recorded
from tests.powerloss.states import Figures, State, anywhere, at_answers, try_states

# Of the moments of answers of a small recording.
_FEW = 12
# On one disk of so many the power fails again.
_AGAIN = 20


def check_states(seed: int, answers: int, others: int) -> Figures:
    """Try some moments of answers, and some others. Raises Broken at the first state that is broken."""
    recording, figures = recorded(seed), Figures()
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


def replay(seed: int, states: int, figures: Figures, *, threads: bool = False) -> list[State]:
    """Record, and try so many states, one half moments of answers; print and return those that are broken."""
    recording = recorded(seed, threads=threads)
    told = at_answers(recording)
    chosen = random.Random(seed).sample(told, min(states // 2, len(told)))
    found = []
    chosen += anywhere(recording, states - len(chosen), seed)
    for state, broken in try_states(recording, chosen, figures, _AGAIN):
        found.append(state)
        print(f"powerloss, seed {seed}{', with threads' if threads else ''}, {state}: {broken}", flush=True)
    return found
