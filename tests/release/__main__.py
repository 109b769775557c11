"""`make release`: build the files of a release into dist/, and try the wheel on every Python of this machine."""

import json
import tempfile
from pathlib import Path

from tests.release import packages, trial


def main() -> None:
    wheel, sdist = packages.build(packages.DIST)
    packages.check(wheel, sdist)
    packages.describe(packages.DIST)
    version = packages.project()["version"]
    found = trial.pythons()
    for name, python in found.items():
        with trial.installed(python, wheel) as programs, tempfile.TemporaryDirectory(prefix="conveyor-try-") as place:
            figures = trial.try_out(programs, Path(place), version)
            print(json.dumps({"python": name, **figures}), flush=True)
    missing = [name for name in trial.VERSIONS if name not in found]
    if missing:
        print(f"Not tried, because it is not here: Python {', '.join(missing)}.")
    print(packages.sign_off(packages.DIST).read_text(), end="")


if __name__ == "__main__":
    main()
