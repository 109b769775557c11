"""Follow a job: wait until it finishes, or stream its events. Both survive a restart of the server. The stream neither
repeats nor skips an event."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec

from conveyor.client.client_session import ClientSession
from conveyor.client.event_frames import MEDIA_TYPE, Frame, frames_of
from conveyor.client.http import ConnectionBroken
from conveyor.client.io import ResponseStream
from conveyor.client.resources import Event, Progress
from conveyor.client.transport import Json, path_of, read_pieces
from conveyor.errors import ServerUnreachable
from conveyor.states import ENDED

# Called with the JSON of the job after each poll.
OnStatus = Callable[[Json], None]

_FIRST_POLL = 0.1
_MAX_POLL = 1.0
_NO_CONTENT = 204
# Delay before reconnecting to a stream, unless the server names another.
_RECONNECT_SECONDS = 2.0
_PROGRESS = "progress"
_FINAL_EVENTS = frozenset({"run.completed", "run.failed", "run.cancelled"})


async def wait(session: ClientSession, job_id: str, timeout: float | None, on_status: OnStatus | None) -> Json:
    """Poll the job until it has finished, and return it. Raises TimeoutError."""
    started = session.io.monotonic()
    delay = _FIRST_POLL
    while True:
        job = await session.job(job_id)
        if on_status is not None:
            on_status(job)
        if job["state"] in ENDED:
            return job
        if timeout is not None:
            remaining = started + timeout - session.io.monotonic()
            if remaining <= 0:
                raise TimeoutError(f"The job is still {job['state']} after {timeout:g} seconds.")
            delay = min(delay, remaining)
        await session.io.pause(delay)
        delay = min(_MAX_POLL, max(_FIRST_POLL, delay * 1.5))


async def stream(session: ClientSession, job_id: str) -> AsyncGenerator[Event | Progress, None]:
    """Yield the events of a job from its creation until its run finishes. After a broken connection the stream resumes
    after the last event, until the server answers that no more will come."""
    path = path_of("jobs", job_id, "stream")
    last: Event | None = None
    shown: Progress | None = None
    reconnected_for: Event | None = None
    delay, last_frame_at = _RECONNECT_SECONDS, session.io.monotonic()
    while True:
        headers = {"Accept": MEDIA_TYPE, **({} if last is None or last.id is None else {"Last-Event-ID": last.id})}
        async with session.transport.open(path, headers) as opened:
            if opened.status == _NO_CONTENT:
                return
            async with aclosing(_frames(opened)) as frames:
                async for frame in frames:
                    last_frame_at = session.io.monotonic()
                    delay = delay if frame.retry is None else frame.retry / 1000
                    item = _decode_frame(frame)
                    if isinstance(item, Event):
                        last = item
                        yield item
                    elif item is not None and item != shown:
                        shown = item
                        yield item
        if session.io.monotonic() - last_frame_at > session.transport.patience:
            raise ServerUnreachable(
                "The server keeps closing the event stream before the first event. Try again later."
            )
        if last is not None and last.event in _FINAL_EVENTS and last is not reconnected_for:
            # A final event ends the stream unless there is a later run. Reconnect at once: the server knows.
            reconnected_for = last
        else:
            await session.io.pause(delay)


async def _frames(opened: ResponseStream) -> AsyncGenerator[Frame, None]:
    """Yield frames until the stream ends or the connection breaks. The caller reconnects in both cases."""
    async with aclosing(frames_of(read_pieces(opened))) as frames:
        try:
            async for frame in frames:
                yield frame
        except ConnectionBroken:
            return


def _decode_frame(frame: Frame) -> Event | Progress | None:
    if not frame.data:
        return None
    try:
        if frame.event == _PROGRESS:
            return msgspec.json.decode(frame.data, type=Progress)
        return msgspec.json.decode(frame.data, type=Event)
    except msgspec.DecodeError:
        # An unknown event of a newer server.
        return None
