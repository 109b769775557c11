"""Transfer: one attempt at downloading one file, over as many connections as it needs. Gets a request and what an
earlier attempt left; returns the stored file, complete and hashed.

    find stored pieces → request the rest → read into pieces → connection cut? request again → seal → compare hashes

A cut connection does not end the attempt: while bytes come in, the transfer requests the rest after a short pause. An
attempt fails when no more bytes come, when the target answers with an error, or when the transfer is too slow.

Requests forbid content codings, because ranges count encoded bytes. A file that is encoded all the same is decoded as
it comes, and cannot be resumed.
"""

import asyncio
from collections.abc import Callable

import msgspec
from pyreqwest.exceptions import PyreqwestError

from conveyor.clock import Clock
from conveyor.egress.decoding import BodyDecoder, codings_of, decoded_head
from conveyor.egress.failures import Failure, failure_of
from conveyor.egress.heads import ResponseHead
from conveyor.egress.redirects import OutgoingRequest
from conveyor.egress.responses import check_length, retry_after
from conveyor.engines.blobs import Blobs
from conveyor.faults import crashpoint
from conveyor.model import BodyRef, Job
from conveyor.process.executors.download.exchange import Exchange, ExchangePlan, OpenResponse, merge_headers
from conveyor.process.executors.download.pieces import Pieces, piece_size
from conveyor.process.executors.download.ranges import (
    RemoteFile,
    ResumeDecision,
    content_range,
    judge,
    rest_headers,
    unexpected,
    validator_of,
)
from conveyor.process.retry import WORKER_LOST
from conveyor.process.task_progress import Track
from conveyor.settings import Settings

# Failures after which the same attempt requests the rest.
_CUTS = frozenset({"read_failed", "timeout", "connect_failed", "connect_timeout", "dns_failed", "gateway_failed"})
_MAX_ROUNDS = 1000
# Limits for one attempt: cuts in a row without a byte, and restarts from the first byte.
_MAX_IDLE = 3
_MAX_RESTARTS = 3
_FIRST_PAUSE = 0.1
# Headers that the transfer sets itself; a job cannot.
_OURS = frozenset({"range", "if-range", "if-match", "if-none-match", "if-modified-since", "if-unmodified-since"})
_REMOVED_AT_ONCE = 1000


class TargetError(Failure):
    """The target answered with an error status. `retry_after` is its Retry-After."""

    def __init__(self, answer: OpenResponse, now: float) -> None:
        cause = unexpected(answer.head)
        super().__init__(cause.error.code, cause.error.message, answer.head.status, str(answer.request.url))
        self.retry_after = retry_after(answer.head.fields.get("retry-after"), now)


class DownloadRequest(msgspec.Struct, frozen=True):
    """What to download: the request, the expected hash, and how long the target may be silent."""

    request: OutgoingRequest
    patience: float
    sha256: str | None = None
    connect: float | None = None


class DownloadedFile(msgspec.Struct, frozen=True):
    """A file that is complete."""

    file: RemoteFile
    body: BodyRef


