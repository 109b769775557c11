"""Transfer: one attempt at taking one file, over as many connections as it needs. Gets a request and what an earlier
attempt left, hands on the file as kept, whole and hashed.

    find what is there → ask for the rest → read into pieces → cut? ask again → seal → compare

A cut is not an attempt: while bytes come in, the rest is asked for again after a short pause. An attempt ends when
nothing moves any more, when the target answers with an error, or when what comes is too slow.
"""

import asyncio
from collections.abc import Callable

import msgspec
from pyreqwest.exceptions import PyreqwestError

from conveyor.clock import Clock
from conveyor.egress.failures import Failure, failure_of
from conveyor.egress.redirects import OutgoingRequest
from conveyor.egress.responses import ResponseHead, retry_after
from conveyor.engines.blobs import Blobs
from conveyor.faults import crashpoint
from conveyor.model import BodyRef, Job
from conveyor.process.executors.download.exchange import Exchange, ExchangePlan, OpenResponse, merged
from conveyor.process.executors.download.pieces import Pieces, piece_size
from conveyor.process.executors.download.ranges import (
    RemoteFile,
    ResumeDecision,
    check_identity,
    content_range,
    judge,
    rest_headers,
    unexpected,
    validator_of,
)
from conveyor.process.retry import WORKER_LOST
from conveyor.process.task_progress import Track
from conveyor.settings import Settings

# Failures after which the rest can be asked for at once.
_CUTS = frozenset({"read_failed", "timeout", "connect_failed", "connect_timeout", "dns_failed", "gateway_failed"})
_MOST_ROUNDS = 1000
# Cuts in a row that brought nothing, and times that the file may be started over, in one attempt.
_MOST_IDLE = 3
_MOST_RESTARTS = 3
_FIRST_PAUSE = 0.1
# Headers that say which part of the file is asked for, and how: nobody else may.
_OURS = frozenset({"range", "if-range", "if-match", "if-none-match", "if-modified-since", "if-unmodified-since"})
_REMOVED_AT_ONCE = 1000


class TargetError(Failure):
    """The target answered with an error. `retry_after` is what it asked for."""

    def __init__(self, head: ResponseHead, now: float) -> None:
        cause = unexpected(head)
        super().__init__(cause.error.code, cause.error.message, head.status)
        self.retry_after = retry_after(head.fields.get("retry-after"), now)


class DownloadRequest(msgspec.Struct, frozen=True):
    """What is to be taken: the request, the hash that it must have, and how long silence may last."""

    request: OutgoingRequest
    patience: float
    sha256: str | None = None
    connect: float | None = None


class DownloadedFile(msgspec.Struct, frozen=True):
    """A file that is whole."""

    file: RemoteFile
    body: BodyRef


