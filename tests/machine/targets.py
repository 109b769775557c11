"""What tasks depend on: hosts that answer, fail, hang and go away, as the URL of a task says and as they are told to.

One place decides for all kinds. Fetches come to it by the fetcher's own class in process, downloads by the real
executor over answers that are made here, and Python tasks by an executor that stands for a handler.
"""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pyreqwest.http import HeaderMap

from conveyor.clock import Clock, SystemClock
from conveyor.egress.failures import Failure
from conveyor.egress.redirects import OutgoingRequest
from conveyor.model import Gateway, Job, JobKind, Options, Outcome, RunId, TaskError, TaskRef
from conveyor.process.executors import LocalExecutor
from conveyor.process.executors.download.download_executor import DownloadExecutor
from conveyor.process.executors.fetch.child import ChildFetcher as FetcherOfChild
from conveyor.process.executors.fetch.fetch_executor import host_of, input_origin
from conveyor.process.executors.fetch.launch import Launched
from conveyor.process.executors.fetch.packs import Packer
from conveyor.settings import Settings
from conveyor.states import TaskStatus

HOSTS = ("a.test", "b.test")
GATEWAY_HOST = "gateway.test"
GATEWAY = f"http://{GATEWAY_HOST}/?to={{url}}"
# Of a pool with the other one: it is never down.
SECOND_GATEWAY = "http://second.test/?to={url}"
# How a host is away.
REFUSED, FAILING, SILENT = "refused", "failing", "silent"
# What a task's URL asks for. All `ok` take the same time, so that several end in one turn of the loop.
BEHAVIOURS = ("ok", "quick", "slow", "flaky", "gone", "busy", "hang", "big")
FILES = ("file", "cut", "stubborn", "nameless", "stall", "gone")
_SECONDS = {"quick": 0.01, "slow": 2.0}
_OK_SECONDS = 0.25
_ANSWER_SECONDS = 0.02
# Over which the pace of attempts at a host is compared with its limit.
_RATE_SECONDS = 5.0
# Those that succeed at once if nothing is in their way.
PLAIN = frozenset({"ok", "quick", "big"})
# A file is kept in pieces of 256 KiB: a cut leaves one behind, and part of another.
_CHUNK = b"0123456789abcdef" * 4096
_CHUNKS = 9
_CUT_AFTER = 5


def url(host: str, behaviour: str, number: int) -> str:
    return f"http://{host}/{behaviour}/{number}"


class Asked(NamedTuple):
    """A URL taken apart."""

    host: str
    behaviour: str

    @classmethod
    def of(cls, text: str) -> "Asked":
        parts = urlsplit(text)
        return cls(parts.hostname or "", parts.path.split("/")[1])


class Start(NamedTuple):
    """An attempt that began."""

    run_id: RunId
    index: int
    host: str
    at: float


