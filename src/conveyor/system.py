"""The composition root: Settings in, System out. The only module that imports concrete engines.

A URL in the settings selects the engine of each seam; without one, the seam is embedded. Seams with the same URL share
one engine: records, tasks and queue on one Postgres are one database, so one transaction accepts a small job.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from conveyor import faults
from conveyor.auth.durable_file import write_durably
from conveyor.auth.signing import signing_key
from conveyor.clock import Clock, SystemClock
from conveyor.coordination.ready_marks import (
    ReadyMarks,
    marking_accept,
    marking_flush,
    marking_jobs,
    marking_queue,
)
from conveyor.disk import sync
from conveyor.engines.blobs import Blobs
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.data_directory import make_data_directory, open_to_others, warn_if_open
from conveyor.engines.event_targets import EventTargets, NoEventTargets
from conveyor.engines.queue import Inbox, Queue, QueueInbox, QueueName
from conveyor.engines.records import AtomicAccept, AtomicFlush, Records
from conveyor.engines.source_buckets import NoSourceBuckets, SourceBuckets
from conveyor.engines.step_functions import StepFunctions
from conveyor.engines.task_router import ReachableJobs, TaskRouter, store_id
from conveyor.engines.tasks import Tasks
from conveyor.errors import ConveyorError, InvalidSetting
from conveyor.faults import crashpoint
from conveyor.settings import Settings, blob_directory
from conveyor.telemetry.seams import measured_engine, metered_records
from conveyor.telemetry.traces import tracing_to

EMBEDDED = ""
# The name of the embedded engine in CONVEYOR_OTHER_TASKS.
EMBEDDED_NAME = "embedded"

SEAMS = ("records", "tasks", "queue", "coordinator", "blobs")

# One server, a cluster, or the servers that Sentinels watch; each with TLS, too.
_REDIS = tuple(
    f"{name}{mode}" for mode in ("", "+cluster", "+sentinel") for name in ("redis", "rediss", "valkey", "valkeys")
)
# The URL schemes that each seam supports.
_SCHEMES = {
    "records": ("postgres", "dynamodb"),
    "tasks": ("postgres", "dynamodb"),
    "other_tasks": ("postgres", "dynamodb"),
    "queue": ("postgres", "sqs"),
    "coordinator": _REDIS,
    "blobs": ("s3", "gs", "az", "file"),
}
# Beside the database and the blobs, in the data directory.
_KEY_FILES = ("signing.key", "local.key")
# Queues that only Conveyor itself may send to.
_OWN_QUEUES = ("control", "overdue")
_EXTRAS = dict.fromkeys(("postgres", *_REDIS), "postgres")


@dataclass(frozen=True)
class System:
    """The engines that the settings select, and the inputs that all stages share."""

    settings: Settings
    clock: Clock
    records: Records
    tasks: Tasks
    queue: Queue
    coordinator: Coordinator
    blobs: Blobs
    # None unless records, tasks and queue are one database.
    atomic_accept: AtomicAccept | None
    atomic_flush: AtomicFlush | None
    # Marks the runs that have work. The queue and the records use it by themselves.
    ready_marks: ReadyMarks
    # Calls back with the name of each queue that any process sends to; None if the engine cannot notify.
    wakes: Callable[[Callable[[QueueName], None]], AbstractAsyncContextManager[None]] | None
    # Offers messages of runs that nobody in this process serves; None if the engine receives no such messages.
    offers: Callable[[Callable[[QueueName, bytes], bool]], AbstractContextManager[None]] | None
    # Signs upload links.
    signing_key: bytes
    # Whether large and open jobs are split over shards (settings.task_shard_count).
    sharded: bool
    # The id of the engine that takes the tasks of new jobs, and those of all open task engines by URL.
    task_store: str
    task_stores: Mapping[str, str]
    # None if Step Functions are not configured.
    step_functions: StepFunctions | None = None
    # Queues from which jobs are taken in, in order of preference.
    inboxes: Sequence[Inbox] = ()
    # Buckets of tenants from which lists are read.
    source_buckets: SourceBuckets = field(default_factory=NoSourceBuckets)
    # State machines and event buses that get the events of jobs.
    event_targets: EventTargets = field(default_factory=NoEventTargets)


def check_shared_engines(settings: Settings) -> None:
    """Raise InvalidSetting if this process would keep for itself what all processes on shared engines must have in
    common: the blobs, and the key that signs links."""
    if not any(_url(settings, seam) for seam in SEAMS if seam != "blobs"):
        return
    answers = {
        "CONVEYOR_BLOBS": (settings.blobs, "s3://…, or file:///DIR for a directory that all processes share"),
        "CONVEYOR_SIGNING_KEY": (
            settings.signing_key,
            "a secret of at least 32 characters, the same for all processes",
        ),
    }
    missing = [f"{name} ({form})" for name, (answer, form) in answers.items() if answer is None]
    if missing:
        raise InvalidSetting(
            f"Shared engines need {' and '.join(missing)}. Without it, each process has its own, and others cannot "
            "read its bodies or open its links."
        )


def exposed_data(settings: Settings) -> list[Path]:
    """The data directory and those of its files that other users can read."""
    return open_to_others(settings.data) if settings.data.exists() else []


@asynccontextmanager
async def open_system(settings: Settings, clock: Clock | None = None) -> AsyncIterator[System]:
    """Open every engine, yield the system, and close the engines."""
    clock = clock or SystemClock()
    if settings.crash_at is not None:
        faults.arm(faults.kill_at(settings.crash_at))
    make_data_directory(settings.data)
    warn_if_open(settings.data)
    async with opened_engines(settings, clock) as engines, AsyncExitStack() as stack:
        records = engines["records"]
        router, stores = await _task_router(settings, clock, engines, stack)
        one_database = records is engines["tasks"] is engines["queue"]
        key = signing_key(settings)
        await _traces(settings, stack)
        measured = {seam: _measured(settings, clock, seam, getattr(engines[seam], seam)) for seam in SEAMS}
        measured["tasks"] = router
        marks = ReadyMarks(measured["coordinator"], clock)
        stack.push_async_callback(marks.close)
        if (returned := getattr(engines["queue"], "returned", None)) is not None:
            # Ends before the marks do, with which it says what it gives back.
            await stack.enter_async_context(returned(marks.note_returned))
        measured["queue"] = marking_queue(measured["queue"], marks)
        jobs = ReachableJobs(marking_jobs(measured["records"].jobs, marks), router)
        measured["records"] = replace(measured["records"], jobs=jobs)
        atomic = partial(_atomic, settings, clock, records)
        yield System(
            settings=settings,
            clock=clock,
            **measured,
            atomic_accept=marking_accept(atomic("atomic_accept"), marks) if one_database else None,
            atomic_flush=marking_flush(atomic("atomic_flush"), marks) if one_database else None,
            ready_marks=marks,
            wakes=getattr(engines["queue"], "wakes", None),
            offers=getattr(engines["queue"], "offers", None),
            signing_key=key,
            # SQL engines have no partitions to spread writes over.
            sharded=settings.force_task_shards or _scheme(settings, "tasks") == "dynamodb",
            task_store=router.stores[0],
            task_stores=stores,
            step_functions=await _step_functions(settings, key, stack),
            inboxes=await _inboxes(settings, clock, measured["queue"], stack),
            source_buckets=await _source_buckets(settings, stack),
            event_targets=await _event_targets(settings, stack),
        )


async def _task_router(
    settings: Settings, clock: Clock, engines: dict[str, Any], stack: AsyncExitStack
) -> tuple[TaskRouter, dict[str, str]]:
    """The task engines: the configured one first, then those of CONVEYOR_OTHER_TASKS. Also their ids by URL."""
    routed: dict[str, Tasks] = {}
    stores: dict[str, str] = {}

    async def add(engine: Any, url: str) -> None:
        scheme = _scheme_of(url) or "sqlite"
        stores[url] = store = await store_id(engine.records.documents, scheme)
        routed.setdefault(store, measured_engine("tasks", engine.tasks, scheme, clock))

    await add(engines["tasks"], _url(settings, "tasks"))
    opened = {_url(settings, seam): engines[seam] for seam in SEAMS if hasattr(engines[seam], "tasks")}
    for url in _other_urls(settings):
        if url not in opened:
            opened[url] = await stack.enter_async_context(_other_tasks(settings, clock, url))
        await add(opened[url], url)
    return TaskRouter(routed), stores


def _other_urls(settings: Settings) -> list[str]:
    return [EMBEDDED if name == EMBEDDED_NAME else name for name in (settings.other_tasks or "").split()]


def _engine_urls(settings: Settings) -> list[tuple[str, str]]:
    """Each seam and its URL, and the URLs of the other task engines."""
    return [(seam, _url(settings, seam)) for seam in SEAMS] + [("other_tasks", url) for url in _other_urls(settings)]


def _other_tasks(settings: Settings, clock: Clock, url: str) -> AbstractAsyncContextManager[Any]:
    if url == EMBEDDED:
        from conveyor.engines.sqlite import SqliteEngine

        return SqliteEngine.open(settings.data, clock)
    return _opener(settings, clock, "other_tasks", url, {})


def _atomic(settings: Settings, clock: Clock, engine: Any, capability: str) -> Any:
    return measured_engine(capability, engine, _engine(settings, "records"), clock)


def _measured(settings: Settings, clock: Clock, seam: str, engine: Any) -> Any:
    name = _engine(settings, seam)
    return metered_records(engine, name, clock) if seam == "records" else measured_engine(seam, engine, name, clock)


def _engine(settings: Settings, seam: str) -> str:
    """The name of the engine behind a seam, for metrics."""
    if seam == "blobs" and blob_directory(settings) is not None:
        return "local"
    return _scheme(settings, seam) or "sqlite"


async def _traces(settings: Settings, stack: AsyncExitStack) -> None:
    """Send spans to the configured OTLP endpoint."""
    if settings.otlp_endpoint is None:
        return
    try:
        from conveyor.telemetry.spans import OtlpSink
    except ImportError as error:
        raise _extra_missing("OTLP_ENDPOINT", "otel", error) from None
    sink = await stack.enter_async_context(OtlpSink.open(settings.otlp_endpoint))
    stack.enter_context(tracing_to(sink, settings.trace_ratio))


@asynccontextmanager
async def opened_engines(settings: Settings, clock: Clock) -> AsyncIterator[dict[str, Any]]:
    """The engine of each seam. An engine that serves several seams is opened once."""
    async with AsyncExitStack() as stack:
        opened: dict[str, Any] = {}
        engines: dict[str, Any] = {}
        for seam in SEAMS:
            url = _url(settings, seam)
            if url not in opened:
                opened[url] = await stack.enter_async_context(_opener(settings, clock, seam, url, engines))
            engines[seam] = opened[url]
        yield engines


async def _step_functions(settings: Settings, key: bytes, stack: AsyncExitStack) -> StepFunctions | None:
    if settings.step_functions is None:
        return None
    try:
        from conveyor.engines.step_functions_client import StepFunctionsClient
    except ImportError as error:
        raise _extra_missing("STEP_FUNCTIONS", "aws", error) from None
    if settings.records is not None and settings.signing_key is None:
        raise InvalidSetting("CONVEYOR_STEP_FUNCTIONS needs CONVEYOR_SIGNING_KEY, the same for all processes")
    before = settings.previous_signing_key
    keys = [key] if before is None else [key, before.encode()]
    return await stack.enter_async_context(StepFunctionsClient.open(settings.step_functions, keys))


async def _inboxes(settings: Settings, clock: Clock, queue: Queue, stack: AsyncExitStack) -> list[Inbox]:
    inboxes: list[Inbox] = []
    for named in (settings.intake or "").split():
        if ":" not in named:
            if named in _OWN_QUEUES:
                raise InvalidSetting(f"CONVEYOR_INTAKE: the queue `{named}` is reserved. Use another name.")
            inboxes.append(QueueInbox(queue, QueueName(named)))
            continue
        try:
            from conveyor.engines.sqs.inbox import SqsInbox
        except ImportError as error:
            raise _extra_missing("INTAKE", "aws", error) from None
        inboxes.append(await stack.enter_async_context(SqsInbox.open(named, clock)))
    return inboxes


async def _source_buckets(settings: Settings, stack: AsyncExitStack) -> SourceBuckets:
    if settings.source_buckets is None:
        return NoSourceBuckets()
    try:
        from conveyor.engines.s3_source_buckets import S3SourceBuckets
    except ImportError as error:
        raise _extra_missing("SOURCE_BUCKETS", "aws", error) from None
    return await stack.enter_async_context(S3SourceBuckets.open(settings.source_buckets))


async def _event_targets(settings: Settings, stack: AsyncExitStack) -> EventTargets:
    if settings.event_targets is None:
        return NoEventTargets()
    try:
        from conveyor.engines.aws_event_targets import AwsEventTargets
    except ImportError as error:
        raise _extra_missing("EVENT_TARGETS", "aws", error) from None
    return await stack.enter_async_context(AwsEventTargets.open(settings.event_targets))


async def migrate(settings: Settings, clock: Clock) -> list[str]:
    """Create or update the tables, queues and buckets that the settings name. Returns which."""
    done = []
    async with AsyncExitStack() as stack:
        engines: dict[str, Any] = {}
        opened: dict[str, Any] = {}
        for seam, url in _engine_urls(settings):
            if url == EMBEDDED:
                continue
            if url in opened:
                engines[seam] = opened[url]
                continue
            if _scheme_of(url) == "postgres":
                from conveyor.engines.postgres import migrate as migrate_postgres

                await migrate_postgres(url)
            engine = await stack.enter_async_context(_opener(settings, clock, seam, url, engines))
            if hasattr(engine, "migrate"):
                await engine.migrate()
            engines[seam] = opened[url] = engine
            done.append(f"{seam}: {_shown(url)}")
    if any(url == EMBEDDED for _, url in _engine_urls(settings)) and await _rewritten(settings):
        done.append(f"database in {settings.data}: rewritten, so that it shrinks after deletes")
    return done


async def _rewritten(settings: Settings) -> bool:
    from conveyor.engines.sqlite.database import rewrite_database

    return await asyncio.to_thread(rewrite_database, settings.data)


class EmbeddedCopy(NamedTuple):
    """What a copy of the embedded engines holds: the database and all blobs."""

    files: int
    bytes: int
    # Whether a server was running meanwhile.
    is_live: bool


def copy_embedded(settings: Settings, place: Path) -> EmbeddedCopy:
    """Copy the embedded engines to a directory, also while a server uses them: the database as it is at one moment,
    then the blobs, then the keys. A second call brings the copy up to date."""
    from conveyor.engines.local_copy import copy_blobs
    from conveyor.engines.sqlite.online_copy import owned_if_free, snapshot

    blobs = blob_directory(settings)
    assert blobs is not None
    with owned_if_free(settings.data) as is_live:
        copy = place / "conveyor.db"
        crashpoint("backup.snapshot.before")
        snapshot(settings.data, copy)
        crashpoint("backup.snapshot.after")
        files, size = copy_blobs(blobs, place / "blobs")
        for name in _KEY_FILES:
            with suppress(FileNotFoundError):
                write_durably(place / name, (settings.data / name).read_text().strip())
        make_durable(copy)
        return EmbeddedCopy(files + 1, size + copy.stat().st_size, is_live)


def make_durable(path: Path) -> None:
    """Wait until a file, or the names in a directory, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


