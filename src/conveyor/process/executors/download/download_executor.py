"""The download executor. Gets references whose input is the URL of a large file, downloads each with constant memory,
and returns where it is stored. An attempt resumes where the one before stopped (transfer.py).

Error codes besides those of a fetch (egress/failures.py):

| Code | Meaning |
|---|---|
| too_slow | fewer than `min_rate` bytes a second for `min_rate_seconds` |
| range_failed | the target's responses to range requests do not fit the file |
| checksum_mismatch | the file came in one response and its sha256 is not the expected one |
| file_changed | the same, but the file came in several responses: the next attempt starts over |
| store_failed | the file could not be stored; the task waits and spends no attempt |
"""

import asyncio
from collections.abc import Sequence

import msgspec

from conveyor.clock import Clock
from conveyor.egress.origins import origin_of
from conveyor.egress.redirects import OutgoingRequest
from conveyor.egress.target_guard import BadUrl, TargetGuard, parse_url
from conveyor.engines.blobs import Blobs
from conveyor.engines.records import Records
from conveyor.errors import BadInput
from conveyor.lists.inputs import MAX_TIMEOUT, DownloadInput, download_problem, parse_download_input
from conveyor.model import Job, Outcome, TaskRef
from conveyor.process.executors import LocalExecutor
from conveyor.process.executors.download.exchange import ExchangePlan, merge_headers
from conveyor.process.executors.download.long_tasks import LongTasks
from conveyor.process.executors.download.ranges import RemoteFile
from conveyor.process.executors.download.transfer import DownloadRequest
from conveyor.process.task_progress import Track
from conveyor.settings import Settings

_file = msgspec.json.Decoder(RemoteFile | None)


class DownloadExecutor(LocalExecutor):
    """Runs tasks of kind download. One for each event loop. `root_certificate`: a PEM to trust beside the system's."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        guard: TargetGuard,
        records: Records,
        blobs: Blobs,
        *,
        root_certificate: bytes | None = None,
    ) -> None:
        self._long = LongTasks(settings, clock, guard, records, blobs, root_certificate)

    def target(self, ref: TaskRef) -> str | None:
        try:
            return (parse_url(parse_download_input(ref.input).url).host_str or "").rstrip(".") or None
        except (BadUrl, BadInput):
            return None

    def origin(self, ref: TaskRef) -> str | None:
        try:
            return origin_of(parse_url(parse_download_input(ref.input).url))
        except (BadUrl, BadInput):
            return None

    async def attempt(self, job: Job, refs: Sequence[TaskRef]) -> list[Outcome]:
        return await self.attempt_through(0, job, refs)

    async def attempt_through(self, gateway: int, job: Job, refs: Sequence[TaskRef]) -> list[Outcome]:
        return list(await asyncio.gather(*(self._attempt(job, ref, gateway) for ref in refs)))

    async def close(self) -> None:
        await self._long.exchange.close()

    async def _attempt(self, job: Job, ref: TaskRef, gateway: int) -> Outcome:
        async def step(plan: ExchangePlan, track: Track) -> Outcome:
            wanted = download_request(plan, parse_download_input(ref.input))
            return await self._long.take(job, ref, plan, track, wanted, _file.decode(track.state), _remember)

        return await self._long.attempt(job, ref, step, gateway)


def download_request(plan: ExchangePlan, task_input: DownloadInput) -> DownloadRequest:
    """Build the task's request. Raises BadInput: the input may have been stored before today's checks."""
    wrong = download_problem(task_input)
    if wrong is not None:
        raise BadInput(wrong)
    headers = merge_headers(plan.headers, tuple(task_input.headers.items()))
    return DownloadRequest(
        OutgoingRequest("GET", parse_url(task_input.url), headers),
        min(task_input.timeout or plan.options.timeout, MAX_TIMEOUT),
        task_input.sha256,
        task_input.connect_timeout,
    )


def _remember(file: RemoteFile | None) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(file))
