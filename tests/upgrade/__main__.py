"""`python -m tests.upgrade`: the last release, or another version, beside and after the next one, under load, then a
rollback; a row of figures for each stack."""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.upgrade.scenarios import SCENARIOS
from tests.upgrade.versions import RELEASES, earlier, later, version_name

# Jobs that were accepted before the upgrade, while the later version runs (alone on SQLite, beside the earlier one
# elsewhere), and after the rollback; jobs that each version found whole, of which `newer` have an option that the
# earlier one does not know.
_COLUMNS = (
    *("before", "after", "both", "rolled back", "newer", "checked by earlier", "checked by later"),
    "passes of the earlier monitor",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.upgrade", description=__doc__)
    parser.add_argument(
        "--earlier", default=[*RELEASES][-1], help="The version before: a release, a commit, or a wheel."
    )
    parser.add_argument("--engine", choices=sorted(SCENARIOS), action="append", help="Default: all.")
    parser.add_argument("--seconds", type=float, default=10.0, help="How long each phase takes.")
    options = parser.parse_args()
    print("|", " | ".join(("engine", "earlier", *_COLUMNS)), "|\n|" + "---|" * (2 + len(_COLUMNS)), flush=True)
    with tempfile.TemporaryDirectory(prefix="conveyor-upgrade-") as folder:
        place = Path(folder)
        old, new = earlier(options.earlier, place), later(place)
        for engine in options.engine or SCENARIOS:
            (place / engine).mkdir()
            figures = SCENARIOS[engine](place / engine, old, new, options.seconds)
            shown = [str(figures.get(column, "")) for column in _COLUMNS]
            print("|", " | ".join((engine, version_name(options.earlier), *shown)), "|", flush=True)
            print(f"{engine}: {figures['kinds']}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