async def engine_findings(settings: Settings, clock: Clock) -> list[tuple[str, str | None]]:
    """The checks of every engine that has a URL: the name of each check, and what to fix, or None."""
    findings: list[tuple[str, str | None]] = []
    asked: dict[str, Any] = {}
    engines: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        for seam, url in _engine_urls(settings):
            if url in asked:
                continue
            asked[url] = None
            try:
                engine = await stack.enter_async_context(_opener(settings, clock, seam, url, engines))
            except ConveyorError as error:
                findings.append((f"{seam}: opens", error.message))
                continue
            engines[seam] = asked[url] = engine
            if url != EMBEDDED:
                findings += [(f"{seam}: {name}", problem) for name, problem in await engine.checks()]
        for seam, url in _engine_urls(settings):
            if seam in ("tasks", "other_tasks") and hasattr(asked[url], "records"):
                # The checks above say what is wrong with an engine that has no tables.
                with suppress(ConveyorError):
                    store = await store_id(asked[url].records.documents, _scheme_of(url) or "sqlite")
                    findings.append((f"{seam}: its id is {store}", None))
    return findings


def aws_region() -> str | None:
    """The region of the environment or of the profile. Raises ImportError without the extra for AWS."""
    from conveyor.engines.aws_session import default_region

    return default_region()


