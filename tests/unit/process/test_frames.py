"""Frames of one step of the loop leave together."""

import asyncio

from conveyor.process.executors.fetch.frames import JoinedFrames, framed, write_frame


class Sink:
    """A writer that keeps what is written at once."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes, /) -> None:
        assert not self.is_closed
        self.writes.append(data)

    async def drain(self) -> None:
        return

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True


async def test_frames_of_one_step_are_one_write_in_their_order() -> None:
    sink = Sink()
    frames = JoinedFrames(sink)
    write_frame(frames, "a")
    write_frame(frames, "b")
    assert not sink.writes
    await asyncio.sleep(0)
    write_frame(frames, "c")
    await frames.drain()
    assert sink.writes == [framed("a") + framed("b"), framed("c")]
    write_frame(frames, "d")
    frames.close()
    assert sink.writes[2:] == [framed("d")], "what waits goes out before the end"


async def test_frames_for_a_process_that_is_gone_are_dropped() -> None:
    sink = Sink()
    frames = JoinedFrames(sink)
    write_frame(frames, "a")
    sink.close()
    await asyncio.sleep(0)
    assert not sink.writes
