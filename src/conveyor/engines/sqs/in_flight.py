"""A message that was received from SQS and handed out: what the process that has it in flight knows of it."""

import msgspec

from conveyor.engines.queue import QueueName
from conveyor.engines.sqs.envelope import Envelope
from conveyor.engines.sqs.polls import Message


class InFlightMessage(msgspec.Struct):
    """A message that was received and not yet acknowledged, released or dead-lettered."""

    queue: QueueName
    message: Message
    envelope: Envelope
    lost: int
    until: float

    @property
    def message_id(self) -> str:
        return self.envelope.id or self.message.sqs_id

    @property
    def receives(self) -> int:
        return self.envelope.before + self.message.count

    def copy(self) -> Envelope:
        """The envelope of the copy that replaces a released message."""
        return msgspec.structs.replace(
            self.envelope, id=self.message_id, before=self.receives - 1, lost=self.lost, due=0.0
        )