async def step_functions_findings(url: str) -> list[tuple[str, str | None]]:
    """The checks of Step Functions, in the same form."""
    try:
        from conveyor.engines.step_functions_client import StepFunctionsClient
    except ImportError as error:
        return [("step functions: opens", _extra_missing("STEP_FUNCTIONS", "aws", error).message)]
    try:
        async with StepFunctionsClient.open(url, []) as waiters:
            return [(f"step functions: {name}", problem) for name, problem in await waiters.checks()]
    except ConveyorError as error:
        return [("step functions: opens", error.message)]


def _opener(
    settings: Settings, clock: Clock, seam: str, url: str, engines: dict[str, Any]
) -> AbstractAsyncContextManager[Any]:
    scheme = _scheme_of(url)
    if url == EMBEDDED:
        return _embedded(settings, clock)
    if scheme not in _SCHEMES[seam]:
        forms = " or ".join(f"{form}://…" for form in _SCHEMES[seam] if not form.startswith(("rediss", "valkey")))
        raise InvalidSetting(
            f"CONVEYOR_{seam.upper()} must be {forms}, or empty for the embedded engine: {_shown(url)}"
        )
    try:
        return _OPENERS[scheme](settings, clock, url, engines)
    except ImportError as error:
        raise _extra_missing(seam.upper(), _EXTRAS.get(scheme, "aws"), error) from None


