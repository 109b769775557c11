"""`python -m tests.everyday --seconds 60 --stack embedded`: the figures of one load."""

import argparse
import asyncio
import sys

from tests.everyday.load import Load, everyday
from tests.everyday.server import STACKS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.everyday", description="Everyday load on a real server.")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long new jobs are submitted")
    parser.add_argument("--stack", choices=STACKS, default="embedded")
    for name, default in (("seed", 1), ("burst", 30), ("clients", 24), ("largest", 10_000), ("jobs", None)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = vars(parser.parse_args())
    figures = asyncio.run(everyday(given.pop("stack"), Load(**given)))
    print(figures)
    return 1 if figures.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
