"""A process that has a job told of, or made by a schedule, unless it is killed in it.

What the receiver of the webhooks gets is a line in DIRECTORY/received before it is answered, every crash point that is
passed one in DIRECTORY/passed. A run finds what the last one made and goes on, as a client does that sends the same
requests until it has an answer.
"""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from conveyor import faults
from conveyor.accept import scheduler as scheduling
from conveyor.accept.schedules import SCHEDULE, ScheduleChange, Schedules, ScheduleSpec, schedule_of
from conveyor.accept.spec import JobSpec
from conveyor.clock import SystemClock
from conveyor.embedded import Embedded
from conveyor.errors import IdempotencyInFlight, NotFound, UploadConflict
from conveyor.jobs import active_jobs
from conveyor.jobs.idempotency import Accepted, IdempotentRequest
from conveyor.lists.uploads import Uploads, UploadSpec
from conveyor.model import Backoff, Job, JobId, JobKind
from conveyor.notify import deliverer, progress_notifier
from conveyor.notify import dispatcher as notify
from conveyor.notify.deliveries import DELIVERY, Deliveries
from conveyor.notify.webhooks import WebhookChange, Webhooks, WebhookSpec
from conveyor.settings import Settings
from conveyor.states import ENDED
from conveyor.system import System, open_system
from tests.faults import child
from tests.faults.child import LIST, TENANT, TOTAL, Scripted, listening
from tests.support.receiver import Told
from tests.support.target_site import answer, read_request

SCENARIOS = (
    "webhooks",  # an endpoint, and a URL that the job names; then they are asked for again, rotated and removed
    "schedule",  # a job with its tasks
    "schedule_list",  # one of an upload
)
# Yearly: there is one fire to make, and no second one in a test.
CRON = "0 0 1 1 *"


class LongAgo(SystemClock):
    """What is made by this clock has been due for months."""

    def now(self) -> float:
        return super().now() - 400 * 86_400


async def ask(send: Callable[[IdempotentRequest], Awaitable[Accepted]], key: str) -> Accepted:
    while True:
        try:
            return await send(IdempotentRequest("POST /v1", key, f"fingerprint of {key}"))
        except IdempotencyInFlight:
            await asyncio.sleep(0.005)


async def receive(directory: Path) -> tuple[asyncio.Server, str]:
    """A receiver in this process; it answers every second event at its second try only."""
    tries: dict[str, int] = {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError):
            while True:
                told = Told(await read_request(reader))
                tries[told.id] = tries.get(told.id, 0) + 1
                ok = len(tries) % 2 == 0 or tries[told.id] > 1
                names = ("webhook-id", "webhook-timestamp", "webhook-signature")
                line = {"path": told.seen.path, **{name: told.seen.headers[name] for name in names}, "ok": ok}
                with (directory / "received").open("a") as file:
                    file.write(json.dumps({**line, "body": told.seen.body.decode()}) + "\n")
                answer(writer, b"", 200 if ok else 500)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def job_spec(tasks: list[msgspec.Raw]) -> JobSpec:
    backoff = Backoff(base=0.001, jitter=False)
    return JobSpec(kind=JobKind.PYTHON, handler="scripted", chunk_size=10, backoff=backoff, tasks=tasks)


def tasks() -> list[msgspec.Raw]:
    return [msgspec.Raw(b"%d" % index) for index in range(TOTAL)]


async def ended(system: System, job_id: JobId) -> Job:
    while True:
        job = await system.records.jobs.job(TENANT, job_id)
        if job is not None and job.state in ENDED and not await system.records.jobs.unswept_jobs(1):
            return job
        await asyncio.sleep(0.003)


async def told(system: System) -> None:
    """Nothing is left to be passed on, or to be delivered."""
    documents, outbox, later = system.records.documents, system.records.outbox, system.clock.now() + 1e6
    while await outbox.undispatched(1) or await documents.due_documents(DELIVERY, later, 1):  # noqa: ASYNC110  (seen from outside)
        await asyncio.sleep(0.003)