def check_database_present(settings: Settings) -> None:
    """Raise DatabaseUnusable if the embedded database is gone and its blobs are there."""
    from conveyor.engines.sqlite.soundness import check_present

    # With other records, the database may be younger than the blobs.
    if not _url(settings, "records"):
        check_present(settings.data / "conveyor.db", blob_directory(settings) or settings.data / "blobs")


@asynccontextmanager
async def _embedded(settings: Settings, clock: Clock) -> AsyncIterator[Any]:
    from conveyor.engines.local_blobs import LocalBlobs
    from conveyor.engines.sqlite import SqliteEngine

    # Another engine has the blobs if they have an address of their own.
    blobs = LocalBlobs(settings.data / "blobs") if settings.blobs is None else None
    if all(_url(settings, seam) for seam in SEAMS if seam != "blobs"):
        # Several processes share a directory of blobs: create and lock no database in it.
        yield SimpleNamespace(blobs=blobs)
        return
    check_database_present(settings)
    async with SqliteEngine.open(settings.data, clock) as engine:
        yield SimpleNamespace(
            records=engine.records,
            tasks=engine.tasks,
            queue=engine.queue,
            coordinator=engine.coordinator,
            blobs=blobs,
            accept_atomically=engine.accept_atomically,
            record_flush=engine.record_flush,
        )


