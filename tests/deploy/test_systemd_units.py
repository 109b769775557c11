"""The systemd units: valid by systemd's own check where it is there, and made of commands and settings that exist."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from conveyor.settings import Settings
from tests.deploy.deployed_settings import DEPLOY, ROLES, is_command, loaded

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


def values(unit: Path, name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", unit.read_text(), re.MULTILINE)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    for unit in UNITS:
        # The only thing that this machine does not have.
        text = unit.read_text().replace("/opt/conveyor/bin/conveyor", "/bin/true").replace("=conveyor\n", "=root\n")
        (tmp_path / unit.name.replace("@.", "@work.")).write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", *map(str, sorted(tmp_path.iterdir()))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "conveyor" in line]
    assert ours == []


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_runs_a_command_with_little_power(unit: Path) -> None:
    [command] = values(unit, "ExecStart")
    program, argument, *flags = command.split()
    assert program == "/opt/conveyor/bin/conveyor"
    assert flags == (["--wait", "60"] if argument == "migrate" else [])
    assert all(is_command([each]) for each in (ROLES if argument == "%i" else {argument}))
    assert (values(unit, "User"), values(unit, "NoNewPrivileges"), values(unit, "ProtectSystem")) == (
        ["conveyor"],
        ["yes"],
        ["strict"],
    )
    if values(unit, "Type") != ["oneshot"]:
        assert values(unit, "KillMode") == ["mixed"]
        assert float(values(unit, "TimeoutStopSec")[0]) > Settings().drain_seconds


def test_the_settings_exist() -> None:
    text = (DEPLOY / "systemd" / "conveyor.env").read_text()
    assert loaded(dict(re.findall(r"^([A-Z_]+)=(.*)$", text, re.MULTILINE))).trusted_proxies == "127.0.0.1 ::1"
    shared = dict(re.findall(r"^(?:# )?([A-Z_]+)=(.*)$", text, re.MULTILINE))
    loaded({**shared, "CONVEYOR_SIGNING_KEY": "k" * 32})
