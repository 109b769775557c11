"""All pairs: rows of values in which every two values of two factors stand together at least once."""

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

_CANDIDATES = 12

Pair = tuple[tuple[str, int], tuple[str, int]]


def all_pairs(factors: Mapping[str, Sequence[Any]], seed: int = 1) -> list[dict[str, Any]]:
    """Greedy: each row is the best of a few, each of which takes, factor by factor, the value that covers most."""
    chance = random.Random(seed)
    names = sorted(factors)
    open_pairs: set[Pair] = {
        ((one, i), (other, j))
        for one, other in combinations(names, 2)
        for i in range(len(factors[one]))
        for j in range(len(factors[other]))
    }
    rows = []
    while open_pairs:
        best: dict[str, int] = {}
        most: set[Pair] = set()
        for _ in range(_CANDIDATES):
            row = _candidate(names, factors, open_pairs, chance)
            covered = _pairs_of(row) & open_pairs
            if len(covered) > len(most):
                best, most = row, covered
        open_pairs -= most
        rows.append({name: factors[name][index] for name, index in best.items()})
    return rows


def _candidate(
    names: Sequence[str], factors: Mapping[str, Sequence[Any]], open_pairs: set[Pair], chance: random.Random
) -> dict[str, int]:
    # It begins with a pair that no row has yet, so that every row is worth its while.
    row = dict(chance.choice(sorted(open_pairs)))
    for name in chance.sample(names, len(names)):
        if name in row:
            continue
        gains = [
            (sum(_pair((name, index), given) in open_pairs for given in row.items()), chance.random(), index)
            for index in range(len(factors[name]))
        ]
        row[name] = max(gains)[2]
    return row


def _pairs_of(row: Mapping[str, int]) -> set[Pair]:
    return {_pair(one, other) for one, other in combinations(row.items(), 2)}


def _pair(one: tuple[str, int], other: tuple[str, int]) -> Pair:
    return (one, other) if one < other else (other, one)
