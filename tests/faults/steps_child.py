"""Processes that have all roles of a system, for state machines to wait on. For each request on standard input one, in
a fork of its own: the modules are imported once. It dies where the request says, or ends when the file `end` is there;
what its callbacks are at is written to the file `shown`."""

import asyncio
import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from conveyor.accept import intake
from conveyor.callbacks import CALLBACK, callback_of
from conveyor.embedded import Embedded
from conveyor.engines.sqs import inbox
from conveyor.engines.step_functions import StepFunctionsClient
from conveyor.model import JobKind, TenantId
from conveyor.recover import callbacks
from conveyor.serve import notify
from conveyor.settings import Settings
from conveyor.system import open_system
from tests.belt import Echo
from tests.faults.child import be_quick

_LOOK_SECONDS = 0.02
_PR_SET_PDEATHSIG = 1

assert inbox and StepFunctionsClient


async def work(settings: Settings, place: Path) -> None:
    async with open_system(settings) as system, Embedded(system, dict.fromkeys(JobKind, Echo())).running():
        while not (place / "end").exists():
            rows = (await system.records.rows(CALLBACK, TenantId("acme"), None, 10)).items
            draft = place / "shown.new"
            draft.write_text(json.dumps([callback_of(row).status for row in rows]))
            draft.replace(place / "shown")
            await asyncio.sleep(_LOOK_SECONDS)


def be_quicker() -> None:
    be_quick()
    intake._IDLE = 0.02
    intake._VISIBILITY = 1.0
    callbacks._EVERY = 0.05
    callbacks._LONGEST_CLAIM = 1.0
    notify._IDLE = 0.02


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run_and_leave(request: dict[str, Any]) -> None:
    """In the fork: standard output belongs to the server."""
    die_with_parent()
    status = 1
    try:
        place = Path(request["directory"])
        log = os.open(place / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream in (1, 2):
            os.dup2(log, stream)
        environ = {"CONVEYOR_CRASH_AT": request["crash_at"]} if request["crash_at"] else {}
        settings = Settings.load(
            environ,
            data=place / "data",
            lease_seconds=1.0,
            idempotency_lease_seconds=0.5,
            flush_seconds=0.002,
            **request["settings"],
        )
        asyncio.run(work(settings, place))
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(status)


def main() -> None:
    die_with_parent()
    be_quicker()
    while line := sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            run_and_leave(json.loads(line))
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"status": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    main()
