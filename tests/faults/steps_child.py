"""A process that has all roles of a system, for state machines to wait on. It dies where it is told to, or ends when
the file `end` is there; what its callbacks are at is written to the file `shown`."""

import asyncio
import json
from pathlib import Path
from typing import Any

import botocore.session

from conveyor.embedded import Embedded
from conveyor.engines.sqs import inbox
from conveyor.engines.step_functions_client import StepFunctionsClient
from conveyor.jobs.callbacks import CALLBACK, callback_of
from conveyor.model import JobKind, TenantId
from conveyor.notify import callback_monitor as callbacks
from conveyor.notify import dispatcher as notify
from conveyor.notify import intake
from conveyor.settings import Settings
from conveyor.system import open_system
from tests.faults import child
from tests.servers.aws import REGION
from tests.support.working import Echo

_LOOK_SECONDS = 0.02

assert inbox and StepFunctionsClient


async def work(settings: Settings, place: Path) -> None:
    executor = Echo()
    if "heartbeat" in (settings.crash_at or ""):
        # A run that has ended before the first look at it gets none.
        executor.gate.clear()
    async with open_system(settings) as system, Embedded(system, dict.fromkeys(JobKind, executor)).running():
        while not (place / "end").exists():
            rows = (await system.records.documents.documents(CALLBACK, TenantId("acme"), None, 10)).items
            draft = place / "shown.new"
            draft.write_text(json.dumps([callback_of(row).status for row in rows]))
            draft.replace(place / "shown")
            await asyncio.sleep(_LOOK_SECONDS)


def prepare() -> None:
    child.prepare()
    # What they read is read then, and not in each child.
    for service in ("sqs", "stepfunctions"):
        botocore.session.get_session().create_client(service, REGION)
    intake._IDLE = 0.02
    intake._VISIBILITY = 1.0
    callbacks._EVERY = 0.05
    callbacks._LONGEST_CLAIM = 1.0
    notify._IDLE = 0.02


def run(directory: Path, settings: dict[str, Any], crash_at: str | None) -> None:
    given = Settings.load(
        {},
        data=directory / "data",
        crash_at=crash_at,
        lease_seconds=1.0,
        idempotency_lease_seconds=0.5,
        flush_seconds=0.002,
        **settings,
    )
    asyncio.run(work(given, directory))
