"""A process that runs one job to its end, unless it is killed in it.

    python child.py DIRECTORY SCENARIO     run it here; CONVEYOR_CRASH_AT=name:n says where to die
    python child.py serve                  the same for each request on standard input, each in a fork of its own:
                                           the modules are imported once

A run submits the job, or finds it and goes on. Every crash point that is passed is a line in DIRECTORY/passed.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import structlog

# Imported here and not in open_system, so that a fork has them.
from conveyor import faults
from conveyor.accept.spec import JobSpec
from conveyor.accept.submit import Idempotency, Submit
from conveyor.ingest import pipeline
from conveyor.ingest.pipeline import Ingest
from conveyor.ingest.worker import Ingester
from conveyor.lifecycle import Lifecycle
from conveyor.model import Backoff, Job, JobId, JobKind, Outcome, ResultLayout, TaskError, TaskRef, TenantId
from conveyor.process import worker
from conveyor.process.bodies import Bodies
from conveyor.process.worker import Worker
from conveyor.recover import sweeper
from conveyor.recover.sweeper import Sweeper
from conveyor.serve.export import export_to_file
from conveyor.service import Service, run_until
from conveyor.settings import Settings
from conveyor.states import ENDED, TaskStatus
from conveyor.system import System, open_system

TENANT = TenantId("acme")
TOTAL = 200
POISON = 3
SCENARIOS = ("inline", "steps", "staged", "export", "poison")

# Small and quick, so that a short job takes every path several times.
pipeline.BATCH = 60
sweeper._EVERY = 0.02
worker._LONGEST_POLL = 0.02
worker._TRIAL_PAUSE = 0.01


def body_of(index: int) -> bytes:
    return f"body of {index} ".encode() * (index + 1)


def expected(scenario: str, index: int) -> tuple[TaskStatus, int, str | None]:
    """How a task must end: its status, attempts and error code."""
    if scenario == "poison" and index == POISON:
        return TaskStatus.FAILED, 1, "worker_lost"
    if index % 50 == 13:
        return TaskStatus.FAILED, 1, "result_not_json"
    return TaskStatus.SUCCEEDED, 2 if index % 10 == 7 else 1, None


class Scripted:
    """An executor whose outcomes follow from the index. One task takes the process with it."""

    def __init__(self, scenario: str) -> None:
        self._scenario = scenario

    def grain(self, job: Job) -> int:
        return 1

    def target(self, ref: TaskRef) -> str | None:
        return None

    async def attempt(self, job: Job, refs: Sequence[TaskRef]) -> list[Outcome]:
        return [self._outcome(ref) for ref in refs]

    async def close(self) -> None:
        pass

    def _outcome(self, ref: TaskRef) -> Outcome:
        if self._scenario == "poison" and ref.index == POISON:
            os.kill(os.getpid(), signal.SIGKILL)
        if ref.index % 50 == 13:
            return Outcome(TaskStatus.FAILED, error=TaskError("result_not_json", "for good"))
        if ref.index % 10 == 7 and ref.attempt == 1:
            return Outcome(TaskStatus.FAILED, error=TaskError("handler_raised", "at first"))
        return Outcome(TaskStatus.SUCCEEDED, body=body_of(ref.index), content_type="text/plain")


async def accepted(system: System, scenario: str) -> JobId:
    """Submit the job as a client does that asks again until it has an answer."""
    submit = Submit(
        settings=system.settings,
        clock=system.clock,
        records=system.records,
        tasks=system.tasks,
        queue=system.queue,
        whole=None if scenario == "steps" else system.whole,
    )
    layout = ResultLayout.OBJECT if scenario == "steps" else ResultLayout.PACKED
    backoff = Backoff(base=0.001, jitter=False)
    spec = JobSpec(kind=JobKind.PYTHON, handler="scripted", chunk_size=10, backoff=backoff, result_layout=layout)
    if scenario != "staged":
        tasks = [msgspec.Raw(b"%d" % index) for index in range(TOTAL)]
        key = Idempotency("POST /v1/jobs", "one and only", "its fingerprint")
        return (await submit.submit(TENANT, msgspec.structs.replace(spec, tasks=tasks), key)).job_id
    jobs = (await system.records.jobs(TENANT, None, 1)).items
    if jobs:
        return jobs[0].job_id
    source = f"uploads/{TENANT}/{system.clock.new_id('upload')}"
    await system.blobs.put(source, b"".join(b"%d\n" % index for index in range(TOTAL)))
    return (await submit.submit_staged(TENANT, spec, source, TOTAL)).job_id


def services(system: System, scenario: str) -> list[Service]:
    clock = system.clock
    lifecycle = Lifecycle(system.records, system.tasks, clock)
    runner = Worker(
        system.settings,
        clock,
        system.records,
        system.tasks,
        system.queue,
        system.coordinator,
        Bodies(system.blobs, clock),
        lifecycle,
        {JobKind.PYTHON: Scripted(scenario)},
    )
    ingest = Ingest(system.records, system.tasks, system.queue, system.coordinator, system.blobs, lifecycle, clock)
    cleaner = Sweeper(system.records, system.tasks, system.queue, lifecycle, clock)
    roles = (runner, Ingester(ingest, clock.new_id("ingester")), cleaner)
    return [Service(role, clock) for role in roles]


async def work(settings: Settings, directory: Path, scenario: str) -> None:
    async with open_system(settings) as system:
        job_id = await accepted(system, scenario)

        async def done() -> None:
            while True:
                job = await system.records.job(TENANT, job_id)
                assert job is not None
                if job.state in ENDED and not await system.records.ended_unswept(1):
                    return
                await asyncio.sleep(0.003)

        await run_until(services(system, scenario), lambda: asyncio.wait_for(done(), 60))
        if scenario == "export":
            job = await system.records.job(TENANT, job_id)
            assert job is not None
            await export_to_file(system.tasks, system.blobs, job, directory / "out.zip")


def listening(directory: Path, crash_at: str | None) -> Callable[[str], None]:
    """Write down each point, and die where it was said."""
    descriptor = os.open(directory / "passed", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    die: Callable[[str], None] = faults.kill_at(crash_at) if crash_at else lambda name: None

    def hook(name: str) -> None:
        os.write(descriptor, f"{name}\n".encode())
        die(name)

    return hook


def run(directory: Path, scenario: str, environ: Mapping[str, str]) -> None:
    assert scenario in SCENARIOS
    settings = Settings.load(environ, data=directory / "data", flush_seconds=0.002)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(),
        ]
    )
    sys.setswitchinterval(0.0005)
    faults.arm(listening(directory, settings.crash_at))
    asyncio.run(work(settings, directory, scenario))


def serve() -> None:
    for request in _requests():
        pid = os.fork()
        if pid == 0:
            _run_and_leave(request)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"status": os.waitstatus_to_exitcode(status)}), flush=True)


def _requests() -> Iterator[dict[str, str]]:
    while line := sys.stdin.readline():
        yield json.loads(line)


def _run_and_leave(request: dict[str, str]) -> None:
    """In the fork: standard output belongs to the server."""
    status = 1
    try:
        directory = Path(request["directory"])
        log = os.open(directory / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream in (1, 2):
            os.dup2(log, stream)
        environ = {"CONVEYOR_CRASH_AT": request["crash_at"]} if request["crash_at"] else {}
        run(directory, request["scenario"], environ)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        run(Path(sys.argv[1]), sys.argv[2], os.environ)
