"""Which planted bugs the machine finds, after how many examples, and by what: `python -m tests.machine.table`.

Each bug of tests/faults/planted that is named here, or on the command line, is planted alone, and the machine runs from
some seeds until it violates something. `--all` takes every planted bug there is: most are not within the machine's
reach, and that shows what is.
"""

import argparse
import statistics
import sys

import pytest

from tests.faults.planted import Planted, all_planted
from tests.machine.run import Figures, Found, run
from tests.support.logs import be_plain

# What the machine must find.
WITHIN_REACH = (
    "all runners of a lane leave in one step",
    "a job whose concurrency is lowered stands still",
    "a fetcher keeps orders when it has no share of the lane",
    "reference_dropped_by_a_lane",
    "reference_dropped_by_a_remote_lane",
    "late_reference_keeps_its_slot",
    "passes_lost_with_a_paused_lane",
    "download_restarts_for_ever",
    "no_patience_with_an_upstream",
    "idle_close_over_a_batch",
)


def hunt(bug: Planted | None, seed: int, examples: int) -> tuple[Found | None, Figures]:
    """Run the machine with a bug in place, or with none."""
    figures = Figures()
    with pytest.MonkeyPatch.context() as patch:
        if bug is not None:
            bug.plant(patch)
        found = run(seed, examples, figures)
    if found is not None:
        print(f"{found.violation}\n{found.program}\n", file=sys.stderr, flush=True)
    return found, figures


def _line(name: str, bug: Planted | None, seeds: range, examples: int) -> str:
    found = [hunt(bug, seed, examples) for seed in seeds]
    hits = [hit for hit, _ in found if hit is not None]
    cpu = sum(figures.cpu for _, figures in found)
    if not hits:
        return f"| {name} | - | 0 of {len(found)} | {cpu:.0f} | |"
    middle = statistics.median(hit.examples for hit in hits)
    what = min(hits, key=lambda hit: hit.examples).violation.replace("\n", " ")[:160]
    return f"| {name} | {middle:g} | {len(hits)} of {len(found)} | {cpu:.0f} | {what} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="planted bugs; without any, those that the machine must find")
    parser.add_argument("--all", action="store_true", help="every planted bug")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--examples", type=int, default=600, help="at most, from each seed")
    chosen = parser.parse_args()
    be_plain()
    bugs = all_planted()
    names = list(bugs) if chosen.all else chosen.names or list(WITHIN_REACH)
    seeds = range(chosen.first, chosen.first + chosen.seeds)
    print("| Planted | Examples | Found from | CPU s | Violated |\n|---|---|---|---|---|", flush=True)
    for name in names:
        print(_line(name, bugs[name], seeds, chosen.examples), flush=True)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
