"""Which planted bugs the machine finds, after how many examples, and by what: `python -m tests.machine.table`.

Each bug of tests/faults/planted that is named here, or on the command line, is planted alone, and the machine runs from
some seeds until it violates something. With `--control` the last line is that of the same seeds without a bug, for as
many examples as the slowest find took. `--all` takes every planted bug there is: most are not within the machine's
reach, and that shows what is.
"""

import argparse
import re
import statistics
import sys

import pytest

from tests.faults.planted import Planted, all_planted
from tests.machine.run import Figures, Found, run
from tests.support.logs import be_plain

# What the machine must find.
WITHIN_REACH = (
    "all runners of a lane leave in one step",
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


def _line(name: str, hunts: list[tuple[Found | None, Figures]]) -> str:
    """Examples and what was violated are listed seed by seed."""
    hits = [hit for hit, _ in hunts if hit is not None]
    examples = ", ".join("-" if hit is None else str(hit.examples) for hit, _ in hunts)
    middle = f"{statistics.median(hit.examples for hit in hits):g}" if len(hits) == len(hunts) else "-"
    cpu = ", ".join(f"{figures.cpu:.0f}" for _, figures in hunts)
    violated = "; ".join(dict.fromkeys(_rule(hit) for hit in hits))
    return f"| {name} | {len(hits)} of {len(hunts)} | {examples} | {middle} | {cpu} | {violated} |"


def _rule(hit: Found) -> str:
    """What was violated, without the particulars."""
    return " ".join(re.sub(r"\b(job|run)_\w+", r"\1", hit.violation.removeprefix("Violation: ")).split())[:90]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="planted bugs; without any, those that the machine must find")
    parser.add_argument("--all", action="store_true", help="every planted bug")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--examples", type=int, default=600, help="at most, from each seed")
    parser.add_argument("--control", action="store_true", help="then the same seeds without a bug")
    chosen = parser.parse_args()
    be_plain()
    bugs = all_planted()
    names = list(bugs) if chosen.all else chosen.names or list(WITHIN_REACH)
    seeds = range(chosen.first, chosen.first + chosen.seeds)
    print("| Planted | Found from | Examples | Median | CPU s | Violated |\n|---|---|---|---|---|---|", flush=True)
    most = 0
    for name in names:
        hunts = [hunt(bugs[name], seed, chosen.examples) for seed in seeds]
        most = max([most, *(hit.examples for hit, _ in hunts if hit is not None)])
        print(_line(name, hunts), flush=True)
    if chosen.control:
        print(_line(f"none, {most} examples", [hunt(None, seed, most) for seed in seeds]), flush=True)


if __name__ == "__main__":
    main()