class Transfer:
    """One attempt. `remember` makes the state of the task's row from the file that is being taken."""

    def __init__(
        self,
        exchange: Exchange,
        blobs: Blobs,
        clock: Clock,
        settings: Settings,
        job: Job,
        plan: ExchangePlan,
        track: Track,
        remember: Callable[[RemoteFile | None], msgspec.Raw],
    ) -> None:
        self._exchange = exchange
        self._blobs = blobs
        self._clock = clock
        self._settings = settings
        self._job = job
        self._plan = plan
        self._track = track
        self._remember = remember
        self._file: RemoteFile | None = None
        self._pieces: Pieces | None = None
        self._ended = False
        self._answers = 0
        # Bytes that were kept at the beginning, and those that are when the attempt ends.
        self._found = 0
        self._kept = 0
        # Whether it began the file from its first byte, and how often it had to although there was a part of it.
        self._anew = False
        self._restarts = 0
        self._pace = TransferPace(plan.options.download.min_rate, plan.options.download.min_rate_seconds, clock)

    @property
    def advanced(self) -> bool:
        """Whether this attempt has left more than there was: the next one goes on from there. One that began the file
        anew has to come further than any before it. To take the same bytes again moves nothing on, and a target that
        cuts every answer and knows no ranges would be asked for ever."""
        there = self._track.begun if self._anew else self._found
        return self._resumable and self._kept > there

    async def take(self, wanted: DownloadRequest, left: RemoteFile | None) -> DownloadedFile:
        """Take the file, going on with what an earlier attempt left. Raises what failures.py knows, or Superseded."""
        try:
            await self._find(left)
            await self._until_complete(wanted)
            return await self._seal(wanted)
        finally:
            await self._leave()

    async def drop(self) -> None:
        """Forget the file and the task's row, for good."""
        before, self._file = self._file, None
        await self._track.remove()
        await self._remove(before)

    async def _find(self, left: RemoteFile | None) -> None:
        self._file = left
        if left is None:
            check_lost(self._track, self._settings)
            return
        pieces = Pieces(self._blobs, left.key, left.piece)
        await pieces.find(left.total)
        # It may be all there, if the attempt before was lost after its last byte. Without a validator, part of it is
        # of no use.
        self._ended = left.total is not None and pieces.offset == left.total
        if self._ended or left.validator is not None:
            self._pieces = pieces
            self._found = pieces.kept
            self._track.found(pieces.offset)
        else:
            await pieces.leave()
        if not self._ended:
            check_lost(self._track, self._settings)

    async def _until_complete(self, wanted: DownloadRequest) -> None:
        rounds = idle = 0
        while not self._ended:
            before = self._offset
            failure: Exception = Failure("read_failed", "the target sends the file in too many parts")
            try:
                await self._ask(wanted)
            except (Failure, PyreqwestError, TimeoutError) as error:
                if not self._is_cut(error):
                    raise
                failure = error
            rounds += 1
            idle = 0 if self._offset > before else idle + 1
            if idle > _MOST_IDLE or rounds > _MOST_ROUNDS:
                raise failure
            if not self._ended:
                self._pace.check()
                await self._clock.sleep(_FIRST_PAUSE * 2**idle)

    def _is_cut(self, error: Exception) -> bool:
        """Whether the rest can be asked for at once."""
        return self._resumable and failure_of(error, self._plan.route.blamed).code in _CUTS

    async def _ask(self, wanted: DownloadRequest) -> None:
        """One answer of the target, read to its end."""
        request = wanted.request
        sent: tuple[tuple[str, str], ...] = (("accept-encoding", "identity"),)
        offset = self._offset
        if offset:
            assert self._file is not None
            sent += rest_headers(self._file, offset)
        own = tuple(pair for pair in request.headers if pair[0].lower() not in _OURS)
        asked = msgspec.structs.replace(request, headers=merged(own, sent))
        with self._pace:
            opening = self._exchange.open(self._plan, asked, wanted.patience, wanted.connect)
            answer = await opening.__aenter__()
        try:
            end = await self._accepted(answer, offset)
            if end is not None:
                await self._read(answer, end, wanted.patience)
        finally:
            await opening.__aexit__(None, None, None)

    async def _accepted(self, answer: OpenResponse, offset: int) -> "ResponseEnd | None":
        """Where this answer ends, once the file is ready to take it; None for one of which nothing is taken."""
        head = answer.head
        self._answers += 1
        if not offset:
            if head.status != 200:
                raise TargetError(head, self._clock.now())
            check_identity(head)
            return await self._begin(answer)
        assert self._file is not None
        if head.status not in {200, 206, 416}:
            raise TargetError(head, self._clock.now())
        match judge(self._file, offset, head):
            case ResumeDecision.REST:
                found = content_range(head)
                assert found is not None
                self._file = msgspec.structs.replace(self._file, total=found[2])
                self._check_size(found[2])
                return ResponseEnd(found[1] + 1, found[2])
            case ResumeDecision.WHOLE:
                self._count_restart()
                return await self._begin(answer)
            case ResumeDecision.USELESS:
                self._count_restart()
                await self._forget()
                return None

    async def _begin(self, answer: OpenResponse) -> "ResponseEnd":
        """The file from its beginning. Its row is written before any piece of it."""
        head = answer.head
        total = _length(head)
        self._check_size(total)
        before = self._file
        await self._leave()
        base = f"results/{self._job.tenant}/{self._job.job_id}/{self._job.run.run_id}"
        self._file = RemoteFile(
            key=f"{base}/{self._clock.new_id('file')}",
            piece=piece_size(total, self._settings.download_piece_bytes),
            validator=validator_of(head),
            total=total,
            content_type=head.fields.get("content-type"),
            final_url=str(answer.request.url),
            headers=head.pairs,
        )
        self._pieces = Pieces(self._blobs, self._file.key, self._file.piece)
        self._found = 0
        self._anew = True
        await self._track.save(0, total, state=self._remember(self._file))
        await self._remove(before)
        return ResponseEnd(total, total)

    async def _forget(self) -> None:
        """What is there fits nothing that the target has now."""
        before, self._file = self._file, None
        await self._leave()
        await self._track.save(0, None, state=self._remember(None))
        await self._remove(before)

    async def _read(self, answer: OpenResponse, end: "ResponseEnd", patience: float) -> None:
        assert self._pieces is not None
        reader = answer.response.body_reader
        most = self._plan.options.download.max_bytes
        while True:
            try:
                with self._pace:
                    async with asyncio.timeout(patience):
                        # Not read(): it would keep to itself what comes before a cut.
                        chunk = await reader.read_chunk()
            except TimeoutError:
                raise Failure("timeout", f"the answer paused for more than {patience:g} seconds") from None
            if chunk is None:
                break
            offset = self._pieces.offset + len(chunk)
            if end.at is not None and offset > end.at:
                # Whatever it is, it is not what it said, and may not have been before either.
                await self._forget()
                raise Failure("range_failed", "the answer is longer than it said")
            if offset > most:
                raise _too_large(most)
            await self._pieces.take(memoryview(chunk))
            self._pace.came(len(chunk))
            await self._track.advance(offset, end.total)
        self._ended = end.total is None or self._pieces.offset == end.total

    async def _seal(self, wanted: DownloadRequest) -> DownloadedFile:
        assert self._file is not None
        assert self._pieces is not None
        total = self._pieces.offset
        if self._file.total != total:
            self._file = msgspec.structs.replace(self._file, total=total)
        # The total makes it known, should this attempt be lost from here on, that nothing is missing.
        await self._track.save(total, total, state=self._remember(self._file))
        crashpoint("download.seal.before")
        body = await self._sealed(self._pieces, total)
        crashpoint("download.seal.after")
        if wanted.sha256 is not None and body.sha256 != wanted.sha256.lower():
            await self._forget()
            raise self._mismatch(body.sha256)
        return DownloadedFile(self._file, body)

    async def _sealed(self, pieces: Pieces, total: int) -> BodyRef:
        """Reading back what an earlier attempt kept, for the hash, may take long: it is not stuck."""
        sealing = asyncio.ensure_future(pieces.seal())
        try:
            while not (await asyncio.wait([sealing], timeout=self._settings.progress_seconds))[0]:
                await self._track.save(total, total)
        except BaseException:
            sealing.cancel()
            await asyncio.wait([sealing])
            raise
        return sealing.result()

    def _mismatch(self, digest: str) -> Failure:
        if self._answers == 1 and not self._found:
            return Failure("checksum_mismatch", f"the file has the sha256 {digest}, not the one that was given")
        return Failure("file_changed", f"the file, put together from several answers, has the sha256 {digest}")

    @property
    def _offset(self) -> int:
        return 0 if self._pieces is None else self._pieces.offset

    @property
    def _resumable(self) -> bool:
        return self._file is not None and self._file.validator is not None

    def _count_restart(self) -> None:
        self._restarts += 1
        if self._restarts > _MOST_RESTARTS:
            raise Failure("range_failed", f"the file had to be started over {self._restarts} times")

    def _check_size(self, total: int | None) -> None:
        most = self._plan.options.download.max_bytes
        if total is not None and total > most:
            raise _too_large(most)

    async def _leave(self) -> None:
        pieces, self._pieces = self._pieces, None
        if pieces is not None:
            await pieces.leave()
            self._kept = pieces.kept

    async def _remove(self, file: RemoteFile | None) -> None:
        while file is not None and await self._blobs.delete_prefix(file.key, _REMOVED_AT_ONCE):
            pass