async def webhooks(system: System, embedded: Embedded, directory: Path) -> None:
    server, url = await receive(directory)
    made = Webhooks(system)
    endpoint = await ask(lambda request: made.create(TENANT, WebhookSpec(f"{url}/endpoint"), request), "endpoint")
    secrets = directory / "secrets"
    secrets.write_text(json.loads(endpoint.body)["secret"])
    # Each process has its receiver on another port.
    await made.change(TENANT, endpoint.subject, WebhookChange(url=f"{url}/endpoint"))
    accepted = await ask(lambda request: embedded.submit.submit(TENANT, job_spec(tasks()), request), "job")
    async with embedded.running():
        await ended(system, JobId(accepted.subject))
        await told(system)
        page = await system.records.documents.documents(DELIVERY, TENANT, None, 1)
        await Deliveries(system).redeliver(TENANT, page.items[0].id)
        await told(system)
    again = await ask(lambda request: made.create(TENANT, WebhookSpec(f"{url}/gone", []), request), "gone")
    with suppress(NotFound):
        await made.remove(TENANT, again.subject)
    server.close()


async def schedule(system: System, embedded: Embedded, directory: Path, listed: bool) -> None:
    template: dict[str, Any] = {"kind": "python", "handler": "scripted", "chunk_size": 10}
    template["backoff"] = {"base": 0.001, "jitter": False}
    if listed:
        template["source"] = {"upload_id": await uploaded(system), "format": "jsonl"}
    else:
        template["tasks"] = list(range(TOTAL))
    past = dataclasses.replace(system, clock=LongAgo())
    spec = ScheduleSpec(CRON, msgspec.Raw(msgspec.json.encode(template)), name="yearly")
    accepted = await ask(lambda request: Schedules(past).create(TENANT, spec, request), "schedule")
    (directory / "schedule").write_text(accepted.subject)
    async with embedded.running():
        if not (directory / "removed").exists():
            while not (jobs := (await system.records.jobs.jobs(TENANT, None, 10)).items):  # noqa: ASYNC110
                await asyncio.sleep(0.003)
            await ended(system, jobs[0].job_id)
            await fired(system, accepted.subject)
            await Schedules(system).change(TENANT, accepted.subject, ScheduleChange(name="renamed"))
            (directory / "row").write_bytes((await Schedules(system).find(TENANT, accepted.subject)).body)
            (directory / "removed").touch()
        with suppress(NotFound):
            await Schedules(system).remove(TENANT, accepted.subject)


async def fired(system: System, schedule_id: str) -> None:
    while True:
        row = await system.records.documents.document(SCHEDULE, TENANT, schedule_id)
        if row is None or schedule_of(row).fires:
            return
        await asyncio.sleep(0.003)


async def uploaded(system: System) -> str:
    uploads = Uploads(system)
    spec = UploadSpec(len(LIST), sha256(LIST).hexdigest())
    answered = await ask(lambda request: uploads.promise(TENANT, spec, "{}/{}".format, request), "upload")
    upload_id, _, signature = json.loads(answered.body)["url"].partition("/")

    async def pieces() -> AsyncIterator[bytes]:
        yield LIST

    with suppress(UploadConflict):
        await uploads.fill(upload_id, signature, None, None, pieces())
    return upload_id


async def work(settings: Settings, directory: Path, scenario: str) -> None:
    async with open_system(settings) as system:
        embedded = Embedded(system, {JobKind.PYTHON: Scripted(scenario)})
        async with asyncio.timeout(60):
            if scenario == "webhooks":
                await webhooks(system, embedded, directory)
            else:
                await schedule(system, embedded, directory, scenario == "schedule_list")


def run(directory: Path, scenario: str, crash_at: str | None) -> None:
    assert scenario in SCENARIOS
    settings = Settings.load(
        {},
        sync_list_bytes=0,
        data=directory / "data",
        allow_private_targets=True,
        flush_seconds=0.002,
        idempotency_lease_seconds=0.02,
        # Longer than what was made long ago is old.
        idempotency_seconds=1000 * 86_400.0,
        webhook_timeout=0.5,
        webhook_retries=" ".join(["0.01"] * 50),
        webhook_concurrency=2,
        failure_notice_seconds=0.0,
    )
    faults.arm(listening(directory, crash_at))
    asyncio.run(work(settings, directory, scenario))


def prepare() -> None:
    child.prepare()
    deliverer._IDLE = notify._IDLE = 0.01
    deliverer._LEASE_MARGIN = 0.05
    progress_notifier._EVERY = 0.01
    active_jobs.FRESH_SECONDS = 0.0
    scheduling._EVERY = 0.01
    scheduling.LEASE_SECONDS = 0.3
    scheduling._LONGEST_PAUSE = 0.05
