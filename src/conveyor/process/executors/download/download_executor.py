"""The download executor. Gets references whose input is the URL of a large file, takes each in flat memory, and hands
on where it is kept. An attempt goes on where the one before stopped, whatever stopped it (transfer.py).

Beside the codes of a fetch (failures.py):

| Code | Meaning |
|---|---|
| too_slow | fewer than `min_rate` bytes a second for `min_rate_seconds` |
| range_failed | the target's answers to requests for the rest fit nothing |
| content_encoded | the target sends the file compressed, although asked not to |
| checksum_mismatch | the file came whole and has another sha256 than was given |
| file_changed | the same, but it was put together from several answers: it is taken again from its beginning |
| store_failed | it could not be kept here; the task waits and spends no attempt |
"""

import asyncio
from collections.abc import Sequence

import msgspec

from conveyor.clock import Clock
from conveyor.egress.redirects import OutgoingRequest
from conveyor.egress.target_guard import BadUrl, TargetGuard, parse_url
from conveyor.engines.blobs import Blobs
from conveyor.engines.records import Records
from conveyor.errors import BadInput
from conveyor.lists.inputs import MAX_TIMEOUT, DownloadInput, download_problem, parse_download_input
from conveyor.model import Job, Outcome, TaskRef
from conveyor.process.executors import LocalExecutor
from conveyor.process.executors.download.exchange import ExchangePlan, merged
from conveyor.process.executors.download.long_tasks import LongTasks
from conveyor.process.executors.download.ranges import RemoteFile
from conveyor.process.executors.download.transfer import DownloadRequest
from conveyor.process.task_progress import Track
from conveyor.settings import Settings

_left = msgspec.json.Decoder(RemoteFile | None)


class DownloadExecutor(LocalExecutor):
    """Runs tasks of kind download. One for each event loop; `root_certificate` is a PEM to trust beside the usual."""

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

    async def attempt(self, job: Job, refs: Sequence[TaskRef]) -> list[Outcome]:
        return list(await asyncio.gather(*(self._attempt(job, ref) for ref in refs)))

    async def close(self) -> None:
        await self._long.exchange.close()

    async def _attempt(self, job: Job, ref: TaskRef) -> Outcome:
        async def step(plan: ExchangePlan, track: Track) -> Outcome:
            wanted = wanted_of(plan, parse_download_input(ref.input))
            return await self._long.take(job, ref, plan, track, wanted, _left.decode(track.state), _remember)

        return await self._long.attempt(job, ref, step)


def wanted_of(plan: ExchangePlan, given: DownloadInput) -> DownloadRequest:
    """What the task asks for. Raises BadInput: what was stored may be older than today's checks."""
    wrong = download_problem(given)
    if wrong is not None:
        raise BadInput(wrong)
    headers = merged(plan.headers, tuple(given.headers.items()))
    return DownloadRequest(
        OutgoingRequest("GET", parse_url(given.url), headers),
        min(given.timeout or plan.options.timeout, MAX_TIMEOUT),
        given.sha256,
        given.connect_timeout,
    )


def _remember(file: RemoteFile | None) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(file))
