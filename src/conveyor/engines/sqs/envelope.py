"""The text of a message in SQS: what is in it, and what the engine has to know of it, which SQS does not keep.

SQS counts every receive and lets nothing of a message be changed. So a message that is given back is sent anew, with
what is to be remembered, and the old one deleted; a crash between the two leaves it there twice.
"""

import zlib

import msgspec

from conveyor.engines.queue import QueueName

VERSION = 1

# Short texts stay readable for whoever looks into a queue; a longer one is billed by its size.
_MOST_PLAIN = 1024
_PRINTABLE = frozenset(range(0x20, 0x7F))


class Envelope(msgspec.Struct, frozen=True, omit_defaults=True):
    """JSON in SQS. One of `text`, `deflated` and `raw` is the body."""

    v: int
    # The queue that it was sent to: one of SQS may be shared by several.
    queue: QueueName
    # When it was first sent.
    at: float
    # That of the message which it is a copy of.
    id: str = ""
    # Receives of those that it is a copy of, as far as they count, and starts that were lost.
    before: int = 0
    lost: int = 0
    # Not to be handed out before, where that is longer than SQS can delay it.
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
    if len(body) <= _MOST_PLAIN and _PRINTABLE.issuperset(body):
        return Envelope(VERSION, queue, now, text=body.decode())
    # The fastest level: a chunk of URLs is then a third of what it was.
    deflated = zlib.compress(body, 1)
    if len(deflated) < len(body):
        return Envelope(VERSION, queue, now, deflated=deflated)
    return Envelope(VERSION, queue, now, raw=body)


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Envelope)


def to_text(envelope: Envelope) -> str:
    return _encoder.encode(envelope).decode()


def from_text(text: str) -> Envelope | None:
    """None if it is no message of ours."""
    try:
        return _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeError):
        return None