def _postgres(_: Settings, clock: Clock, url: str, __: dict[str, Any]) -> AbstractAsyncContextManager[Any]:
    from conveyor.engines.postgres import PostgresEngine

    return PostgresEngine.open(url, clock)


def _dynamodb(_: Settings, clock: Clock, url: str, __: dict[str, Any]) -> AbstractAsyncContextManager[Any]:
    from conveyor.engines.dynamodb import DynamoEngine

    return DynamoEngine.open(url, clock)


def _sqs(settings: Settings, clock: Clock, url: str, engines: dict[str, Any]) -> AbstractAsyncContextManager[Any]:
    from conveyor.engines.sqs import SqsEngine

    # SQS cannot list a queue, so dead letters are documents.
    engine = engines.get("records")
    documents: Any = None if engine is None else engine.records.documents
    return SqsEngine.open(url, clock, documents, settings.run_queue_limit)


def _redis(_: Settings, clock: Clock, url: str, __: dict[str, Any]) -> AbstractAsyncContextManager[Any]:
    from conveyor.engines.redis import RedisEngine

    return RedisEngine.open(url, clock)


def _objects(_: Settings, clock: Clock, url: str, __: dict[str, Any]) -> AbstractAsyncContextManager[Any]:
    from conveyor.engines.object_blobs import ObjectEngine

    return ObjectEngine.open(url, clock)


def _directory(settings: Settings, _: Clock, __: str, ___: dict[str, Any]) -> AbstractAsyncContextManager[Any]:
    from conveyor.engines.directory_engine import DirectoryEngine

    directory = blob_directory(settings)
    assert directory is not None
    return DirectoryEngine.open(directory)


_OPENERS: dict[str, Callable[[Settings, Clock, str, dict[str, Any]], AbstractAsyncContextManager[Any]]] = {
    "postgres": _postgres,
    "dynamodb": _dynamodb,
    "sqs": _sqs,
    **dict.fromkeys(_REDIS, _redis),
    "s3": _objects,
    "gs": _objects,
    "az": _objects,
    "file": _directory,
}


def _extra_missing(setting: str, extra: str, error: ImportError) -> InvalidSetting:
    return InvalidSetting(
        f"CONVEYOR_{setting} needs the extra '{extra}': pip install 'conveyor-jobs[{extra}]' ({error.name} is missing)"
    )


def _url(settings: Settings, seam: str) -> str:
    url: str | None = getattr(settings, seam)
    return url or EMBEDDED


def _scheme(settings: Settings, seam: str) -> str:
    return _scheme_of(_url(settings, seam))


def _scheme_of(url: str) -> str:
    scheme = url.partition(":")[0]
    return "postgres" if scheme == "postgresql" else scheme


def _shown(url: str) -> str:
    """The URL without its password and its options, which may have one."""
    address, _, options = url.partition("?")
    head, at, tail = address.rpartition("@")
    if "@" in options:
        # Either a password with a question mark, or an option with an @.
        head, at, tail = address, "@", ""
    return f"{head.partition('://')[0]}://…{at}{tail}" if at else address
