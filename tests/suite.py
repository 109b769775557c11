"""`python -m tests.suite`: run every test, then those that failed again, alone.

Among ten thousand tests that share two cores, with real servers, one may fail because of the others. A failure counts
if there are more than two, or if the test fails alone, too. What passes alone every time is printed as unstable: it is
a bug of the test, or a rare one of the code, and wants a look.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Where pytest notes what failed (`cache_dir` in pyproject.toml).
FAILED = ROOT / ".cache" / "pytest" / "v" / "cache" / "lastfailed"

MAX_UNSTABLE = 2
TIMES_ALONE = 5
_TESTS_FAILED = 1


def main(arguments: Sequence[str]) -> int:
    FAILED.unlink(missing_ok=True)
    code = _pytest(*arguments)
    if code != _TESTS_FAILED:
        return code
    names = list(json.loads(FAILED.read_text())) if FAILED.exists() else []
    # A file that cannot be collected has no test to run again.
    if not 0 < len(names) <= MAX_UNSTABLE or not all("::" in name for name in names):
        return code
    for time in range(1, TIMES_ALONE + 1):
        print(f"\nRunning what failed alone, {time} of {TIMES_ALONE}", flush=True)
        if (alone := _pytest("-n", "0", *names)) != 0:
            return alone
    print("\nUnstable: failed among the others, passed alone every time.", *names, sep="\n  ")
    return 0


def _pytest(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
