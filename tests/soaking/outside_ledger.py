"""The ledger outside of the server: what it acknowledged, what the site was asked for, and whether the jobs came to
what was handed over. It sees the server only through its API, as any client does."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from conveyor.client import AsyncClient
from conveyor.client.job import AsyncJob
from conveyor.client.resources import Result
from conveyor.errors import ConveyorError, NotFound
from tests.everyday.site import FAST, SLOW, Site, digest_of

T = TypeVar("T")

PAGES = ("ok", "ok", "ok", "ok", "ok", "ok", "flaky", "missing")
# What is wrong on the way, not with the server: it is asked again.
_PATIENT_STATUSES = frozenset({408, 425, 429, 502, 503, 504, 507})
_PATIENT_CODES = frozenset({"idempotency_in_flight"})
_MAX_SURPRISES = 5
_ENDS = ("completed", "failed", "cancelled")
_READ_BODIES = 5


@dataclass
class Entry:
    """One job that the server has acknowledged."""

    number: int
    total: int
    kind: str
    key: str
    spec: dict[str, Any]
    inputs: list[Any]
    job: AsyncJob
    ended: bool = False

    @property
    def pages(self) -> list[str]:
        return [page_at(index) for index in range(self.total)]

    @property
    def failures(self) -> int:
        return self.pages.count("missing")


def page_at(index: int) -> str:
    return PAGES[index % len(PAGES)]


@dataclass
class SoakFigures:
    """What happened, and what is wrong."""

    jobs: int = 0
    tasks: int = 0
    ended: int = 0
    looks: int = 0
    replays: int = 0
    bodies: int = 0
    deleted: int = 0
    requests: int = 0
    troubles: Counter[str] = field(default_factory=Counter)
    # Answers that were asked for again, by code.
    refusals: Counter[str] = field(default_factory=Counter)
    # Errors in the server's log, by event.
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Abandoned(Exception):
    """A request that the server refuses for good. It is in the figures."""


class OutsideLedger:
    """Hands jobs over until each has an acknowledgement, watches them, and audits those that ended."""

    def __init__(self, client: AsyncClient, site: Site, figures: SoakFigures, seed: int) -> None:
        self._client = client
        self._site = site
        self._figures = figures
        self._chance = random.Random(seed)
        self._numbers = 0
        self.entries: list[Entry] = []

    @property
    def unfinished(self) -> list[Entry]:
        return [entry for entry in self.entries if not entry.ended]

    async def submit(self) -> Entry:
        """One job, of a size and a way that chance chooses."""
        self._numbers += 1
        number, chance = self._numbers, self._chance
        total = chance.choice((1, 3, 10, 40, 40, 150, 1500))
        way = chance.choice(("submit", "submit", "submit", "open"))
        kind = chance.choice(("fetch", "fetch", "fetch", "python"))
        key = f"soak-{number}-{chance.randrange(1 << 40)}"
        # Retries are for what the troubles do to requests: handlers fail by what they are given.
        backoff = {"base": 0.2, "rate": 1.5, "cap": 2.0}
        spec: dict[str, Any] = {"attempts": 20, "backoff": backoff, "concurrency": chance.choice((4, 20, 60))}
        if kind == "python":
            spec |= {"handler": "everyday.quick", "attempts": 2}
        inputs = [self._input(kind, number, index) for index in range(total)]
        if way == "submit":
            job = await self.answered(lambda: self._client.submit(inputs, idempotency_key=key, kind=kind, **spec))  # type: ignore[arg-type]  # options as data
        else:
            job = await self._opened(kind, key, spec, inputs)
        entry = Entry(number, total, kind, key, {"way": way, **spec}, inputs, job)
        self.entries.append(entry)
        self._figures.jobs += 1
        self._figures.tasks += total
        return entry

    async def _opened(self, kind: str, key: str, spec: dict[str, Any], inputs: list[Any]) -> AsyncJob:
        job = await self.answered(lambda: self._client.open_job(idempotency_key=key, kind=kind, **spec))  # type: ignore[arg-type]  # options as data
        step = -(-len(inputs) // 3)
        for start in range(0, len(inputs), step):
            body = {"tasks": inputs[start : start + step], "last_batch": start + step >= len(inputs)}

            async def add(body: dict[str, Any] = body, part: str = f"{key}-{start}") -> object:
                return await self._client.request("POST", f"/v1/jobs/{job.id}/tasks", body=body, idempotency_key=part)

            await self.answered(add)
        return job

    def _input(self, kind: str, number: int, index: int) -> Any:
        page = page_at(index)
        if kind == "python":
            return {"n": index, "page": "broken" if page == "missing" else "ok"}
        hosts = SLOW if index % 10 == 0 else FAST
        return self._site.url(hosts[index % len(hosts)], number, index, page)

    async def look(self, entry: Entry) -> None:
        """Read a job as a user does while it runs: its counts never lead what the site was asked for."""
        await self.answered(entry.job.refresh)
        self._figures.looks += 1
        counts, total = entry.job.data["run"]["counts"], entry.job.data["run"]["total"]
        ended = counts["succeeded"] + counts["failed"] + counts["cancelled"]
        if entry.kind == "fetch" and ended > (asked := len(self._site.jobs[entry.number].requests)):
            self._wrong(entry, f"{ended} tasks are counted, and {asked} were asked for")
        if ended > entry.total or total > entry.total:
            self._wrong(entry, f"{ended} of {total} tasks are counted, of {entry.total} that were handed over")
        if entry.job.data["state"] in _ENDS:
            entry.ended = True

    async def audit(self, entry: Entry) -> None:
        """A job that ended: each task once, with what the site said, and one end."""
        data = entry.job.data
        expected = {"succeeded": entry.total - entry.failures, "failed": entry.failures, "cancelled": 0}
        counts = {name: data["run"]["counts"][name] for name in expected}
        if (data["state"], data["run"]["total"], counts) != ("completed", entry.total, expected):
            self._wrong(entry, f"it is {data['state']} ({data.get('reason')}): {counts} of {data['run']['total']}")
        results = await self.answered(lambda: self._results(entry))
        self._check_results(entry, results)
        events = await self.answered(lambda: self._events(entry))
        if [events[name] for name in ("job.accepted", "run.completed")] != [1, 1]:
            self._wrong(entry, f"its events are {dict(events)}")
        await self._check_bodies(entry, results)
        await self._replay(entry)
        self._figures.ended += 1
        if entry.number % 2:
            await self._delete(entry)
            self._figures.deleted += 1

    async def _delete(self, entry: Entry) -> None:
        """Delete a job. One that is gone at the second try was deleted by the first, whose answer was an error."""
        tries = 0

        async def delete() -> None:
            nonlocal tries
            tries += 1
            try:
                await entry.job.delete()
            except NotFound:
                if tries == 1:
                    raise

        await self.answered(delete)

    def _check_results(self, entry: Entry, results: list[Result]) -> None:
        indexes = sorted(result.index for result in results)
        if indexes != list(range(entry.total)):
            missing = set(range(entry.total)) - set(indexes)
            self._wrong(entry, f"{len(missing)} tasks are missing, {len(indexes) - len(set(indexes))} are there twice")
        asked = self._site.jobs[entry.number].requests
        for result in results:
            index = result.index
            is_failure = page_at(index) == "missing"
            if (result.status == "failed") is not is_failure:
                self._wrong(entry, f"task {index} {result.status}: {result.error}")
            if entry.kind == "fetch" and not asked[index]:
                self._wrong(entry, f"task {index} {result.status}, and its page was never asked for")
            if entry.kind == "fetch" and not is_failure and result.sha256 != digest_of(entry.number, index):
                self._wrong(entry, f"task {index} has another body than the site sent")

    async def _check_bodies(self, entry: Entry, results: list[Result]) -> None:
        for result in self._chance.sample(results, min(_READ_BODIES, len(results))):
            if result.status == "succeeded":
                body = await self.answered(lambda result=result: entry.job.body(result.task_id))  # type: ignore[misc]  # the default binds it
                self._figures.bodies += 1
                if entry.kind == "fetch" and not body.startswith(b"job %d, page %d." % (entry.number, result.index)):
                    self._wrong(entry, f"the body of task {result.index} is another one")

    async def _replay(self, entry: Entry) -> None:
        """The same request again is the same job."""
        if entry.spec["way"] != "submit" or entry.total > 200:
            return
        spec = {name: value for name, value in entry.spec.items() if name != "way"}
        again = await self.answered(
            lambda: self._client.submit(entry.inputs, idempotency_key=entry.key, kind=entry.kind, **spec)  # type: ignore[arg-type]  # options as data
        )
        self._figures.replays += 1
        if again.id != entry.job.id:
            self._wrong(entry, f"its request made another job, {again.id}")

    async def _results(self, entry: Entry) -> list[Result]:
        return [result async for result in entry.job.results()]

    async def _events(self, entry: Entry) -> Counter[str]:
        return Counter([event.event async for event in entry.job.events()])

    async def answered(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer, however often it takes: the server may be away, and its clock may make a link expire."""
        surprises = 0
        while True:
            try:
                return await ask()
            except ConveyorError as error:
                self._figures.refusals[error.code] += 1
                if not _is_passing(error):
                    surprises += 1
                    self._figures.wrong.append(f"an answer {error.status} {error.code}: {error.message}")
                if surprises >= _MAX_SURPRISES:
                    raise Abandoned from error
            except (OSError, TimeoutError) as error:
                self._figures.refusals[type(error).__name__] += 1
            await asyncio.sleep(0.3)

    def _wrong(self, entry: Entry, what: str) -> None:
        if len(self._figures.wrong) < 100:
            self._figures.wrong.append(f"job {entry.number} ({entry.job.id}, {entry.kind}, {entry.spec}): {what}")


def _is_passing(error: ConveyorError) -> bool:
    """Whether the server is busy or away; or its clock was stepped between two requests, and a signed link expired."""
    return error.status in _PATIENT_STATUSES or error.code in _PATIENT_CODES or error.status == 403
