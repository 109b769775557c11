"""Completion of the command line in bash, as `conveyor --install-completion` installs it."""

import os
import shlex
import subprocess
from pathlib import Path

from tests.support.up_process import environment


def completed(programs: Path, home: Path, *words: str) -> list[str]:
    """What bash offers for a line, once completion is installed into this home."""
    script = f"""
        conveyor --install-completion > /dev/null || exit
        . {home}/.bashrc
        COMP_WORDS=({" ".join(map(shlex.quote, words))}) COMP_CWORD={len(words) - 1}
        _conveyor_completion conveyor
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    settings = environment(HOME=str(home), PATH=f"{programs}{os.pathsep}{os.environ['PATH']}", PYTHONNOUSERSITE="1")
    done = subprocess.run(["bash", "-c", script], cwd=home, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.split())
