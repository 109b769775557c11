"""`python -m tests.powerloss --states 5000`: power cuts, and the figures."""

import argparse
import sys

from tests.powerloss.run import replay
from tests.powerloss.states import Figures
from tests.support.logs import be_plain


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.powerloss", description="Power-loss replay.")
    parser.add_argument("--states", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1, help="of the first recording")
    parser.add_argument("--each", type=int, default=250, help="states for each recording")
    parser.add_argument("--threads", action="store_true", help="record in real time, with the threads of production")
    given = parser.parse_args()
    be_plain()
    figures, seed = Figures(), given.seed
    while figures.states < given.states:
        replay(seed, min(given.each, given.states - figures.states), figures, threads=given.threads)
        print(figures, flush=True)
        seed += 1
    return 1 if figures.broken else 0


if __name__ == "__main__":
    sys.exit(main())
