"""Idempotency: a request with an Idempotency-Key is claimed before it is carried out, and its answer is stored in one
step with what it makes.

The same request, sent again, gets the same answer, byte for byte. A different request with the same key is a conflict,
and so is one that is still in progress. If the process that holds a claim dies, the next request takes the claim over
once its lease has expired, with the id that was reserved: the second attempt makes the same thing, not a second one.

Where one process owns the database, a request that makes all in one write needs no stored claim: it is held in memory,
and if the process dies, nothing was made.
"""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from conveyor.clock import Clock
from conveyor.engines.records import HoldsClaims, IdempotencyClaim, Records
from conveyor.errors import ConveyorError, IdempotencyInFlight, IdempotencyMismatch, Overloaded
from conveyor.faults import crashpoint
from conveyor.model import TenantId
from conveyor.settings import Settings


class IdempotentRequest(NamedTuple):
    """The client's own name for a request, and a fingerprint of its content."""

    route: str
    key: str
    fingerprint: str


class Accepted(NamedTuple):
    """The answer to a request. A replay has the same bytes in `body`."""

    status: int
    body: bytes
    subject: str
    replayed: bool = False


class ClaimedAnswer(NamedTuple):
    """The answer to a claimed request. Its row is written in one step with what the request makes."""

    accepted: Accepted
    # None without an idempotency key.
    row: IdempotencyClaim | None

    def unless_lost(self, existing: IdempotencyClaim | None) -> Accepted:
        """This answer; if the claim was lost to the row `existing`, the answer in that row."""
        if existing is None or self.row is None:
            return self.accepted
        return replay(existing, self.row.fingerprint)


class Claim(NamedTuple):
    """The right to carry a request out. `subject` is the id of what it makes; `row` is None without a key."""

    subject: str
    row: IdempotencyClaim | None = None
    # Whether an earlier attempt may have begun to make the same thing.
    is_repeated: bool = False

    def answer(self, status: int, body: bytes, subject: str | None = None) -> ClaimedAnswer:
        """Answer the request; `subject` is given where it made nothing new."""
        row = None if self.row is None else msgspec.structs.replace(self.row, status=status, body=body)
        return ClaimedAnswer(Accepted(status, body, subject or self.subject), row)


class Idempotency:
    """Carries requests out, each once."""

    def __init__(self, settings: Settings, clock: Clock, records: Records) -> None:
        self._settings = settings
        self._clock = clock
        self._records = records
        self._holder = records.access if isinstance(records.access, HoldsClaims) else None

    async def once(
        self,
        tenant: TenantId,
        request: IdempotentRequest | None,
        subject: str,
        carry_out: Callable[[Claim], Awaitable[Accepted]],
        *,
        is_one_write: bool = False,
    ) -> Accepted:
        """Claim the request and carry it out; replay its answer if it has one. `subject` is the id of what it makes,
        unless an earlier claim has reserved another. Without a key the request is carried out each time.
        `is_one_write` says that it writes nothing before `accept_atomically` writes all."""
        claim = await self._claim(tenant, request, subject, is_one_write)
        if isinstance(claim, Accepted):
            return claim
        try:
            return await carry_out(claim)
        except ConveyorError as error:
            # A refused request made nothing: the client may correct it and send it with the same key. A failure on our
            # side may have made something: the claim stays until its lease expires.
            refused = error.status < HTTPStatus.INTERNAL_SERVER_ERROR or isinstance(error, Overloaded)
            if claim.row is not None and refused:
                await self._records.access.release_claim(claim.row)
            raise

    async def _claim(
        self, tenant: TenantId, request: IdempotentRequest | None, subject: str, is_one_write: bool = False
    ) -> Claim | Accepted:
        """A claim, or the answer that this request got before."""
        if request is None:
            return Claim(subject)
        now = self._clock.now()
        row = IdempotencyClaim(
            tenant=tenant,
            route=request.route,
            key=request.key,
            fingerprint=request.fingerprint,
            subject=subject,
            lease_until=now + self._settings.idempotency_lease_seconds,
            expires_at=now + self._settings.idempotency_seconds,
        )
        if is_one_write and self._holder is not None:
            claimed = await self._holder.hold_claim(row)
        else:
            crashpoint("request.claim.before")
            claimed = await self._records.access.claim(row)
            crashpoint("request.claim.after")
        if claimed.granted:
            return Claim(claimed.row.subject, claimed.row, claimed.row.subject != subject)
        return replay(claimed.row, request.fingerprint)


def replay(row: IdempotencyClaim, fingerprint: str) -> Accepted:
    """The answer in a row that another process claimed. Raises IdempotencyMismatch and IdempotencyInFlight."""
    if row.fingerprint != fingerprint:
        raise IdempotencyMismatch
    if row.status == 0:
        raise IdempotencyInFlight
    return Accepted(row.status, row.body, row.subject, replayed=True)
