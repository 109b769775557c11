"""The nets with a long budget: `make soak`, or `python -m tests.soak --minutes 60`.

Each net gets an equal part of the time, runs from seeds that nobody has tried before, and prints its figures. Whatever
it finds is printed with the seed; `--seed` repeats it. Ends with 1 if anything was found.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from tests.machine.run import Figures, run
from tests.powerloss.run import replay
from tests.powerloss.states import Figures as PowerlossFigures
from tests.soaking import net
from tests.support.logs import be_plain

_EXAMPLES_AT_ONCE = 200
_STATES_AT_ONCE = 250

# Gets the seconds that it has and a first seed; prints what it finds, and returns how much that is.
Net = Callable[[float, int], int]


def machine(seconds: float, seed: int) -> int:
    """The state machine over the whole embedded system."""
    figures, found = Figures(), 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        hit = run(seed, _EXAMPLES_AT_ONCE, figures, shrink=True)
        if hit is not None:
            found += 1
            print(f"machine, seed {seed}, example {hit.examples}: {hit.violation}\n{hit.program}\n", flush=True)
        seed += 1
    shown = {name: round(value, 1) for name, value in msgspec.structs.asdict(figures).items()}
    print(f"machine: {found} violations; {shown}", flush=True)
    return found


def powerloss(seconds: float, seed: int) -> int:
    """Power cuts at any moment of a recorded system, and what is left of it."""
    figures = PowerlossFigures()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        # In turn on a loop, where the seed repeats it, and with threads, whose order it does not decide.
        replay(seed, _STATES_AT_ONCE, figures, threads=seed % 2 == 1)
        seed += 1
    shown = {name: round(value, 1) for name, value in msgspec.structs.asdict(figures).items()}
    print(f"powerloss: {figures.broken} violations; {shown}", flush=True)
    return figures.broken


# The state machine, power cuts, and real servers under troubles on each stack.
NETS: Mapping[str, Net] = {
    "machine": machine,
    "powerloss": powerloss,
    **{stack: partial(net.report, stack) for stack in net.STACKS},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="the first seed; without it, a random one")
    parser.add_argument("nets", nargs="*", choices=[*NETS, []], help="all of them, unless some are named")
    chosen = parser.parse_args()
    be_plain()
    seed = random.SystemRandom().randrange(1 << 30) if chosen.seed is None else chosen.seed
    nets = chosen.nets or list(NETS)
    found = sum(NETS[name](chosen.minutes * 60 / len(nets), seed) for name in nets)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
