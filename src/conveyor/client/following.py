"""Following a job: until it ends, or as it happens. A server that goes away meanwhile is waited for; what was seen is
not told twice, and nothing is left out."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec

from conveyor.client.client_session import ClientSession
from conveyor.client.event_frames import MEDIA_TYPE, Frame, frames_of
from conveyor.client.http import Broken
from conveyor.client.io import Opened
from conveyor.client.resources import Event, Progress
from conveyor.client.transport import Json, path_of, pieces_of
from conveyor.errors import ServerUnreachable
from conveyor.states import ENDED

# Gets the job as it is, now and then.
Seen = Callable[[Json], None]

_FIRST_LOOK = 0.1
_LONGEST_LOOK = 1.0
_NO_CONTENT = 204
# Before coming again to a stream, unless the server says another time.
_COME_AGAIN = 2.0
_PROGRESS = "progress"
_ENDS = frozenset({"run.completed", "run.failed", "run.cancelled"})


async def wait(session: ClientSession, job_id: str, timeout: float | None, seen: Seen | None) -> Json:
    """The job, once its run has ended. Raises TimeoutError."""
    began = session.io.monotonic()
    look = _FIRST_LOOK
    while True:
        job = await session.job(job_id)
        if seen is not None:
            seen(job)
        if job["state"] in ENDED:
            return job
        if timeout is not None:
            left = began + timeout - session.io.monotonic()
            if left <= 0:
                raise TimeoutError(f"The job is still {job['state']} after {timeout:g} seconds.")
            look = min(look, left)
        await session.io.pause(look)
        look = min(_LONGEST_LOOK, max(_FIRST_LOOK, look * 1.5))


async def stream(session: ClientSession, job_id: str) -> AsyncGenerator[Event | Progress, None]:
    """What happens to a job as it happens, from its beginning to the end of its run. Cut off, it goes on behind the
    last event that was seen, until the server says that nothing more will come."""
    path = path_of("jobs", job_id, "stream")
    last: Event | None = None
    shown: Progress | None = None
    hurried: Event | None = None
    again, heard = _COME_AGAIN, session.io.monotonic()
    while True:
        headers = {"Accept": MEDIA_TYPE, **({} if last is None or last.id is None else {"Last-Event-ID": last.id})}
        async with session.transport.open(path, headers) as opened:
            if opened.status == _NO_CONTENT:
                return
            async with aclosing(_frames(opened)) as frames:
                async for frame in frames:
                    heard = session.io.monotonic()
                    again = again if frame.retry is None else frame.retry / 1000
                    told = _told(frame)
                    if isinstance(told, Event):
                        last = told
                        yield told
                    elif told is not None and told != shown:
                        shown = told
                        yield told
        if session.io.monotonic() - heard > session.transport.patience:
            raise ServerUnreachable("The server ends every stream of events before it has said anything.")
        if last is not None and last.event in _ENDS and last is not hurried:
            # An end is the last that is told, unless there is a later run: the server knows that at once.
            hurried = last
        else:
            await session.io.pause(again)


async def _frames(opened: Opened) -> AsyncGenerator[Frame, None]:
    """Until the end, or until the connection breaks: either way the stream is asked for again."""
    async with aclosing(frames_of(pieces_of(opened))) as frames:
        try:
            async for frame in frames:
                yield frame
        except Broken:
            return


def _told(frame: Frame) -> Event | Progress | None:
    if not frame.data:
        return None
    try:
        if frame.event == _PROGRESS:
            return msgspec.json.decode(frame.data, type=Progress)
        return msgspec.json.decode(frame.data, type=Event)
    except msgspec.DecodeError:
        # Of a kind that a newer server has.
        return None