class Transfer:
    """One attempt. `remember` encodes the file for the state in the task's progress document."""

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
        # The last response.
        self.reached: OpenResponse | None = None
        self._file: RemoteFile | None = None
        self._pieces: Pieces | None = None
        # For a file that the target sends encoded.
        self._decoder: BodyDecoder | None = None
        self._ended = False
        self._answers = 0
        # Stored bytes at the start and at the end of the attempt.
        self._stored_before = 0
        self._stored = 0
        # Whether it began at the first byte, and how often it restarted although a part was stored.
        self._from_start = False
        self._restarts = 0
        self._pace = TransferPace(plan.options.download.min_rate, plan.options.download.min_rate_seconds, clock)

    @property
    def advanced(self) -> bool:
        """Whether this attempt stored more bytes than earlier ones, so that the next one resumes from there. One that
        began at the first byte must get further than any before it: a target that cuts every answer and has no ranges
        would otherwise be asked for ever."""
        before = self._track.begun if self._from_start else self._stored_before
        return self._resumable and self._stored > before

    async def take(self, wanted: DownloadRequest, left: RemoteFile | None) -> DownloadedFile:
        """Download the file, or resume what an earlier attempt left. Raises what failures.py maps, or Superseded."""
        try:
            await self._find(left)
            await self._until_complete(wanted)
            return await self._seal(wanted)
        finally:
            await self._leave()

    async def drop(self) -> None:
        """Remove the stored pieces and the progress document."""
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
        # The file may be complete, if the attempt before was lost after its last byte. Without a validator, a part of
        # it cannot be resumed.
        self._ended = left.total is not None and pieces.offset == left.total
        if self._ended or left.validator is not None:
            self._pieces = pieces
            self._stored_before = pieces.stored
            self._track.start_at(pieces.offset)
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
                await self._request(wanted)
            except (Failure, PyreqwestError, TimeoutError) as error:
                if not self._is_cut(error):
                    raise
                failure = error
            rounds += 1
            idle = 0 if self._offset > before else idle + 1
            if idle > _MAX_IDLE or rounds > _MAX_ROUNDS:
                raise failure
            if not self._ended:
                self._pace.check()
                await self._clock.sleep(_FIRST_PAUSE * 2**idle)

    def _is_cut(self, error: Exception) -> bool:
        """Return whether to request the rest in the same attempt."""
        return self._resumable and failure_of(error, self._plan.route.gateway_codes).code in _CUTS

    async def _request(self, wanted: DownloadRequest) -> None:
        """Send one request and read the response to its end."""
        request = wanted.request
        range_headers: tuple[tuple[str, str], ...] = (("accept-encoding", "identity"),)
        offset = self._offset
        if offset:
            assert self._file is not None
            range_headers += rest_headers(self._file, offset)
        job_headers = tuple(pair for pair in request.headers if pair[0].lower() not in _OURS)
        request = msgspec.structs.replace(request, headers=merge_headers(job_headers, range_headers))
        with self._pace:
            opening = self._exchange.open(self._plan, request, wanted.patience, wanted.connect)
            answer = await opening.__aenter__()
        try:
            end = await self._accept(answer, offset)
            if end is not None:
                await self._read(answer, end, wanted.patience)
        finally:
            await opening.__aexit__(None, None, None)

    async def _accept(self, answer: OpenResponse, offset: int) -> "ResponseEnd | None":
        """Prepare the file for this response and return where the response ends; None if the response is of no use."""
        head = answer.head
        self.reached = answer
        self._answers += 1
        if not offset:
            if head.status != 200:
                raise TargetError(answer, self._clock.now())
            return await self._begin(answer)
        assert self._file is not None
        if head.status not in {200, 206, 416}:
            raise TargetError(answer, self._clock.now())
        match judge(self._file, offset, head):
            case ResumeDecision.REST:
                parts = content_range(head)
                assert parts is not None
                _, last, total = parts
                self._file = msgspec.structs.replace(self._file, total=total)
                self._check_size(total)
                return ResponseEnd(last + 1, total)
            case ResumeDecision.WHOLE:
                self._count_restart()
                return await self._begin(answer)
            case ResumeDecision.USELESS:
                self._count_restart()
                await self._forget()
                return None

    async def _begin(self, answer: OpenResponse) -> "ResponseEnd":
        """Begin the file at its first byte. The progress document names it before any piece is stored."""
        codings = codings_of(answer.head)
        self._decoder = BodyDecoder(codings, self._plan.options.download.max_bytes) if codings else None
        head = decoded_head(answer.head) if codings else answer.head
        total = _length(head)
        self._check_size(total)
        before = self._file
        await self._leave()
        base = f"results/{self._job.tenant}/{self._job.job_id}/{self._job.run.run_id}"
        self._file = RemoteFile(
            key=f"{base}/{self._clock.new_id('file')}",
            piece=piece_size(total, self._settings.download_piece_bytes),
            # Its ranges would be those of the encoded file.
            validator=None if codings else validator_of(head),
            total=total,
            content_type=head.fields.get("content-type"),
            final_url=str(answer.request.url),
            headers=head.pairs,
        )
        self._pieces = Pieces(self._blobs, self._file.key, self._file.piece)
        self._stored_before = 0
        self._from_start = True
        await self._track.save(0, total, state=self._remember(self._file))
        await self._remove(before)
        return ResponseEnd(total, total)

    async def _forget(self) -> None:
        """Remove stored pieces that match nothing that the target has now."""
        before, self._file = self._file, None
        await self._leave()
        await self._track.save(0, None, state=self._remember(None))
        await self._remove(before)

    async def _read(self, answer: OpenResponse, end: "ResponseEnd", patience: float) -> None:
        assert self._pieces is not None
        reader = answer.response.body_reader
        received = 0
        while True:
            try:
                with self._pace:
                    async with asyncio.timeout(patience):
                        # Not read(): it would lose the bytes before a cut.
                        chunk = await reader.read_chunk()
            except TimeoutError:
                raise Failure("timeout", f"the answer paused for more than {patience:g} seconds") from None
            if chunk is None:
                break
            received += len(chunk)
            if self._decoder is None:
                await self._keep(memoryview(chunk), end)
                self._pace.add(len(chunk))
                continue
            size = 0
            for piece in self._decoder.decode(chunk.to_bytes()):
                if piece:
                    await self._keep(memoryview(piece), end)
                    size += len(piece)
                # One chunk may decode to thousands of pieces.
                await asyncio.sleep(0)
            self._pace.add(max(size, len(chunk)))
        if self._decoder is not None:
            check_length(answer.head, answer.request.method, received)
            self._decoder.finish()
        elif end.at is not None and self._pieces.offset < end.at:
            # Over HTTP/2 the client takes a response that the server ends early, without an error, for a whole one.
            raise Failure("read_failed", "the response ended before it was complete")
        self._ended = end.total is None or self._pieces.offset == end.total

    async def _keep(self, data: memoryview, end: "ResponseEnd") -> None:
        """Add bytes to the file. Raises Failure if it gets too large, or longer than the response said."""
        assert self._pieces is not None
        offset = self._pieces.offset + len(data)
        if end.at is not None and offset > end.at:
            # The response is not what its headers say, and earlier ones may not have been either.
            await self._forget()
            raise Failure("range_failed", "the answer is longer than it said")
        if offset > self._plan.options.download.max_bytes:
            raise _too_large(self._plan.options.download.max_bytes)
        await self._pieces.take(data)
        await self._track.advance(offset, end.total)

    async def _seal(self, wanted: DownloadRequest) -> DownloadedFile:
        assert self._file is not None
        assert self._pieces is not None
        total = self._pieces.offset
        if self._file.total != total:
            self._file = msgspec.structs.replace(self._file, total=total)
        # Should this attempt be lost from here on, the total shows the next one that the file is complete.
        await self._track.save(total, total, state=self._remember(self._file))
        crashpoint("download.seal.before")
        body = await self._seal_pieces(self._pieces, total)
        crashpoint("download.seal.after")
        if wanted.sha256 is not None and body.sha256 != wanted.sha256.lower():
            await self._forget()
            raise self._mismatch(body.sha256)
        return DownloadedFile(self._file, body)

    async def _seal_pieces(self, pieces: Pieces, total: int) -> BodyRef:
        """Seal the pieces. Hashing the pieces of earlier attempts may take long: write progress meanwhile."""
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
        if self._answers == 1 and not self._stored_before:
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
        if self._restarts > _MAX_RESTARTS:
            raise Failure("range_failed", f"the file had to be started over {self._restarts} times")

    def _check_size(self, total: int | None) -> None:
        limit = self._plan.options.download.max_bytes
        if total is not None and total > limit:
            raise _too_large(limit)

    async def _leave(self) -> None:
        pieces, self._pieces = self._pieces, None
        if pieces is not None:
            await pieces.leave()
            self._stored = pieces.stored

    async def _remove(self, file: RemoteFile | None) -> None:
        while file is not None and await self._blobs.delete_prefix(file.key, _REMOVED_AT_ONCE):
            pass


