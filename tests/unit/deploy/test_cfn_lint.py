"""The template is valid to the linter of CloudFormation."""

import subprocess
import sys
from pathlib import Path

import pytest

from conveyor.deploy.aws_stack import TEMPLATE


@pytest.mark.slow
def test_the_linter_has_nothing_to_say() -> None:
    linter = Path(sys.executable).with_name("cfn-lint")
    ended = subprocess.run(
        [linter, "--template", TEMPLATE, "--regions", "us-east-1", "eu-central-1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.stdout, ended.returncode) == ("", 0), ended.stdout