class Targets:
    """All hosts, and what runs at this moment."""

    def __init__(self, clock: Clock, grain: int = 1) -> None:
        self._clock = clock
        # Python tasks that take one place together.
        self._grain = grain
        self.down: dict[str, str] = {}
        # After how many attempts from now, or from the death before, the process dies that makes the next.
        self.deaths: list[int] = []
        # Hosts that were away at any time.
        self.failed: set[str] = set()
        self.starts: list[Start] = []
        self.running: Counter[tuple[RunId, str]] = Counter()
        # Attempts that began although a limit of their job left no place for them.
        self.over: list[str] = []
        # Runs of which nothing may run beside this one, and attempts that began all the same.
        self.before: dict[RunId, frozenset[RunId]] = {}
        self.beside: list[str] = []

    def take_down(self, host: str, how: str) -> None:
        self.down[host] = how
        self.failed.add(host)

    def is_deadly(self) -> bool:
        """Whether this attempt is the one with which its process dies."""
        if self.deaths and self.deaths[0] == 0:
            del self.deaths[0]
            return True
        if self.deaths:
            self.deaths[0] -= 1
        return False

    async def attempt(self, job: Job, ref: TaskRef, gateway: int = 0) -> Outcome:
        """One attempt at a fetch, through one of the gateways, or at a call that asks a host."""
        asked = Asked.of(json.loads(ref.input))
        began = self._clock.monotonic()
        with self._at_work(job, ref, asked.host):
            outcome = await self._outcome(job.options, ref, asked, gateway)
        outcome.elapsed = self._clock.monotonic() - began
        return outcome

    @contextmanager
    def _at_work(self, job: Job, ref: TaskRef, host: str) -> Iterator[None]:
        self.starts.append(Start(job.run.run_id, ref.index, host, self._clock.now()))
        self.running[job.run.run_id, host] += 1
        self._compare(job, host)
        try:
            yield
        finally:
            self.running[job.run.run_id, host] -= 1

    def _compare(self, job: Job, host: str) -> None:
        options, run_id = job.options, job.run.run_id
        before = self.before.get(run_id, frozenset())
        if still := {run: count for (run, _), count in self.running.items() if count and run in before}:
            self.beside.append(f"an attempt of {run_id} beside those of runs that it replaces: {still}")
        at_host = self.running[run_id, host]
        in_all = sum(count for (run, _), count in self.running.items() if run == run_id)
        if in_all > options.concurrency * (self._grain if job.kind is JobKind.PYTHON else 1):
            self.over.append(f"{in_all} of {job.job_id} at once, its concurrency is {options.concurrency}")
        if options.concurrency_per_host is not None and at_host > options.concurrency_per_host:
            self.over.append(f"{at_host} of {job.job_id} at {host}, its limit is {options.concurrency_per_host}")
        if options.rate_per_host is not None:
            since = self._clock.now() - _RATE_SECONDS
            begun = sum(
                start.at > since and start.run_id == run_id and start.host == host for start in self.starts[-200:]
            )
            if begun > options.rate_per_host * _RATE_SECONDS + 2:
                self.over.append(f"{begun} of {job.job_id} at {host} in {_RATE_SECONDS:g} s")

    async def _outcome(self, options: Options, ref: TaskRef, asked: Asked, gateway: int) -> Outcome:
        if isinstance(options.gateway, Gateway) and gateway == 0 and GATEWAY_HOST in self.down:
            await self._clock.sleep(_ANSWER_SECONDS)
            return _failed("gateway_failed")
        away = self.down.get(asked.host)
        if away == REFUSED:
            await self._clock.sleep(_ANSWER_SECONDS)
            return _failed("connect_failed")
        if away == FAILING:
            await self._clock.sleep(_ANSWER_SECONDS)
            return _answered(503)
        if away == SILENT or asked.behaviour == "hang":
            await self._clock.sleep(options.timeout)
            return _failed("timeout")
        seconds = _SECONDS.get(asked.behaviour, _OK_SECONDS)
        if seconds >= options.timeout:
            await self._clock.sleep(options.timeout)
            return _failed("timeout")
        await self._clock.sleep(seconds)
        if asked.behaviour == "gone":
            return _answered(404)
        if asked.behaviour == "flaky" and ref.attempt == 1:
            return _answered(500)
        if asked.behaviour == "busy" and ref.attempt == 1:
            outcome = _answered(429)
            outcome.retry_after = 1.0
            return outcome
        body = b"x" * 20_000 if asked.behaviour == "big" else f"body of {ref.index}".encode()
        return Outcome(TaskStatus.SUCCEEDED, http_status=200, body=body, content_type="text/plain")


def _failed(code: str) -> Outcome:
    return Outcome(TaskStatus.FAILED, error=TaskError(code, "as it was told"))


def _answered(status: int) -> Outcome:
    return Outcome(TaskStatus.FAILED, http_status=status, error=TaskError(f"http_{status}", "as it was told"))


class Handlers(LocalExecutor):
    """In the place of the executor of Python tasks: each call asks the host of its input."""

    def __init__(self, targets: Targets, grain: int, die: Callable[[], None]) -> None:
        self._targets = targets
        self._grain = grain
        self._die = die

    def grain(self, job: Job) -> int:
        return self._grain

    def target(self, ref: TaskRef) -> str | None:
        return host_of(ref.input)

    def origin(self, ref: TaskRef) -> str | None:
        return input_origin(ref.input)

    async def attempt(self, job: Job, refs: Sequence[TaskRef]) -> list[Outcome]:
        return list(await asyncio.gather(*(self._one(job, ref) for ref in refs)))

    async def _one(self, job: Job, ref: TaskRef) -> Outcome:
        if self._targets.is_deadly():
            self._die()
        outcome = await self._targets.attempt(job, ref)
        if outcome.error is not None:
            code = "timeout" if outcome.error.code == "timeout" else "handler_raised"
            return Outcome(TaskStatus.FAILED, error=TaskError(code, "as it was told"), elapsed=outcome.elapsed)
        return outcome


class Answers:
    """In the place of the executor inside a fetching process."""

    def __init__(self, targets: Targets) -> None:
        self._targets = targets
        self.die: Callable[[], None] = lambda: None

    async def attempt_one(self, job: Job, ref: TaskRef, gateway: int = 0, condition: object = None) -> Outcome:
        if self._targets.is_deadly():
            self.die()
        return await self._targets.attempt(job, ref, gateway)


