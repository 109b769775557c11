"""Settings as a file under deploy/ gives them to a process: names that exist, values that are valid."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from conveyor.cli.command_list import app
from conveyor.settings import PREFIX, Settings
from conveyor.system import check_shared_engines

DEPLOY = Path(__file__).parents[2] / "deploy"
# Every command that runs one role. The intake is for those who have queues to take jobs from.
ROLES = {"api", "work", "ingest", "sweep", "schedule", "monitor"}

_SECRET = "0123456789abcdef0123456789abcdef"


def interpolated(text: str) -> str:
    """A value of a compose file whose variables are unset, but for those that it asks for."""
    text = re.sub(r"\$\{[A-Z_]+:\?[^}]*\}", _SECRET, text)
    return re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", text)


def loaded(environment: Mapping[str, str]) -> Settings:
    """The settings of a process with these variables. Raises for an unknown name."""
    known = {PREFIX + field.upper() for field in Settings.__struct_fields__}
    assert {name for name in environment if name.startswith(PREFIX)} <= known
    settings = Settings.load({name: interpolated(value) for name, value in environment.items()})
    check_shared_engines(settings)
    return settings


def is_command(arguments: list[Any]) -> bool:
    """Whether the command line has a command of this name, which takes no other arguments."""
    return [str(argument) for argument in arguments][:1] == arguments and arguments[0] in _commands()


def _commands() -> set[str]:
    group: Any = typer.main.get_command(app)
    return set(group.commands)
