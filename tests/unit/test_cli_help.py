"""The command line's help: every command has one, and showing it is quick because nothing heavy is imported."""

import subprocess
import sys

import pytest

COMMANDS = [
    [],
    ["run"],
    ["demo"],
    ["up"],
    ["submit"],
    ["jobs"],
    ["show"],
    ["watch"],
    ["results"],
    ["export"],
    ["invalid"],
    ["rerun"],
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
    ["doctor"],
    ["version"],
]
LISTING = [
    ["jobs"],
    ["show"],
    ["results"],
    ["invalid"],
    ["dead-letters"],
    ["dead-letters", "list"],
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


def conveyor(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _WITH_MODULES, *arguments], capture_output=True, text=True, check=False
    )


def test_every_command_is_tested_here() -> None:
    from conveyor.cli.app import app

    named = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    assert named == {command[0] for command in COMMANDS if command}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command) or "conveyor")
def test_help(command: list[str]) -> None:
    shown = conveyor(*command, "--help")
    assert shown.returncode == 0, shown.stderr
    assert "Usage: " + " ".join(["conveyor", *command]) in shown.stdout
    loaded = shown.stderr.partition("modules:")[2].split()
    assert not [name for name in loaded if name in HEAVY]
    if command in LISTING:
        assert "--json" in shown.stdout


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
