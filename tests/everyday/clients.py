"""The clients: each takes the next job of the mix, submits it, does with it what the mix says, waits until it ends and
holds what came of it to the site's ledger."""

import asyncio
import csv
import json
import random
import time
import zipfile
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

from conveyor.client import AsyncClient
from conveyor.client.job import AsyncJob
from conveyor.errors import Conflict
from tests.everyday.figures import Figures
from tests.everyday.mix import Job
from tests.everyday.site import Site, digest_of
from tests.everyday.watch import Watch, Watched

_BATCHES = 3
_CANCEL_SECONDS = 180.0


class Clients:
    """What clients share."""

    def __init__(self, client: AsyncClient, site: Site, watch: Watch, figures: Figures, place: Path) -> None:
        self._client = client
        self._site = site
        self._watch = watch
        self._figures = figures
        self._place = place

    async def carry_out(self, job: Job) -> None:
        """All of one job's life. What is wrong with it goes to the figures."""
        began = time.time()
        submitted = await self._submit(job)
        self._figures.answers.append(time.time() - began)
        before = self._site.requests
        watched = self._watch.began(job, submitted.id)
        watching = asyncio.create_task(self._stream(job, submitted)) if job.watched else None
        await self._disturb(job, submitted, watched)
        await submitted.wait()
        self._watch.over(watched)
        self._figures.ended(job, _moment(submitted.data["run"]["ended_at"]) - began)
        if job.is_plain and job.kind == "fetch":
            self._figures.overtaken.append(max(0, self._site.jobs[job.number].first - before - 1))
        if watching is not None:
            async with self._figures.timed("the end of its stream", job):
                await watching
        if job.cancelled:
            async with self._figures.timed("cancelling its tasks", job):
                await self._check_cancelled(job, submitted)
        else:
            async with self._figures.timed("reading its results", job):
                await self._check(job, submitted, self._site.jobs[job.number].requests)
            await self._rerun(job, submitted)
        if job.export is not None:
            async with self._figures.timed("its export", job):
                await self._export(job, submitted, job.export)
        if job.deleted:
            await submitted.delete()

    async def _submit(self, job: Job) -> AsyncJob:
        inputs = job.inputs(self._site)
        if job.way == "submit":
            return await self._client.submit(inputs, name=str(job.number), **job.options)
        opened = await self._client.open_job(name=str(job.number), **job.options)
        step = -(-len(inputs) // _BATCHES)
        for start in range(0, len(inputs), step):
            await opened.add(inputs[start : start + step], last=start + step >= len(inputs))
        return opened

    async def _disturb(self, job: Job, submitted: AsyncJob, watched: Watched) -> None:
        """Change, pause, resume or cancel it while it runs; it may have ended by then."""
        chance = random.Random(job.number)
        try:
            for width in job.widths:
                await asyncio.sleep(chance.uniform(0.05, 0.5))
                await submitted.change(concurrency=width)
            if job.paused:
                await asyncio.sleep(chance.uniform(0.05, 0.5))
                watched.paused = True
                await submitted.pause()
                await asyncio.sleep(chance.uniform(0.2, 1.0))
                await submitted.resume()
                watched.moved()
                watched.paused = False
            if job.cancelled:
                await asyncio.sleep(chance.uniform(0.05, 0.3))
                watched.paused = True
                await submitted.cancel()
        except Conflict:
            # Ended: the server says so.
            watched.moved()
            watched.paused = False

    async def _stream(self, job: Job, submitted: AsyncJob) -> None:
        """Watch it as a page does. Its end is told once, and nothing after it."""
        told: Counter[str] = Counter()
        async for said in submitted.stream():
            if hasattr(said, "event"):
                told[said.event] += 1
                if said.event in ("run.completed", "run.failed", "run.cancelled"):
                    break
        if told["job.accepted"] != 1:
            self._unexpected(job, f"its stream told {dict(told)}")

    async def _check(self, job: Job, submitted: AsyncJob, requests: Counter[int]) -> None:
        """Counts, results and the ledger say the same."""
        asked = Counter(requests)
        counts = submitted.data["run"]["counts"]
        failed = sum(map(job.fails, range(job.size)))
        if (submitted.state, submitted.succeeded, submitted.failed) != ("completed", job.size - failed, failed):
            self._unexpected(job, f"{submitted.state} {submitted.reason} with {counts}, {failed} fail")
        seen: Counter[int] = Counter()
        async for result in submitted.results():
            seen[result.index] += 1
            self._check_result(job, result, asked[result.index])
        self._check_indexes(job, "results", seen)
        extra = set(asked) - set(range(job.size))
        if extra:
            self._figures.duplicated.append(f"{job}: tasks that it has not: {sorted(extra)[:5]}")

    def _check_result(self, job: Job, result: Any, requests: int) -> None:
        index = result.index
        if result.status != ("failed" if job.fails(index) else "succeeded"):
            self._unexpected(job, f"task {index} ({job.pages[index]}): {result.status} {result.error}")
            return
        if job.kind == "python":
            return
        if result.ok and result.sha256 != digest_of(job.number, index):
            self._unexpected(job, f"task {index}: another body, {result.size} bytes")
        due = job.requests(index)
        if requests < due and not job.paused:
            self._figures.lost.append(f"{job}: task {index} was asked for {requests} times, not {due}")
        # A pause breaks attempts off, which begin again.
        if (requests > due or result.attempts != requests) and not job.paused:
            self._figures.duplicated.append(
                f"{job}: task {index} ({job.pages[index]}) was asked for {requests} times in {result.attempts} attempts"
            )

    def _check_indexes(self, job: Job, what: str, seen: Counter[int]) -> None:
        missing = [index for index in range(job.size) if not seen[index]]
        twice = [index for index, count in seen.items() if count > 1]
        if missing:
            self._figures.lost.append(f"{job}: {what} without {len(missing)} tasks: {missing[:5]}")
        if twice or len(seen) > job.size:
            self._figures.duplicated.append(f"{job}: {what} with {len(twice)} tasks twice: {twice[:5]}")

    async def _check_cancelled(self, job: Job, submitted: AsyncJob) -> None:
        """Every task has ended one way or another, in the end."""
        patience = time.monotonic() + _CANCEL_SECONDS
        while submitted.data["run"]["counts"]["pending"] and time.monotonic() < patience:
            await asyncio.sleep(0.2)
            await submitted.refresh()
        # Batches of an open job that were not ingested when it was cancelled never are.
        whole = submitted.done == (submitted.total if job.way == "open" else job.size)
        if submitted.state not in ("cancelled", "completed") or not whole:
            self._unexpected(job, f"cancelled, and is {submitted.state} with {submitted.data['run']['counts']}")

    async def _rerun(self, job: Job, submitted: AsyncJob) -> None:
        failed = [index for index in range(job.size) if job.fails(index)]
        if not job.rerun or not failed:
            return
        ledger = self._site.jobs[job.number]
        before = Counter(ledger.requests)
        async with self._figures.timed("its rerun", job):
            await submitted.rerun(failed=True)
            await submitted.wait()
        run = submitted.data["run"]
        of_run = (run["total"], run["counts"]["failed"])
        of_job = (submitted.total, submitted.failed)
        if (submitted.state, of_run, of_job) != ("completed", (len(failed),) * 2, (job.size, len(failed))):
            self._unexpected(job, f"its rerun of {len(failed)}: {submitted.state}, {submitted.data['run']}")
        again = {index: count for index, count in (ledger.requests - before).items() if count}
        due = {index: job.requests(index) for index in failed}
        if job.kind == "fetch" and again != due:
            more = {index: count for index, count in again.items() if count > due.get(index, 0)}
            (self._figures.duplicated if more else self._figures.lost).append(
                f"{job}: its rerun asked for {again}, not {due}"
            )

    async def _export(self, job: Job, submitted: AsyncJob, form: str) -> None:
        (path,) = await submitted.export(self._place / f"{job.number}.{form}", run="latest-per-task")
        seen = Counter(await asyncio.to_thread(_exported, path))
        if not job.cancelled:
            self._check_indexes(job, f"its {form} export", seen)
        path.unlink()

    def _unexpected(self, job: Job, what: str) -> None:
        self._figures.unexpected.append(f"{job}: {what}")


def _exported(path: Path) -> list[int]:
    """The indexes of the tasks in an export."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            return [int(json.loads(line)["index"]) for line in archive.read("manifest.jsonl").splitlines()]
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return [int(row["index"]) for row in csv.DictReader(file)]
    return [int(json.loads(line)["index"]) for line in path.read_bytes().splitlines()]


def _moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
