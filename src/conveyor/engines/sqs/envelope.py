"""The envelope of a message in SQS: the body, and the fields that the engine needs and SQS does not store.

SQS counts every receive, and a message cannot be changed. So to release a message, the engine sends a copy with updated
fields and deletes the original; a crash between the two duplicates it.
"""

import zlib

import msgspec

from conveyor.engines.queue import QueueName

VERSION = 1

# Short texts stay readable in the queue; long ones are compressed, because SQS bills by size.
_MAX_PLAIN = 1024
_PRINTABLE = frozenset(range(0x20, 0x7F))


class Envelope(msgspec.Struct, frozen=True, omit_defaults=True):
    """JSON in SQS. One of `text`, `deflated` and `raw` is the body."""

    v: int
    # The queue that it was sent to: several queues may share one SQS queue.
    queue: QueueName
    # When it was first sent.
    at: float
    # The id of the message that this is a copy of.
    id: str = ""
    # Counted receives and lost starts of the earlier copies.
    before: int = 0
    lost: int = 0
    # Not visible before this time, if the delay is longer than SQS supports.
    due: float = 0.0
    text: str = ""
    deflated: bytes = b""
    raw: bytes = b""

    @property
    def body(self) -> bytes:
        if self.deflated:
            return zlib.decompress(self.deflated)
        return self.raw or self.text.encode()


def wrap(queue: QueueName, body: bytes, now: float) -> Envelope:
    """A new message."""
    if len(body) <= _MAX_PLAIN and _PRINTABLE.issuperset(body):
        return Envelope(VERSION, queue, now, text=body.decode())
    # The fastest level: it compresses a chunk of URLs to a third.
    deflated = zlib.compress(body, 1)
    if len(deflated) < len(body):
        return Envelope(VERSION, queue, now, deflated=deflated)
    return Envelope(VERSION, queue, now, raw=body)


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Envelope)


def to_text(envelope: Envelope) -> str:
    return _encoder.encode(envelope).decode()


def from_text(text: str) -> Envelope | None:
    """Decode an envelope; None if it is not a message of Conveyor."""
    try:
        return _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeError):
        return None