def check_lost(track: Track, settings: Settings) -> None:
    """Raise Failure if the task takes its workers down. Starts are counted, not failures: it leaves none behind."""
    if track.lost >= max(1, settings.max_lost_starts):
        message = f"The worker was lost {track.lost} times while it ran this task, which did not move."
        raise Failure(WORKER_LOST, message)


class ResponseEnd(msgspec.Struct, frozen=True):
    """Where an answer ends in the file, and how long the file is, if that is known."""

    at: int | None
    total: int | None


class TransferPace:
    """Whether bytes come in fast enough. Only waiting for the target counts, not for our own store."""

    def __init__(self, least: float, window: float, clock: Clock) -> None:
        self._least = least
        self._window = window
        self._clock = clock
        self._bytes = 0
        self._waited = 0.0
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = self._clock.monotonic()

    def __exit__(self, *_: object) -> None:
        self._waited += self._clock.monotonic() - self._since

    def came(self, count: int) -> None:
        self._bytes += count
        self.check()

    def check(self) -> None:
        """Raise Failure if too little came in over the window."""
        if self._waited < self._window:
            return
        if self._bytes < self._least * self._window:
            raise Failure("too_slow", f"less than {self._least:g} bytes a second for {self._window:g} seconds")
        self._bytes = 0
        self._waited = 0.0


def _length(head: ResponseHead) -> int | None:
    text = head.fields.get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() else None


def _too_large(most: int) -> Failure:
    return Failure("body_too_large", f"the file is larger than {most} bytes")
