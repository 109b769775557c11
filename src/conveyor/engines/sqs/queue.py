"""The Queue on SQS. A receipt is SQS's own handle, and is valid only in the process that received it: that process
keeps the body and the receive count of each message in flight.

SQS lacks some operations, which this module builds from others:

- *Release without counting the receive.* Send a copy that carries the count, then delete the original.
- *A visibility timeout above 12 hours.* Not possible: the receipt becomes stale, and SQS redelivers the message.
- *A delay above 15 minutes.* The message carries its due time; a process that receives it earlier sends a copy.
- *Stale receipts.* SQS accepts a delete with an old handle and does nothing. So a receipt whose timeout has passed by
  our clock is first extended; if SQS refuses, it is stale. A receipt whose timeout has not passed is valid.
- *Depth.* SQS counts late, and not by run: see depths.py.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.engines.queue import DeadLetter, Delivery, Depth, Outgoing, QueueName
from conveyor.engines.records import DocumentRecords
from conveyor.engines.sqs.address import SqsAddress, plain
from conveyor.engines.sqs.calls import Calls, EntryVerdict, SqsRefused
from conveyor.engines.sqs.dead_letter_documents import DeadLetterDocuments, NewDeadLetter
from conveyor.engines.sqs.depths import Depths
from conveyor.engines.sqs.envelope import VERSION, Envelope, from_text, to_text, wrap
from conveyor.engines.sqs.in_flight import InFlightMessage
from conveyor.engines.sqs.polls import LONGEST_HOLD, Message, Polls, whole
from conveyor.engines.sqs.queues import MAX_RECEIVES, QueuePlace, Queues, is_run
from conveyor.engines.sqs.shared import Shared
from conveyor.engines.sqs.shared_runs import SharedRuns
from conveyor.engines.sqs.starts import Starts
from conveyor.errors import EngineFailed, EngineRefused
from conveyor.faults import crashpoint
from conveyor.model import Page, TenantId

log = structlog.get_logger()

_LONGEST_DELAY = 900
_DELETE = "delete_message_batch"
_SEND = "send_message_batch"
_HOLD = "change_message_visibility_batch"
# The timeout to which a possibly stale receipt is extended before it is used.
_CHECK_SECONDS = 30.0
# A margin for the drift between this clock and that of SQS.
_HOLD_MARGIN = 10.0
_MAX_HELD = 10_000
_FORGET_SECONDS = 3600.0
_POLICY_LETTERS = 10


class SqsQueue:
    """Queue. Dead letters, marked starts and tombstones of dropped queues are documents."""

    def __init__(
        self, calls: Calls, address: SqsAddress, clock: Clock, rows: DocumentRecords, run_queue_limit: int
    ) -> None:
        tenant = TenantId(f"~{address.prefix}")
        self._calls = calls
        self._clock = clock
        # Called with each queue for which a message has arrived.
        self.wake: Callable[[QueueName], None] = lambda _: None
        # Called with a queue that nobody here receives from and the body of a message of it: whether somebody will.
        self.offer: Callable[[QueueName, bytes], bool] = lambda queue, body: False
        # Called with a queue and the seconds in which SQS redelivers a message of it that this process received and
        # handed to nobody.
        self.on_returned: Callable[[QueueName, float], None] = lambda queue, delay: None
        self.queues = Queues(calls, address, clock, run_queue_limit, SharedRuns(rows, tenant, clock))
        self._polls = Polls(calls, clock, address.wait, self._on_arrival, self._on_returned)
        self._letters = DeadLetterDocuments(rows, tenant, clock)
        self._starts = Starts(rows, tenant, clock)
        self._shared = Shared(calls, self.queues, self._polls, rows, tenant, clock, self._wake, self._offer)
        self._depths = Depths(calls, self.queues, clock, address.settle)
        self._held: dict[str, InFlightMessage] = {}
        # The queues that this process receives from, by URL.
        self._received: dict[str, QueueName] = {}

    async def close(self) -> None:
        """Give back what was received and not handed out."""
        await self._shared.close()
        await self._polls.close()

    async def send(self, queue: QueueName, messages: Sequence[Outgoing]) -> list[int]:
        now = self._clock.now()
        envelopes = [(wrap(queue, message.body, now), message.delay) for message in messages]
        crashpoint("queue.send.before")
        verdicts = await self._send(queue, envelopes)
        crashpoint("queue.send.after")
        return [number for number, verdict in enumerate(verdicts) if verdict is not EntryVerdict.DONE]

    async def receive(self, queue: QueueName, limit: int, visibility: float) -> list[Delivery]:
        if limit <= 0:
            return []
        taken = await self._from_own(queue, limit, visibility)
        if len(taken) < limit and await self.queues.may_share(queue):
            taken += await self._shared.take(queue, limit - len(taken), visibility)
        crashpoint("queue.receive.after")
        return await self._handed_out(queue, taken)

    async def extend(self, queue: QueueName, receipts: Sequence[str], visibility: float) -> frozenset[str]:
        known = [held for held in map(self._held.get, receipts) if held is not None and held.queue == queue]
        kept = await self._hold(known, visibility)
        return frozenset(receipts) - kept.keys()

    async def mark_started(self, queue: QueueName, receipts: Sequence[str]) -> None:
        for held in (await self._live(queue, receipts)).values():
            await self._starts.mark(held.message.sqs_id, held.message.count)

    async def ack(self, queue: QueueName, receipts: Sequence[str]) -> frozenset[str]:
        live = await self._live(queue, receipts)
        crashpoint("queue.ack.before")
        gone = await self._delete(list(live.values()))
        crashpoint("queue.ack.after")
        return frozenset(receipts) - gone

    async def release(self, queue: QueueName, receipts: Sequence[str], delay: float) -> None:
        await self._replace(list((await self._live(queue, receipts)).values()), delay)

    async def dead_letter(self, queue: QueueName, receipts: Sequence[str], reason: str) -> None:
        live = list((await self._live(queue, receipts)).values())
        crashpoint("queue.bury.before")
        await self._letters.dead_letter(
            [NewDeadLetter(queue, held.envelope.at, held.message_id, held.envelope.body, reason) for held in live]
        )
        crashpoint("sqs.bury.between")
        await self._delete(live)
        crashpoint("queue.bury.after")

    async def dead_letters(self, cursor: str | None, limit: int) -> Page[DeadLetter]:
        if cursor is None:
            await self._bury_what_the_policy_moved()
        return await self._letters.page(cursor, limit)

    async def find_dead_letters(self, message_ids: Collection[str]) -> list[DeadLetter]:
        return await self._letters.some(message_ids)

    async def discard(self, message_ids: Collection[str]) -> int:
        return await self._letters.discard(message_ids)

    async def redrive(self, message_ids: Collection[str]) -> int:
        async def send(queue: QueueName, body: bytes) -> bool:
            return await self.send(queue, [Outgoing(body)]) == []

        return await self._letters.redrive(message_ids, send)

    async def depth(self, queue: QueueName) -> Depth:
        return await self._depths.of(queue)

    async def shared_depth(self) -> Depth | None:
        return None if await self.queues.shared() is None else await self._shared.depth()

    async def drop(self, queue: QueueName) -> None:
        url = await self.queues.own(queue)
        if url is not None:
            self._polls.leave(url)
            self._received.pop(url, None)
        self._held = {handle: held for handle, held in self._held.items() if held.queue != queue}
        self._depths.forget(queue)
        crashpoint("sqs.drop.before")
        await self.queues.drop(queue)
        if is_run(queue):
            await self._shared.drop(queue)
        crashpoint("sqs.drop.after")

    async def _send(self, queue: QueueName, envelopes: Sequence[tuple[Envelope, float]]) -> list[EntryVerdict]:
        """Send to the queue's current place. Raises EngineRefused for messages that SQS never accepts."""
        if not envelopes:
            return []
        place = await self.queues.to_send(queue)
        try:
            verdicts = await self._send_to(place, envelopes)
        except SqsRefused:
            # The queue was dropped, perhaps by another process.
            self.queues.forget(queue)
            verdicts = await self._send_again(queue, envelopes)
        if EntryVerdict.REFUSED in verdicts:
            size = len(to_text(envelopes[verdicts.index(EntryVerdict.REFUSED)][0]))
            raise EngineRefused(f"SQS does not accept a message of {size} bytes.")
        self._depths.forget(queue)
        return verdicts

    async def _send_again(self, queue: QueueName, envelopes: Sequence[tuple[Envelope, float]]) -> list[EntryVerdict]:
        try:
            return await self._send_to(await self.queues.to_send(queue), envelopes)
        except SqsRefused:
            # Not created yet, or dropped: the caller retries later.
            self.queues.forget(queue)
            return [EntryVerdict.OPEN] * len(envelopes)

    async def _send_to(self, place: QueuePlace, envelopes: Sequence[tuple[Envelope, float]]) -> list[EntryVerdict]:
        now = self._clock.now()
        entries = [_entry(place, envelope, delay, now) for envelope, delay in envelopes]
        return await self._calls.each(_SEND, place.url, entries, once=True)

    async def _from_own(self, queue: QueueName, limit: int, visibility: float) -> list[Message]:
        url = await self.queues.own(queue)
        if url is None:
            return []
        if len(self._received) >= _MAX_HELD:
            self._received.clear()
        self._received[url] = queue
        try:
            return await self._polls.take(url, limit, visibility)
        except SqsRefused:
            self.queues.forget(queue)
            return []

    async def _handed_out(self, queue: QueueName, taken: list[Message]) -> list[Delivery]:
        now = self._clock.now()
        ready: list[InFlightMessage] = []
        early: list[InFlightMessage] = []
        foreign: list[Message] = []
        for message in taken:
            envelope = from_text(message.text)
            if envelope is None:
                foreign.append(message)
            elif envelope.v > VERSION:
                # From a newer version: its timeout passes, and a newer process receives it.
                log.warning("message of a newer version left alone", queue=queue, version=envelope.v)
            else:
                # The envelope holds the text now: do not keep it twice.
                kept = msgspec.structs.replace(message, text="")
                held = InFlightMessage(queue, kept, envelope, envelope.lost, message.until)
                (early if envelope.due > now else ready).append(held)
        if foreign:
            await self._bury_foreign(queue, foreign)
        for held in early:
            await self._replace([held], held.envelope.due - now)
        return await self._deliveries(ready)

    async def _deliveries(self, ready: list[InFlightMessage]) -> list[Delivery]:
        lost = await self._starts.lost([(held.message.sqs_id, held.message.count) for held in ready])
        self._forget_old()
        deliveries = []
        for held, more in zip(ready, lost, strict=True):
            held.lost += more
            self._held[held.message.handle] = held
            deliveries.append(
                Delivery(held.message_id, held.message.handle, held.receives, held.envelope.body, held.lost)
            )
        return deliveries

    async def _replace(self, old: list[InFlightMessage], delay: float) -> None:
        """Send a copy of each message that does not count this receive, then delete the original. A message whose copy
        SQS does not accept becomes visible again, and counts."""
        for url in {held.message.url for held in old}:
            some = [held for held in old if held.message.url == url]
            place = QueuePlace(url, shared=url == await self.queues.shared())
            crashpoint("sqs.replace.before")
            try:
                verdicts = await self._send_to(place, [(held.copy(), delay) for held in some])
            except SqsRefused:
                # The queue was dropped with all its messages.
                verdicts = [EntryVerdict.REFUSED] * len(some)
            crashpoint("sqs.replace.between")
            sent = [held for held, verdict in zip(some, verdicts, strict=True) if verdict is EntryVerdict.DONE]
            unsent = [held for held, verdict in zip(some, verdicts, strict=True) if verdict is not EntryVerdict.DONE]
            await self._delete(sent)
            await self._hold(unsent, delay)
            for held in unsent:
                self._held.pop(held.message.handle, None)
            crashpoint("sqs.replace.after")

    async def _live(self, queue: QueueName, receipts: Sequence[str]) -> dict[str, InFlightMessage]:
        """The messages that are still in flight here."""
        now = self._clock.monotonic()
        known = {receipt: self._held[receipt] for receipt in receipts if receipt in self._held}
        ours = {receipt: held for receipt, held in known.items() if held.queue == queue}
        lapsed = [held for held in ours.values() if held.until <= now]
        kept = await self._hold(lapsed, _CHECK_SECONDS) if lapsed else {}
        return {receipt: held for receipt, held in ours.items() if held.until > now or receipt in kept}

    async def _hold(self, messages: list[InFlightMessage], visibility: float) -> dict[str, InFlightMessage]:
        """Extend visibility timeouts. Returns the messages for which SQS accepted it."""
        now = self._clock.monotonic()
        able: list[tuple[InFlightMessage, float]] = []
        for held in messages:
            left = held.message.taken + LONGEST_HOLD - _HOLD_MARGIN - now
            if left > 0:
                able.append((held, min(visibility, left)))
        kept: dict[str, InFlightMessage] = {}
        for url in {held.message.url for held, _ in able}:
            some = [(held, seconds) for held, seconds in able if held.message.url == url]
            entries = [
                {"ReceiptHandle": held.message.handle, "VisibilityTimeout": whole(seconds)} for held, seconds in some
            ]
            verdicts = await self._each(_HOLD, url, entries)
            for (held, seconds), verdict in zip(some, verdicts, strict=True):
                if verdict is EntryVerdict.DONE:
                    held.until = now + seconds
                    kept[held.message.handle] = held
        return kept

    async def _delete(self, messages: list[InFlightMessage]) -> set[str]:
        """Delete messages in flight. Returns the receipts that were not stale."""
        gone: set[str] = set()
        for url in {held.message.url for held in messages}:
            handles = [held.message.handle for held in messages if held.message.url == url]
            verdicts = await self._each(_DELETE, url, [{"ReceiptHandle": handle} for handle in handles])
            for handle, verdict in zip(handles, verdicts, strict=True):
                if verdict is EntryVerdict.OPEN:
                    raise EngineFailed("SQS did not say whether it deleted a message.")
                self._held.pop(handle, None)
                if verdict is EntryVerdict.DONE:
                    gone.add(handle)
        return gone

    async def _each(self, operation: str, url: str, entries: list[dict[str, Any]]) -> list[EntryVerdict]:
        """Treat a missing queue as empty."""
        try:
            return await self._calls.each(operation, url, entries, gone_is_done=operation == _DELETE)
        except SqsRefused:
            return [EntryVerdict.REFUSED] * len(entries)

    async def _bury_foreign(self, queue: QueueName, foreign: list[Message]) -> None:
        """Dead-letter messages of other senders: SQS would redeliver them without end."""
        log.error("message is not one of Conveyor's", queue=queue, count=len(foreign))
        await self._bury_texts(queue, foreign, "The message is not one of Conveyor's.")

    async def _bury_what_the_policy_moved(self) -> None:
        url = await self.queues.dead()
        if url is None:
            return
        try:
            moved = await self._polls.now(url, _POLICY_LETTERS, _CHECK_SECONDS)
        except SqsRefused:
            return
        await self._bury_texts(
            QueueName("unknown"), moved, f"The message was received {MAX_RECEIVES} times and never acknowledged."
        )

    async def _bury_texts(self, queue: QueueName, messages: list[Message], reason: str) -> None:
        if not messages:
            return
        now = self._clock.now()
        letters = []
        for message in messages:
            envelope = from_text(message.text)
            if envelope is None:
                letters.append(NewDeadLetter(queue, now, message.sqs_id, message.text.encode(), reason))
            else:
                known = envelope.id or message.sqs_id
                letters.append(NewDeadLetter(envelope.queue, envelope.at, known, envelope.body, reason))
        await self._letters.dead_letter(letters)
        entries = [{"ReceiptHandle": message.handle} for message in messages]
        await self._each(_DELETE, messages[0].url, entries)

    def _on_arrival(self, url: str) -> None:
        queue = self._received.get(url)
        if queue is None:
            self._shared.on_arrival()
        else:
            self._wake(queue)

    def has_arrived(self, queue: QueueName) -> bool:
        own = any(name == queue and self._polls.has_arrived(url) for url, name in self._received.items())
        return own or self._shared.stashed(queue) > 0

    async def give_back(self, queue: QueueName) -> None:
        for url in [url for url, name in self._received.items() if name == queue]:
            await self._polls.give_back_arrived(url)
        await self._shared.give_back(queue)

    def _on_returned(self, message: Message, delay: float) -> None:
        if (envelope := from_text(message.text)) is not None:
            self.on_returned(envelope.queue, max(delay, envelope.due - self._clock.now()))

    def _wake(self, queue: QueueName) -> None:
        self.wake(queue)

    def _offer(self, queue: QueueName, body: bytes) -> bool:
        return self.offer(queue, body)

    def _forget_old(self) -> None:
        """Evict messages whose visibility timeout passed long ago."""
        if len(self._held) >= _MAX_HELD:
            since = self._clock.monotonic() - _FORGET_SECONDS
            self._held = {handle: held for handle, held in self._held.items() if held.until > since}


def _entry(place: QueuePlace, envelope: Envelope, delay: float, now: float) -> dict[str, Any]:
    seconds = max(0, math.ceil(delay))
    if seconds > _LONGEST_DELAY:
        envelope = msgspec.structs.replace(envelope, due=now + delay)
        seconds = _LONGEST_DELAY
    entry: dict[str, Any] = {"MessageBody": to_text(envelope)}
    if seconds:
        entry["DelaySeconds"] = seconds
    if place.shared:
        entry["MessageGroupId"] = plain(envelope.queue)
    return entry