def check_lost(track: Track, settings: Settings) -> None:
    """Raise Failure if the task has lost too many workers. Starts are counted: a lost worker records no failure."""
    if track.lost >= max(1, settings.max_lost_starts):
        message = f"The worker was lost {track.lost} times while it ran this task, which did not move."
        raise Failure(WORKER_LOST, message)


class ResponseEnd(msgspec.Struct, frozen=True):
    """Where a response ends in the file, and the size of the file, if known."""

    at: int | None
    total: int | None


class TransferPace:
    """Checks the transfer rate. Only time spent waiting for the target counts, not for our own store."""

    def __init__(self, min_rate: float, window: float, clock: Clock) -> None:
        self._min_rate = min_rate
        self._window = window
        self._clock = clock
        self._bytes = 0
        self._waited = 0.0
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = self._clock.monotonic()

    def __exit__(self, *_: object) -> None:
        self._waited += self._clock.monotonic() - self._since

    def add(self, count: int) -> None:
        self._bytes += count
        self.check()

    def check(self) -> None:
        """Raise Failure if too few bytes came in over the window."""
        if self._waited < self._window:
            return
        if self._bytes < self._min_rate * self._window:
            raise Failure("too_slow", f"less than {self._min_rate:g} bytes a second for {self._window:g} seconds")
        self._bytes = 0
        self._waited = 0.0


def _length(head: ResponseHead) -> int | None:
    text = head.fields.get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() else None


def _too_large(limit: int) -> Failure:
    return Failure("body_too_large", f"the file is larger than {limit} bytes")
