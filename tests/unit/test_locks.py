"""The locks in requirements/: what a server runs on, and nothing that only builds it."""

import re
import subprocess
import sys
from pathlib import Path

LOCKS = Path(__file__).parents[2] / "requirements"

# Litestar requires these, for examples in OpenAPI documents. Conveyor's document has none.
UNUSED = {"polyfactory", "faker"}

WITHOUT_THEM = """
import sys
sys.modules.update(dict.fromkeys(["polyfactory", "faker"]))
import conveyor.embedded, conveyor.api.server
from conveyor.api import router
print(len(router._described().openapi_schema.to_schema()["paths"]))
"""


def packages(name: str) -> dict[str, str]:
    """The packages of a lock, each with what it comes by."""
    parts = re.split(r"^(?=[\w-]+==)", (LOCKS / name).read_text(), flags=re.MULTILINE)[1:]
    return {part.partition("==")[0]: part.partition("# via")[2] for part in parts}


def test_the_run_lock_holds_no_build_tool() -> None:
    build = packages("build.txt")
    assert "hatchling" in build
    assert build.keys() & packages("run.txt").keys() == set()
    assert build.keys() <= packages("dev.txt").keys()


def test_no_lock_names_a_host() -> None:
    for lock in LOCKS.glob("*.txt"):
        assert "://" not in lock.read_text()
        assert "index-url" not in lock.read_text()


def test_what_comes_by_litestar_alone_is_not_needed() -> None:
    run = packages("run.txt")
    comes_by = {name: set(re.findall(r"[\w-]+", run[name])) for name in UNUSED}
    assert comes_by == {"polyfactory": {"litestar"}, "faker": {"polyfactory"}}
    command = [sys.executable, "-c", WITHOUT_THEM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 30


def test_the_image_does_not_hold_it() -> None:
    dockerfile = (LOCKS.parent / "deploy/docker/Dockerfile").read_text()
    removed = re.findall(r"uninstall -qq -y (.*)$", dockerfile, re.MULTILINE)
    assert [set(names.split()) for names in removed] == [UNUSED]
