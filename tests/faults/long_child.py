"""A process that runs one job of long tasks, submitted or found again, until it is killed or the job has ended:

python -m tests.faults.long_child DIRECTORY [POINT:N]      the job is DIRECTORY/spec.json; die at the crash point
"""

import asyncio
import sys
from pathlib import Path

from conveyor.accept.spec import decode_spec
from conveyor.embedded import Embedded
from conveyor.jobs.idempotency import IdempotentRequest
from conveyor.model import JobId, TenantId
from conveyor.process import feeder, worker
from conveyor.settings import Settings
from conveyor.states import ENDED
from conveyor.system import open_system
from tests.faults.forks import die_with_parent
from tests.support.logs import be_plain

TENANT = TenantId("acme")


async def work(directory: Path, crash_at: str | None) -> None:
    settings = Settings.load(
        {},
        data=directory / "data",
        app="tests.support.handlers_app:handlers",
        allow_private_targets=True,
        # They would only stand by here, and the memory is to be that of the long task.
        fetchers=0,
        crash_at=crash_at,
        # A claim of a request whose process died is taken over at once.
        idempotency_lease_seconds=0.0,
    )
    async with open_system(settings) as system:
        embedded = Embedded(system)
        spec = decode_spec((directory / "spec.json").read_bytes())
        accepted = await embedded.submit.submit(TENANT, spec, IdempotentRequest("POST /v1/jobs", "once", "the same"))
        (directory / "job").write_text(accepted.subject)
        async with embedded.running():
            while (await embedded.job(TENANT, JobId(accepted.subject))).state not in ENDED:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


def prepare() -> None:
    worker._LOOK_FOR_RUNS = feeder._LONGEST_POLL = feeder._TRIAL_PAUSE = 0.02


def run(directory: Path, crash_at: str | None) -> None:
    asyncio.run(work(directory, crash_at))


if __name__ == "__main__":
    # Should the test be killed, this one goes too.
    die_with_parent()
    be_plain()
    prepare()
    run(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
