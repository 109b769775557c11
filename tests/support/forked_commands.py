"""Commands of `conveyor`, each in a fork of one process that has imported it: most of what a short command takes is to
import. That each is quick to start by itself is seen to elsewhere (test_cli_help.py)."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_FILES = ("stdin", "stdout", "stderr")


class Commands:
    """The process that forks. It ends with its standard input, and so with the test process."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(environ), text=True
        )

    def run(
        self, arguments: Sequence[str], place: Path, environ: Mapping[str, str], given: str | None, patience: float
    ) -> subprocess.CompletedProcess[str]:
        """As subprocess.run does it, with what it said as text."""
        with self._lock, tempfile.TemporaryDirectory() as folder:
            files = [str(Path(folder) / name) for name in _FILES]
            Path(files[0]).write_text(given or "")
            request = {"arguments": list(arguments), "place": str(place), "environ": dict(environ), "files": files}
            pid = int(self._ask(request)["pid"])
            late = threading.Timer(patience, os.kill, (pid, signal.SIGKILL))
            late.start()
            status = int(self._answer()["status"])
            late.cancel()
            said = [Path(name).read_text() for name in files[1:]]
        return subprocess.CompletedProcess([*arguments], status, *said)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return dict(json.loads(self._process.stdout.readline()))


def _serve() -> None:
    # What most commands import at some time.
    import conveyor.client
    import conveyor.embedded  # noqa: F401
    from conveyor.cli.command_list import app  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _run(request)
        print(json.dumps({"pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"status": os.waitstatus_to_exitcode(status)}), flush=True)


def _run(request: dict[str, Any]) -> None:
    """In the fork: become the command."""
    os.chdir(request["place"])
    os.environ.clear()
    os.environ.update(request["environ"])
    for number, name in enumerate(request["files"]):
        file = os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(file, number)
        os.close(file)
    # The old one has read ahead.
    sys.stdin = os.fdopen(0, closefd=False)
    sys.argv = ["conveyor", *request["arguments"]]
    code = 1
    try:
        from conveyor.cli import main

        main(request["arguments"])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