class _Pipe:
    """What one end writes, the other reads."""

    def __init__(self, other: asyncio.StreamReader) -> None:
        self._other = other
        self._closed = False

    def write(self, data: bytes) -> None:
        if not self._closed:
            self._other.feed_data(data)

    async def drain(self) -> None:
        if self._closed:
            raise ConnectionResetError
        await asyncio.sleep(0)

    def is_closing(self) -> bool:
        return self._closed

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._other.feed_eof()


class _InProcess:
    """A fetching process that is none."""

    _numbers = itertools.count(1)

    def __init__(self, serving: "asyncio.Task[None]", ends: Sequence[_Pipe], child: FetcherOfChild) -> None:
        self.pid = next(self._numbers)
        self.child = child
        self.has_died = False
        self._serving = serving
        self._ends = ends

    def kill(self) -> None:
        for end in self._ends:
            end.close()
        self._serving.cancel()
        for lane in self.child._lanes.values():
            for runner in lane.running:
                runner.cancel()

    def die(self) -> None:
        """By itself, over an attempt."""
        self.has_died = True
        self.kill()

    async def wait(self) -> None:
        await asyncio.wait([self._serving])


class Launcher:
    """Launches fetchers inside this process; `children` are those that live."""

    def __init__(self, targets: Targets) -> None:
        self._targets = targets
        self.processes: list[_InProcess] = []

    async def __call__(self, settings: Settings) -> Launched:
        to_parent, to_child = asyncio.StreamReader(), asyncio.StreamReader()
        there, here = _Pipe(to_child), _Pipe(to_parent)
        answers = Answers(self._targets)
        child = FetcherOfChild(answers, here, Packer(here, SystemClock()))
        serving = asyncio.create_task(child.serve(to_child))
        process = _InProcess(serving, [there, here], child)
        self.processes.append(process)
        answers.die = process.die
        serving.add_done_callback(lambda _: process.kill())
        return Launched(to_parent, there, process)

    @property
    def children(self) -> list[FetcherOfChild]:
        return [process.child for process in self.living]

    @property
    def living(self) -> list[_InProcess]:
        return [process for process in self.processes if not process._serving.done()]


class Answer:
    """An answer of the origin, as far as a transfer looks at it."""

    def __init__(self, status: int, headers: dict[str, str], chunks: AsyncIterator[bytes]) -> None:
        self.status = status
        self.headers = HeaderMap(headers)
        self.body_reader = self
        self._chunks = chunks

    async def read_chunk(self) -> bytes | None:
        return await anext(self._chunks, None)


def answer_requests(executor: DownloadExecutor, begin: Callable[..., Awaitable[Answer]]) -> None:
    """Have the executor's requests answered here: all above the connection is real."""
    exchange: Any = executor._long.exchange
    exchange._begin = begin
    exchange._clients.shared = lambda connect: None


class Origin:
    """Where files come from. Some know no ranges, and one of these cuts every answer midway although it has an ETag."""

    def __init__(self, targets: Targets, clock: Clock) -> None:
        self._targets = targets
        self._clock = clock

    def serve(self, executor: DownloadExecutor) -> None:
        answer_requests(executor, self._begin)

    async def _begin(self, stack: AsyncExitStack, request: OutgoingRequest, hop: Any, patience: float) -> Answer:
        asked = Asked.of(str(request.url))
        await self._clock.sleep(_ANSWER_SECONDS)
        away = self._targets.down.get(asked.host)
        if away == REFUSED:
            raise Failure("connect_failed", "as it was told")
        if away == SILENT:
            await self._clock.sleep(patience)
            raise Failure("timeout", "as it was told")
        if away == FAILING or asked.behaviour == "gone":
            return Answer(503 if away else 404, {}, self._chunks(0, 0, 0.0))
        return self._file(asked.behaviour, dict(request.headers).get("range"), patience)

    def _file(self, behaviour: str, asked: str | None, patience: float) -> Answer:
        total = _CHUNKS * len(_CHUNK)
        start = 0
        if asked is not None and behaviour != "stubborn":
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
        headers = {"content-length": str(total - start)}
        if behaviour != "nameless":
            headers["etag"] = '"one"'
        if start:
            headers["content-range"] = f"bytes {start}-{total - 1}/{total}"
        until = min(total, start + _CUT_AFTER * len(_CHUNK)) if behaviour in ("cut", "stubborn", "stall") else total
        pause = patience + 1.0 if behaviour == "stall" and until < total else 0.0
        return Answer(206 if start else 200, headers, self._chunks(start, until, pause, cut=until < total))

    async def _chunks(self, start: int, until: int, pause: float, *, cut: bool = False) -> AsyncIterator[bytes]:
        for at in range(start, until, len(_CHUNK)):
            await self._clock.sleep(0.01)
            yield _CHUNK[: until - at]
        await self._clock.sleep(pause)
        if cut:
            raise Failure("read_failed", "as it was told")
