"""Turns: an ingester that works on a long list serves other tenants in between, so that no list, however long, makes
the lists of others wait."""

from collections.abc import Awaitable, Callable

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.engines.queue import CONTROL, Delivery, Queue
from conveyor.model import IngestJob, IngestRange, TenantId

log = structlog.get_logger()

TURN_SECONDS = 1.0
# A step is a message, a batch of lines, or some pieces of a list that is only looked over: at most a few megabytes.
TURN_STEPS = 64

# Messages that an ingester looks at in search of another tenant's, and in one call.
_LOOK = 50
_CALL = 10

Message = IngestJob | IngestRange

decode_message = msgspec.json.Decoder(Message).decode


class Turn:
    """How long to work for one tenant before others are served."""

    def __init__(self, clock: Clock, tenant: TenantId | None, least: float = 0.0) -> None:
        """It lasts `least` seconds in any case: as long as others were served."""
        self.tenant = tenant
        self._clock = clock
        self._began = clock.monotonic()
        self._least = least
        self._steps = 0

    @property
    def elapsed(self) -> float:
        return self._clock.monotonic() - self._began

    def allow(self, seconds: float) -> None:
        """Extend the turn, if it ends sooner, to this many seconds from now: the time that a checkpoint took."""
        self._least = max(self._least, self.elapsed + seconds)

    def step(self) -> bool:
        """Count a step. Returns whether the turn is over."""
        self._steps += 1
        elapsed = self.elapsed
        return (self._steps >= TURN_STEPS or elapsed >= TURN_SECONDS) and elapsed >= self._least


async def serve_others(
    queue: Queue,
    clock: Clock,
    tenant: TenantId | None,
    lease: float,
    handle: Callable[[Delivery, Turn], Awaitable[None]],
) -> Turn:
    """Handle messages of other tenants for a turn, or until none waits. Returns the next turn of this tenant."""
    turn = Turn(clock, None)
    try:
        while (delivery := await _of_another(queue, tenant, lease)) is not None:
            await handle(delivery, turn)
            if turn.step():
                break
    except Exception as error:
        # The trouble of another tenant's list is no reason to give up this one: its message is redelivered.
        log.warning("ingest of another tenant's list failed, will retry", error=repr(error))
    return Turn(clock, tenant, turn.elapsed)


async def _of_another(queue: Queue, tenant: TenantId | None, lease: float) -> Delivery | None:
    """A waiting message of another tenant. Those of this tenant go to the end of the queue: the next look meets the
    messages behind them."""
    own: list[str] = []
    found: Delivery | None = None
    while found is None and len(own) < _LOOK:
        deliveries = await queue.receive(CONTROL, _CALL, lease)
        for delivery in deliveries:
            if found is None and tenant_of(delivery) != tenant:
                found = delivery
            else:
                own.append(delivery.receipt)
        if len(deliveries) < _CALL:
            break
    if own:
        await queue.release(CONTROL, own, 0.0)
    return found


def tenant_of(delivery: Delivery) -> TenantId | None:
    """The tenant of a message; None if it cannot be read."""
    try:
        message: Message = decode_message(delivery.body)
    except msgspec.DecodeError:
        return None
    return message.tenant
