"""growth: what a list of ten million costs a task, beside one of one million.

The limit of a large list is a small one of the same run: ours against ours, and the bare loop against the bare loop, so
that a layout whose limit itself falls with the size shows, too. CPU time is what a busy machine changes least.
"""

from collections.abc import Sequence
from typing import Any

from bench.child import Setup
from bench.figures import Figure, cpu_each, details, rates

SMALL, LARGE = 1_000_000, 10_000_000


def run(setup: Setup) -> list[Figure]:
    small, large = setup.count(SMALL), setup.count(LARGE)
    sides: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for _ in range(setup.repeat):
        for count in (small, large):
            sides.setdefault(("ours", count), []).append(setup.ours("bench.ingest:ours", count=count))
            sides.setdefault(("bare", count), []).append(setup.bare("bench.ingest:bare", count=count))
    ours, bare = ([sides[side, count] for count in (large, small)] for side in ("ours", "bare"))

    def grown(name: str, unit: str, of: Sequence[list[float]], goal: tuple[str, float], **more: Any) -> Figure:
        return Figure("growth", name, unit, of[0], f"of {small:,}", of[1], goal, more)

    shares = [
        [mine / limit for mine, limit in zip(rates(ours_of), rates(bare_of), strict=True)]
        for ours_of, bare_of in zip(ours, bare, strict=True)
    ]
    sizes = [[each["bytes"] for each in side[0]] for side in (ours, bare)]
    return [
        grown(f"rows of {large:,}", "tasks/s", [rates(each) for each in ours], ("at least", 0.8), **details(ours[0])),
        grown(f"CPU time of {large:,}", "µs/task", [cpu_each(each) for each in ours], ("at most", 1.15)),
        grown(f"bare loop, {large:,}", "tasks/s", [rates(each) for each in bare], ("at least", 0.8)),
        grown(f"bare loop, CPU time of {large:,}", "µs/task", [cpu_each(each) for each in bare], ("at most", 1.15)),
        grown(f"share of the bare loop, {large:,}", "of 1", shares, ("at least", 0.9)),
        Figure("growth", f"disk of {large:,}", "bytes/task", sizes[0], "bare apsw loop", sizes[1], ("at most", 1.1)),
    ]
