"""The command line's help: every command has one, and showing it is quick because nothing heavy is imported."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.support.bash_completion import completed

COMMANDS = [
    [],
    ["run"],
    ["demo"],
    ["up"],
    ["dashboard"],
    ["submit"],
    ["jobs"],
    ["show"],
    ["errors"],
    ["hosts"],
    ["watch"],
    ["results"],
    ["export"],
    ["invalid"],
    ["rerun"],
    ["duplicate"],
    ["cancel"],
    ["pause"],
    ["resume"],
    ["change"],
    ["delete"],
    ["schedules"],
    ["schedules", "list"],
    ["schedules", "create"],
    ["schedules", "show"],
    ["schedules", "pause"],
    ["schedules", "resume"],
    ["schedules", "delete"],
    ["webhooks"],
    ["webhooks", "list"],
    ["webhooks", "create"],
    ["webhooks", "show"],
    ["webhooks", "enable"],
    ["webhooks", "disable"],
    ["webhooks", "rotate"],
    ["webhooks", "delete"],
    ["webhooks", "deliveries"],
    ["webhooks", "redeliver"],
    ["webhooks", "secret"],
    ["dead-letters"],
    ["dead-letters", "list"],
    ["dead-letters", "redrive"],
    ["breakers"],
    ["breakers", "list"],
    ["breakers", "reset"],
    ["deploy"],
    ["deploy", "aws"],
    ["keys"],
    ["keys", "create"],
    ["keys", "list"],
    ["keys", "revoke"],
    ["api"],
    ["work"],
    ["ingest"],
    ["sweep"],
    ["schedule"],
    ["intake"],
    ["monitor"],
    ["migrate"],
    ["move-tasks"],
    ["backup"],
    ["restore"],
    ["verify"],
    ["doctor"],
    ["version"],
]
LISTING = [
    ["jobs"],
    ["show"],
    ["errors"],
    ["hosts"],
    ["results"],
    ["invalid"],
    ["dead-letters"],
    ["dead-letters", "list"],
    ["breakers"],
    ["breakers", "list"],
    ["keys", "list"],
    ["doctor"],
    ["schedules"],
    ["schedules", "list"],
    ["schedules", "show"],
    ["webhooks"],
    ["webhooks", "list"],
    ["webhooks", "deliveries"],
]
HEAVY = ("litestar", "apsw", "pyreqwest", "uvicorn", "uvloop", "structlog", "conveyor.system", "conveyor.embedded")

_WITH_MODULES = """
import sys
from conveyor.cli import main
try:
    main(sys.argv[1:])
finally:
    print("modules:", *sys.modules, file=sys.stderr)
"""


# All of them in one process: to start one for each takes longer than all else here.
_HELPS = """
import contextlib, io, json, sys
from conveyor.cli import main
shown = []
for command in json.loads(sys.argv[1]):
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            main([*command, "--help"])
    except SystemExit as ended:
        shown.append([ended.code or 0, said.getvalue()])
print(json.dumps([shown, list(sys.modules)]))
"""


@pytest.fixture(scope="module")
def helps() -> tuple[dict[str, list[Any]], list[str]]:
    """What each command shows, and the modules that are there after all of them."""
    given = [sys.executable, "-c", _HELPS, json.dumps(COMMANDS)]
    shown, modules = json.loads(subprocess.run(given, capture_output=True, text=True, check=True).stdout)
    return {" ".join(command): one for command, one in zip(COMMANDS, shown, strict=True)}, modules


def conveyor(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _WITH_MODULES, *arguments], capture_output=True, text=True, check=False
    )


def test_the_list_shows_what_each_command_says_of_itself() -> None:
    """`conveyor --help` imports no command: the list has the beginning of the help of each."""
    from conveyor.cli.command_list import app, make_app

    whole, stubs = typer.main.get_group(app), typer.main.get_group(make_app("--help"))
    said = {name: " ".join((command.help or "").split("\n\n")[0].split()) for name, command in whole.commands.items()}
    assert {name: command.help for name, command in stubs.commands.items()} == said
    for name in said:
        assert list(typer.main.get_group(make_app(name)).commands) == [name]


def test_every_command_is_tested_here() -> None:
    from conveyor.cli.command_list import app

    named = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    assert named == {command[0] for command in COMMANDS if command}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command) or "conveyor")
def test_help(helps: tuple[dict[str, list[Any]], list[str]], command: list[str]) -> None:
    code, shown = helps[0][" ".join(command)]
    assert code == 0
    assert "Usage: " + " ".join(["conveyor", *command]) in shown
    if command in LISTING:
        assert "--json" in shown


def test_help_imports_nothing_heavy(helps: tuple[dict[str, list[Any]], list[str]]) -> None:
    assert not set(helps[1]) & set(HEAVY)


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["run"], ["run", "list.txt"], ["jobs", "--nonsense"], ["up", "--port", "99999"], ["keys", "create"]],
    ids=" ".join,
)
def test_misuse_is_one_line_and_exit_2(arguments: list[str]) -> None:
    refused = conveyor(*arguments)
    lines = refused.stderr.partition("modules:")[0].splitlines()
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert len(lines) == 1
    assert lines[0].startswith("conveyor: ")
    assert lines[0].endswith("[usage]")


def test_no_command_shows_help_and_exits_2() -> None:
    shown = conveyor()
    assert shown.returncode == 2
    assert "Usage: conveyor" in shown.stdout


def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    programs = Path(sys.executable).parent
    assert completed(programs, tmp_path, "conveyor", "ver") == ["verify", "version"]
    assert completed(programs, tmp_path, "conveyor", "submit", "--on-ex") == ["--on-exhausted"]
