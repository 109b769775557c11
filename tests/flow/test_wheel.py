"""The built wheel in an environment of its own: what it asks for, and that the SDK works with nothing more."""

import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest

from tests.support.up_process import ROOT, Up, environment, running

SDK = {"msgspec", "pyreqwest"}
NAME = re.compile(r"[A-Za-z0-9._-]+")

USES = """
import sys
from conveyor import AsyncClient, Client, ConveyorError, task

@task("mine")
def mine(given): ...

with Client() as client:
    job = client.submit(range(1500), handler="tests.echo").wait(progress=True)
    print(job.ok, job.total, sum(1 for _ in job.results()), "run.completed" in [event.event for event in job.events()])
own = set(sys.stdlib_module_names) | {"__main__", "__mp_main__", "conveyor"}
print(*sorted({name.partition(".")[0] for name in sys.modules} - own))
"""


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(requirements: list[str], extra: str | None = None) -> set[str]:
    """The packages that are asked for: always, or by an extra."""
    found = set()
    for line in requirements:
        asked = re.search(r"extra == ['\"]([^'\"]+)['\"]", line)
        if (asked[1] if asked else None) == extra:
            match = NAME.match(line)
            assert match is not None
            found.add(plain(match[0]))
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(place)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [built] = place.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as opened:
        [name] = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(opened.read(name).decode()).get_all("Requires-Dist") or []


class Environment:
    """An empty environment with the wheel in it, and of all else only what is let in."""

    def __init__(self, place: Path, wheel: Path) -> None:
        venv.create(place, with_pip=False, symlinks=True)
        self.bin = place / "bin"
        [self._packages] = place.glob("lib/python*/site-packages")
        command = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install", "-qq", "--no-compile"]
        subprocess.run([*command, "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True)

    def let_in(self, names: set[str]) -> None:
        """Packages of ours, with what they need themselves."""
        for name in closure(names):
            package = metadata.distribution(name)
            for top in {file.parts[0] for file in package.files or () if file.parts[0] != ".."}:
                here, there = self._packages / top, Path(str(package.locate_file(top)))
                if there.exists() and not here.exists() and top != "__pycache__":
                    here.symlink_to(there)

    def run(self, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
        # No site-packages but its own, and no directory of ours on the path.
        return subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=self.bin,
            env=environment(**more, PYTHONNOUSERSITE="1"),
            capture_output=True,
            text=True,
            check=False,
        )


def closure(names: set[str]) -> set[str]:
    found: set[str] = set()
    left = set(names)
    while left:
        name = left.pop()
        found.add(name)
        asked = needed(metadata.requires(name) or [])
        left |= {other for other in asked if other not in found and installed(other)}
    return found


def installed(name: str) -> bool:
    """Not what is for other systems only."""
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


@pytest.fixture(scope="module")
def sdk(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    made = Environment(tmp_path_factory.mktemp("sdk") / "venv", wheel)
    made.let_in(SDK)
    return made


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    with running(tmp_path, "--app", "tests.stacks.app") as started:
        yield started


def test_the_wheel_asks_for_no_more_than_the_sdk_needs(requirements: list[str]) -> None:
    assert needed(requirements) == SDK
    assert needed(requirements, "server") >= {"litestar", "apsw", "typer", "uvicorn"}


@pytest.mark.parametrize("extra", ["aws", "postgres", "parquet", "otel"])
def test_every_other_extra_brings_the_server(requirements: list[str], extra: str) -> None:
    brings = needed(requirements, extra)
    assert "conveyor-jobs" in brings or brings > needed(requirements, "server")


def test_what_the_sdk_needs_brings_no_more_either() -> None:
    assert closure(SDK) == SDK


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"conveyor"}
    assert "conveyor/py.typed" in names
    kept = [path for path in (ROOT / "src" / "conveyor").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert {str(path.relative_to(ROOT / "src")) for path in kept} <= set(names)


def test_the_wheel_carries_its_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        [licence] = [name for name in opened.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
        assert opened.read(licence) == (ROOT / "LICENSE").read_bytes()


def test_the_sdk_alone(sdk: Environment, up: Up) -> None:
    """It makes a job of a staged list on a real server, and loads nothing of the server."""
    done = sdk.run("python", "-I", "-W", "error", "-c", USES, CONVEYOR_DATA=str(up.data))
    assert done.returncode == 0, done.stderr
    result, loaded = done.stdout.splitlines()
    assert result == "True 1500 1500 True"
    assert set(loaded.split()) == SDK


def test_without_the_server_the_command_says_what_to_install(sdk: Environment) -> None:
    for arguments in ([], ["--help"], ["run", "urls.txt"]):
        refused = sdk.run("conveyor", *arguments)
        assert (refused.returncode, refused.stdout) == (1, "")
        [line] = refused.stderr.splitlines()
        assert line.startswith("conveyor: ")
        assert "pip install 'conveyor-jobs[server]'" in line


def test_with_some_of_it_too(sdk: Environment, wheel: Path, tmp_path: Path) -> None:
    """Others bring typer and rich as well; what else is missing is missed when it is needed."""
    made = Environment(tmp_path / "venv", wheel)
    made.let_in(SDK | {"typer", "rich"})
    assert made.run("conveyor", "--help").returncode == 0
    (tmp_path / "urls.txt").write_text("http://example.com/\n")
    refused = made.run("conveyor", "run", str(tmp_path / "urls.txt"), "-o", str(tmp_path / "out.zip"))
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert "pip install 'conveyor-jobs[server]'" in refused.stderr


def test_with_the_server(wheel: Path, requirements: list[str], tmp_path: Path) -> None:
    """All that the extra asks for is enough: a run without any other package of ours."""
    made = Environment(tmp_path / "venv", wheel)
    made.let_in(SDK | {name for name in needed(requirements, "server") if installed(name)})
    helped = made.run("conveyor", "--help")
    assert helped.returncode == 0
    assert "Usage: conveyor" in helped.stdout
    (tmp_path / "words.txt").write_text("one\ntwo\n")
    (tmp_path / "app.py").write_text(
        'import conveyor\n\n@conveyor.task("up")\ndef up(word):\n    return word.upper()\n'
    )
    out = tmp_path / "out.zip"
    command = ["run", str(tmp_path / "words.txt"), "-o", str(out), "--app", "app", "--handler", "up"]
    done = made.run("conveyor", *command, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(out) as archive:
        bodies = sorted(archive.read(name) for name in archive.namelist() if name.startswith("bodies/"))
    assert bodies == [b'"ONE"', b'"TWO"']
