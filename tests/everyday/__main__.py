"""`python -m tests.everyday --seconds 60 --stack embedded`: the figures of one load."""

import argparse
import asyncio
import sys

from tests.everyday.load import everyday
from tests.everyday.server import STACKS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.everyday", description="Everyday load on a real server.")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long new jobs are submitted")
    parser.add_argument("--stack", choices=STACKS, default="embedded")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--largest", type=int, default=10_000, help="tasks of the largest job")
    parser.add_argument("--jobs", type=int, help="no more jobs than this")
    given = parser.parse_args()
    figures = asyncio.run(everyday(given.stack, given.seconds, given.seed, given.largest, given.jobs))
    print(figures)
    return 1 if figures.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
